"""What is saved upon a notice is the most that fits, by the measured times; how often to save follows from them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaderkit.checkpoint.timing.costs import CostLog, Extent, SaveCost, extents, most_within
from loaderkit.checkpoint.timing.pace import SavePace

SECONDS = st.floats(0.0, 1e5)
COSTS = st.builds(SaveCost, SECONDS, SECONDS, SECONDS, st.none() | SECONDS)
SHARES = st.none() | st.floats(0.01, 0.99)


class TestMostWithin:
    @given(COSTS, SHARES, st.booleans(), SECONDS, st.floats(-10.0, 4e5))
    def test_it_is_the_first_that_fits(
        self, cost: SaveCost, share: float | None, has_local: bool, busy_s: float, left_s: float
    ) -> None:
        choices = extents(cost, weights_share=share, has_local=has_local, busy_s=busy_s)
        chosen = most_within(choices, left_s)
        fitting = [choice for choice in choices if choice.seconds is not None and choice.seconds <= left_s]
        if fitting:
            assert chosen == fitting[0]
        else:
            soonest = min(choice.seconds for choice in choices if choice.seconds is not None)
            assert chosen.seconds == soonest

    @given(COSTS, SHARES, st.booleans(), SECONDS, SECONDS, SECONDS)
    def test_more_time_never_saves_less(
        self, cost: SaveCost, share: float | None, has_local: bool, busy_s: float, left_s: float, more_s: float
    ) -> None:
        choices = extents(cost, weights_share=share, has_local=has_local, busy_s=busy_s)
        less, more = (most_within(choices, seconds) for seconds in (left_s, left_s + more_s))
        if less.seconds is not None and less.seconds <= left_s:
            assert choices.index(more) <= choices.index(less)

    @given(COSTS, st.floats(0.01, 0.99), SECONDS)
    def test_the_bytes_over_the_rate_are_what_it_takes(self, cost: SaveCost, share: float, busy_s: float) -> None:
        whole, weights = extents(cost, weights_share=share, has_local=False)
        assert whole == Extent(True, "to", cost.staging_s + cost.writing_s + cost.commit_s)
        expected_s = share * (cost.staging_s + cost.writing_s) + cost.commit_s
        assert weights == Extent(False, "to", expected_s)
        by_place = {
            (choice.whole, choice.place): choice.seconds
            for choice in extents(cost, weights_share=share, has_local=True, busy_s=busy_s)
        }
        assert [*by_place] == [(True, "to"), (True, "local"), (False, "to"), (False, "local")]
        if cost.upload_s is not None:
            assert by_place[True, "to"] == pytest.approx(cost.saving_s() + busy_s + cost.upload_s)
            assert by_place[False, "to"] == pytest.approx(expected_s + busy_s + share * cost.upload_s)

    def test_what_was_never_measured(self) -> None:
        """The whole state, in the place that is near: its time is not known to be too long."""
        assert most_within(extents(None, weights_share=0.2, has_local=False), 9.0) == Extent(True, "to", None)
        assert most_within(extents(None, weights_share=0.2, has_local=True), 9.0) == Extent(True, "local", None)
        never_uploaded = extents(SaveCost(1.0, 2.0, 0.5), weights_share=0.2, has_local=True)
        assert most_within(never_uploaded, 100.0) == Extent(True, "local", 3.5)


def stats_of(staging_s: float, flush_s: float, commit_s: float) -> dict[str, float]:
    return {"staging_s": staging_s, "flush_s": flush_s, "commit_s": commit_s}


class TestCostLog:
    def test_the_last_five_count(self) -> None:
        log = CostLog()
        assert log.typical() is None
        log.before = SaveCost(7.0, 8.0, 9.0, 10.0)
        assert log.slowest() == log.before
        for number in range(1, 8):
            log.add(stats_of(number, 10 * number + 0.5, 0.5))
        assert log.typical() == SaveCost(5.0, 50.0, 0.5, 10.0)
        assert log.slowest(33.0) == SaveCost(7.0, 70.0, 0.5, 33.0)

    def test_a_save_may_end_while_training_asks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        log = CostLog()
        for number in range(1, 4):
            log.add(stats_of(number, number + 0.5, 0.5))

        def interrupted(values: Iterable[float]) -> float:
            left = iter(values)
            first = next(left)
            log.add(stats_of(9, 9.5, 0.5))
            return max(first, *left)

        monkeypatch.setattr("statistics.median", interrupted)
        assert log.typical() == SaveCost(3.0, 3.0, 0.5)

    @given(COSTS)
    def test_they_come_back_from_a_checkpoint(self, cost: SaveCost) -> None:
        assert SaveCost.restored(cost.saved()) == cost

    @pytest.mark.parametrize("said", [{}, {"staging_s": 1.0}, {"x": 1}, {**SaveCost(1, 2, 3).saved(), "commit_s": -1.0},
                                      {**SaveCost(1, 2, 3).saved(), "writing_s": math.nan}])  # fmt: skip
    def test_what_is_none_counts_as_nothing(self, said: dict[str, float]) -> None:
        assert SaveCost.restored(said) is None


class Uploads:
    """Times of uploads."""

    def __init__(self, *times_s: float, running_s: float | None = None) -> None:
        self.times_s, self.running_s = times_s, running_s

    def upload_s(self, chosen: Callable[[Iterable[float]], float]) -> float | None:
        return chosen(self.times_s) if self.times_s else None

    def upload_running_s(self) -> float | None:
        return self.running_s


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class TestPace:
    def test_how_much_is_saved_is_in_the_log(self, caplog: pytest.LogCaptureFixture) -> None:
        clock, uploads = Clock(), Uploads(20.0, 24.0, running_s=4.0)
        pace = SavePace(uploads, has_local=True, time_of_day=clock)
        pace.add(stats_of(1.0, 4.0, 1.0), None)
        with caplog.at_level(logging.INFO):
            found = [pace.extent(7, "SIGTERM", clock() + within_s, 0.25) for within_s in (60.0, 40.0, 4.0, 1.0)]
        near, weights = Extent(True, "local", 5.0), Extent(False, "local", 2.0)
        assert found == [Extent(True, "to", 49.0), near, weights, weights]
        assert [record.levelno for record in caplog.records] == [logging.INFO, *[logging.WARNING] * 3]
        assert caplog.messages[2] == (
            "after step 7 (SIGTERM) 3.6 s are left to save: the state without that of optimizers to `local`, which takes 2 s; "
            "the whole state to `to` would take 49 s"
        )

    def test_the_interval_is_that_of_young_and_daly(self) -> None:
        pace = SavePace(Uploads(), mtbf_s=7200.0)
        assert pace.interval_s() == 60.0  # to measure
        pace.add(stats_of(1.0, 3.0, 0.1), None)
        assert pace.interval_s() == pytest.approx(math.sqrt(2 * 1.0 * 7200.0), rel=0.02)
        for _ in range(5):
            pace.add(stats_of(1.0, 400.0, 0.1), None)  # saves would queue up
        assert pace.interval_s() == 400.0

    def test_interruptions_are_learned_from_restarts(self) -> None:
        clock = Clock()
        first = SavePace(Uploads(), clock=clock)
        assert first.mtbf_s == 86400.0
        clock.now_s += 3600.0
        assert first.mtbf_s == 90000.0
        first.add(stats_of(1.0, 3.0, 0.5), None)
        for is_end, expected_s in ((False, 45000.0), (True, 90000.0)):
            second = SavePace(Uploads(), clock=clock)
            second.resume(first.saved(is_end=is_end))
            assert second.mtbf_s == expected_s
            assert second.costs.typical() == SaveCost(1.0, 2.5, 0.5)
        third = SavePace(Uploads(), clock=clock)
        for said in (None, "", "[]", "{}", '{"trained_s": "x", "num_interruptions": 1, "is_end": true, "cost": 3}'):
            third.resume(said)
            assert third.mtbf_s == 86400.0

    def test_a_launcher_that_kills_too_soon_is_named_once(self, caplog: pytest.LogCaptureFixture) -> None:
        pace = SavePace(Uploads(), has_local=False)
        pace.add(stats_of(1.0, 20.0, 0.5), 30.0)
        assert not caplog.messages
        for _ in range(2):
            pace.add(stats_of(1.0, 40.0, 0.5), 30.0)
        assert caplog.messages == [
            "a notice needs 45.6 s to save the whole state, and torchrun kills its ranks 30 s after the signal: start it with "
            "--shutdown-timeout 46, or TORCH_ELASTIC_SHUTDOWN_TIMEOUT in its environment"
        ]
