"""`executor: process` and `executor: ray`: the engine in one or several other processes, here or on other machines.

    process 0 ──batches 0, N, ... ───┐
    process 1 ──batches 1, N+1, ... ├──> next() ──> the training loop
    ...                             ┘

No thread of this process works on batches, except for stages that must run here: those on CUDA tensors.

A worker that dies is replaced inside `next()`: which batches are its own is arithmetic, so another process makes them again
from its first unfinished one on. Until it has made all that the dead one may have had in work it makes one at a time, so that
if it dies as well, it is known of which batch.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from loaderkit._internal.garbage import close_collected
from loaderkit.engine.metrics import stalls
from loaderkit.engine.metrics.host import CpuWatch, host_stats
from loaderkit.engine.metrics.snapshot import merged
from loaderkit.engine.metrics.stats import Stats
from loaderkit.engine.metrics.trace import Handoff, Trace, num_entries
from loaderkit.engine.metrics.tuning import Tuning
from loaderkit.engine.remote.contracts import MakeProcess, ReceivedBatch, WorkerSpec
from loaderkit.engine.remote.delivery import Delivered
from loaderkit.engine.remote.remote_process import RemoteProcess
from loaderkit.engine.restarts import Restarts
from loaderkit.engine.watchdog import Patience
from loaderkit.engine.work import SourceCounts
from loaderkit.errors import ClosedError, ConfigError, WorkerDiedError
from loaderkit.sampling.dealing import BatchDealing
from loaderkit.sampling.schedule import BatchSampler
from loaderkit.sampling.shard import Shard

_JOIN_S = 10.0
_LOOK_S = 1.0  # between checks of the processes that are not awaited
logger = logging.getLogger("loaderkit")


class RemoteEngine:
    """An `Executor` with `num_processes` processes; batches are dealt round-robin."""

    def __init__(
        self,
        spec: WorkerSpec,
        make: MakeProcess,
        *,
        num_processes: int = 1,
        schedule: BatchSampler,
        timeout_s: float,
        raises: bool = False,
        restarts: Restarts | None = None,
    ) -> None:
        """`restarts` says which processes that died are replaced; without it none is."""
        self._spec = spec
        self.processes = tuple(
            RemoteProcess(spec, make, Shard(number, num_processes)) for number in range(num_processes)
        )
        self._restarts = restarts or Restarts()
        self._dealing = BatchDealing(schedule, num_processes)
        self._timeout_s = timeout_s
        self._raises = raises
        self._is_started = False
        self._generation = 0  # the number of seeks so far
        self._is_recorded = False  # the workers are traced
        self._failure: BaseException | None = None
        self._is_closed = False
        self._has_ended = False
        self._closing = threading.RLock()  # the collector may close it within a close
        self._sizing = threading.RLock()  # held while sizes change, and while a process that gets them is replaced
        self._pid = os.getpid()
        self._workers = {row.name: num_processes * row.workers for row in spec.rows}
        self._depth = (spec.num_batches, spec.memory_bytes)
        self._waits = stalls.Waits()
        self._num_delivered = 0
        self._num_samples = 0
        self._num_dropped = 0
        self._restarting: list[tuple[float, float]] = []  # when processes were replaced during the consumer's wait
        self._by_source = SourceCounts()
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
                process.start(self._dealing.next_position)
        except WorkerDiedError as error:
            # Without the traceback: its frames would hold the arena open for as long as the error is kept.
            self._failure = error.with_traceback(None)
            self._end_processes(0.0)
            raise
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
        with self._sizing:
            self._order("resize", (stage, num_workers), (stage, self._workers[stage]))
            self._workers.update(dict.fromkeys(pool, num_workers))

    def set_depth(self, num_batches: int | None, memory_bytes: int | None) -> None:
        """Set how far all processes together read ahead. Raises ConfigError if the memory holds not even one batch."""
        self._check_usable()
        with self._sizing:
            self._order("set_depth", (num_batches, memory_bytes), self._depth)
            self._depth = (num_batches or self._depth[0], memory_bytes or self._depth[1])

    def _order(self, name: str, sizes: tuple[Any, ...], before: tuple[Any, ...]) -> None:
        """Send an order to all processes. If one refuses it, undo it in the others and raise that error."""
        for number, process in enumerate(self.processes):
            refused = process.order(name, *self._sizes_of(process, name, sizes))
            if refused is not None:
                for other in self.processes[:number]:
                    other.order(name, *self._sizes_of(other, name, before))
                raise refused

    def _sizes_of(self, process: RemoteProcess, name: str, sizes: tuple[Any, ...]) -> tuple[Any, ...]:
        """The same, but no more than one batch for a process that is cautious."""
        if name != "set_depth" or not process.num_cautious or sizes[0] is None:
            return sizes
        return (len(self.processes), *sizes[1:])

    def seek(self, epoch: int, position: int) -> None:
        """Continue at another position, unless the next batch begins there."""
        self._check_usable()
        if (epoch, position) == self._dealing.next_position:
            return
        try:
            self._replace_dead()  # as long as it is known what they made
        except Exception as error:
            self._failure = self._failure or error
        self._dealing.seek(epoch, position)
        if self._is_started:
            self._generation += 1
            for process in self.processes:
                process.tell("seek", self._generation, epoch, position)
            try:
                for process in self.processes:
                    process.skim(self._generation)
            except Exception as error:
                self._failure = self._failure or error

    def next(self) -> Delivered:
        """The next batch in order; its error, if it has one, is still in it."""
        begin = time.perf_counter()
        if self._first_wait_s is None:
            self._first_wait_s = begin
            self._cpu_watch.begin()
        self._waits.begin(begin)
        self._restarting = []
        process = self.processes[self._dealing.turn]
        try:
            self.start()
            if self._failure is not None:
                raise self._failure
            batch = self._take(process)
            end = time.perf_counter()
        except BaseException:
            self._waits.begin(None)  # only waits that end in a batch count
            raise
        self._charge(batch, begin, end, is_after_restart=process.num_cautious > 0)
        self._count_taken(process)
        if batch.error is None and not batch.is_end:
            self._num_delivered += not batch.is_empty
            self._num_samples += len(batch) - batch.num_dropped - batch.num_skipped
            self._num_dropped += batch.num_dropped
            self._by_source = self._by_source.plus(batch.by_source)
        self._dealing.delivered(batch.epoch, batch.end)
        return batch

    @property
    def last_wait(self) -> Mapping[str, float]:
        """See `Executor`."""
        return self._waits.last

    def _take(self, process: RemoteProcess) -> Delivered:
        try:
            while True:
                self._replace_dead()
                try:
                    arrived = process.take(self._generation, 0.0) or self._wait_for(process)
                    has_died = False
                except EOFError:
                    arrived, has_died = None, True
                if arrived is not None:
                    process.taken()
                    return arrived.batch
                if has_died:  # its end may not be known yet
                    self._replace(process)
        except ClosedError:
            raise
        except Exception as error:
            self._failure = error
            raise

    def _wait_for(self, process: RemoteProcess) -> ReceivedBatch | None:
        """Wait for the process's next batch; None if another process has died. Raises EOFError if this one has."""
        process.give_back()  # only before a wait, since `taken` sends the same: a message wakes the worker process, 0.1 ms
        patience = Patience(self._timeout_s, self._raises)
        while True:
            left_s = patience.next_s
            while left_s > 0:
                arrived = process.take(self._generation, min(left_s, _LOOK_S))
                if arrived is not None:
                    return arrived
                for other in self.processes:
                    if other.failure is not None:
                        raise other.failure
                    if other.has_died and other is not process:
                        return None
                left_s -= _LOOK_S
            patience.ends(process.report)

    def _charge(self, batch: Delivered, begin: float, end: float, *, is_after_restart: bool) -> None:
        """Charge the wait [begin, end) for `batch`, which was made by a process that has just taken another one's place, or
        not."""
        first_s = batch.segments[0].since_s if batch.segments else batch.done_s
        segments = [
            stalls.WaitSegment(begin, first_s, stalls.START),
            *batch.segments,
            stalls.WaitSegment(batch.done_s, end, stalls.WAKEUP),
        ]
        causes: dict[str, float] = {}
        since = begin
        for replaced_s, until_s in (*self._restarting, (end, end)):
            for cause, seconds in stalls.charge(segments, since, replaced_s).items():
                causes[cause] = causes.get(cause, 0.0) + seconds
            if until_s > replaced_s:
                causes[stalls.RESTART] = causes.get(stalls.RESTART, 0.0) + until_s - replaced_s
            since = until_s
        if is_after_restart:
            causes = _start_as_restart(causes)
        self._waits.end(causes)
        if self._waits.handoffs is not None:
            self._waits.handoffs.append(Handoff(begin, end, batch.epoch, batch.end, len(batch), causes))

    # ------------------------------------------------------------------------------------------------------- deaths

    def _replace_dead(self) -> None:
        for process in self.processes:
            if process.has_died:
                self._replace(process)

    def _replace(self, process: RemoteProcess) -> None:
        """Start another process in the place of one that has died, if that may be; else note why not as its failure. Nothing
        happens while what it has finished still goes through the trainer's stages."""
        begin = time.perf_counter()
        with self._closing, self._sizing:
            self._check_open()
            num_finished = process.drain(self._generation)
            if num_finished is None:
                return
            number, death = process.number, process.death()
            place = self._dealing.unfinished(number, num_finished)
            process.failure = self._restarts.refuse(death, place)
            if process.failure is not None:
                return
            process.release()
            process.num_cautious = num_finished + Shard(number, len(self.processes)).num_batches(self._depth[0])
            try:
                process.start(self._dealing.base(number, num_finished), self._generation, self._orders())
            except WorkerDiedError as error:
                raise error.with_traceback(None) from error.__cause__
            try:
                self._check_open()
            except ClosedError:  # by a signal's handler meanwhile, which did not see the new process
                process.close(0.0)
                raise
        self._restarting.append((begin, time.perf_counter()))
        logger.warning("%s", self._restarts.describe(death, place, f"Another one ({process.where})"))

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the loader was closed while a batch was awaited")

    def _orders(self) -> list[tuple[Any, ...]]:
        """What a process has to be told that takes another one's place: the present sizes, but one batch at a time."""
        orders: list[tuple[Any, ...]] = [("set_depth", len(self.processes), self._depth[1])]
        orders += [("resize", pool[0], self._workers[pool[0]]) for pool in self._spec.pools]
        return [*orders, ("record",)] if self._is_recorded else orders

    def _count_taken(self, process: RemoteProcess) -> None:
        """Let a process read ahead once it has made all that may have ended the one before it."""
        if not process.num_cautious:
            return
        process.num_cautious -= 1
        if not process.num_cautious:
            with self._sizing:
                refused = process.order("set_depth", *self._depth)
            if refused is not None:
                logger.warning("%s reads no more than a batch ahead: %s", process.name, refused)

    # ------------------------------------------------------------------------------------------------- any thread

    def stats(self, tuning: Tuning, run: int) -> Stats:
        """The counters of all processes together up to now; a process that does not answer counts with its last ones."""
        # One moment for all: each process answers once it has its GIL, at another time.
        turn, num_batches, num_samples = self._dealing.turn, self._num_delivered, self._num_samples
        num_dropped, by_source = self._num_dropped, self._by_source
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
            if self.processes[turn].num_cautious:
                waited = _start_as_restart(waited)
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
            num_restarts=self._restarts.num,
            by_source=by_source,
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
        self._is_recorded = True
        for process in self.processes:
            process.record()

    def recorded(self) -> Trace:
        """The trace since `record`; ends it. What a process did that has died is missing."""
        self._is_recorded = False
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
        """Close because the loader was collected."""
        close_collected(self.close)

    def _check_usable(self) -> None:
        if self._is_closed:
            raise ClosedError("the loader is closed: build another one")
        if os.getpid() != self._pid:
            raise ClosedError(
                "the loader was made before a fork and used after it, where its process answers only to the parent: build "
                "one in each process"
            )


def _start_as_restart(causes: dict[str, float]) -> dict[str, float]:
    """The causes of a wait for a process that was started in another one's place."""
    causes = dict(causes)
    seconds = causes.pop(stalls.START, 0.0)
    if seconds:
        causes[stalls.RESTART] = causes.get(stalls.RESTART, 0.0) + seconds
    return causes
