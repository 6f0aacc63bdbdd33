"""`executor: process`: the engine in one or several worker processes, with batches in shared memory.

    worker 0 ──batches 0, N, ...───┐
    worker 1 ──batches 1, N+1, ... ├──> next() ──> the training loop
    ...                            ┘

No thread of this process works on batches, except for stages that must run here: those on CUDA tensors.
"""

from __future__ import annotations

import _thread
import errno
import os
import resource
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from loaderkit.engine.metrics import stalls
from loaderkit.engine.metrics.host import CpuWatch, host_stats
from loaderkit.engine.metrics.snapshot import merged
from loaderkit.engine.metrics.stats import Stats
from loaderkit.engine.metrics.trace import Handoff, Trace, num_entries
from loaderkit.engine.metrics.tuning import Tuning
from loaderkit.engine.process import messages
from loaderkit.engine.process.receiver import ReceivedBatch
from loaderkit.engine.process.worker_process import WorkerProcess, WorkerSpec
from loaderkit.engine.watchdog import Patience
from loaderkit.errors import ClosedError, ConfigError, WorkerDiedError
from loaderkit.sampling.schedule import BatchSampler
from loaderkit.sampling.shard import Shard

_JOIN_S = 10.0
_LOOK_S = 1.0  # between checks of the processes that are not awaited


