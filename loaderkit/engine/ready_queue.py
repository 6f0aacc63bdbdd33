"""The consumer's side of the scheduler: open work items in order, handed over as they become complete."""

from __future__ import annotations

import threading
import time
from collections import deque

from loaderkit.engine.budget import Budget
from loaderkit.engine.metrics.worker_clock import Clock
from loaderkit.engine.work import WorkItem
from loaderkit.errors import ClosedError

_LOOK_S = 2e-3  # while batches are quick the consumer polls, and most of them need no wake-up


class ReadyQueue:
    """Open work items in order, complete or not. They share the budget's lock."""

    def __init__(self, budget: Budget, clock: Clock) -> None:
        self._lock = budget.lock
        self._budget = budget
        self._clock = clock
        self._ready = threading.Condition(budget.lock)
        self._items: deque[WorkItem] = deque()
        self.is_asleep = False  # the consumer waits and will not look again soon by itself
        self.is_over = False  # no more items will come: closed or failed
        self._is_closed = False
        self._failure: BaseException | None = None
        self.num_ready = 0  # items that are complete
        self.is_last = False  # the plan has no item behind these

    # ------------------------------------------------------------------------------------------------ the consumer

    def first(self, *, keep: bool = False) -> WorkItem | None:
        """The first item, taken out, if it is complete. Raises the error that stopped the workers.

        With `keep` it stays in the budget until `Scheduler.leave`: a sender takes it for the consumer.
        """
        with self._lock:
            return self._first(keep=keep)

    def wait_for_first(self, timeout_s: float) -> tuple[WorkItem | None, float]:
        """`first`, after waiting for it, and the rest of `timeout_s`; None when that has passed."""
        with self._lock:
            ends_s = time.monotonic() + timeout_s
            while True:
                work_item, left_s = self._first(), ends_s - time.monotonic()
                if work_item is not None or left_s <= 0:
                    return work_item, left_s
                assert self._items or not self.is_last, "the loader asks for no batch past the last"
                self._sleep(min(left_s, _LOOK_S) if self._budget.is_quick else left_s)

    def wait_until_ready(self) -> None:
        """Wait without a limit until `first` returns an item or raises."""
        with self._lock:
            while not (self.is_over or (self._items and self._items[0].is_done)):
                self._sleep(_LOOK_S if self._budget.is_quick else None)

    def _sleep(self, wait_s: float | None) -> None:
        self.is_asleep = wait_s is None or wait_s > _LOOK_S
        try:
            self._ready.wait(wait_s)
        finally:
            self.is_asleep = False

    def _first(self, *, keep: bool = False) -> WorkItem | None:
        if self._is_closed:
            raise ClosedError("the loader was closed while a batch was awaited")
        if self._failure is not None:
            raise self._failure
        if not self._items or not self._items[0].is_done:
            return None
        self.num_ready -= 1
        work_item = self._items.popleft()
        if not keep:
            self._budget.release(work_item)
            if self._budget.num_resting and self._budget.is_worth_waking:
                self._budget.wake_worker()
        return work_item

    # ------------------------------------------------------------------------------------------------- the workers

    def deliver(self, work_item: WorkItem) -> None:
        """Mark an item as complete; wake the consumer if it is the awaited one."""
        with self._lock:
            if work_item.cancelled:
                self.drop(work_item)
                return
            work_item.done_s = self._clock()
            work_item.is_done = True
            self.num_ready += 1
            budget = self._budget
            if self.is_asleep or not budget.is_quick or self.num_ready >= budget.burst:
                self.announce()

    # --------------------------------------------------------------------------------------------- under the lock

    @property
    def head(self) -> WorkItem | None:
        """The awaited item."""
        return self._items[0] if self._items else None

    def append(self, work_item: WorkItem) -> None:
        """Add an item that was opened."""
        self._items.append(work_item)

    def announce(self) -> None:
        """Wake the consumer if the item it waits for is complete."""
        if self._items and self._items[0].is_done:
            self._ready.notify()

    def drop(self, work_item: WorkItem) -> None:
        """Free the memory of a cancelled item whose last chunk has left the stages."""
        work_item.let_go()
        work_item.result = None
        self._budget.release(work_item)
        self._budget.wake_worker()

    def cancel(self) -> None:
        """Drop all items; those with chunks inside a stage are dropped when these have left it."""
        for work_item in self._items:
            work_item.cancelled = True
            num_untaken = sum(not chunk.marks for chunk in work_item.chunks)
            work_item.num_pending -= num_untaken
            if work_item.is_done or (num_untaken and not work_item.num_pending):
                self.drop(work_item)
        self._items.clear()
        self.num_ready = 0
        self.is_last = False

    def fail(self, error: BaseException) -> None:
        """Make the consumer raise the first `error` at its next wait."""
        self._failure, self.is_over = self._failure or error, True
        self._ready.notify_all()

    def close(self) -> None:
        """Wake the consumer and cancel everything."""
        self._is_closed = self.is_over = True
        for work_item in self._items:
            work_item.cancelled = True
        self._ready.notify_all()

    def clear(self) -> None:
        """Drop the items."""
        self._items.clear()
