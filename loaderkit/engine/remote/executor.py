"""`executor: process` and `executor: ray`: the engine in one or several other processes, here or on other machines.

    process 0 ──batches 0, N, ... ───┐
    process 1 ──batches 1, N+1, ... ├──> next() ──> the training loop
    ...                             ┘

No thread of this process works on batches, except for stages that must run here: those on CUDA tensors.

A worker that dies is replaced inside `next()`. Which batches are its own is arithmetic, so another process makes them
again from the first unfinished one on. It makes one batch at a time until it has passed all that the dead worker may
have been working on: if it dies as well, the batch that caused it is known.

The number of processes can change while they run. Processes that join are started first. From a position on, the
border, which is behind all batches that any process may have begun, batches are dealt to the new number of processes.
Processes that leave end once their last batch is taken.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from loaderkit._internal.garbage import close_collected
from loaderkit.engine.lifetime import Lifetime
from loaderkit.engine.metrics import stalls
from loaderkit.engine.metrics.consumer_account import ConsumerAccount
from loaderkit.engine.metrics.host import host_stats
from loaderkit.engine.metrics.snapshot import Snapshot
from loaderkit.engine.metrics.trace import Trace, num_entries
from loaderkit.engine.metrics.tuning import Tuning
from loaderkit.engine.remote.contracts import MakeProcess, ReceivedBatch, WorkerSpec
from loaderkit.engine.remote.delivery import Delivered
from loaderkit.engine.remote.process_table import ProcessTable
from loaderkit.engine.remote.remote_process import RemoteProcess
from loaderkit.engine.remote.sizes import SharedSizes
from loaderkit.engine.remote.wait_causes import causes_of, start_as_restart
from loaderkit.engine.restarts import Restarts
from loaderkit.engine.watchdog import Patience
from loaderkit.errors import ClosedError, WorkerDiedError
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
        self._make = make
        self._table = ProcessTable(spec, make, num_processes)
        self._num_wanted = num_processes
        self._refused: Callable[[str], None] = lambda reason: None
        self._restarts = restarts or Restarts()
        self._schedule = schedule
        self._dealing = BatchDealing(schedule, num_processes)
        self._timeout_s = timeout_s
        self._raises = raises
        self._is_started = False
        self._generation = 0  # the number of seeks so far
        self._is_recorded = False  # the workers are traced
        self._failure: BaseException | None = None
        self.lifetime = Lifetime()
        self.account = ConsumerAccount(time.perf_counter)
        self._has_ended = False
        self._closing = threading.RLock()  # the collector may close it within a close
        self._sizes = SharedSizes(spec, num_processes)
        self._awaited: RemoteProcess | None = None  # by the consumer, or the last one that was
        self._restarting: list[tuple[float, float]] = []  # when processes were replaced during the consumer's wait

    # ------------------------------------------------------------------------------------------------ the consumer

    def start(self) -> None:
        """Start the processes; they import what they need meanwhile. Idempotent."""
        self.lifetime.check_usable()
        if self._is_started:
            return
        self._is_started = True
        try:
            for process in self.processes:
                self._start(process, self._dealing.next_position)
        except (WorkerDiedError, ClosedError) as error:
            # Without the traceback: its frames would hold the arena open for as long as the error is kept.
            self._failure = error.with_traceback(None)
            self._table.end(0.0)
            raise
        except BaseException as error:
            self._failure = error
            raise

    def resize(self, stage: str, num_workers: int) -> None:
        """Set the workers of a stage, of all processes together; see `SharedSizes`."""
        self.lifetime.check_usable()
        with self._sizes.lock:
            self._sizes.resize(self.processes, stage, num_workers)

    def set_depth(self, num_batches: int | None, memory_bytes: int | None) -> None:
        """Set how far all processes together read ahead; see `SharedSizes`."""
        self.lifetime.check_usable()
        with self._sizes.lock:
            self._sizes.set_depth(self.processes, num_batches, memory_bytes)

    def seek(self, epoch: int, position: int) -> None:
        """Continue at another position, unless the next batch begins there."""
        self.lifetime.check_usable()
        if (epoch, position) == self._dealing.next_position:
            return
        try:
            self._replace_dead()  # as long as it is known what they made
        except Exception as error:
            self._failure = self._failure or error
        self._dealing.seek(epoch, position)
        if self._is_started:
            self._generation += 1
            self._fit_to_deal()
            self._sizes.forget_depth()
            for process in self.processes:
                order = "begin" if process in self._table.held_back else "seek"
                process.tell(order, self._generation, epoch, position, process.shard)
            self._table.held_back = ()
            try:
                for process in self.processes:
                    process.skim(self._generation)
            except Exception as error:
                self._failure = self._failure or error

    def next(self) -> Delivered:
        """The next batch in order; its error, if it has one, is still in it."""
        batch = self.account.take(self._wait, self._causes)
        assert self._awaited is not None
        self._sizes.count_taken(self._awaited)
        self._dealing.delivered(batch.epoch, batch.end)
        self._release_held_back()
        if self._dealing.is_at_border:
            self._dealing.pass_border()
            self._fit_to_deal()
        return batch

    def _wait(self) -> Delivered:
        self._restarting = []
        self.start()
        if self._failure is not None:
            raise self._failure
        self._redeal()
        self._awaited = self.processes[self._dealing.turn]
        return self._take(self._awaited)

    def _causes(self, batch: Delivered, begin_s: float, end_s: float) -> dict[str, float]:
        is_after_restart = self._awaited is not None and self._awaited.num_cautious > 0
        return causes_of(batch, begin_s, end_s, self._restarting, is_after_restart=is_after_restart)

    def has_begun(self) -> bool:
        """True once all processes answer, for a consumer that asks for nothing yet: batches that they have made are
        dropped, and a seek has to follow. Raises EOFError if one has ended, and the error that ended it."""
        have_begun = [process.begins(self._generation + 1) for process in self.processes]  # each is asked
        return all(have_begun)

    def try_next(self) -> Delivered:
        """The next batch, which is not counted anywhere; a seek has to follow."""
        batch = self._take(self.processes[self._dealing.turn])
        self._dealing.delivered(batch.epoch, batch.end)
        return batch

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
                    if not arrived.batch.is_end:  # which follows one that was cut, so from where is not known
                        self._dealing.check(arrived.batch.epoch, arrived.batch.end)
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

    # ------------------------------------------------------------------------------------------------------- deaths

    def _replace_dead(self) -> None:
        for process in self.processes:
            if process.has_died:
                self._replace(process)

    def _replace(self, process: RemoteProcess) -> None:
        """Start another process in place of one that has died, if that is allowed; else note why not as its failure.
        Nothing happens while its finished batches still go through the trainer's stages."""
        begin = time.perf_counter()
        with self._closing, self._sizes.lock:
            self.lifetime.check_awaited()
            num_finished = process.drain(self._generation)
            if num_finished is None:
                return
            due, death = self._dealing.begin_of(process.number, num_finished), process.death()
            if due is None:
                process.is_done = True
                return
            process.failure = self._restarts.refuse(death, due.first)
            if process.failure is not None:
                return
            process.release()
            # It begins at once.
            self._table.held_back = tuple(one for one in self._table.held_back if one is not process)
            process.shard = due.shard
            self._sizes.be_cautious(process, num_finished)
            orders = self._orders(process)
            if (border := self._dealing.border) is not None and due.first < border:
                orders.append(("redeal", *border, self._shard_behind(process)))
            try:
                self._start(process, due.base, self._generation, orders)
            except WorkerDiedError as error:
                raise error.with_traceback(None) from error.__cause__
        self._restarting.append((begin, time.perf_counter()))
        logger.warning("%s", self._restarts.describe(death, due.first, f"Another one ({process.where})"))

    def _start(self, process: RemoteProcess, *arguments: Any) -> None:
        process.start(*arguments)
        if self.lifetime.is_closed:  # by a signal's handler meanwhile, which did not see this process
            process.close(0.0)
        self.lifetime.check_awaited()

    def _orders(self, process: RemoteProcess) -> list[tuple[Any, ...]]:
        """The commands for a process that begins now."""
        orders = [self._sizes.order_for(process)]
        return [*orders, ("record",)] if self._is_recorded else orders

    # ------------------------------------------------------------------------------------- another number of processes

    def set_processes(self, num: int, refused: Callable[[str], None] = lambda reason: None) -> None:
        """See `Executor`. New processes start now, and the consumer lets them make batches. From any thread."""
        self.lifetime.check_usable()
        with self._closing, self._sizes.lock:
            self.lifetime.check_usable()
            table, dealing = self._table, self._dealing
            if self._is_started:
                numbers = range(dealing.num_behind + len(table.starting), num)
                table.start_ahead(
                    [Shard(number, num) for number in numbers], dealing.next_position, self._sizes.order_for
                )
                self._num_wanted, self._refused = num, refused
                return
            self._num_wanted, self._refused = num, refused
            self._table = ProcessTable(self._spec, self._make, num)
            self._dealing = BatchDealing(self._schedule, num)
            self._dealing.seek(*dealing.next_position)
            self._sizes.share_out((), num)
            for process in self.processes:
                for order in self._orders(process):
                    process.tell(*order)

    def _redeal(self) -> None:
        """Once the processes that are to join are ready, set a border, from which on batches are dealt to the wanted
        number of processes."""
        table, dealing = self._table, self._dealing
        table.reap()
        num_before = dealing.num_processes
        if dealing.border is not None or (self._num_wanted == num_before and not table.starting):
            return
        if any(process.num_cautious for process in self.processes):
            return
        with self._closing, self._sizes.lock:
            self.lifetime.check_awaited()
            joining, reason = table.joining(self._num_wanted - num_before)
            if joining is None:
                return
            if reason:
                self._num_wanted = num_before + len(joining)
                self._refused(reason)
            num_after = self._num_wanted
            if num_after == num_before:
                table.add_started([])
                return
            border = dealing.redeal(num_after, self._sizes.most_ahead(self.processes))
            for process in self.processes:
                process.tell("redeal", *border, self._shard_behind(process))
            for number, process in enumerate(joining, num_before):
                process.shard = Shard(number, num_after)
                if self._is_recorded:
                    process.record()
            table.add_started(joining)
            self._sizes.share_out(self.processes, max(num_before, num_after))
            self._release_held_back()
        logger.info("%d processes load instead of %d, from %s on", num_after, num_before, border)

    def _release_held_back(self) -> None:
        """Let processes that have joined begin, as soon as the others hold no more batches than their new share, so
        that all together hold no more than before. They know their share by then: before the next border they may not
        begin more than that."""
        table, dealing = self._table, self._dealing
        if table.held_back and dealing.num_left <= dealing.num_processes * self._sizes.num_of_each(dealing.num_behind):
            assert dealing.border is not None
            for process in table.held_back:
                process.tell("begin", self._generation, *dealing.border, process.shard)
            table.held_back = ()

    def _shard_behind(self, process: RemoteProcess) -> Shard | None:
        """The shard of a process behind the border, or None if it leaves there."""
        num = self._dealing.num_behind
        return Shard(process.number, num) if process.number < num else None

    def _fit_to_deal(self) -> None:
        """Let processes leave that make no more batches, and divide the sizes among the others."""
        num = self._dealing.num_processes
        if len(self.processes) > num:
            self._table.retire(num, may_ask=True, is_recorded=self._is_recorded)
        for process in self.processes:
            process.shard = Shard(process.number, num)
        self._sizes.share_out(self.processes, num)

    # ------------------------------------------------------------------------------------------------- any thread

    @property
    def processes(self) -> tuple[RemoteProcess, ...]:
        """The processes that make batches, by number; while a border is ahead, also those that make some only before or
        only behind it."""
        return self._table.active

    @property
    def _may_ask(self) -> bool:
        return not self.lifetime.is_closed and not self.lifetime.is_fork

    def stats(self, tuning: Tuning, run: int) -> Snapshot:
        """The counters of all processes together up to now; a process that does not answer counts with its last ones."""
        # One moment for all: each process answers once it has its GIL, at another time.
        awaited, read, open_wait = self._awaited, self.account.read(), dict[str, float]()
        stats = self._table.stats(awaited, read.waiting_since_s, read.now_s, may_ask=self._may_ask)
        if read.waiting_since_s is not None:
            waited, so_far_s = stats.waits_s, sum(stats.waits_s.values())
            if so_far_s <= 0:
                waited, so_far_s = {stalls.START: 1.0}, 1.0
            if awaited is not None and awaited.num_cautious:
                waited = start_as_restart(waited)
            wait_s = read.now_s - read.waiting_since_s
            open_wait = {cause: seconds * wait_s / so_far_s for cause, seconds in waited.items()}
        return replace(
            stats,
            run=run,
            **read.counters(open_wait),
            num_restarts=self._restarts.num,
            memory={
                **stats.memory,
                "rss_peak_bytes": host_stats().rss_peak_bytes,
                "process_rss_peak_bytes": stats.memory["rss_peak_bytes"],
            },
            host=self.account.cpus.added_to(stats.host, children_s=stats.host.cpu_s),
            tuning=replace(
                tuning,
                processes=self._dealing.num_processes,
                pids=tuple(
                    pid for process in self.processes if (pid := process.pid) is not None and not process.has_ended
                ),
                nodes=tuple(process.node for process in self.processes if process.node is not None) or None,
            ),
        )

    def record(self) -> None:
        """Start a trace of workers and loop."""
        self.account.record(num_entries(1))
        self._is_recorded = True
        for process in self.processes:
            process.record()

    def recorded(self) -> Trace:
        """The trace since `record`; ends it. It lacks processes that have died."""
        self._is_recorded = False
        return Trace(self._table.lanes() if self._may_ask else [], self.account.recorded())

    def close(self, join_s: float = _JOIN_S) -> None:
        """End the processes; batches that were delivered stay valid. Idempotent, from any thread and any state."""
        self.lifetime.is_closed = True
        self._failure = None  # an error's traceback would keep all of it alive
        if self.lifetime.is_fork:
            return  # in a fork's child the processes are not ours, nor is their memory
        with self._closing:
            if not self._has_ended:  # a second call completes a close that was interrupted
                self._table.end(join_s)
                self._has_ended = True

    def abandon(self) -> None:
        """Close because the loader was collected."""
        close_collected(self.close)
