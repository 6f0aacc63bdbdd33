"""One of the processes that load, as the engine sees it: its memory, what it is told, and its batches as they arrive.

link ──messages──> receiver ──> (late stages, when there is a GPU) ──> take()
  ^                                                                      │
  └── taken: one batch has left the budget; released: no longer referenced ──┘
"""

from __future__ import annotations

import logging
import pickle
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from loaderkit.engine.metrics.snapshot import StageStats
from loaderkit.engine.metrics.stats import Stats
from loaderkit.engine.metrics.trace import Lane, joined
from loaderkit.engine.process import messages
from loaderkit.engine.process.connection import WorkerConnection
from loaderkit.engine.process.leases import LeaseTable
from loaderkit.engine.process.receiver import Inbox, ReceivedBatch, Receiver, relay
from loaderkit.engine.process.shared_memory import Allocator, SharedArena
from loaderkit.engine.process.trainer_stages import TrainerStages
from loaderkit.engine.watchdog import HangReport
from loaderkit.engine.work import Stage
from loaderkit.errors import ConfigError, WorkerDiedError
from loaderkit.sampling.shard import Shard

logger = logging.getLogger("loaderkit")


@dataclass(frozen=True)
class WorkerSpec:
    """What every process is to do. `make_engine` makes the engine there: it is pickled, and gets a function that allocates
    slabs, and its share. `preload`: the module it is from, imported while the spec is on its way. `trainer_stages` run here, on
    batches that have arrived; `rows` name the stages that run there, with the workers of one process; `pools` which of them
    share theirs."""

    make_engine: Any
    preload: str
    rows: Sequence[StageStats]
    pools: Sequence[Sequence[str]]
    num_batches: int  # ahead, by all processes together
    memory_bytes: int  # of all processes
    trainer_stages: Sequence[Stage] = ()
    pinned_for: torch.device | None = None  # to which the late stages copy


