"""The intake: open destinations, the chunks nobody has taken yet, and the budget, under one lock.

Workers pull: there is no feeder thread. Whoever finds no chunk opens the next destination, if there is room for it. The lock
is held for microseconds, and never while a user's code runs.
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

# Batches quicker than this are handed over several at a time: to wake the other thread up, and to hand it the GIL, costs as
# much as such a batch (16 windows of tokens: 47,000 a second one at a time). The consumer looks by itself after _LOOK_S.
_QUICK_S = 0.5e-3
_LOOK_S = 2e-3


class Scheduler:
    """What is being filled, and what comes next."""

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
        """`is_whole`: whoever takes a chunk also delivers what it completes. `one_works`: whether only one worker takes
        chunks at present."""
        self._plan = plan
        self._states = states
        self._clock = clock
        self._num_workers = num_workers
        self._is_whole = is_whole
        self._one_works = one_works
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._ready = threading.Condition(self._lock)
        self._queue: deque[WorkItem] = deque()  # open destinations in order, complete or not
        self._chunks: deque[Chunk] = deque()  # of open destinations, taken by nobody yet
        self._resting: list[WorkerClock] = []  # of the first pool's workers that wait for room or work
        self._scratches: list[dict[str, Any]] = []
        self._chunk_sizer = ChunkSizer()
        self._at_end = False
        self._is_preparing = False
        self._is_closed = False
        self._failure: BaseException | None = None
        self._is_asleep = False  # the consumer waits, and will not look by itself before long
        self.num_ready = 0  # destinations in the queue that are complete
        self.num_open = 0  # destinations in the queue, or cancelled with chunks still in a stage: they hold memory
        self.is_short_of_memory = False  # memory, not depth, is what keeps the next destination from being opened

    # ------------------------------------------------------------------------------------------------ the consumer

    def first(self, *, keep: bool = False) -> WorkItem | None:
        """The first destination in order, taken out, if it is complete. Raises what made the workers stop.

        With `keep` it stays in the budget until `leave`, for somebody who takes it on the consumer's behalf.
        """
        with self._lock:
            return self._first(keep=keep)

    def wait_for_first(self, timeout_s: float) -> tuple[WorkItem | None, float]:
        """The same after waiting for it, and what is left of `timeout_s`; None when that has passed."""
        with self._lock:
            ends_s = time.monotonic() + timeout_s
            while True:
                found, left_s = self._first(), ends_s - time.monotonic()
                if found is not None or left_s <= 0:
                    return found, left_s
                assert not (self._at_end and not self._queue), "the loader asks for no batch past the last"
                self._sleep(min(left_s, _LOOK_S) if self._is_quick() else left_s)

    def wait_until_ready(self) -> None:
        """Return once `first` has something to give or to raise, however long that takes."""
        with self._lock:
            while not (self._is_closed or self._failure or (self._queue and self._queue[0].is_done)):
                self._sleep(_LOOK_S if self._is_quick() else None)

    def _sleep(self, wait_s: float | None) -> None:
        """Wait to be told that the first destination is complete."""
        self._is_asleep = wait_s is None or wait_s > _LOOK_S
        try:
            self._ready.wait(wait_s)
        finally:
            self._is_asleep = False

    def leave(self, count: int) -> None:
        """So many destinations that were kept in the budget have reached the consumer, or nobody."""
        with self._lock:
            self.num_open -= count
            if self._resting:
                self._room.notify(count)

    def _first(self, *, keep: bool = False) -> WorkItem | None:
        if self._is_closed:
            raise ClosedError("the loader was closed while a batch was awaited")
        if self._failure is not None:
            raise self._failure
        if not self._queue or not self._queue[0].is_done:
            return None
        self.num_ready -= 1
        if not keep:
            self.num_open -= 1
            self._plan.release(self._queue[0])
            if self._resting and self._is_worth_waking():
                self._room.notify()
        return self._queue.popleft()

    @property
    def num_queued(self) -> int:
        """Chunks that nobody has taken yet; for any thread."""
        return len(self._chunks)

    def _is_quick(self) -> bool:
        # Only where workers announce what is complete before they wait, so that no complete batch goes unannounced.
        sample_s = self._chunk_sizer.sample_s
        return self._is_whole and sample_s is not None and sample_s * self._plan.batch_size < _QUICK_S

    def _is_worth_waking(self) -> bool:
        """Whether there is room for as many batches as a worker makes at a time."""
        return not self._is_quick() or self.num_open <= self._plan.room[0] - self._burst()

    def _burst(self) -> int:
        """How many quick batches are handed over at a time: half of what there is room for, so that both sides go on
        meanwhile; all of it where only one thread can run anyway."""
        room = self._plan.room[0]
        return room if self._one_works() else -(-room // 2)

    def head(self) -> WorkItem | None:
        """The awaited destination, for reports."""
        with self._lock:
            return self._queue[0] if self._queue else None

    def seek(self, epoch: int, position: int) -> None:
        """Drop everything read ahead and go on from another place, unless that is where the plan already stands."""
        with self._lock:
            stands = (self._queue[0].epoch, self._queue[0].begin) if self._queue else self._plan.place
            if stands == self._plan.begins_at(epoch, position):
                return
            self._chunks.clear()
            for work_item in self._queue:
                work_item.cancelled = True
                num_untaken = sum(not chunk.marks for chunk in work_item.chunks)
                work_item.num_pending -= num_untaken
                # Chunks inside a stage, and batches inside a batch stage, drop their destination when they come out.
                if work_item.is_done or (num_untaken and not work_item.num_pending):
                    self._drop(work_item)
            self._queue.clear()
            self.num_ready = 0
            self._at_end = False
            self._plan.seek(epoch, position)
            self._room.notify_all()

    def fail(self, error: BaseException) -> None:
        """Make the consumer raise `error` at its next wait."""
        with self._lock:
            self._failure = self._failure or error
            self._ready.notify_all()

    def close(self) -> None:
        """Wake everybody up and cancel everything."""
        with self._lock:
            self._is_closed = True
            for work_item in self._queue:
                work_item.cancelled = True
            self._room.notify_all()
            self._ready.notify_all()

    def clear(self) -> None:
        """Let go of what was read ahead, once no worker is left."""
        self._queue.clear()
        self._chunks.clear()
        self._scratches.clear()

    # ------------------------------------------------------------------------------------------------- the workers

    def take(self, worker_clock: WorkerClock) -> Chunk | None:
        """The next chunk; waits for room in the budget (blocked) or for work (starved). None when closed, or when this worker
        is not wanted."""
        while True:
            with self._lock:
                while not self.is_over and worker_clock.is_wanted:
                    if self._chunks:
                        chunk = self._chunks.popleft()
                        chunk.marks.append((self._clock(), stalls.QUEUED))
                        chunk.scratch = self._scratches.pop() if self._scratches else {}
                        if self._chunks and self._resting:
                            self._room.notify()
                        return chunk
                    if not self._plan.is_prepared and not self._is_preparing:
                        self._is_preparing = True
                        break
                    if not self._plan.is_prepared or not self._open_next():
                        self._rest(worker_clock)
                else:
                    if self._resting and not worker_clock.is_wanted:
                        self._room.notify()  # it may have been woken in another one's place
                    return None
            self._prepare()

    @property
    def is_over(self) -> bool:
        """Nothing more will come: closed, or failed."""
        return self._is_closed or self._failure is not None

    def resize(self, num_workers: int) -> None:
        """There are so many workers in all from now on; whoever waits looks again."""
        with self._lock:
            self._num_workers = num_workers
            self._room.notify_all()

    def set_depth(self, num_batches: int | None, memory_bytes: int | None) -> None:
        """Change how far is read ahead; None: as it is. Raises ConfigError if the memory holds not even one batch."""
        with self._lock:
            self._plan.set_depth(num_batches, memory_bytes)
            self._room.notify_all()

    def _rest(self, worker_clock: WorkerClock) -> None:
        """Let a worker wait for room or work. Under the lock."""
        states = self._states
        has_work = self.num_open and not self._at_end
        worker_clock.enter(states.blocked if has_work else states.starved)
        self._announce()
        self._resting.append(worker_clock)
        self._room.wait()
        self._resting.remove(worker_clock)

    def wake_worker(self) -> None:
        """Wake a worker that waits for room or work, if there is one."""
        with self._lock:
            if self._resting:
                self._room.notify()

    def _prepare(self) -> None:
        """Let the plan find out what batches look like. It runs a user's code, so not under the lock."""
        error: BaseException | None = None
        begin = self._clock()
        try:
            self._plan.prepare()
            self._chunk_sizer.sample_s = (
                self._clock() - begin
            )  # so that large samples begin with small chunks, and little memory
        except BaseException as raised:
            error = raised
        with self._lock:
            self._is_preparing = False
            if error is not None:
                self._failure = self._failure or error
                self._ready.notify_all()
            self._room.notify_all()

    def _open_next(self) -> bool:
        plan = self._plan
        num_allowed, by_memory = plan.room
        if self.num_open >= num_allowed:
            self.is_short_of_memory = by_memory
            return False
        work_item = plan.open(self._chunk_sizer.next_chunk_size(plan.batch_size, self._num_workers))
        if work_item is None:
            self._at_end = True
            return False
        work_item.opened_s = self._clock()
        self.num_open += 1
        self._queue.append(work_item)
        self._chunks.extend(work_item.chunks)
        return True

    def _chunk_size(self) -> int:
        return self._chunk_sizer.chunk_size(self._plan.batch_size, self._num_workers)

    def land(self, chunk: Chunk) -> WorkItem | None:
        """Count a chunk as landed; its destination, if that was the last one and somebody still wants it."""
        work_item = chunk.work_item
        took_s = self._clock() - chunk.marks[0][0]
        with self._lock:
            self._chunk_sizer.landed(took_s, len(chunk))
            scratch = chunk.empty()
            trim(scratch, self._chunk_size)
            self._scratches.append(scratch)
            work_item.num_pending -= 1
            if work_item.num_pending:
                return None
            work_item.last_chunk = chunk
            if work_item.cancelled:
                self._drop(work_item)
                return None
        return work_item

    def _drop(self, work_item: WorkItem) -> None:
        """The last chunk of a cancelled destination is out of the stages: its memory is free. Under the lock."""
        work_item.let_go()
        work_item.result = None
        self.num_open -= 1
        self._plan.release(work_item)
        if self._resting:
            self._room.notify()

    def deliver(self, work_item: WorkItem) -> None:
        """A destination is complete; wake the consumer if it is the one awaited."""
        with self._lock:
            if work_item.cancelled:
                self._drop(work_item)
                return
            work_item.done_s = self._clock()
            work_item.is_done = True
            self.num_ready += 1
            if self._is_asleep or not self._is_quick() or self.num_ready >= self._burst():
                self._announce()

    def _announce(self) -> None:
        """Wake the consumer if the batch it waits for is complete. Under the lock."""
        if self._queue and self._queue[0].is_done:
            self._ready.notify()
