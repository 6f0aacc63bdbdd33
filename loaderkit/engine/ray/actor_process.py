"""One actor from the trainer's side: its start, its commands, its end."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError

from loaderkit._internal import torch_threads
from loaderkit._internal.config import keys
from loaderkit._internal.system.log_records import relay
from loaderkit._internal.version import __version__
from loaderkit.engine.metrics.nodes.ledger import NodeLedger
from loaderkit.engine.metrics.snapshot import Snapshot
from loaderkit.engine.ray.actor import GROUPS, ORDERS, LoadingActor
from loaderkit.engine.ray.actor_death import actor_death
from loaderkit.engine.ray.actor_inbox import ActorInbox, say_place
from loaderkit.engine.ray.clock_offset import lane_here, stats_here
from loaderkit.engine.ray.cluster import RaySettings, describe_wait, node_here
from loaderkit.engine.ray.connection import Connection
from loaderkit.engine.ray.messages import ActorSpec, Hello
from loaderkit.engine.ray.object_memory import ObjectMemory
from loaderkit.engine.ray.shared_engine import SharedEngine
from loaderkit.engine.ray.surroundings import Surroundings
from loaderkit.engine.remote.contracts import WorkerSpec
from loaderkit.engine.restarts import Death
from loaderkit.errors import ClosedError, ConfigError, WorkerDiedError
from loaderkit.native.identity import identity
from loaderkit.sampling.shard import Shard

_PATIENCE_S = 1.0  # the longest wait for an answer that should come at once
_END_S = 5.0  # for Ray to end an actor that was killed
logger = logging.getLogger("loaderkit")


class ActorProcess:
    """A `RunningProcess` in an actor of a Ray cluster."""

    def __init__(
        self, settings: RaySettings, connection: Connection, engine: SharedEngine, spec: WorkerSpec, shard: Shard
    ) -> None:
        """`engine` is shared by all actors of the loader."""
        self._settings = settings
        self._connection = connection
        self._engine = engine
        self._spec = spec
        self._shard = shard
        self._actor: Any = None
        self._inbox: ActorInbox | None = None
        self._life: Any = None  # the call that returns at the actor's end
        self._logs: Any = None  # the call that returns log records
        self._closing: Any = None
        self._unanswered: Future[Any] | None = None  # a question that was not answered in time
        self._asking = threading.Lock()
        self._has_ended = threading.Event()
        self._has_logged = threading.Event()
        self._is_closed = False

    def start(self, next_position: tuple[int, int], generation: int, orders: Sequence[tuple[Any, ...]]) -> None:
        """See `RunningProcess`."""
        self._connection.open()
        do = self._connection.do
        ledger = self._spec.ledger or NodeLedger()
        ledger.stands_on(do(node_here))
        try:
            packed = self._engine.argument(self._spec.make_engine)
        except RayError as error:
            raise WorkerDiedError(f"Ray's object store does not take what the actors are given: {error}") from error
        try:
            actor = self._actor = do(_remote_class().options(**self._settings.options()).remote, __version__)
            self._inbox = ActorInbox(
                actor,
                ObjectMemory(self._spec.pinned_for),
                ledger,
                generation,
                self._shard.num_batches(self._spec.num_batches),
                connection=self._connection,
                why_not_placed=lambda: str(do(describe_wait, self._settings)),
                relay_logs=self._relay_logs,
            )
            self._life = life = do(actor.live.remote)
            life.future().add_done_callback(self._end)
            for order in orders:
                self.tell(*order)
            begun = do(
                actor.begin.remote,
                packed,
                ActorSpec(
                    Surroundings.here(),
                    self._spec.preload,
                    (self._shard.number, self._shard.of),
                    torch_threads.get_num_threads(),
                    next_position,
                    generation,
                    logger.getEffectiveLevel(),
                    tuple(identity()),
                ),
            )
            self._ask_for_logs(actor)
            self._inbox.start(begun)
            self._actor = actor  # again, as a signal's handler may have closed it: it is closed once more then
        except RayError as error:
            raise WorkerDiedError(f"an actor could not be started: {error}") from error
        except ValueError as error:
            raise ConfigError(f"{keys.RAY}: Ray refuses what each actor needs: {error}") from error

    def _end(self, _: Any) -> None:
        """Note the actor's end; in a thread of Ray's."""
        self._has_ended.set()
        self.inbox.end()

    # ------------------------------------------------------------------------------------------------- talking

    @property
    def _hello(self) -> Hello | None:
        return None if self._inbox is None else self._inbox.hello

    @property
    def pid(self) -> int | None:
        """See `RunningProcess`; of its node."""
        return None if self._hello is None else self._hello.pid

    @property
    def node(self) -> str | None:
        """See `RunningProcess`."""
        return None if self._hello is None else self._hello.node

    @property
    def where(self) -> str:
        """See `RunningProcess`."""
        return "it has no place yet" if self._hello is None else say_place(self._hello)

    @property
    def inbox(self) -> ActorInbox:
        """See `RunningProcess`."""
        assert self._inbox is not None
        return self._inbox

    @property
    def is_awake(self) -> bool:
        """See `RunningProcess`."""
        return self._inbox is not None and self._inbox.has_begun

    def tell(self, name: str, *arguments: Any) -> None:
        """See `RunningProcess`."""
        if self._actor is None or self._is_closed:
            return
        with suppress(RayError, ClosedError):
            self._note(name, arguments)
            self.inbox.tell(name, *arguments)

    def _note(self, name: str, arguments: tuple[Any, ...]) -> None:
        """What a command changes on this side."""
        if name in ("seek", "begin"):
            self.inbox.seek(arguments[0])
        elif name == "share":
            self._shard, num_batches, *_ = arguments
            self.inbox.set_depth(self._shard.num_batches(num_batches))
        elif name == "set_depth" and arguments[0] is not None:
            self.inbox.set_depth(self._shard.num_batches(arguments[0]))

    def ask(self, question: str, *arguments: Any) -> Any:
        """See `RunningProcess`."""
        if not self.is_awake or self.has_ended or self._is_closed:
            return None
        offset_s = self.inbox.offset_s
        if question == "stats":
            arguments = tuple(at_s if at_s is None else at_s + offset_s for at_s in arguments)
        with self._asking:
            answer = self._ask(question, arguments)
        if isinstance(answer, Snapshot):
            return stats_here(answer, offset_s)
        if question == "recorded" and answer is not None and answer[1] is not None:
            return answer[0], lane_here(answer[1], offset_s)
        if question in ORDERS and not isinstance(answer, ConfigError):
            self._note(question, arguments)
        return answer

    def _ask(self, question: str, arguments: tuple[Any, ...]) -> Any:
        """The answer. While an earlier one is missing only orders are sent: questions would pile up."""
        deadline = time.monotonic() + _PATIENCE_S
        do, actor, missing = self._connection.do, self._actor, self._unanswered  # `release` may come meanwhile
        if actor is None:
            return None
        try:
            # Not by ray.wait: see ActorInbox.
            if missing is not None and question not in ORDERS and not wait([missing], _PATIENCE_S).done:
                return None
            asked: Future[Any] = do(do(actor.ask.remote, question, *arguments).future)
            is_answered = bool(wait([asked], max(0.0, deadline - time.monotonic())).done)
            self._unanswered = None if is_answered or self._actor is None else asked
            return asked.result() if is_answered else None
        except (RayError, ClosedError):
            self._unanswered = None
            return None

    def _ask_for_logs(self, actor: Any) -> None:
        self._has_logged.clear()
        self._logs = logs = self._connection.do(actor.logs.remote)
        logs.future().add_done_callback(lambda _: self._has_logged.set())

    def _relay_logs(self) -> None:
        """Log what the actor has logged, if that is anything."""
        if not self._has_logged.is_set():  # the store would be asked for 0.2 ms
            return
        self._has_logged.clear()
        logs, actor = self._logs, self._actor  # `release` may come meanwhile
        if logs is None:
            return
        with suppress(RayError, ClosedError):
            records = self._connection.do(ray.get, logs)
            if records is not None and not self._is_closed:
                self._ask_for_logs(actor)
            for record in records or ():
                relay(record)

    # -------------------------------------------------------------------------------------------------- ending

    @property
    def has_ended(self) -> bool:
        """See `RunningProcess`."""
        return self._has_ended.is_set()

    def death(self) -> Death:
        """See `RunningProcess`; an actor that cannot be reached is killed."""
        error = self.inbox.lost
        if self._life is not None and self._has_ended.wait(_PATIENCE_S):
            try:
                self._connection.do(ray.get, self._life)
            except RayError as ended:
                error = ended.with_traceback(None)
        self._kill()
        return actor_death(f"the actor that loads ({self.where})", error, is_early=not self.is_awake)

    def _kill(self) -> None:
        if self._actor is not None:
            with suppress(RayError, ValueError, ClosedError):
                self._connection.do(ray.kill, self._actor, no_restart=True)

    def begin_closing(self, join_s: float) -> None:
        """See `RunningProcess`."""
        if self._actor is None or self._is_closed or not self._connection.is_there:
            return
        if not self.is_awake or self.has_ended:
            self._kill()
        elif self._closing is None:
            with suppress(RayError, ClosedError):
                self._closing = self._connection.do(self._actor.end.remote, join_s)

    def close(self, join_s: float) -> None:
        """See `RunningProcess`."""
        if self._is_closed or not self._connection.is_there:
            self._is_closed = True
            self._kill()  # one that has begun since the first call, which came within its start
            return
        try:
            if self._closing is not None:
                with suppress(ClosedError):
                    self._connection.do(ray.wait, [self._closing], timeout=join_s + _PATIENCE_S)
                self._relay_logs()
        finally:
            self._is_closed = True
            self._kill()
            if self._actor is not None:
                self._has_ended.wait(_END_S)

    def release(self) -> None:
        """See `RunningProcess`."""
        self._actor = self._life = self._logs = self._closing = self._unanswered = None


def _remote_class() -> Any:
    remote: Any = ray.remote  # its types lack the groups
    return remote(concurrency_groups=GROUPS)(LoadingActor)
