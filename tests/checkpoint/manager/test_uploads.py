"""Retention over two directories, whatever order saves, uploads, failures and restarts come in; and the bound on the speed."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiered import Two, flip, number_in, state_of, steps_in

import loaderkit
from loaderkit.checkpoint.discovery.locate import save_target
from loaderkit.checkpoint.manager.bandwidth import Bandwidth
from loaderkit.checkpoint.manager.retention import SavedStep, steps_to_keep
from loaderkit.checkpoint.manager.settings import KeepArgs
from loaderkit.checkpoint.save.owner import this_process
from loaderkit.checkpoint.save.placement import Placement, marker_key, put_marker
from loaderkit.connectors.base import Connector, writes_of
from loaderkit.errors import ConnectorError, UnreachableError

pytestmark = pytest.mark.filterwarnings("ignore")
MiB = 2**20

RULES = st.fixed_dictionaries(
    {"last": st.integers(1, 3)},
    optional={
        "every": st.integers(2, 4),
        "best": st.fixed_dictionaries({"metric": st.just("loss"), "num": st.integers(1, 2)}),
    },
)
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["save", "save", "save", "save", "hold", "release", "fail", "heal", "wait", "restart"]),
        st.integers(0, 5),
    ),
    min_size=1,
    max_size=25,
)


class Run:
    """A job that saves, and what must hold after each of its events."""

    def __init__(self, far_rules: dict[str, Any] | None, near_rules: dict[str, Any]) -> None:
        self.two = Two()
        self.far_rules, self.near_rules = far_rules, near_rules
        self.saved: list[SavedStep] = []
        self.newest_far = -1
        self.checkpoints = self._manager()

    def _manager(self) -> loaderkit.CheckpointManager:
        return self.two.manager(local={"keep": self.near_rules}, keep=self.far_rules)

    def happen(self, event: str, number: int) -> None:
        if event == "save":
            self.saved.append(SavedStep(len(self.saved) + 1, time.time(), {"loss": float(number)}))
            step = self.saved[-1].step
            with suppress(UnreachableError):
                self.checkpoints.save(step, state_of(step, 3), wait=True, metrics=self.saved[-1].metrics)
        elif event == "hold":
            self.two.far.gate.clear()
        elif event == "release":
            self.two.far.gate.set()
        elif event in ("fail", "heal"):
            self.two.far.error = UnreachableError("no route") if event == "fail" else None
        else:
            self.two.far.gate.set()
            with suppress(UnreachableError):
                self.checkpoints.wait_until_finished() if event == "wait" else self.checkpoints.close()
            if event == "restart":
                self.checkpoints = self._manager()

    def check(self) -> None:
        near, far = steps_in(self.two.near), steps_in(self.two.far)
        if not self.saved:
            return
        newest = self.saved[-1].step
        assert newest in near  # the newest one is always at hand
        assert max(far, default=-1) >= self.newest_far  # the newest far one stays until there is a newer
        self.newest_far = max(far, default=-1)
        # What the far rules keep of all that was saved is in one of the two.
        assert self.kept() <= {*near, *far}

    def kept(self) -> set[int]:
        if self.far_rules is None:
            return {item.step for item in self.saved}
        return steps_to_keep(self.saved, KeepArgs.model_validate(self.far_rules), time.time())

    def end(self) -> None:
        self.two.far.error = None
        self.two.far.gate.set()
        with suppress(UnreachableError):
            self.checkpoints.wait_until_finished()
        self.checkpoints.wait_until_finished()
        self.checkpoints.save(len(self.saved) + 1, state_of(len(self.saved) + 1, 3), metrics={"loss": 2.5})
        self.saved.append(SavedStep(len(self.saved) + 1, time.time(), {"loss": 2.5}))
        self.checkpoints.close()
        self.check()
        far = steps_in(self.two.far)
        assert set(far) == self.kept()
        near_rules = KeepArgs.model_validate(self.near_rules)
        assert set(steps_in(self.two.near)) >= {self.saved[-1].step}
        assert len(steps_in(self.two.near)) <= near_rules.last + sum(
            near_rules.every is not None and item.step % near_rules.every == 0 for item in self.saved
        ) + (0 if near_rules.best is None else near_rules.best.num)
        with loaderkit.CheckpointManager("far://", connectors=self.two.connectors) as other:
            for step in far:
                assert number_in(other, step, 3) == step


@settings(deadline=None, max_examples=25)
@given(st.none() | RULES, RULES, EVENTS)
def test_nothing_that_counts_is_ever_lost(
    far_rules: dict[str, Any] | None, near_rules: dict[str, Any], events: list[tuple[str, int]]
) -> None:
    run = Run(far_rules, near_rules)
    try:
        for event in events:
            run.happen(*event)
            run.check()
    finally:
        run.two.far.gate.set()
    run.end()


def uploading_elsewhere(store: Connector, step: int) -> str:
    """What a process on another machine leaves that is killed while it uploads a step; the key."""
    target = save_target(f"far://step-{step:010d}", {"far": store})
    owner = this_process()._replace(host="node7", machine="another")
    placement = Placement(
        "0123456789abcdef", 1, owner, f".saving-step-{step:010d}.0123456789abcdef/", 0, in_place=False
    )
    put_marker(target, writes_of(target.connector), placement)
    return marker_key(target, placement)


def test_what_is_saved_and_left_to_another_process_is_told() -> None:
    """The job goes on elsewhere, saves that step again, and ends before the other process counts as dead."""
    two = Two()
    key = uploading_elsewhere(two.far, 2)
    checkpoints = two.manager()
    checkpoints.save(1, state_of(1))
    checkpoints.save(2, state_of(2))
    for end in (checkpoints.wait_until_finished, checkpoints.wait_until_finished):
        with pytest.raises(ConnectorError, match=r"2 is not uploaded .* or has died at it within the last 15 minutes"):
            end()
        assert steps_in(two.far) == [1]
    writes_of(two.far).delete(key)  # it was cleared
    checkpoints.close()
    assert steps_in(two.far) == [1, 2]


def test_a_damaged_one_of_an_earlier_run_ends_no_start(caplog: pytest.LogCaptureFixture) -> None:
    two = Two()
    two.far.error = UnreachableError("no route")
    checkpoints = two.manager()
    checkpoints.save(1, state_of(1))
    with suppress(UnreachableError):
        checkpoints.close()
    two.far.error = None
    flip(two.near, 1)
    for step in (3, 4):
        with two.manager() as checkpoints:
            checkpoints.wait_until_finished()
            checkpoints.save(step, state_of(step))
    assert steps_in(two.far) == [3, 4]
    assert sum("is not uploaded to far://: " in message for message in caplog.messages) == 2


class TestBandwidth:
    @given(
        st.integers(1, 2**33),
        st.lists(st.tuples(st.floats(0, 60), st.floats(0, 10)), min_size=1, max_size=40),
    )
    def test_in_no_time_more_than_the_bound_and_one_part(self, speed: int, drawn: list[tuple[float, float]]) -> None:
        """And no slower than that, for parts that come as soon as they may."""
        now_s = 0.0

        def sleep(seconds: float) -> None:
            nonlocal now_s
            now_s += seconds

        # A part takes a minute at most: one of 16 MiB would sleep 30 million times at a byte a second.
        parts = [(max(1, min(16 * MiB, int(speed * takes_s))), pause_s) for takes_s, pause_s in drawn]
        bandwidth = Bandwidth(speed, clock=lambda: now_s, sleep=sleep)
        went: list[tuple[float, int]] = []
        for num_bytes, pause_s in parts:
            now_s += pause_s
            bandwidth.wait(num_bytes)
            went.append((now_s, num_bytes))
        for first in range(len(went)):
            total = 0
            for at_s, num_bytes in went[first:]:
                before, total = total, total + num_bytes
                assert before <= speed * (at_s - went[first][0]) * (1 + 1e-9) + 1e-3 * speed
        if not any(pause_s for _, pause_s in parts):
            assert now_s == pytest.approx(sum(num_bytes for num_bytes, _ in parts[:-1]) / speed)

    def test_threads_share_it(self) -> None:
        """Eight threads that want 100 parts at once get the times of one."""
        lock, now_s = threading.Lock(), 0.0
        slept: list[float] = []

        def sleep(seconds: float) -> None:
            nonlocal now_s
            with lock:
                now_s += seconds
                slept.append(seconds)

        bandwidth = Bandwidth(8 * MiB, clock=lambda: now_s, sleep=sleep)

        def send() -> None:
            for _ in range(100):
                bandwidth.wait(MiB)

        threads = [threading.Thread(target=send) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert now_s >= 99.875
        assert max(slept) <= 0.5

    def test_none_is_no_bound(self) -> None:
        def fail(*_: float) -> float:
            raise AssertionError

        Bandwidth(None, clock=fail, sleep=fail).wait(2**40)
