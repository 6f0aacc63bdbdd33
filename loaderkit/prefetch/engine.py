"""The engine: pools of workers that pull chunks, fill destinations, and hand them over in order.

Workers pull: there is no feeder thread. Whoever finds no chunk opens the next destination, if there is room for it. One
lock guards the cursor, the budget and the completion of destinations; it is held for microseconds. A chunk runs through all
stages of a pool without a hand-off; a hand-off to another pool costs 10 to 20 us.
"""

from __future__ import annotations

import _thread
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from loaderkit.errors import ClosedError
from loaderkit.prefetch import stalls, watch
from loaderkit.prefetch.accounts import Account, Clock, States
from loaderkit.prefetch.buffers import Buffer
from loaderkit.prefetch.plan import BatchPlan
from loaderkit.prefetch.pools import PoolPlan
from loaderkit.types import BatchContext, Chunk, Destination, Stage

# Interleaved rounds on pictures of 1 ms, two threads: chunks of 2 ms 1,070 img/s, 4 ms 1,439, 10 ms 1,530, 20 ms 1,716,
# 60 ms 1,766: fewer exchanges of the GIL, and one stage's code at a time in the caches.
_CHUNK_TARGET_S = 0.02
_FIRST_CHUNK_SIZE = 8
_JOIN_S = 10.0
logger = logging.getLogger("loaderkit")


class Pool:
    """A running pool. The first takes its chunks from the engine's intake, the others from a buffer."""

    def __init__(self, number: int, plan: PoolPlan, states: States) -> None:
        self.number = number
        self.plan = plan
        self.buffer: Buffer[Chunk | Destination] | None = Buffer(2 * plan.num_workers, states) if number else None
        self.accounts: list[Account] = []
        self.threads: list[threading.Thread] = []


