"""A loop that does little between quick batches makes them itself where that is faster, and nothing but the thread changes."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import loaderkit
from loaderkit import Pipeline
from loaderkit.engine import self_service
from loaderkit.engine.scheduler import Scheduler
from loaderkit.engine.self_service import SelfService
from loaderkit.profile.settings_patch import settings_for


@pytest.fixture
def records(tmp_path: Path) -> Pipeline:
    np.save(tmp_path / "records.npy", np.arange(8000).reshape(2000, 4))
    return Pipeline.array(str(tmp_path / "records.npy")).shuffle(seed=0).read().batch(16)


class TestWhen:
    """By a clock of its own. A batch takes the loop 100 us to make; to be handed one, `handed_s`."""

    now = 0.0
    handed_s = 150e-6

    @pytest.fixture
    def scheduler(self) -> Any:
        scheduler = SimpleNamespace(batch_s=100e-6, num_ready=0, is_self_service=False, set_self_service=None)
        scheduler.set_self_service = lambda is_on: setattr(scheduler, "is_self_service", is_on)
        return scheduler

    def loop(self, service: SelfService, *away_s: float, num: int = 6000) -> bool:
        """A loop that stays away for so long between its batches, in turns, so many times; whether it then serves itself."""
        comes = False
        for _ in range(num):
            for seconds in away_s:
                self.now += seconds
                comes = service.comes(self.now)
                self.now += 100e-6 if comes else self.handed_s
                service.leaves(self.now)
        return comes

    def test_a_loop_that_does_little_serves_itself_until_it_does_more(self, scheduler: Any) -> None:
        service = SelfService(scheduler)
        assert self.loop(service, 5e-6)
        assert self.loop(service, 300e-6), "it need not do nothing"
        assert scheduler.is_self_service
        assert not self.loop(service, 2e-3, num=20)
        assert not scheduler.is_self_service
        assert self.loop(service, 5e-6, num=50), "that is settled"

    def test_not_where_workers_are_faster(self, scheduler: Any) -> None:
        service = SelfService(scheduler)
        self.handed_s = 80e-6
        assert not self.loop(service, 5e-6)
        begin, num_own = self.now, 0
        while self.now < begin + 60:
            num_own += self.loop(service, 5e-6, num=1)
        assert num_own * 100e-6 < 0.01 * 60, "and seldom tried"

    def test_what_is_faster_may_change(self, scheduler: Any) -> None:
        service = SelfService(scheduler)
        assert self.loop(service, 5e-6)
        self.handed_s = 20e-6
        assert self.loop(service, 5e-6), "for half a minute nobody asks"
        self.now += 40
        assert not self.loop(service, 5e-6)

    def test_with_another_number_of_workers_it_is_tried_again(self, scheduler: Any) -> None:
        service = SelfService(scheduler)
        assert self.loop(service, 5e-6)
        self.handed_s = 20e-6
        service.forget()
        assert not self.loop(service, 5e-6)

    def test_one_standstill_in_a_trial_is_not_what_decides(self, scheduler: Any) -> None:
        service = SelfService(scheduler)
        while not self.loop(service, 5e-6, num=1):  # being handed a batch is tried first
            pass
        self.loop(service, 5e-6, num=20)
        self.now += 1.0 - 5e-6
        service.leaves(self.now)
        assert self.loop(service, 5e-6)

    def test_what_workers_had_made_does_not_count_as_made_by_itself(self, scheduler: Any) -> None:
        """However much was read ahead: here it takes longer to make a batch than to be handed one."""
        service = SelfService(scheduler)
        self.handed_s = 80e-6
        comes, made_s = service.comes, 100e-6
        for _ in range(6000):
            is_own = comes(self.now)
            is_there = is_own and scheduler.num_ready > 0
            scheduler.num_ready = scheduler.num_ready - 1 if is_there else 0 if is_own else 64
            self.now += 1e-6 if is_there else made_s if is_own else self.handed_s
            service.leaves(self.now)
            self.now += 5e-6
        assert not comes(self.now)

    def test_one_pause_ends_it_at_once(self, scheduler: Any) -> None:
        service = SelfService(scheduler)
        assert self.loop(service, 5e-6)
        assert not self.loop(service, 20e-3, num=1)

    def test_a_look_at_some_batch_does_not(self, scheduler: Any) -> None:
        service = SelfService(scheduler)
        assert self.loop(service, 5e-6)
        for _ in range(20):
            assert self.loop(service, *[3e-6] * 15, 1e-3, num=1)

    @pytest.mark.parametrize("num_together", [2, 8, 16])
    def test_a_loop_that_trains_on_several_batches_at_once_is_read_ahead_for(
        self, scheduler: Any, num_together: int
    ) -> None:
        service = SelfService(scheduler)
        for _ in range(200):
            assert not self.loop(service, 10e-3, *[3e-6] * (num_together - 1), num=1)
        assert self.loop(service, 3e-6), "a pass in which it does nothing else"
        for _ in range(6000):
            self.loop(service, 10e-3, *[3e-6] * (num_together - 1), num=1)
        assert not self.loop(service, 10e-3, *[3e-6] * (num_together - 1), num=1)

    @pytest.mark.parametrize("batch_s", [None, 2e-3])
    def test_not_with_batches_that_take_long(self, scheduler: Any, batch_s: float | None) -> None:
        scheduler.batch_s = batch_s
        assert not self.loop(SelfService(scheduler), 0.0)

    def test_not_in_inference_mode_which_tensors_would_keep(self, scheduler: Any) -> None:
        with torch.inference_mode():
            assert not self.loop(SelfService(scheduler), 0.0)


@pytest.mark.parametrize(
    ("own", "handed", "is_decided"),
    [
        ([1], [9], False),
        ([1, 2], [3, 4], True),
        ([3, 4], [2, 1], True),
        ([1, 2], [3], False),
        ([1, 3], [2, 4], False),
        ([1, 2], [2, 3], False),
        ([1, 3, 2], [2, 4, 1], True),
    ],
)
def test_a_trial_ends_when_a_third_time_could_not_change_it(
    own: list[float], handed: list[float], is_decided: bool
) -> None:
    service = SelfService(SimpleNamespace())  # type: ignore[arg-type]
    service._times = {True: own, False: handed}
    assert service._is_decided() is is_decided


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_a_loop_that_wants_to_make_its_batches_does(
    records: Pipeline, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that is done with a batch comes to rest, and says so; it does not begin another one while the loop waits."""
    monkeypatch.setattr(SelfService, "comes", lambda self, now: self._scheduler.set_self_service(True) or True)
    monkeypatch.setattr(Scheduler, "_is_quick", lambda self: False)  # else the loop looks by itself before long
    overrides = {"prefetch.concurrency": workers, "prefetch.timeout": 20, "prefetch.on_timeout": "raise"}
    with loaderkit.build(records, overrides=overrides) as loader:
        num_batches = sum(1 for _ in range(4) for _ in loader)
        assert loader.stats().num_self_served > num_batches - 4 * workers - 8, "all but what was read ahead"


