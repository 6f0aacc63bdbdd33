"""A loop that does nothing between quick batches makes them itself, and nothing but the thread changes."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import loaderkit
from loaderkit import Pipeline
from loaderkit.prefetch.self_service import SelfService, Trial


@pytest.fixture
def records(tmp_path: Path) -> Pipeline:
    np.save(tmp_path / "records.npy", np.arange(8000).reshape(2000, 4))
    return Pipeline.array(str(tmp_path / "records.npy")).shuffle(seed=0).read().batch(16)


class TestWhen:
    now = 0.0

    @pytest.fixture
    def intake(self) -> Any:
        intake = SimpleNamespace(batch_s=100e-6, is_self_service=False, num_ready=0, set_self_service=None)
        intake.set_self_service = lambda is_on: setattr(intake, "is_self_service", is_on)
        return intake

    def loop(self, service: SelfService, away_s: float, num: int = 20) -> bool:
        comes = False
        for _ in range(num):
            comes = service.comes(self.now)
            self.now += 100e-6
            service.leaves(self.now)
            self.now += away_s
        return comes

    def test_a_loop_that_does_nothing_serves_itself_until_it_does_something(self, intake: Any) -> None:
        service = SelfService(intake, lambda: True)
        assert not self.loop(service, 5e-6, num=8)
        assert self.loop(service, 5e-6)
        assert intake.is_self_service
        assert self.loop(service, 50e-6, num=2), "that may have been another program"
        assert not self.loop(service, 50e-6, num=3)
        assert not intake.is_self_service

    def test_at_once_if_only_one_works_anyway(self, intake: Any) -> None:
        turns: Any = SimpleNamespace(one_at_a_time=False)
        service = SelfService(intake, lambda: turns.one_at_a_time)
        self.loop(service, 0.0, num=70)
        assert not self.loop(service, 0.0), "the workers' turn"
        turns.one_at_a_time = True
        assert self.loop(service, 0.0)

    def test_several_workers_are_compared_with(self, intake: Any) -> None:
        service = SelfService(intake, lambda: False)
        assert self.loop(service, 0.0, num=50), "its turn to be tried"
        assert not self.loop(service, 0.0, num=50), "that of the workers"
        assert self.loop(service, 0.0, num=100)
        assert not self.loop(service, 50e-6, num=4), "the loop does something else"

    @pytest.mark.parametrize("batch_s", [None, 2e-3])
    def test_not_with_batches_that_take_long(self, intake: Any, batch_s: float | None) -> None:
        intake.batch_s = batch_s
        assert not self.loop(SelfService(intake, lambda: True), 0.0)

    def test_not_in_inference_mode_which_tensors_would_keep(self, intake: Any) -> None:
        with torch.inference_mode():
            assert not self.loop(SelfService(intake, lambda: True), 0.0)


class TestTrial:
    """`batch_s`: what a batch takes by workers and by the consumer alone."""

    @staticmethod
    def ways(trial: Trial, num: int, batch_s: tuple[float, float], now: float = 0.0) -> list[bool]:
        found = []
        for _ in range(num):
            found.append(trial.goes_on(now, 0))
            now += batch_s[found[-1]]
        return found

    @pytest.mark.parametrize("batch_s", [(2e-4, 1e-4), (1e-4, 2e-4)])
    def test_the_quicker_way_is_kept(self, batch_s: tuple[float, float]) -> None:
        trial = Trial()
        assert len(set(self.ways(trial, 1000, batch_s))) == 2, "both were tried"
        assert set(self.ways(trial, 5000, batch_s)) == {batch_s[1] < batch_s[0]}

    def test_workers_work_while_there_is_little_in_it(self) -> None:
        trial = Trial()
        self.ways(trial, 1000, (1e-4, 0.98e-4))
        assert not any(self.ways(trial, 5000, (1e-4, 0.98e-4)))

    def test_what_was_ready_says_nothing(self) -> None:
        """The first batches after the workers' turn cost the consumer nothing: they were made already."""
        trial, now, num_ready = Trial(), 0.0, 0
        for _ in range(2000):
            num_ready = max(0, num_ready - 1) if trial.alone else 200
            alone = trial.goes_on(now, num_ready)
            now += 1e-4 if not alone else 2e-4 if not num_ready else 1e-6
        assert not any(self.ways(trial, 5000, (1e-4, 2e-4)))

    def test_tried_again_and_ever_more_rarely(self) -> None:
        trial = Trial()
        found = self.ways(trial, 200_000, (2e-4, 1e-4))
        again = [n for n in range(1, len(found)) if found[n - 1] and not found[n]]
        assert len(again) > 3
        gaps = np.diff([n for n in again if n > 1000])
        assert max(gaps) > 4 * 10_000

    def test_what_turns_out_otherwise_is_noticed(self) -> None:
        trial = Trial()
        self.ways(trial, 5000, (2e-4, 1e-4))
        assert trial.alone
        self.ways(trial, 20_000, (1e-4, 2e-4))
        assert not trial.alone

    @given(st.integers(0, 5))
    def test_another_program_in_one_turn_does_not_decide(self, disturbed: int) -> None:
        trial, now, num_turns, before = Trial(), 0.0, 0, True
        for _ in range(1000):
            alone = trial.goes_on(now, 0)
            num_turns += alone != before
            before = alone
            now += (1e-4 if alone else 2e-4) * (10 if num_turns == disturbed else 1)
        assert trial.alone

    def test_a_turn_that_is_broken_off_is_begun_anew(self) -> None:
        trial, now = Trial(), 0.0
        while trial.goes_on(now, 0):
            now += 1e-4
        for number in range(2000):
            now += 1e-4
            if number % 50 == 49:  # the loop was away
                trial.broken_off()
                now += 1.0
            assert not trial.goes_on(now, 0), "the workers' turn has not ended"


