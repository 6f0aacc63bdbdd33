"""Decides which stages share a pool of workers."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from loaderkit.engine.metrics.worker_clock import WorkerClock, WorkerStates
from loaderkit.engine.work import Stage

T = TypeVar("T")


class Buffer(Generic[T]):
    """A bounded first-in, first-out queue between two pools."""

    def __init__(self, capacity: int, states: WorkerStates) -> None:
        self.capacity = capacity
        self._states = states
        self._items: deque[T] = deque()
        self._lock = threading.Lock()
        self._not_empty = threading.Condition(self._lock)
        self._not_full = threading.Condition(self._lock)
        self.is_closed = False

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T, worker_clock: WorkerClock) -> bool:
        """Wait for room (blocked) and append; False if the buffer was closed."""
        with self._lock:
            while len(self._items) >= self.capacity and not self.is_closed:
                worker_clock.enter(self._states.blocked)
                self._not_full.wait()
            if self.is_closed:
                return False
            self._items.append(item)
            self._not_empty.notify()
            return True

    def get(self, worker_clock: WorkerClock) -> T | None:
        """Wait for an item (starved) and take it; None once the buffer is closed, or this worker is not wanted."""
        with self._lock:
            while not self._items and worker_clock.is_wanted and not self.is_closed:
                worker_clock.enter(self._states.starved)
                self._not_empty.wait()
            if self.is_closed:
                return None
            if not worker_clock.is_wanted:
                self._not_empty.notify()  # its wake-up may have been meant for another worker
                return None
            item = self._items.popleft()
            self._not_full.notify()
            return item

    def resize(self, capacity: int) -> None:
        """Set the capacity and wake the threads that wait."""
        with self._lock:
            self.capacity = capacity
            self._not_empty.notify_all()
            self._not_full.notify_all()

    def close(self) -> None:
        """Wake all threads that wait; what is queued is dropped."""
        with self._lock:
            self.is_closed = True
            self._items.clear()
            self._not_empty.notify_all()
            self._not_full.notify_all()


@dataclass(frozen=True)
class PoolPlan:
    """A planned pool: the numbers of its stages (sample stages, then batch stages) and its workers."""

    sample_stages: tuple[int, ...]
    batch_stages: tuple[int, ...]
    num_workers: int
    lands: bool  # it runs the last sample stage: chunks that leave it have landed

    @property
    def stages(self) -> tuple[int, ...]:
        """All of them, in order."""
        return (*self.sample_stages, *self.batch_stages)


def plan_pools(stages: Sequence[Stage], num_workers: int) -> list[PoolPlan]:
    """Fuse neighbouring stages without `workers` into pools, and divide `num_workers` among those.

    A fused chunk passes from stage to stage without a hand-off. Stages with `workers: N` get a pool of N.
    """
    groups: list[list[int]] = []
    for number, stage in enumerate(stages):
        last = stages[groups[-1][-1]] if groups else None
        are_one = last is not None and stage.pool != "" and stage.pool == last.pool
        if last is not None and (are_one or (stage.workers is None and last.workers is None)):
            groups[-1].append(number)
        else:
            groups.append([number])
    last_sample = max(number for number, stage in enumerate(stages) if stage.scope == "sample")
    num_fixed = sum(stages[group[0]].workers or 0 for group in groups)
    automatic = [group for group in groups if stages[group[0]].workers is None]
    # A pool of batch stages alone does little (a copy, a call a batch) and gets one worker; sample pools share the rest.
    heavy = [group for group in automatic if stages[group[0]].scope == "sample"]
    num_left = max(len(heavy), num_workers - num_fixed - (len(automatic) - len(heavy)))
    pools = []
    for group in groups:
        workers = stages[group[0]].workers
        if workers is None:
            rank = heavy.index(group) if group in heavy else None
            workers = 1 if rank is None else num_left // len(heavy) + (rank < num_left % len(heavy))
        pools.append(
            PoolPlan(
                tuple(number for number in group if stages[number].scope == "sample"),
                tuple(number for number in group if stages[number].scope == "batch"),
                workers,
                last_sample in group,
            )
        )
    return pools
