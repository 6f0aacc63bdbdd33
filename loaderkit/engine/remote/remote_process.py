"""One of the processes that make batches, from the trainer's side, and the process that replaces it if it dies.

running process ──> inbox ──> (trainer stages, with a GPU) ──> take()
  ^                                                              │
  └── taken: one batch has left the budget; no longer referenced ──┘

What the dead one had finished is delivered first.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from loaderkit.engine.metrics.snapshot import Snapshot, as_past, merged
from loaderkit.engine.metrics.trace import Lane, joined
from loaderkit.engine.remote.contracts import Inbox, MakeProcess, ReceivedBatch, RunningProcess, WorkerSpec
from loaderkit.engine.remote.trainer_stages import TrainerStages
from loaderkit.engine.restarts import Death
from loaderkit.engine.watchdog import HangReport
from loaderkit.errors import ConfigError
from loaderkit.sampling.shard import Shard

_PATIENCE_S = 1.0  # for threads of a process that has ended
logger = logging.getLogger("loaderkit")


class _Counters:
    """The last answer of a process, and the counters of the processes that it has replaced."""

    def __init__(self, latest: Snapshot, past: Snapshot | None = None) -> None:
        self.latest = latest
        self._past = past

    def total(self) -> Snapshot:
        return self.latest if self._past is None else merged([self.latest, self._past])


class RemoteProcess:
    """A process that makes batches, from before its start until its end, and those that replace it. All methods belong
    to the consumer's thread, except `tell`, `order`, `stats`, `begin_closing` and `close`."""

    def __init__(self, spec: WorkerSpec, make: MakeProcess, shard: Shard) -> None:
        self._spec = spec
        self._make = make
        self.shard = shard  # with which it, or the next one in its place, begins
        self._trainer_stages = TrainerStages(spec.trainer_stages, time.perf_counter) if spec.trainer_stages else None
        self.running: RunningProcess | None = None
        self._inbox: Inbox | None = None
        self._skimmed: ReceivedBatch | None = None  # the batch that `skim` has received
        self._finished: deque[ReceivedBatch] = deque()  # by a process that has died
        self._took_finished = False  # the last batch taken was one of those
        self.failure: BaseException | None = (
            None  # of a process that has ended and has no successor; comes behind those
        )
        self.is_done = False  # it has ended, and had no batch left to make
        self.num_cautious = 0  # batches to be taken until it may read ahead again, since its predecessor died
        self._telling = threading.Lock()
        self._early: list[tuple[Any, ...]] = []  # commands for the process, until it is started
        self._has_told_early = False
        self._counters = _Counters(self._no_counters())

    def _no_counters(self) -> Snapshot:
        return Snapshot.empty(self._spec.rows, self.shard.num_bytes(self._spec.memory_bytes))

    @property
    def number(self) -> int:
        """It makes every batch whose turn is this."""
        return self.shard.number

    def start(
        self, next_position: tuple[int, int], generation: int = 0, orders: Sequence[tuple[Any, ...]] = ()
    ) -> None:
        """Start the process and send its spec and `orders`, which it obeys before it makes a batch; it imports modules
        meanwhile. `generation` is the number of seeks so far. Raises WorkerDiedError, ConfigError; after an error `close`
        releases what was started."""
        running = self.running = self._make(self._spec, self.shard)
        running.start(next_position, generation, orders)
        with self._telling:
            for order in self._early:
                running.tell(*order)
            self._early.clear()
            self._has_told_early = True
            inbox = running.inbox
            self._inbox = inbox if self._trainer_stages is None else self._trainer_stages.follow(inbox)

    @property
    def pid(self) -> int | None:
        """None before it is started."""
        return self.running.pid if self.running is not None else None

    @property
    def node(self) -> str | None:
        """See `RunningProcess`."""
        return None if self.running is None else self.running.node

    @property
    def where(self) -> str:
        """See `RunningProcess`."""
        return self.running.where if self.running is not None else "not started yet"

    @property
    def name(self) -> str:
        """For messages."""
        return f"the process that loads ({self.where})"

    def tell(self, *order: Any) -> None:
        """Send a command to the process; before its start, queue it."""
        running = self._started_for(order)
        if running is not None:
            running.tell(*order)

    def order(self, *order: Any) -> ConfigError | None:
        """Send a command and return the error with which the process refuses it; None too while the process still starts."""
        running = self._started_for(order)
        if running is None:
            return None
        if not running.is_awake:
            running.tell(*order)
            return None
        refused: ConfigError | None = running.ask(*order)
        return refused

    def _started_for(self, order: tuple[Any, ...]) -> RunningProcess | None:
        """The process to send a command to; None if it is not started yet: the command is queued behind earlier ones
        until then."""
        with self._telling:
            if not self._has_told_early:
                self._early.append(order)
                return None
        return self.running

    def _ask(self, question: str, *arguments: Any) -> Any:
        """The answer to a question; None if there is none."""
        return self.running.ask(question, *arguments) if self.running is not None else None

    # ------------------------------------------------------------------------------------------------- its batches

    def take(self, generation: int, timeout_s: float) -> ReceivedBatch | None:
        """The next batch; see `Inbox`. Raises EOFError once the process has ended or is closed, and its `failure`."""
        while self._finished:
            finished = self._finished.popleft()
            if finished.generation == generation:
                self._took_finished = True
                return finished
            del finished  # made before the last seek
        if self.failure is not None:
            raise self.failure
        return self._take(generation, timeout_s)

    def _take(self, generation: int, timeout_s: float) -> ReceivedBatch | None:
        skimmed, self._skimmed = self._skimmed, None
        inbox = self._inbox  # another thread's `close` may set it to None
        if inbox is None:
            raise EOFError
        if skimmed is not None and skimmed.generation == generation:
            return skimmed
        if skimmed is not None:
            del skimmed
            inbox.taken()
        return inbox.take(generation, timeout_s)

    def skim(self, generation: int) -> None:
        """Drop batches sent before the last seek, so that the process can continue before its next batch is awaited."""
        self._finished.clear()
        with suppress(EOFError):
            self._skimmed = self._take(generation, 0.0)

    def taken(self) -> None:
        """See `Inbox`."""
        if self._took_finished:
            self._took_finished = False  # its process is not there any more
        elif (inbox := self._inbox) is not None:
            inbox.taken()

    def give_back(self) -> None:
        """See `Inbox`."""
        if (inbox := self._inbox) is not None:
            inbox.give_back()

    # ----------------------------------------------------------------------------------------- its death, its successor

    @property
    def has_died(self) -> bool:
        """True if it has ended, and nothing is decided about it yet."""
        return self.has_ended and self.failure is None and not self.is_done

    def is_ready(self) -> bool:
        """True once it answers, before it is to make batches. Raises EOFError if it has ended, and the error that ended it."""
        is_awake = self.running is not None and self.running.is_awake
        self._take(0, 0.0)  # afterwards: what is awake by the end of its socket has ended
        return is_awake

    def begins(self, generation: int) -> bool:
        """True once it answers; batches from before `generation` are dropped. Raises EOFError if it has ended, and the
        error that ended it."""
        if self.running is None or not self.running.is_awake:
            return False
        self._skimmed = self._take(generation, 0.0)
        return True

    @property
    def num_finished(self) -> int:
        """The number of batches that a dead process has finished, and that are not taken yet."""
        return len(self._finished)

    def drain(self, generation: int) -> int | None:
        """Receive the batches that a process had finished before it ended, and return their number; None if some still
        go through the trainer's stages."""
        try:
            while (finished := self._take(generation, 0.0)) is not None:
                self._finished.append(finished)
        except EOFError:
            return len(self._finished)
        except Exception as error:
            self.failure = error
        return None

    def release(self) -> None:
        """Free what a process that has ended leaves, except batches that are referenced. Commands are queued until
        `start`."""
        with self._telling:
            self._has_told_early = False
        if self._spec.ledger is not None and self.node is not None:
            self._spec.ledger.restarted(self.node)
            self._spec.ledger.left(self.node, self.cpu_s)
        self._release(_PATIENCE_S)
        self._counters = _Counters(self._no_counters(), as_past(self._counters.total()))
        if self._trainer_stages is not None:
            self._trainer_stages.end()

    # --------------------------------------------------------------------------------------------------- reports

    def record(self) -> None:
        """Start a trace of its workers."""
        self.tell("record")
        if self._trainer_stages is not None:
            self._trainer_stages.record()

    def recorded(self) -> list[Lane]:
        """The trace since `record`; ends it. If the process has ended its lanes are missing."""
        pages: list[Lane] = []
        while (answer := self._ask("recorded", len(pages))) is not None and answer[1] is not None:
            pages.append(answer[1])
        return [*joined(pages), *(self._trainer_stages.recorded() if self._trainer_stages is not None else ())]

    def report(self) -> HangReport:
        """Why its next batch is not ready."""
        silent = HangReport(f"{self.name} is still starting, or does not answer")
        inbox = self._inbox
        report: HangReport | None = (inbox.report() if inbox is not None else None) or self._ask("report")
        return report or silent

    def stats(self, waiting_since_s: float | None, at_s: float, *, may_ask: bool) -> Snapshot:
        """Its counters up to `at_s`, or its last ones if it does not answer. `waits_s` is the consumer's open wait for it."""
        counters = self._counters
        answer: Snapshot | None = self._ask("stats", waiting_since_s, at_s) if may_ask else None
        counters.latest = answer or replace(counters.latest, waits_s={})
        stats = counters.total()
        trainer_rows = [] if self._trainer_stages is None else self._trainer_stages.rows(time.perf_counter())
        return replace(stats, stages=[*stats.stages, *trainer_rows])

    @property
    def cpu_s(self) -> float:
        """CPU time as last reported, without the processes that it has replaced."""
        return self._counters.latest.host.cpu_s

    @property
    def has_ended(self) -> bool:
        """True if it was started and has ended."""
        return self.running is not None and self.running.has_ended

    def death(self) -> Death:
        """How it has ended by itself."""
        assert self.running is not None
        return self.running.death()

    # ---------------------------------------------------------------------------------------------------- ending

    def begin_closing(self, join_s: float) -> None:
        """Tell the process to end, without waiting for its end."""
        if self.running is not None:
            self.running.begin_closing(join_s)

    def close(self, join_s: float) -> None:
        """End the process, by force after `join_s`; delivered batches stay valid."""
        self.begin_closing(join_s)  # again, since Ctrl-C may have interrupted the first call
        self._release(join_s)
        self._finished.clear()
        self.failure = None

    def _release(self, join_s: float) -> None:
        if self.running is not None:
            self.running.close(join_s)
        if self._inbox is not None:
            self._inbox.close(join_s)
        if self.running is not None:
            self.running.release()
        self._inbox = self._skimmed = None  # an error's traceback would keep all of it alive