@pytest.mark.parametrize("workers", [1, 3])
def test_ways_are_tried_in_turns_and_nothing_else_changes(
    records: Pipeline, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is, but that trials are short and that any loop counts as one that does nothing: the ways change all the time."""
    for name, value in (("_TRIAL_S", 0.0), ("_LEAST", 4), ("_PATIENCE_S", 2e-3), ("_QUICK_S", 10.0)):
        monkeypatch.setattr(self_service, name, value)
    ways: list[bool] = []
    comes = SelfService.comes

    def noted(self: SelfService, now: float) -> bool:
        ways.append(comes(self, now))
        return ways[-1]

    monkeypatch.setattr(SelfService, "comes", noted)
    with (
        loaderkit.build(records, overrides={"prefetch.executor": "inline"}) as inline,
        loaderkit.build(records, overrides={"prefetch.concurrency": workers}) as loader,
    ):
        for epoch in range(6):
            if epoch == 3:
                loader.resize("read", workers=2)
            for mine, theirs in zip(loader, inline, strict=True):
                assert mine["__key__"] == theirs["__key__"]
                assert torch.equal(mine["data"], theirs["data"])
    assert 20 < sum(ways) < len(ways) - 20


class TestHow:
    @pytest.fixture(params=[1, 3])
    def loader(self, request: Any, records: Pipeline, monkeypatch: pytest.MonkeyPatch) -> Iterator[loaderkit.Loader]:
        """One that changes its mind at random."""
        chance = random.Random(request.param)

        def comes(self: SelfService, now: float) -> bool:
            wanted = chance.random() < 0.8
            self._scheduler.set_self_service(wanted)
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
    monkeypatch.setattr(SelfService, "comes", lambda self, now: self._scheduler.set_self_service(True) or True)
    with loaderkit.build(records, overrides={"prefetch.concurrency": 1}) as loader:
        batches = iter(loader)
        next(batches)
        engine: Any = loader._engine
        while engine.scheduler.borrow() is None:  # what was read ahead comes first
            next(batches)
        closing = threading.Thread(target=engine.close)
        closing.start()
        while not engine.is_closed:
            pass
        engine.scheduler.give_back()
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


def test_the_verdict_does_not_ask_for_workers_that_would_rest(tmp_path: Path) -> None:
    """Nor does the profiler's patch, for an executor that the pipeline has."""
    np.save(tmp_path / "records.npy", np.zeros((2000, 40_000), np.uint8))
    pipeline = Pipeline.array(str(tmp_path / "records.npy")).read().batch(64)
    with loaderkit.build(pipeline, overrides={"prefetch.executor": "inline"}) as loader:
        for _ in loader:
            pass
        before = loader.stats()
        for _ in range(3):
            for _ in loader:
                pass
        inline = loader.stats(since=before)
        config = loader._parts.config
    own = replace(inline, num_self_served=inline.num_batches, tuning={**inline.tuning, "executor": "thread"})
    assert "prefetch.executor: thread" in inline.verdict().change
    assert [setting.value for setting in settings_for(inline.verdict(), inline, config)] == ["thread"]
    assert own.verdict().kind == inline.verdict().kind
    assert "larger batches" in own.verdict().change
    assert settings_for(own.verdict(), own, config) == []