class WorkerProcess:
    """A process, from before it is started until it has ended. Belongs to the consumer's thread, but for `tell`, `order`,
    `stats`, `begin_closing` and `close`."""

    def __init__(self, spec: WorkerSpec, shard: Shard) -> None:
        self._spec = spec
        self._shard = shard
        self._trainer_stages = TrainerStages(spec.trainer_stages, time.perf_counter) if spec.trainer_stages else None
        self._connection: WorkerConnection | None = None
        self._inbox: Inbox | None = None
        self._lease_table: LeaseTable | None = None
        self._found: ReceivedBatch | None = None  # what `skim` came upon
        self._telling = threading.Lock()
        self._early: list[tuple[Any, ...]] = []  # what to tell the process once there is one
        self._has_told_early = False
        self._latest = Stats.empty(spec.rows, shard.num_bytes(spec.memory_bytes))  # what it said last

    def start(self, place: tuple[int, int]) -> None:
        """Start the process and send it its spec; it imports what it needs meanwhile. Raises OSError, RuntimeError,
        ConfigError; `close` ends what was begun."""
        arena = SharedArena.create(self._shard.of)
        try:
            allocator = Allocator(arena)
            connection = self._connection = WorkerConnection(arena, allocator, self._spec.preload)
            self._send_spec(connection, arena, allocator, place)
        finally:
            arena.release_descriptor()
        with self._telling:
            for order in self._early:
                connection.tell(*order)
            self._early.clear()
            self._has_told_early = True
            self._lease_table = LeaseTable(arena, pinned_for=self._spec.pinned_for)
            receiver = Receiver(connection, self._lease_table)
            self._inbox = receiver if self._trainer_stages is None else self._trainer_stages.follow(receiver)

    def _send_spec(
        self, connection: WorkerConnection, arena: SharedArena, allocator: Allocator, place: tuple[int, int]
    ) -> None:
        spec = (self._spec.make_engine, self._shard, torch.get_num_threads())
        packed, _ = messages.post(spec, arena, allocator)
        epoch, position = place
        settings = {
            "spec": packed,
            "begin": allocator.end,
            "keep_pages": self._spec.pinned_for is not None,
            "epoch": epoch,
            "position": position,
            "log_level": logger.getEffectiveLevel(),
        }
        connection.tell("spec", pickle.dumps(settings, 5))

    @property
    def pid(self) -> int | None:
        """None before it is started."""
        return self._connection.pid if self._connection is not None else None

    def tell(self, *order: Any) -> None:
        """Give an order to the process, or to the one there will be."""
        connection = self._connection_after(order)
        if connection is not None:
            connection.tell(*order)

    def order(self, *order: Any) -> ConfigError | None:
        """The same, and what the process refuses that with; None also where it is too early for it to say."""
        connection = self._connection_after(order)
        if connection is None:
            return None
        if not connection.is_awake:
            connection.tell(*order)
            return None
        refused: ConfigError | None = connection.ask(*order)
        return refused

    def _connection_after(self, order: tuple[Any, ...]) -> WorkerConnection | None:
        """What to give an order to; None: it is noted down until the process has been told what came before."""
        with self._telling:
            if not self._has_told_early:
                self._early.append(order)
                return None
        return self._connection

    def _ask(self, question: str, *arguments: Any) -> Any:
        """The answer to a question; None if there is none."""
        return self._connection.ask(question, *arguments) if self._connection is not None else None

    # ------------------------------------------------------------------------------------------------- its batches

    def take(self, generation: int, timeout_s: float) -> ReceivedBatch | None:
        """Its next batch; see `Inbox`. Raises EOFError when there will be none, as it has ended or is closed."""
        found, self._found = self._found, None
        inbox = self._inbox  # which another thread's `close` lets go
        if inbox is None:
            raise EOFError
        if found is not None and found.generation == generation:
            return found
        if found is not None:
            del found
            inbox.taken()
        return inbox.take(generation, timeout_s)

    def skim(self, generation: int) -> None:
        """Drop what was sent before the last seek, so that the process continues without waiting for its turn."""
        with suppress(EOFError):
            self._found = self.take(generation, 0.0)

    def taken(self) -> None:
        """See `Inbox`."""
        if (inbox := self._inbox) is not None:
            inbox.taken()

    def give_back(self) -> None:
        """See `Inbox`."""
        if (inbox := self._inbox) is not None:
            inbox.give_back()

    # --------------------------------------------------------------------------------------------------- reports

    def record(self) -> None:
        """Keep what its workers do from now on."""
        self.tell("record")
        if self._trainer_stages is not None:
            self._trainer_stages.record()

    def recorded(self) -> list[Lane]:
        """What was kept; nothing more is. What the process does not tell, as it has ended, is missing."""
        found: list[Lane] = []
        while (answer := self._ask("recorded", len(found))) is not None and answer[1] is not None:
            found.append(answer[1])
        return [*joined(found), *(self._trainer_stages.recorded() if self._trainer_stages is not None else ())]

    def report(self) -> HangReport:
        """Why its next batch is not there yet."""
        silent = HangReport(f"process {self.pid} is still starting, or does not answer")
        inbox = self._inbox
        found: HangReport | None = (inbox.report() if inbox is not None else None) or self._ask("report")
        return found or silent

    def stats(self, waiting_since_s: float | None, at_s: float, *, may_ask: bool) -> Stats:
        """Its accounts up to `at_s`; what it said last, if it does not answer. `stall_s` is the wait for it that the consumer
        is in."""
        answer: Stats | None = self._ask("stats", waiting_since_s, at_s) if may_ask else None
        self._latest = found = answer or replace(self._latest, stall_s={})
        late = [] if self._trainer_stages is None else self._trainer_stages.rows(time.perf_counter())
        return replace(found, stages=[*found.stages, *late])

    @property
    def has_ended(self) -> bool:
        """Whether it was started and is there no more."""
        return self._connection is not None and self._connection.has_ended

    def death(self) -> WorkerDiedError:
        """What became of it, when it has ended by itself."""
        assert self._connection is not None
        return self._connection.death()

    # ---------------------------------------------------------------------------------------------------- ending

    def begin_closing(self, join_s: float) -> None:
        """Tell it to end, and do not wait for that."""
        if self._connection is not None:
            self._connection.begin_closing(join_s)

    def close(self, join_s: float) -> None:
        """End it, by force after `join_s`; batches that were delivered stay valid."""
        self.begin_closing(join_s)  # Ctrl-C may have kept it from hearing of it
        for message in self._connection.close(join_s) if self._connection is not None else ():
            if isinstance(message, messages.LogMessage):
                relay(message)
        if self._inbox is not None:
            self._inbox.close(join_s)
        if self._lease_table is not None:
            self._lease_table.close()
        self._inbox = self._lease_table = self._found = None  # an error's traceback would keep all of it alive
