"""The queue of open work items, the queue of chunks and the budget, under one lock that is held for microseconds."""

from __future__ import annotations

from collections.abc import Callable

from loaderkit.engine.budget import Budget
from loaderkit.engine.contracts import Plan
from loaderkit.engine.metrics.worker_clock import Clock, WorkerStates
from loaderkit.engine.ready_queue import ReadyQueue
from loaderkit.engine.work import WorkItem
from loaderkit.engine.work_queue import WorkQueue


class Scheduler:
    """`ready` is for the consumer, `work` for the workers, `budget` bounds both; the methods here concern all three."""

    def __init__(
        self,
        plan: Plan,
        states: WorkerStates,
        clock: Clock,
        *,
        num_workers: int,
        is_whole: bool,
        one_works: Callable[[], bool] = lambda: False,
    ) -> None:
        """See `Budget`."""
        self._plan = plan
        self.budget = Budget(plan, num_workers=num_workers, is_whole=is_whole, one_works=one_works)
        self.lock = self.budget.lock
        self.ready = ReadyQueue(self.budget, clock)
        self.work = WorkQueue(plan, self.budget, self.ready, states, clock)

    def head(self) -> WorkItem | None:
        """The awaited work item, for reports."""
        with self.lock:
            return self.ready.head

    def leave(self, count: int) -> None:
        """Take `count` items that `ready.first` kept out of the budget: they were delivered or dropped."""
        with self.lock:
            self.budget.num_open -= count
            self.budget.wake_worker(count)

    def wake_worker(self) -> None:
        """Wake a worker that waits for room or work, if there is one."""
        with self.lock:
            self.budget.wake_worker()

    def resize(self, num_workers: int) -> None:
        """Set the number of workers and wake those that wait."""
        with self.lock:
            self.budget.num_workers = num_workers
            self.budget.changed.notify_all()

    def set_depth(self, num_batches: int | None, memory_bytes: int | None) -> None:
        """Set how far to read ahead; None: unchanged. Raises ConfigError if the memory holds not even one batch."""
        with self.lock:
            self._plan.set_depth(num_batches, memory_bytes)
            self.budget.changed.notify_all()

    def seek(self, epoch: int, position: int) -> None:
        """Drop everything read ahead and continue at another position, unless the plan is already there."""
        with self.lock:
            head = self.ready.head
            next_position = self._plan.next_position if head is None else (head.epoch, head.begin)
            if next_position == self._plan.begins_at(epoch, position):
                return
            self.work.clear()
            self.ready.cancel()
            self._plan.seek(epoch, position)
            self.budget.changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Make the consumer raise `error` at its next wait."""
        with self.lock:
            self.ready.fail(error)

    def close(self) -> None:
        """Cancel all work and wake all threads that wait."""
        with self.lock:
            self.ready.close()
            self.budget.changed.notify_all()

    def clear(self) -> None:
        """Drop what was read ahead, once no worker is left."""
        self.ready.clear()
        self.work.clear()