class Engine:
    """Runs a plan. All public methods but `stats` and `close` belong to the consumer's thread."""

    def __init__(
        self,
        plan: BatchPlan,
        stages: Sequence[Stage],
        pools: Sequence[PoolPlan],
        *,
        inline: bool,
        timeout_s: float,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.plan = plan
        self.stages = stages
        self.states = States(len(stages))
        self.clock = clock
        self.inline = inline
        self.pools = [Pool(number, pool, self.states) for number, pool in enumerate(pools)]
        self.stall_s: dict[str, float] = {}
        self.num_delivered = 0
        self.num_samples = 0
        self.first_wait_s: float | None = None
        self.waiting_since_s: float | None = None
        self._timeout_s = timeout_s
        self._num_workers = sum(pool.num_workers for pool in pools)
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._ready = threading.Condition(self._lock)
        self._queue: deque[Destination] = deque()  # open destinations in order, complete or not
        self._chunks: deque[Chunk] = deque()  # of open destinations, taken by nobody yet
        self._num_open = 0  # in the queue, or cancelled with chunks still in a stage
        self._num_waiting = 0  # workers of the first pool
        self._scratches: list[dict[str, Any]] = []
        self._sample_s: float | None = None
        self._at_end = False
        self._is_preparing = False
        self._is_short_of_memory = False
        self._failure: BaseException | None = None
        self._is_started = False
        self._is_closed = False
        self._pid = os.getpid()

    # ------------------------------------------------------------------------------------------------ the consumer

    def start(self) -> None:
        """Begin to work ahead. Idempotent. The inline executor has nothing to start: it works when it is asked."""
        self._check_usable()
        if self._is_started:
            return
        self._is_started = True
        if self.inline:
            self.pools[0].accounts.append(Account(self.states, self.clock, first_state=self.states.blocked))
            return
        num_torch_threads = torch.get_num_threads()
        ready = threading.Barrier(self._num_workers + 1)
        try:
            self._start_workers(ready)
            ready.wait()
        except BaseException as error:
            ready.abort()  # Ctrl-C, or no more threads to be had: let those go that run
            self.fail(error)
            raise
        finally:
            # torch keeps one number for threads to come besides one for each thread: put back what the workers set.
            torch.set_num_threads(num_torch_threads)

    def _start_workers(self, ready: threading.Barrier) -> None:
        for pool in self.pools:
            for number in range(pool.plan.num_workers):
                account = Account(self.states, self.clock, first_state=self.states.starved)
                pool.accounts.append(account)
                names = [self.stages[s].name for s in (*pool.plan.sample_stages, *pool.plan.batch_stages)]
                thread = threading.Thread(
                    target=self._work,
                    args=(pool, account, ready),
                    name=f"loaderkit-{'+'.join(names)}-{number}"[:64],
                    daemon=True,
                )
                thread.start()
                pool.threads.append(thread)

    def next(self) -> Destination:
        """The next destination in order, complete; its error, if it has one, is still in it."""
        self.start()
        begin = self.clock()
        if self.first_wait_s is None:
            self.first_wait_s = begin
        self.waiting_since_s = begin
        try:
            destination = self._wait()
            end = self.clock()
        finally:
            self.waiting_since_s = None
        assert destination.last_chunk is not None
        way = stalls.Way(destination.opened_s, destination.last_chunk.marks, destination.done_s)
        for cause, seconds in self.attribute(begin, end, way).items():
            self.stall_s[cause] = self.stall_s.get(cause, 0.0) + seconds
        if destination.error is None:
            self.num_delivered += 1
            self.num_samples += len(destination)
        destination.last_chunk = None
        destination.chunks = []
        return destination

    def attribute(self, begin_s: float, end_s: float, way: stalls.Way) -> dict[str, float]:
        """Seconds of the wait [begin_s, end_s) by cause, along the way of the chunk that was waited for."""
        return stalls.attribute(
            begin_s,
            end_s,
            way,
            was_short_of_memory=self._is_short_of_memory,
            stage_names=[stage.name for stage in self.stages],
            pools=[pool.accounts for pool in self.pools],
        )

    def open_wait(self, now: float) -> dict[str, float]:
        """Seconds by cause of the wait that the consumer is in just now; for any thread."""
        begin = self.waiting_since_s
        if begin is None or begin >= now:
            return {}
        with self._lock:
            head = self._queue[0] if self._queue else None
            if head is None or head.is_done:
                way = stalls.Way(now, [], now)
            else:
                # Of the chunks that keep the batch waiting, the one that is the least far.
                last = min((chunk for chunk in head.chunks if chunk.samples), key=lambda c: len(c.marks), default=None)
                way = stalls.Way(head.opened_s, list(last.marks) if last is not None else [], now)
        return self.attribute(begin, now, way)

    def _wait(self) -> Destination:
        while self.inline:
            with self._lock:
                self._raise_failure()
                if self._queue and self._queue[0].is_done:
                    return self._take_first()
            self._work_inline()
        with self._lock:
            while True:
                self._raise_failure()
                if self._queue and self._queue[0].is_done:
                    return self._take_first()
                assert not (self._at_end and not self._queue), "the loader asks for no batch past the last"
                if not self._ready.wait(self._timeout_s):
                    report = watch.describe_wait(
                        self._queue[0] if self._queue else None,
                        self.clock(),
                        stage_names=[stage.name for stage in self.stages],
                        key_of=self.plan.key,
                        threads=[thread for pool in self.pools for thread in pool.threads],
                    )
                    logger.warning("no batch for %g s (prefetch.timeout)\n%s", self._timeout_s, report)

    def _take_first(self) -> Destination:
        destination = self._queue.popleft()
        self._num_open -= 1
        if self._num_waiting:
            self._room.notify()
        return destination

    def _raise_failure(self) -> None:
        if self._is_closed:
            raise ClosedError("the loader was closed while a batch was awaited")
        if self._failure is not None:
            raise self._failure

    def seek(self, epoch: int, position: int) -> None:
        """Drop everything read ahead and go on from another place, unless that is where the plan already stands."""
        self._check_usable()
        with self._lock:
            stands = (self._queue[0].epoch, self._queue[0].begin) if self._queue else self.plan.place
            if stands == (epoch, position):
                return
            self._chunks.clear()
            for destination in self._queue:
                destination.cancelled = True
                num_untaken = sum(not chunk.marks for chunk in destination.chunks)
                destination.num_pending -= num_untaken
                # Chunks inside a stage, and batches inside a batch stage, drop their destination when they come out.
                if destination.is_done or (num_untaken and not destination.num_pending):
                    self._drop(destination)
            self._queue.clear()
            self._at_end = False
            self.plan.seek(epoch, position)
            self._room.notify_all()

    def fail(self, error: BaseException) -> None:
        """Make the consumer raise `error` at its next wait."""
        with self._lock:
            self._failure = self._failure or error
            self._ready.notify_all()

    def close(self, join_s: float = _JOIN_S) -> None:
        """Stop and join the workers, drop what was read ahead. Idempotent, from any thread and any state.

        A worker that is still inside a stage after `join_s` is left to end by itself, with a warning.
        """
        if os.getpid() != self._pid:
            # In a fork's child none of our threads is here, and a lock may have been copied while it was held.
            self._is_closed = True
            return
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            for destination in self._queue:
                destination.cancelled = True
            self._room.notify_all()
            self._ready.notify_all()
        for pool in self.pools:
            if pool.buffer is not None:
                pool.buffer.close()
        deadline = time.monotonic() + join_s
        for thread in [thread for pool in self.pools for thread in pool.threads]:
            if thread.ident != threading.get_ident():
                thread.join(max(0.0, deadline - time.monotonic()))
                if thread.is_alive():
                    stack = watch.stack_of(thread)
                    logger.warning("%s did not stop within %g s: a stage hangs\n%s", thread.name, join_s, stack)
        self._queue.clear()
        self._chunks.clear()
        self._scratches.clear()

    def abandon(self) -> None:
        """Close, once the loader is garbage. The collector may run in a worker that holds a lock of ours, and that one
        cannot close anything itself; `threading.Thread` would take locks of its own."""
        if any(thread.ident == threading.get_ident() for pool in self.pools for thread in pool.threads):
            _thread.start_new_thread(self.close, ())
        else:
            self.close()

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def num_open(self) -> int:
        """Destinations that hold memory of the budget: being filled, or complete and not delivered."""
        return self._num_open

    def _check_usable(self) -> None:
        if self._is_closed:
            raise ClosedError("the loader is closed: build another one")
        if os.getpid() != self._pid:
            raise ClosedError(
                "the loader was made before a fork and used after it, where its threads do not exist: build one in each process"
            )

    # ------------------------------------------------------------------------------------------------- the workers

    def _work(self, pool: Pool, account: Account, ready: threading.Barrier) -> None:
        torch.get_num_threads()  # makes torch initialise this thread, which would undo the next line later
        torch.set_num_threads(1)  # two threads inside an operation of a worker cost 13 % of the throughput
        try:
            ready.wait()
            while True:
                item = self._take(account) if pool.buffer is None else pool.buffer.get(account)
                if item is None:
                    return
                self._process(pool, account, item)
                del item  # or the worker would keep a delivered batch's memory while it waits
        except threading.BrokenBarrierError:
            return
        except BaseException as error:
            self.fail(error)

    def _work_inline(self) -> None:
        """Carry one chunk through every pool, in the consumer's thread."""
        account = self.pools[0].accounts[0]
        item: Chunk | Destination | None = self._take(account)
        num_torch_threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as in the workers: on small tensors a second thread only spins
        try:
            for pool in self.pools:
                if item is not None:
                    item = self._run(pool, account, item)
        finally:
            torch.set_num_threads(num_torch_threads)
        if isinstance(item, Destination):
            self._deliver(item)
        account.enter(self.states.blocked)

    def _process(self, pool: Pool, account: Account, item: Chunk | Destination) -> None:
        onward = self._run(pool, account, item)
        if onward is None:
            return
        if pool.number + 1 < len(self.pools):
            following = self.pools[pool.number + 1]
            assert following.buffer is not None
            chunk = onward if isinstance(onward, Chunk) else onward.last_chunk
            assert chunk is not None
            chunk.marks.append((self.clock(), stalls.QUEUED - following.number))
            following.buffer.put(onward, account)
        elif isinstance(onward, Destination):
            self._deliver(onward)

    def _take(self, account: Account) -> Chunk | None:
        """The next chunk; waits for room in the budget (blocked) or for work (starved). None when closed."""
        with self._lock:
            while not self._is_closed and self._failure is None:
                if self._chunks:
                    chunk = self._chunks.popleft()
                    chunk.marks.append((self.clock(), stalls.QUEUED))
                    chunk.scratch = self._scratches.pop() if self._scratches else {}
                    if self._chunks and self._num_waiting:
                        self._room.notify()
                    return chunk
                if self.plan.specs is None and not self._is_preparing:
                    self._prepare()
                elif self.plan.specs is None or not self._open_next():
                    if self.inline:
                        return None
                    has_work = self._num_open and not self._at_end
                    account.enter(self.states.blocked if has_work else self.states.starved)
                    self._num_waiting += 1
                    self._room.wait()
                    self._num_waiting -= 1
            return None

    def _prepare(self) -> None:
        """Let the plan find out what batches look like. It runs a user's code, so the lock is open meanwhile."""
        self._is_preparing = True
        self._lock.release()
        error: BaseException | None = None
        begin = self.clock()
        try:
            self.plan.prepare()
            self._sample_s = self.clock() - begin  # so that large samples begin with small chunks, and little memory
        except BaseException as raised:
            error = raised
        finally:
            self._lock.acquire()
            self._is_preparing = False
        if error is not None:
            self._failure = self._failure or error
            self._ready.notify_all()
        self._room.notify_all()

    def _open_next(self) -> bool:
        plan = self.plan
        num_allowed, by_memory = plan.room
        if self._num_open >= (1 if self.inline else num_allowed):
            self._is_short_of_memory = by_memory
            return False
        destination = plan.open(self._chunk_size())
        if destination is None:
            self._at_end = True
            return False
        destination.opened_s = self.clock()
        self._num_open += 1
        self._queue.append(destination)
        self._chunks.extend(destination.chunks)
        return True

    def _chunk_size(self) -> int:
        size = self.plan.batch_size
        if self._sample_s is None:
            return max(1, min(_FIRST_CHUNK_SIZE, -(-size // self._num_workers)))
        wanted = int(_CHUNK_TARGET_S / max(self._sample_s, 1e-9))
        return size if wanted >= size else max(1, min(wanted, -(-size // self._num_workers)))

    def _run(self, pool: Pool, account: Account, item: Chunk | Destination) -> Chunk | Destination | None:
        """Run a pool's stages on an item; what goes on from there: the chunk, its complete destination, or nothing."""
        if isinstance(item, Destination):
            self._run_batch_stages(pool, account, item)
            return item
        destination = item.destination
        try:
            for number in pool.plan.sample_stages:
                if destination.cancelled:
                    break
                item.marks.append((account.enter(number), number))
                num_failed = len(item.failures)
                num_bytes = self.stages[number].run(item)
                account.served(number, len(item), num_bytes or 0)
                account.stages[number].num_failed += len(item.failures) - num_failed
        except Exception as error:
            destination.error = destination.error or error
        if not pool.plan.lands:
            return item
        landed = self._land(item)
        if landed is not None:
            self._run_batch_stages(pool, account, landed)
        return landed

    def _land(self, chunk: Chunk) -> Destination | None:
        """Count a chunk as landed; its destination, if that was the last one and somebody still wants it."""
        destination = chunk.destination
        took_s = (self.clock() - chunk.marks[0][0]) / len(chunk)
        with self._lock:
            self._sample_s = took_s if self._sample_s is None else 0.9 * self._sample_s + 0.1 * took_s
            size = self._chunk_size()
            for pieces in chunk.scratch.values():
                if isinstance(pieces, list):
                    del pieces[size:]  # what longer chunks needed is given back
            self._scratches.append(chunk.scratch)
            chunk.scratch = {}
            chunk.samples = []
            destination.num_pending -= 1
            if destination.num_pending:
                return None
            destination.last_chunk = chunk
            if destination.cancelled:
                self._drop(destination)
                return None
        return destination

    def _drop(self, destination: Destination) -> None:
        """The last chunk of a cancelled destination is out of the stages: its memory is free. Under the lock."""
        destination.fields = {}
        destination.result = None
        self._num_open -= 1
        if self._num_waiting:
            self._room.notify()

    def _run_batch_stages(self, pool: Pool, account: Account, destination: Destination) -> None:
        try:
            if destination.result is None and destination.error is None:
                destination.result = self.plan.finish(destination)
            for number in pool.plan.batch_stages:
                if destination.cancelled or destination.error is not None:
                    break
                now = account.enter(number)
                assert destination.last_chunk is not None
                destination.last_chunk.marks.append((now, number))
                first = int(destination.positions[0])
                context = BatchContext(
                    destination.epoch, destination.step, first, destination.result["__key__"], destination.specs
                )
                self.stages[number].run(destination.result, context)
                account.served(number, len(destination), 0)
        except Exception as error:
            destination.error = error

    def _deliver(self, destination: Destination) -> None:
        with self._lock:
            if destination.cancelled:
                self._drop(destination)
                return
            destination.done_s = self.clock()
            destination.is_done = True
            if self._queue and self._queue[0] is destination:
                self._ready.notify()