class TestHow:
    @pytest.fixture(params=[1, 3])
    def loader(self, request: Any, records: Pipeline, monkeypatch: pytest.MonkeyPatch) -> Iterator[loaderkit.Loader]:
        """One that changes its mind at random."""
        chance = random.Random(request.param)

        def comes(self: SelfService, now: float) -> bool:
            wanted = chance.random() < 0.8
            self._intake.set_self_service(wanted)
            return wanted

        monkeypatch.setattr(SelfService, "comes", comes)
        with loaderkit.build(records, overrides={"prefetch.concurrency": request.param}) as loader:
            yield loader

    def test_the_batches_are_the_same(self, loader: loaderkit.Loader, records: Pipeline) -> None:
        with loaderkit.build(records, overrides={"prefetch.executor": "inline"}) as inline:
            for _ in range(4):
                for mine, theirs in zip(loader, inline, strict=True):
                    assert mine["__key__"] == theirs["__key__"]
                    assert torch.equal(mine["data"], theirs["data"])

    def test_the_accounts_stay_whole(self, loader: loaderkit.Loader) -> None:
        for _ in loader:
            pass
        before = loader.stats()
        for _ in range(2):
            for _ in loader:
                pass
        stats = loader.stats(since=before).to_dict()
        slots_s = sum(stage["slot_s"] for stage in stats["stages"])
        assert slots_s == pytest.approx(stats["stages"][0]["workers"] * stats["wall_s"], rel=0.05)
        assert sum(stats["stall"]["by_stage"].values()) == pytest.approx(stats["stall"]["total_s"], rel=0.01)
        assert sum(stage["num_items"] for stage in stats["stages"]) >= 2 * (
            2 * 2000 - 5 * 16
        )  # what was ahead counted before

    def test_nothing_is_left_after_a_break_or_a_seek(self, loader: loaderkit.Loader) -> None:
        for n in range(30):
            for number, _ in enumerate(loader):
                if number == n % 7:
                    break
            if n % 3 == 0:
                loader.set_epoch(n)
        loader.close()
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("loaderkit-read")]


def test_whoever_is_asked_to_stop_meanwhile_stops(records: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker whose account is lent sleeps through `close`, and is woken when the account comes back."""
    monkeypatch.setattr(SelfService, "comes", lambda self, now: self._intake.set_self_service(True) or True)
    with loaderkit.build(records, overrides={"prefetch.concurrency": 1}) as loader:
        batches = iter(loader)
        next(batches)
        engine: Any = loader._engine
        while engine.intake.borrow() is None:  # what was read ahead comes first
            next(batches)
        closing = threading.Thread(target=engine.close)
        closing.start()
        while not engine.is_closed:
            pass
        engine.intake.give_back()
        closing.join(20)
        assert not closing.is_alive()


def test_other_peoples_code_runs_in_workers_only(records: Pipeline) -> None:
    called = records.config.stages
    assert called
    with loaderkit.build(records) as loader:
        loader.start()
        assert loader._engine._self_service is not None  # type: ignore[union-attr]
    data_set = Pipeline.dataset(list(range(100))).read().batch(4)
    with loaderkit.build(data_set) as loader:
        loader.start()
        assert loader._engine._self_service is None  # type: ignore[union-attr]
