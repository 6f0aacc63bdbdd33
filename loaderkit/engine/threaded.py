"""The engine of threads: pools of workers that pull chunks from the scheduler and read ahead.

A hand-off to another pool costs 10 to 20 us.
"""

from __future__ import annotations

import _thread
import logging
import threading
import time
from collections.abc import Callable, Sequence

from loaderkit._internal.torch_threads import ONE_AT_A_TIME, new_thread_default_kept
from loaderkit.engine import watchdog
from loaderkit.engine.base import Engine, WorkerPool
from loaderkit.engine.contracts import Plan
from loaderkit.engine.metrics import stalls
from loaderkit.engine.metrics.worker_clock import Clock, WorkerClock
from loaderkit.engine.pools import PoolPlan
from loaderkit.engine.scheduler import Scheduler
from loaderkit.engine.work import Chunk, Stage, WorkItem
from loaderkit.errors import ConfigError
from loaderkit.sampling.shard import Shard

_FOREIGN_S = 1.0  # a close waits for a worker that is in code which nothing can end
logger = logging.getLogger("loaderkit")


class ThreadEngine(Engine):
    """Runs a plan with worker threads."""

    def __init__(
        self,
        plan: Plan,
        stages: Sequence[Stage],
        pools: Sequence[PoolPlan],
        *,
        timeout_s: float,
        raises: bool = False,
        tries_one_worker: bool = True,
        clock: Clock = time.perf_counter,
        counters: Callable[[], dict[str, float]] | None = None,
    ) -> None:
        """`raises`: a wait longer than `timeout_s` raises StallTimeout instead of logging. The rest: see `Engine`."""
        super().__init__(plan, stages, pools, tries_one_worker=tries_one_worker, clock=clock, counters=counters)
        self._timeout_s = timeout_s
        self._raises = raises
        self.scheduler = Scheduler(
            plan,
            self.states,
            self.clock,
            num_workers=sum(pool.num_workers for pool in pools),
            is_whole=len(pools) == 1,
            one_works=self.pools[0].one_works,
        )
        self._sizing = threading.RLock()  # held while pools are resized
        self._resized = threading.Condition(self._sizing)  # idle workers wait on it
        self._is_started = False

    # ------------------------------------------------------------------------------------------------ the consumer

    def start(self) -> None:
        self.lifetime.check_usable()
        if self._is_started:
            return
        self._is_started = True
        with self._sizing:
            try:
                self._start_missing_workers()
            except BaseException as error:  # Ctrl-C, or the system has no more threads
                self.scheduler.fail(error)
                raise

    def resize(self, stage: str, num_workers: int) -> None:
        """See `Engine`; surplus workers become idle after their chunk. Raises ConfigError for an unknown stage, and where the
        system has no more threads; the number of workers is unchanged then."""
        self.lifetime.check_usable()
        pool = self._pool_of(stage)
        with self._sizing:
            self.lifetime.check_usable()  # a thread that starts now would never be joined
            before = pool.num_workers
            try:
                self._want(pool, num_workers)
                if self._is_started:
                    self._start_missing_workers()
            except BaseException as error:
                self._want(pool, before)
                if not isinstance(error, RuntimeError):
                    raise
                raise ConfigError(
                    f"resize: {num_workers} workers for {stage!r} could not be started ({error}): the system allows no more "
                    f"threads (`ulimit -u`, the cgroup's pids.max, or memory for their stacks); the stage keeps {before}"
                ) from error
        self.scheduler.resize(sum(pool.num_workers for pool in self.pools))
        if pool.buffer is not None:
            pool.buffer.resize(2 * num_workers)

    def _want(self, pool: WorkerPool, num_workers: int) -> None:
        """Set the number of workers of a pool; the others become idle. Under `_sizing`."""
        pool.num_workers = num_workers
        for number, worker_clock in enumerate(pool.worker_clocks):
            worker_clock.is_wanted = number < num_workers
        self._resized.notify_all()

    def _pool_of(self, stage: str) -> WorkerPool:
        for pool in self.pools:
            if stage in (self.stages[number].name for number in pool.plan.stages):
                return pool
        raise ConfigError(f"there is no stage {stage!r} to resize; there are {', '.join(self._stage_names)}")

    def set_depth(self, num_batches: int | None, memory_bytes: int | None) -> None:
        self.lifetime.check_usable()
        self.scheduler.set_depth(num_batches, memory_bytes)

    def _start_missing_workers(self) -> None:
        """Start the missing threads and return when all of them run; if that raises, none of them is left. Under `_sizing`."""
        num_before = [len(pool.worker_clocks) for pool in self.pools]
        missing = [(pool, n) for pool in self.pools for n in range(len(pool.worker_clocks), pool.num_workers)]
        since_s = self.clock()  # starting them is part of their time: a few milliseconds
        ready = threading.Barrier(len(missing) + 1)
        with ONE_AT_A_TIME, new_thread_default_kept() as compute_alone:
            try:
                for pool, number in missing:
                    self._start_worker(pool, number, ready, since_s, compute_alone)
                ready.wait()
            except BaseException:
                ready.abort()  # ends those that wait at the barrier
                for pool, num_kept in zip(self.pools, num_before, strict=True):
                    for thread in pool.threads[num_kept:]:
                        thread.join()
                    del pool.worker_clocks[num_kept:], pool.threads[num_kept:]
                raise

    def _start_worker(
        self, pool: WorkerPool, number: int, ready: threading.Barrier, since_s: float, compute_alone: Callable[[], None]
    ) -> None:
        worker_clock = self._new_worker_clock(self.states.starved, since_s)
        names = [self.stages[stage].name for stage in pool.plan.stages]
        thread = threading.Thread(
            target=self._work,
            args=(pool, worker_clock, ready, compute_alone),
            name=f"loaderkit-{'+'.join(names)}-{number}"[:64],
            daemon=True,
        )
        thread.start()
        pool.threads.append(thread)
        pool.worker_clocks.append(worker_clock)

    def seek(self, epoch: int, position: int, shard: Shard | None = None) -> None:
        """See `Engine`; `shard`: see `Plan.seek`."""
        self.lifetime.check_usable()
        self.scheduler.seek(epoch, position, shard)

    def _wait(self) -> WorkItem:
        self.start()
        patience = watchdog.Patience(self._timeout_s, self._raises)
        left_s = patience.next_s
        while True:
            work_item, left_s = self.scheduler.ready.wait_for_first(left_s)
            if work_item is not None:
                return work_item
            if left_s <= 0:
                patience.ends(self.describe_wait)
                left_s = patience.next_s

    def describe_wait(self) -> watchdog.HangReport:
        """The stage of each unfinished chunk of the awaited batch, and the workers' stacks; for any thread."""
        return watchdog.describe_wait(
            self.head(),
            self.clock(),
            preparing=self.plan.preparing(),
            stage_names=[stage.name for stage in self.stages],
            key_of=self.plan.key,
            threads=[thread for pool in self.pools for thread in pool.threads],
        )

    def trace(self, begin_s: float, end_s: float, path: stalls.ChunkPath) -> list[stalls.WaitSegment]:
        """The path of the awaited chunk within [begin_s, end_s)."""
        return stalls.segments_of(begin_s, end_s, path, self._facts[self.is_short_of_memory])

    def record(self) -> None:
        with self._sizing:
            super().record()

    def fail(self, error: BaseException) -> None:
        self.scheduler.fail(error)

    def _stop(self, join_s: float) -> None:
        """Cancel and join; a worker that is still inside a stage after `join_s`, or after a second in code that nothing
        can end, is left behind, with a warning."""
        self.scheduler.close()
        for turn in self.turns:
            if turn is not None:
                turn.close()
        for pool in self.pools:
            if pool.buffer is not None:
                pool.buffer.close()
            pool.gate.close()
        with self._sizing:
            self.lifetime.is_closed = True
            self._resized.notify_all()
        deadline = time.monotonic() + join_s
        for thread in [thread for pool in self.pools for thread in pool.threads]:
            if thread.ident != threading.get_ident():
                self._join(thread, deadline, join_s)
        self.scheduler.clear()

    def _join(self, thread: threading.Thread, deadline: float, join_s: float) -> None:
        """Wait for the end of a worker until `deadline`, which was `join_s` away, and warn if it is left behind."""
        thread.join(min(_FOREIGN_S, max(0.0, deadline - time.monotonic())))
        if not thread.is_alive():
            return
        what = next(filter(None, (stage.waits_for(thread.ident or 0) for stage in self.stages)), None)
        if what is not None:
            logger.warning(
                "%s waits for %s, which nothing can end: it is left behind, and ends when that comes, or with the process\n%s",
                thread.name,
                what,
                watchdog.stack_of(thread),
            )
            return
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            stack = watchdog.stack_of(thread)
            logger.warning("%s did not stop within %g s: a stage hangs\n%s", thread.name, join_s, stack)

    def abandon(self) -> None:
        """Close because the loader was collected. A worker that holds a lock of the engine may run the garbage collector, and
        cannot close: a new thread does, started without the locks of `threading.Thread`."""
        if any(thread.ident == threading.get_ident() for pool in self.pools for thread in pool.threads):
            _thread.start_new_thread(self.close, ())
        else:
            self.close()

    def head(self) -> WorkItem | None:
        return self.scheduler.head()

    @property
    def is_short_of_memory(self) -> bool:
        return self.scheduler.budget.is_short_of_memory

    @property
    def num_queued(self) -> int:
        return len(self.scheduler.work)

    @property
    def num_open(self) -> int:
        return self.scheduler.budget.num_open

    @property
    def num_ready(self) -> int:
        return self.scheduler.ready.num_ready

    # ------------------------------------------------------------------------------------------------- the workers

    def _work(
        self, pool: WorkerPool, worker_clock: WorkerClock, ready: threading.Barrier, compute_alone: Callable[[], None]
    ) -> None:
        try:
            compute_alone()  # two threads inside an operation of a worker cost 13 % of the throughput
            ready.wait()
            while True:
                if not worker_clock.is_wanted:
                    self._rest(pool, worker_clock)
                if pool.num_workers > 1:
                    pool.gate.wait(worker_clock, self.states.idle, self.scheduler.wake_worker)
                item = self.scheduler.work.take(worker_clock) if pool.buffer is None else pool.buffer.get(worker_clock)
                if item is not None:
                    self._process(pool, worker_clock, item)
                elif self.scheduler.ready.is_over or (pool.buffer is not None and pool.buffer.is_closed):
                    return
                del item  # or the worker would keep a delivered batch's memory while it waits
        except threading.BrokenBarrierError:
            return
        except BaseException as error:
            self.scheduler.fail(error)

    def _rest(self, pool: WorkerPool, worker_clock: WorkerClock) -> None:
        """Wait until this worker is wanted again, or the engine is closed."""
        worker_clock.enter(self.states.idle)
        pool.gate.leave(worker_clock)
        with self._sizing:
            while not worker_clock.is_wanted and not self.lifetime.is_closed:
                self._resized.wait()

    def _process(self, pool: WorkerPool, worker_clock: WorkerClock, item: Chunk | WorkItem) -> None:
        probe = pool.probe if pool.num_workers > 1 else None
        probed = None if probe is None else probe.begin(worker_clock)
        try:
            onward = self._run(pool, worker_clock, item)
        finally:
            if probe is not None:
                probe.end(probed, len(item))
        if onward is None:
            return
        if pool.number + 1 < len(self.pools):
            following = self.pools[pool.number + 1]
            assert following.buffer is not None
            chunk = onward if isinstance(onward, Chunk) else onward.last_chunk
            assert chunk is not None
            chunk.marks.append((self.clock(), stalls.QUEUED - following.number))
            following.buffer.put(onward, worker_clock)
        elif isinstance(onward, WorkItem):
            self.scheduler.ready.deliver(onward)

    def _land(self, chunk: Chunk) -> WorkItem | None:
        return self.scheduler.work.land(chunk)
