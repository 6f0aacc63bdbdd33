"""The processes of an engine: those that make batches, those that are getting ready to, and those that are done.

set_processes(more) ──> starting: may not begin yet ──ready──> active: have turns, from a border on
set_processes(fewer) ──> active: none behind a border ──last batch taken──> leaving ──ended──> their counters stay
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from loaderkit.engine.metrics.snapshot import Snapshot, as_past, merged
from loaderkit.engine.metrics.trace import Lane
from loaderkit.engine.remote.contracts import MakeProcess, WorkerSpec
from loaderkit.engine.remote.remote_process import RemoteProcess
from loaderkit.engine.remote.wait_causes import wakeup_as_network
from loaderkit.sampling.dealing import Place
from loaderkit.sampling.shard import Shard

_READY_S = 180.0  # within which a process that is to join is ready
_LEAVE_S = 10.0  # within which a process that is no longer needed ends by itself
_NO_GENERATION = -1  # of batches that a process began before it was told to wait: they are dropped


class ProcessTable:
    """The processes of one engine. All methods belong to the consumer's thread, except `start_ahead`, which is called under
    the engine's locks, and the methods for any thread."""

    def __init__(self, spec: WorkerSpec, make: MakeProcess, num_processes: int) -> None:
        self._spec = spec
        self._make = make
        # The processes that make batches, and the counters of those that did: one value, for readers in other threads.
        self._account: tuple[tuple[RemoteProcess, ...], Snapshot | None] = ((), None)
        self.add([self._new(Shard(number, num_processes)) for number in range(num_processes)])
        self.starting: tuple[RemoteProcess, ...] = ()
        self.held_back: tuple[RemoteProcess, ...] = ()  # they make batches behind a border, and may not begin yet
        self._starting_since_s = 0.0
        self._leaving: tuple[RemoteProcess, ...] = ()
        self._past_lanes: list[Lane] = []

    def _new(self, shard: Shard) -> RemoteProcess:
        return RemoteProcess(self._spec, self._make, shard)

    @property
    def active(self) -> tuple[RemoteProcess, ...]:
        """The processes that make batches, by number; while a border is ahead, also those that make some only before or
        only behind it."""
        return self._account[0]

    def add(self, processes: Sequence[RemoteProcess]) -> None:
        """Add processes that make batches, after those that do already."""
        active, past = self._account
        self._account = (*active, *processes), past

    # ------------------------------------------------------------------------------------------------------- growing

    def start_ahead(
        self, shards: Sequence[Shard], place: Place, order: Callable[[RemoteProcess], tuple[Any, ...]]
    ) -> None:
        """Start processes that are to join; they import what they need, and make no batch. `place` may be any, `order`
        gives a command for each process. Raises WorkerDiedError, ConfigError; then none of these processes is left."""
        self._starting_since_s = time.monotonic()
        started: list[RemoteProcess] = []
        try:
            for shard in shards:
                started.append(self._new(shard))
                started[-1].start(place, _NO_GENERATION, [("hold",), order(started[-1])])
        except BaseException:
            for process in started:
                process.close(0.0)
            raise
        self.starting = (*self.starting, *started)

    def joining(self, num: int) -> tuple[list[RemoteProcess] | None, str]:
        """Up to `num` that can join, and why there are fewer, if there are; None while some are still starting. If one
        has ended, or they take too long, the others join without it."""
        if num <= 0:
            return [], ""
        ready, reason = self.ready()
        if len(ready) >= num:
            return ready[:num], ""
        if not reason and time.monotonic() - self._starting_since_s < _READY_S:
            return None, ""
        return ready, reason or f"{num - len(ready)} of {num} more processes were not ready in {_READY_S:.0f} s"

    def ready(self) -> tuple[list[RemoteProcess], str]:
        """The started processes that can begin, and, if one has ended, why it cannot."""
        ready, reason = [], ""
        for process in self.starting:
            try:
                if process.is_ready():
                    ready.append(process)
            except EOFError:
                death = process.death()
                reason = f"{death.who} {death.what}: {death.fix}"
            except Exception as error:
                reason = str(error)
        return ready, reason

    def add_started(self, joining: Sequence[RemoteProcess]) -> None:
        """Let these processes make batches, once they may begin, and the others end."""
        self.add(joining)
        self.held_back = tuple(joining)
        dropped = [process for process in self.starting if process not in joining]
        self.starting = ()
        self._leaving = (*self._leaving, *dropped)
        for process in dropped:
            process.begin_closing(_LEAVE_S)

    # ------------------------------------------------------------------------------------------------------ shrinking

    def retire(self, first: int, *, may_ask: bool, is_recorded: bool) -> None:
        """Let the processes with numbers from `first` on leave: no batch of theirs is awaited any more."""
        active, past = self._account
        kept, surplus = active[:first], active[first:]
        now = time.perf_counter()
        counters = [as_past(process.stats(None, now, may_ask=may_ask)) for process in surplus]
        if is_recorded:
            self._past_lanes += [lane for process in surplus for lane in process.recorded()]
        for process in surplus:
            if self._spec.ledger is not None and process.node is not None:
                self._spec.ledger.left(process.node, process.cpu_s)
            process.begin_closing(_LEAVE_S)
        self._leaving = (*self._leaving, *surplus)
        self._account = kept, merged([*counters, *([] if past is None else [past])])

    def reap(self) -> None:
        """Free what those leave that have ended."""
        ended = [process for process in self._leaving if process.has_ended]
        if ended:
            self._leaving = tuple(process for process in self._leaving if process not in ended)
            for process in ended:
                process.close(0.0)

    # ------------------------------------------------------------------------------------------------------ any thread

    def stats(
        self, awaited: RemoteProcess | None, waiting_since_s: float | None, at_s: float, *, may_ask: bool
    ) -> Snapshot:
        """The counters of all of them up to `at_s`. If the consumer waits, it waits for `awaited`."""
        active, past = self._account
        parts = [
            process.stats(waiting_since_s if process is awaited else None, at_s, may_ask=may_ask) for process in active
        ]
        stats = merged([*parts, *([] if past is None else [past])])
        ledger = self._spec.ledger
        if ledger is None:
            return stats
        if awaited is not None and ledger.is_away(awaited.node):
            stats = replace(stats, waits_s=wakeup_as_network(stats.waits_s))
        placed = [(process.node, process.cpu_s) for process in active]
        return replace(stats, nodes=ledger.stats((node, cpu_s) for node, cpu_s in placed if node is not None))

    def lanes(self) -> list[Lane]:
        """The trace of all of them, which ends it."""
        past, self._past_lanes = self._past_lanes, []
        return [*past, *(lane for process in self.active for lane in process.recorded())]

    def end(self, join_s: float) -> None:
        """End all of them; no other one is started."""
        processes = (*self.active, *self.starting, *self._leaving)
        with ExitStack() as ending:  # all of them, also if closing one is interrupted
            if self._spec.free is not None:
                ending.callback(self._spec.free)
            for process in processes:
                ending.callback(process.close, join_s)
            for process in processes:  # these callbacks run first: the stack calls the last one first
                ending.callback(process.begin_closing, join_s)
