"""The accounts of a watched loop against a clock of the test: what it waited, by cause, whatever is drawn."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from loaderkit.profile.recording import Profile
from loaderkit.profile.watched.batches import num_samples_of, size_of
from loaderkit.profile.watched.iterator import open_watched
from loaderkit.profile.watched.recorder import Recorder
from loaderkit.profile.watched.subject import watched_subject


class Clock:
    """Goes on only when it is told to."""

    def __init__(self) -> None:
        self.now_s = 50.0

    def __call__(self) -> float:
        return self.now_s

    def generate(self, waits_s: list[float], end_s: float) -> Iterator[torch.Tensor]:
        """Batches of 4 samples, each after a wait."""
        for wait_s in waits_s:
            self.now_s += wait_s
            yield torch.zeros(4, 2)
        self.now_s += end_s


def test_waits_and_epochs_are_told_apart(rng: random.Random) -> None:
    clock = Clock()
    recorder = Recorder("generator", clock)
    waited_s = computed_s = paused_s = 0.0
    num_epochs, opens_s, ends_s, num_batches = rng.randrange(1, 5), 0.0, 0.0, 0
    with Profile(watched_subject(recorder, "drawn")) as profile:
        assert profile._log is not None
        profile._log._clock = clock
        profile._log._mark_s = profile._log.begin_s = clock()
        for _ in range(num_epochs):
            open_s, end_s = rng.uniform(0, 2), rng.uniform(0, 2)
            waits_s = [rng.uniform(0, 1) for _ in range(rng.randrange(1, 9))]

            def begin(open_s: float = open_s, waits_s: list[float] = waits_s, end_s: float = end_s) -> Any:
                clock.now_s += open_s
                return clock.generate(waits_s, end_s)

            for _ in open_watched(recorder, begin):
                step_s = rng.uniform(0, 1)
                clock.now_s += step_s
                computed_s += step_s
            pause_s = rng.uniform(0, 3)
            clock.now_s += pause_s
            paused_s += pause_s
            waited_s += open_s + sum(waits_s) + end_s
            opens_s, ends_s, num_batches = opens_s + open_s, ends_s + end_s, num_batches + len(waits_s)
    stats, report = recorder.stats(), profile.result
    assert sum(stats.waits_s.values()) == pytest.approx(waited_s)
    assert sum(report.stall.by_stage.values()) == pytest.approx(waited_s)
    assert stats.waits_s["epoch change"] >= ends_s - 1e-9
    assert (
        (stats.num_batches, stats.num_samples)
        == (num_batches, 4 * num_batches)
        == (report.num_batches, report.num_samples)
    )
    assert report.throughput["bytes_per_s"] * report.wall_s == pytest.approx(32 * num_batches)
    assert report.stall.percent == pytest.approx(100 * waited_s / report.wall_s)
    steps = report.steps
    assert steps.stall_s + steps.compute_s + steps.overhead_s + steps.outside_s == pytest.approx(steps.wall_s)
    assert steps.overhead_s == pytest.approx(0, abs=1e-9)
    # What comes after an epoch's last batch is outside of its steps, as it may be a validation.
    assert steps.compute_s + steps.outside_s == pytest.approx(computed_s + paused_s)


@pytest.mark.parametrize("every", [1, 2, 3, 5])
def test_late_batches_are_seen_to_come_every_nth_time(every: int, rng: random.Random) -> None:
    clock = Clock()
    recorder = Recorder("generator", clock)
    waits_s = [rng.uniform(0.2, 0.3) if number % every == every - 1 else 1e-5 for number in range(60)]
    for _ in open_watched(recorder, lambda: clock.generate(waits_s, 0.0)):
        clock.now_s += 0.01
    assert recorder.stats().watched.every_nth == (None if every == 1 else every)


def test_waits_by_chance_have_no_period(rng: random.Random) -> None:
    clock = Clock()
    recorder = Recorder("generator", clock)
    waits_s = [rng.expovariate(10) for _ in range(400)]
    for _ in open_watched(recorder, lambda: clock.generate(waits_s, 0.0)):
        pass
    assert recorder.stats().watched.every_nth is None


class Named(dict[str, Any]):
    """As transformers has it."""


class Holder:
    def __init__(self, **fields: Any) -> None:
        self.__dict__ |= fields


@pytest.mark.parametrize(
    ("make", "num_samples", "num_bytes", "num_tensors"),
    [
        (lambda: torch.zeros(5, 2), 5, 40, 1),
        (lambda: [torch.zeros(5, 2), torch.zeros(5, dtype=torch.int64)], 5, 80, 2),
        (lambda: {"x": torch.zeros(5, 2), "names": ["ab"] * 5}, 5, 50, 1),
        (lambda: Named(input_ids=torch.zeros(3, 7, dtype=torch.int64)), 3, 168, 1),
        (lambda: Holder(x=torch.zeros(6), y=1), 6, 24, 1),
        (lambda: [torch.zeros(3, 9), torch.zeros(3, 8)], 2, 204, 2),  # a list of as many samples as a batch has
        (lambda: [torch.zeros(2, 9), torch.zeros(1, 9)], 2, 108, 2),
        (lambda: [torch.zeros(1, 9), torch.zeros(1)], 1, 40, 2),  # the last batch of an epoch
        (lambda: [(torch.zeros(3, 9), 1), (torch.zeros(3, 9), 2), (torch.zeros(3, 9), 3)], 3, 324, 3),
        (lambda: [{"x": 1}, {"x": 2}, {"x": 3}], 3, 0, 0),
        (lambda: (np.zeros((4, 2)), ["a"] * 4), 4, 68, 1),
        (lambda: [{"x": torch.zeros(4, 3)}], 4, 48, 1),  # of one of DALI's pipelines
        (lambda: 5, 1, 0, 0),
        (list, 0, 0, 0),
    ],
)
def test_what_a_batch_holds(make: Callable[[], Any], num_samples: int, num_bytes: int, num_tensors: int) -> None:
    batch, batch_size = make(), 2 if num_samples <= 2 else None
    assert num_samples_of(batch, batch_size) == num_samples
    assert size_of(batch, batch_size)[:3] == (num_samples, num_bytes, num_tensors)


def test_a_batch_that_holds_itself_is_counted_all_the_same() -> None:
    batch: list[Any] = []
    batch.append(batch)
    assert size_of(batch).num_bytes == 0


def test_what_leaving_an_epoch_early_takes_is_waited_for(rng: random.Random) -> None:
    """As the end of a DataLoader's workers does, which finish their batches first."""
    clock = Clock()
    ends_s, steps_s, pauses_s = ([rng.uniform(0, 2) for _ in range(3)] for _ in range(3))
    recorder = Recorder("generator", clock)
    with Profile(watched_subject(recorder, "drawn")) as profile:
        assert profile._log is not None
        profile._log._clock = clock
        profile._log._mark_s = profile._log.begin_s = clock()
        for end_s, step_s, pause_s in zip(ends_s, steps_s, pauses_s, strict=True):

            def generate(end_s: float = end_s) -> Iterator[int]:
                try:
                    for number in range(9):
                        clock.now_s += 0.5
                        yield number
                finally:
                    clock.now_s += end_s

            for number in open_watched(recorder, generate):
                if number == 1:
                    clock.now_s += pause_s
                    break
                clock.now_s += step_s
            clock.now_s += pause_s
    stats = recorder.stats()
    assert stats.num_batches == 6
    assert stats.waits_s["epoch change"] == pytest.approx(sum(ends_s))
    assert stats.watched.stop_s == pytest.approx(sum(ends_s))
    assert sum(stats.waits_s.values()) == pytest.approx(3.0 + sum(ends_s), abs=1e-6)
    report = profile.result
    assert report.stall.total_s == pytest.approx(3.0 + sum(ends_s), abs=1e-6)
    assert report.steps.compute_s == pytest.approx(sum(steps_s))
    assert report.steps.outside_s == pytest.approx(2 * sum(pauses_s))
    # Stats and report say the same of the loop, without what comes after the last batch that it takes.
    assert stats.wall_s == pytest.approx(report.wall_s)
    assert stats.wall_s + stats.paused_s == pytest.approx(clock() - 50.0)
    assert stats.stall_s == pytest.approx(
        {cause: s for cause, s in report.stall.by_stage.items() if cause != "release"}
    )
    assert stats.verdict().stage == report.verdict.stage
