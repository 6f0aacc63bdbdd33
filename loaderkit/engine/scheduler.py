"""The open work items and their chunks: `ReadyQueue` is the consumer's side, `WorkQueue` the workers', `Budget` bounds both.

One lock guards all, and is held for microseconds, never while a user's code runs. Workers pull: there is no feeder thread. A
worker that finds no chunk opens the next work item, if there is room for it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from loaderkit.engine.autotune.chunk_sizer import ChunkSizer, trim
from loaderkit.engine.contracts import Plan
from loaderkit.engine.metrics import stalls
from loaderkit.engine.metrics.worker_clock import Clock, WorkerClock, WorkerStates
from loaderkit.engine.work import Chunk, WorkItem
from loaderkit.errors import ClosedError
from loaderkit.sampling.shard import Shard

# Batches quicker than this are handed over several at a time: to wake the other thread up, and to hand it the GIL, costs as
# much as such a batch (16 windows of tokens: 47,000 a second one at a time).
_QUICK_S = 0.5e-3
_LOOK_S = 2e-3  # while batches are quick the consumer polls, and most of them need no wake-up


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
        """Wake workers that wait for room or work, if there are any."""
        self.changed.notify(count)

    @property
    def is_quick(self) -> bool:
        """True if a batch takes less than a hand-off. This is only so where workers announce complete batches before
        they wait, so that no batch stays unannounced."""
        sample_s = self.chunk_sizer.sample_s
        return self._is_whole and sample_s is not None and sample_s * self._plan.batch_size < _QUICK_S

    @property
    def is_worth_waking(self) -> bool:
        """True if there is room for as many batches as a worker makes at a time."""
        return not self.is_quick or self.num_open <= self._plan.room[0] - self.burst

    @property
    def burst(self) -> int:
        """How many quick batches are handed over at a time: half of those that there is room for, so that both sides
        keep working; all of them where only one thread can run at a time."""
        room = self._plan.room[0]
        return room if self._one_works() else -(-room // 2)


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


class WorkQueue:
    """Chunks of open work items. The budget's lock is never held while a user's code runs."""

    def __init__(self, plan: Plan, budget: Budget, ready: ReadyQueue, states: WorkerStates, clock: Clock) -> None:
        self._plan = plan
        self._lock = budget.lock
        self._budget = budget
        self._ready = ready
        self._states = states
        self._clock = clock
        self._chunks: deque[Chunk] = deque()
        self._scratches: list[dict[str, Any]] = []
        self._is_preparing = False
        self._num_taken = 0
        self.is_held = False  # nothing is prepared or opened

    def __len__(self) -> int:
        return len(self._chunks)

    def take(self, worker_clock: WorkerClock) -> Chunk | None:
        """The next chunk, after waiting for room in the budget (blocked) or for work (starved). None when closed, or when this
        worker is not wanted."""
        budget = self._budget
        while True:
            with self._lock:
                while not self._ready.is_over and worker_clock.is_wanted:
                    if self._chunks:
                        chunk = self._chunks.popleft()
                        chunk.number, self._num_taken = self._num_taken, self._num_taken + 1
                        chunk.marks.append((self._clock(), stalls.QUEUED))
                        chunk.scratch = self._scratches.pop() if self._scratches else {}
                        if self._chunks and budget.num_resting:
                            budget.wake_worker()
                        return chunk
                    if self.is_held:
                        self._rest(worker_clock)
                        continue
                    if not self._plan.is_prepared and not self._is_preparing:
                        self._is_preparing = True
                        break
                    if not self._plan.is_prepared or not self._open_next():
                        self._rest(worker_clock)
                else:
                    if not worker_clock.is_wanted:
                        budget.wake_worker()  # this wake-up may have been meant for another worker
                    return None
            self._prepare()

    def land(self, chunk: Chunk) -> WorkItem | None:
        """Count a chunk as landed; returns its work item, if that was the last chunk and the item is not cancelled."""
        work_item, size = chunk.work_item, len(chunk)
        took_s = self._clock() - chunk.marks[0][0]
        with self._lock:
            self._budget.chunk_sizer.landed(took_s, size)
            chunk.has_landed = True
            chunk.let_go()
            scratch, chunk.scratch = chunk.scratch, {}
            trim(scratch, size)
            self._scratches.append(scratch)
            work_item.num_pending -= 1
            if work_item.num_pending:
                return None
            work_item.last_chunk = chunk
            if work_item.cancelled:
                self._ready.drop(work_item)
                return None
        return work_item

    def clear(self) -> None:
        """Drop the chunks. Under the lock, or once no worker is left."""
        self._chunks.clear()
        self._scratches.clear()

    def _open_next(self) -> bool:
        work_item, is_last = self._budget.open_next()
        if work_item is None:
            self._ready.is_last = self._ready.is_last or is_last
            return False
        work_item.opened_s = self._clock()
        self._ready.append(work_item)
        self._chunks.extend(work_item.chunks)
        return True

    def _rest(self, worker_clock: WorkerClock) -> None:
        """Let a worker wait for room or work. Under the lock."""
        states, budget = self._states, self._budget
        has_work = budget.num_open and not self._ready.is_last
        worker_clock.enter(states.blocked if has_work else states.starved)
        self._ready.announce()
        budget.num_resting += 1
        budget.changed.wait()
        budget.num_resting -= 1

    def _prepare(self) -> None:
        """Prepare the plan, without the lock: it runs the user's code."""
        error: BaseException | None = None
        begin = self._clock()
        try:
            self._plan.prepare()
            self._budget.chunk_sizer.first(
                self._clock() - begin, self._plan.memory_stats(0)["batch_bytes"] / self._plan.batch_size
            )
        except BaseException as raised:
            error = raised
        with self._lock:
            self._is_preparing = False
            if error is not None:
                self._ready.fail(error)
            self._budget.changed.notify_all()


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
        """Set how far to read ahead; None leaves a value unchanged. Raises ConfigError if the memory holds not even one
        batch."""
        with self.lock:
            self._plan.set_depth(num_batches, memory_bytes)
            self.budget.changed.notify_all()

    def seek(self, epoch: int, position: int, shard: Shard | None = None) -> None:
        """Drop everything read ahead and continue at another position, unless the plan is already there. `shard`: see
        `Plan.seek`."""
        with self.lock:
            head = self.ready.head
            next_position = self._plan.next_position if head is None else (head.epoch, head.begin)
            if next_position != self._plan.begins_at(epoch, position, shard):
                self._go_to(epoch, position, shard)

    def hold(self) -> None:
        """Open nothing until `release`."""
        with self.lock:
            self.work.is_held = True

    def release(self, epoch: int, position: int, shard: Shard) -> None:
        """Begin, after `hold`, with what `shard` has from a position on."""
        with self.lock:
            self.work.is_held = False
            self._go_to(epoch, position, shard)

    def _go_to(self, epoch: int, position: int, shard: Shard | None) -> None:
        self.work.clear()
        self.ready.cancel()
        self._plan.seek(epoch, position, shard)
        self.budget.changed.notify_all()

    def share(self, shard: Shard) -> None:
        """See `Plan.share`."""
        with self.lock:
            self._plan.share(shard)

    def redeal(self, border: tuple[int, int], shard: Shard | None) -> None:
        """Open other work items from (epoch, position) `border` on; see `Plan.redeal`."""
        with self.lock:
            self._plan.redeal(border, shard)

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