class ProcessEngine:
    """An `Executor` with `num_processes` worker processes; batches are dealt round-robin."""

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        num_processes: int = 1,
        schedule: BatchSampler,
        timeout_s: float,
        raises: bool = False,
    ) -> None:
        self._spec = spec
        self.processes = tuple(WorkerProcess(spec, Shard(number, num_processes)) for number in range(num_processes))
        self._schedule = schedule
        self._timeout_s = timeout_s
        self._raises = raises
        self._is_started = False
        self._generation = 0  # the number of seeks so far
        self._next_position = (0, 0)  # (epoch, position) of the next batch
        self._turn = 0  # the worker process that makes the next batch
        self._failure: BaseException | None = None
        self._is_closed = False
        self._has_ended = False
        self._closing = threading.RLock()  # the collector may close it within a close
        self._pid = os.getpid()
        self._workers = {row.name: num_processes * row.workers for row in spec.rows}
        self._depth = (spec.num_batches, spec.memory_bytes)
        self._waits = stalls.Waits()
        self._num_delivered = 0
        self._num_samples = 0
        self._num_dropped = 0
        self._first_wait_s: float | None = None
        self._cpu_watch = CpuWatch()

    # ------------------------------------------------------------------------------------------------ the consumer

    def start(self) -> None:
        """Start the processes; they import what they need meanwhile. Idempotent."""
        self._check_usable()
        if self._is_started:
            return
        self._is_started = True
        try:
            for process in self.processes:
                process.start(self._next_position)
        except (OSError, RuntimeError) as error:
            # Without the traceback: its frames would hold the arena open for as long as the error is kept.
            self._failure = _not_started(error)
            self._end_processes(0.0)
            raise self._failure from error.with_traceback(None)
        except BaseException as error:
            self._failure = error
            raise

    def resize(self, stage: str, num_workers: int) -> None:
        """Set the workers of a stage, of all processes together. Raises ConfigError for a stage they do not run, and where the
        system has no more threads; nothing is changed then."""
        self._check_usable()
        pool = next((pool for pool in self._spec.pools if stage in pool), None)
        if pool is None:
            names = [row.name for row in self._spec.rows]
            why = "runs in the trainer's process, by one thread" if self._spec.trainer_stages else "does not exist"
            raise ConfigError(f"stage {stage!r} {why} and cannot be resized; {', '.join(names)} can")
        self._order("resize", (stage, num_workers), (stage, self._workers[stage]))
        self._workers.update(dict.fromkeys(pool, num_workers))

    def set_depth(self, num_batches: int | None, memory_bytes: int | None) -> None:
        """Set how far all processes together read ahead. Raises ConfigError if the memory holds not even one batch."""
        self._check_usable()
        self._order("set_depth", (num_batches, memory_bytes), self._depth)
        self._depth = (num_batches or self._depth[0], memory_bytes or self._depth[1])

    def _order(self, name: str, sizes: tuple[Any, ...], before: tuple[Any, ...]) -> None:
        """Send an order to all processes. If one refuses it, undo it in the others and raise that error."""
        for number, process in enumerate(self.processes):
            refused = process.order(name, *sizes)
            if refused is not None:
                for other in self.processes[:number]:
                    other.order(name, *before)
                raise refused

    def seek(self, epoch: int, position: int) -> None:
        """Continue at another position, unless the next batch begins there."""
        self._check_usable()
        if (epoch, position) == self._next_position:
            return
        self._next_position, self._turn = (epoch, position), 0
        if self._is_started:
            self._generation += 1
            for process in self.processes:
                process.tell("seek", self._generation, epoch, position)
            try:
                for process in self.processes:
                    process.skim(self._generation)
            except Exception as error:
                self._failure = self._failure or error

    def next(self) -> messages.Delivered:
        """The next batch in order; its error, if it has one, is still in it."""
        begin = time.perf_counter()
        if self._first_wait_s is None:
            self._first_wait_s = begin
            self._cpu_watch.begin()
        self._waits.begin(begin)
        try:
            self.start()
            if self._failure is not None:
                raise self._failure
            batch = self._take()
            end = time.perf_counter()
        except BaseException:
            self._waits.begin(None)  # only waits that end in a batch count
            raise
        self._charge(batch, begin, end)
        if batch.error is None and not batch.is_end:
            self._num_delivered += not batch.is_empty
            self._num_samples += len(batch) - batch.num_dropped
            self._num_dropped += batch.num_dropped
        self._next_position = self._schedule.next_position_after(batch.epoch, batch.end, 0)
        self._turn = (self._turn + 1) % len(self.processes)
        return batch

    def _take(self) -> messages.Delivered:
        process = self.processes[self._turn]
        try:
            arrived = process.take(self._generation, 0.0)
            if arrived is None:
                arrived = self._wait_for(process)
        except EOFError:
            if self._is_closed:
                raise ClosedError("the loader was closed while a batch was awaited") from None
            self._failure = next((one for one in self.processes if one.has_ended), process).death()
            raise self._failure from None
        except Exception as error:
            self._failure = error
            raise
        process.taken()
        return arrived.batch

    def _wait_for(self, process: WorkerProcess) -> ReceivedBatch:
        """Wait for the process's next batch. Raises EOFError if a process has ended."""
        process.give_back()  # only before a wait, since `taken` sends the same: a message wakes the worker process, 0.1 ms
        patience = Patience(self._timeout_s, self._raises)
        while True:
            left_s = patience.next_s
            while left_s > 0:
                arrived = process.take(self._generation, min(left_s, _LOOK_S))
                if arrived is not None:
                    return arrived
                if any(other.has_ended for other in self.processes if other is not process):
                    raise EOFError
                left_s -= _LOOK_S
            patience.ends(process.report)

    def _charge(self, batch: messages.Delivered, begin: float, end: float) -> None:
        first_s = batch.segments[0].since_s if batch.segments else batch.done_s
        segments = [
            stalls.WaitSegment(begin, first_s, stalls.START),
            *batch.segments,
            stalls.WaitSegment(batch.done_s, end, stalls.WAKEUP),
        ]
        causes = stalls.charge(segments, begin, end)
        self._waits.end(causes)
        if self._waits.handoffs is not None:
            self._waits.handoffs.append(Handoff(begin, end, batch.epoch, batch.end, len(batch), causes))

    # ------------------------------------------------------------------------------------------------- any thread

    def stats(self, tuning: Tuning, run: int) -> Stats:
        """The counters of all processes together up to now; a process that does not answer counts with its last ones."""
        # One moment for all: each process answers once it has its GIL, at another time.
        turn, num_batches, num_samples = self._turn, self._num_delivered, self._num_samples
        num_dropped = self._num_dropped
        waits_s, since_s, now = self._waits.read(time.perf_counter)
        may_ask = not self._is_closed and os.getpid() == self._pid
        stats = merged(
            [
                process.stats(since_s if n == turn else None, now, may_ask=may_ask)
                for n, process in enumerate(self.processes)
            ]
        )
        if since_s is not None:
            waited, so_far_s = stats.waits_s, sum(stats.waits_s.values())
            if so_far_s <= 0:
                waited, so_far_s = {stalls.START: 1.0}, 1.0
            for cause, seconds in waited.items():
                waits_s[cause] = waits_s.get(cause, 0.0) + seconds * (now - since_s) / so_far_s
        return replace(
            stats,
            run=run,
            now_s=now,
            wall_s=0.0 if self._first_wait_s is None else now - self._first_wait_s,
            num_batches=num_batches,
            num_samples=num_samples,
            num_dropped=num_dropped,
            waits_s=waits_s,
            memory={
                **stats.memory,
                "rss_peak_bytes": host_stats().rss_peak_bytes,
                "process_rss_peak_bytes": stats.memory["rss_peak_bytes"],
            },
            host=self._cpu_watch.added_to(stats.host, children_s=stats.host.cpu_s),
            tuning=replace(tuning, pids=tuple(process.pid for process in self.processes if process.pid is not None)),
        )

    def record(self) -> None:
        """Start a trace of workers and loop."""
        self._waits.record(num_entries(1))
        for process in self.processes:
            process.record()

    def recorded(self) -> Trace:
        """The trace since `record`; ends it."""
        may_ask = not self._is_closed and os.getpid() == self._pid
        lanes = [lane for process in self.processes for lane in process.recorded()] if may_ask else []
        return Trace(lanes, self._waits.recorded())

    def close(self, join_s: float = _JOIN_S) -> None:
        """End the processes; batches that were delivered stay valid. Idempotent, from any thread and any state."""
        self._is_closed = True
        self._failure = None  # an error's traceback would keep all of it alive
        if os.getpid() != self._pid:
            return  # in a fork's child the processes are not ours, nor is their memory
        with self._closing:
            if not self._has_ended:  # a second call completes a close that was interrupted
                self._end_processes(join_s)
                self._has_ended = True

    def _end_processes(self, join_s: float) -> None:
        with ExitStack() as ending:  # all of them, also if closing one is interrupted
            for process in self.processes:
                ending.callback(process.close, join_s)
            for process in self.processes:  # these callbacks run first: the stack calls the last one first
                ending.callback(process.begin_closing, join_s)

    def abandon(self) -> None:
        """Close because the loader was collected; the collector may run in a thread that `close` would wait for."""
        if threading.current_thread().name.startswith("loaderkit"):
            _thread.start_new_thread(self.close, ())
        else:
            self.close()

    def _check_usable(self) -> None:
        if self._is_closed:
            raise ClosedError("the loader is closed: build another one")
        if os.getpid() != self._pid:
            raise ClosedError(
                "the loader was made before a fork and used after it, where its process answers only to the parent: build "
                "one in each process"
            )


def _not_started(error: OSError | RuntimeError) -> WorkerDiedError:
    """The error for a process that could not be started: the system lacks a descriptor, process or memory."""
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        reason += f": this process may have {limit} descriptors (`ulimit -n`): raise that, or keep fewer files open"
    return WorkerDiedError(
        f"the process that loads could not be started: {reason}; or use prefetch.executor: thread, which needs no process"
    )
