"""Which stages share a pool of workers."""

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
                self._not_empty.notify()  # it may have been woken in another one's place
                return None
            item = self._items.popleft()
            self._not_full.notify()
            return item

    def resize(self, capacity: int) -> None:
        """Hold `capacity` items from now on; threads that wait look again."""
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
    """A pool to be: which stages it runs, by number (sample stages, then batch stages), with how many workers."""

    sample_stages: tuple[int, ...]
    batch_stages: tuple[int, ...]
    num_workers: int
    lands: bool  # its last sample stage is the last of all: what leaves it has landed

    @property
    def stages(self) -> tuple[int, ...]:
        """All of them, in order."""
        return (*self.sample_stages, *self.batch_stages)


def plan_pools(stages: Sequence[Stage], num_workers: int) -> list[PoolPlan]:
    """Fuse neighbouring stages without workers of their own into pools, and share `num_workers` out among those.

    A fused chunk passes from stage to stage without a hand-off. Stages with `workers: N` get a pool of N.
    """
    groups: list[list[int]] = []
    for number, stage in enumerate(stages):
        if groups and stage.workers is None and stages[groups[-1][-1]].workers is None:
            groups[-1].append(number)
        else:
            groups.append([number])
    last_sample = max(number for number, stage in enumerate(stages) if stage.scope == "sample")
    num_fixed = sum(stage.workers or 0 for stage in stages)
    automatic = [group for group in groups if stages[group[0]].workers is None]
    # Batch stages alone are light (a copy, a call a batch): one worker; the rest is shared by the sample pools.
    heavy = [group for group in automatic if stages[group[0]].scope == "sample"]
    num_left = max(len(heavy), num_workers - num_fixed - (len(automatic) - len(heavy)))
    pools = []
    for group in groups:
        workers = stages[group[0]].workers
        if workers is None:
            place = heavy.index(group) if group in heavy else None
            workers = 1 if place is None else num_left // len(heavy) + (place < num_left % len(heavy))
        pools.append(
            PoolPlan(
                tuple(number for number in group if stages[number].scope == "sample"),
                tuple(number for number in group if stages[number].scope == "batch"),
                workers,
                last_sample in group,
            )
        )
    return pools
