"""How many work items may be open, and how they are cut into chunks."""

from __future__ import annotations

import threading
from collections.abc import Callable

from loaderkit.engine.autotune.chunk_sizer import ChunkSizer
from loaderkit.engine.contracts import Plan
from loaderkit.engine.work import WorkItem

# Batches quicker than this are handed over several at a time: to wake the other thread up, and to hand it the GIL, costs as
# much as such a batch (16 windows of tokens: 47,000 a second one at a time).
_QUICK_S = 0.5e-3


class Budget:
    """Room for open work items, and the condition on which workers wait for it. All methods are called under `lock`."""

    def __init__(self, plan: Plan, *, num_workers: int, is_whole: bool, one_works: Callable[[], bool]) -> None:
        """`is_whole`: the worker that takes a chunk also delivers the item it completes. `one_works`: True while only one
        worker takes chunks."""
        self._plan = plan
        self._is_whole = is_whole
        self._one_works = one_works
        self.num_workers = num_workers
        self.chunk_sizer = ChunkSizer()
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.num_resting = 0  # workers that wait on `changed`
        self.num_open = 0  # items that hold memory: in the queue, or cancelled with chunks still in a stage
        self.is_short_of_memory = False  # memory, not depth, keeps the next item from being opened

    def open_next(self) -> tuple[WorkItem | None, bool]:
        """The plan's next item, if there is room for it, and whether the plan is at its end."""
        num_allowed, by_memory = self._plan.room
        if self.num_open >= num_allowed:
            self.is_short_of_memory = by_memory
            return None, False
        size = self.chunk_sizer.next_chunk_size(self._plan.batch_size, self.num_workers, num_allowed)
        work_item = self._plan.open(size)
        if work_item is None:
            return None, True
        self.num_open += 1
        return work_item, False

    def release(self, work_item: WorkItem) -> None:
        """Take an item out of the budget: it was dropped, or the consumer has it."""
        self.num_open -= 1
        self._plan.release(work_item)

    def wake_worker(self, count: int = 1) -> None:
        """Wake workers that wait for room or work, if any do."""
        self.changed.notify(count)

    @property
    def is_quick(self) -> bool:
        """True if a batch takes less than a hand-off. Only where workers announce complete batches before they wait, so that
        none goes unannounced."""
        sample_s = self.chunk_sizer.sample_s
        return self._is_whole and sample_s is not None and sample_s * self._plan.batch_size < _QUICK_S

    @property
    def is_worth_waking(self) -> bool:
        """True if there is room for as many batches as a worker makes at a time."""
        return not self.is_quick or self.num_open <= self._plan.room[0] - self.burst

    @property
    def burst(self) -> int:
        """How many quick batches are handed over at a time: half of the room, so that both sides keep working;
        all of it where only one thread can run at a time."""
        room = self._plan.room[0]
        return room if self._one_works() else -(-room // 2)
