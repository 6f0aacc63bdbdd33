"""The actor that hosts an engine: its start, its commands, its batches and its end.

    trainer ──begin────────────> start      makes the engine
            ──tell, ask────────> control    goes to the engine; `start` lets it run
            ──next─────────────> batches    takes batches that have left out of the budget, at once; returns the next
                                            finished one, in its turn, into the object store
            ──live, logs───────> life, logs return at the end, and with log records

Each group of calls has one thread, but for `batches`, all of whose calls are to begin when they come. This module imports
nothing heavy at its top, so that an actor answers before it has imported torch.
"""

from __future__ import annotations

import importlib
import os
import queue
import threading
import time
from typing import TYPE_CHECKING, Any

import ray

from loaderkit._internal.system.log_records import forward_logs
from loaderkit._internal.version import __version__
from loaderkit.engine.ray import messages
from loaderkit.engine.ray.cluster import node_here
from loaderkit.engine.ray.surroundings import boot_id
from loaderkit.engine.remote import error_transport

if TYPE_CHECKING:
    from loaderkit.engine.ray.actor_server import ActorServer

ORDERS = ("resize", "set_depth")  # questions that are also executed, even if they come before the engine exists
_END = None


class LoadingActor:
    """Hosts an engine. Its methods are called by the trainer's `ActorProcess` only."""

    def __init__(self, version: str) -> None:
        """`version` is the trainer's version of loaderkit: messages fit no other. Raises RuntimeError."""
        if version != __version__:
            raise RuntimeError(f"loaderkit {__version__} is there, and the program has {version}")
        self._server: ActorServer | None = None
        self._failure: error_transport.PackedError | None = None
        self._lock = threading.Lock()
        self._early: list[tuple[Any, ...]] = []  # commands that came before the engine existed
        self._turns = threading.Condition()
        self._turn = 0  # the number of the call that gets the next batch
        self._num_told = 0  # commands that were executed, or will be by the engine's start
        self._has_begun = threading.Event()
        self._has_ended = threading.Event()
        self._records: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()

    # ---------------------------------------------------------------------------------------------------- start

    @ray.method(concurrency_group="control")
    def hello(self) -> messages.Hello:
        """Answers as soon as the actor has a process."""
        return messages.Hello(os.getpid(), node_here(), boot_id())

    @ray.method(concurrency_group="start")
    def begin(self, packed: messages.PackedEngine, spec: messages.ActorSpec) -> None:
        """Make the engine; what goes wrong is the answer to `next`."""
        try:
            self._begin(packed, spec)
        except BaseException as error:
            self._failure = error_transport.pack_error(error)
        finally:
            self._has_begun.set()

    def _begin(self, packed: messages.PackedEngine, spec: messages.ActorSpec) -> None:
        spec.surroundings.enter()
        forward_logs(self._records.put, spec.log_level)
        importlib.import_module(spec.preload)
        from loaderkit.engine.ray.actor_server import ActorServer
        from loaderkit.native.identity import Identity, check_same

        check_same(Identity(*spec.program))
        server = ActorServer(packed, spec)
        with self._lock:
            for name, *arguments in self._early:
                getattr(server, name)(*arguments)
            self._early.clear()
            self._server = server

    # -------------------------------------------------------------------------------------------------- batches

    @ray.method(concurrency_group="batches")
    def next(
        self, number: int, generation: int, num_taken: int, num_told: int
    ) -> messages.PackedBatch | error_transport.PackedError | None:
        """The next finished batch after `generation` seeks, once it is finished; None if there were more seeks. A
        PackedError is the error that has stopped the engine. `number` is the number of calls before this one;
        `num_taken` more batches of after `generation` seeks have been taken since, which counts behind the first
        `num_told` commands."""
        self._has_begun.wait()
        if num_taken and self._server is not None:
            with self._turns:
                self._turns.wait_for(lambda: self._num_told >= num_told)
            self._server.taken(generation, num_taken)
        with self._turns:
            self._turns.wait_for(lambda: self._turn == number)
        try:
            return self._next(generation)
        finally:
            with self._turns:
                self._turn += 1
                self._turns.notify_all()

    def _next(self, generation: int) -> messages.PackedBatch | error_transport.PackedError | None:
        if self._failure is None:
            assert self._server is not None
            try:
                return self._server.next(generation)
            except BaseException as error:
                self._failure = error_transport.pack_error(error)
        return self._failure

    # -------------------------------------------------------------------------------------------------- control

    @ray.method(concurrency_group="control")
    def clock(self) -> float:
        """This machine's clock, in s."""
        return time.perf_counter()

    @ray.method(concurrency_group="control")
    def tell(self, name: str, *arguments: Any) -> None:
        """Execute a command, from the start on."""
        self._tell(name, arguments)
        with self._turns:
            self._num_told += 1
            self._turns.notify_all()

    def _tell(self, name: str, arguments: tuple[Any, ...]) -> None:
        with self._lock:
            if self._server is None:
                self._early.append((name, *arguments))
                return
        try:
            getattr(self._server, name)(*arguments)
        except Exception as error:
            self._server.fail(error)

    @ray.method(concurrency_group="control")
    def ask(self, question: str, *arguments: Any) -> Any:
        """The answer to a question; None before there is an engine."""
        with self._lock:
            if self._server is None:
                if question in ORDERS:
                    self._early.append((question, *arguments))
                return None
        return getattr(self._server, question)(*arguments)

    @ray.method(concurrency_group="control")
    def end(self, join_s: float) -> None:
        """Stop the engine."""
        if self._server is not None:
            self._server.close(join_s)
        self._has_ended.set()
        self._records.put(_END)

    # -------------------------------------------------------------------------------------------------- waiting

    @ray.method(concurrency_group="life")
    def live(self) -> None:
        """Returns at the end; Ray raises for a call to an actor that dies before."""
        self._has_ended.wait()

    @ray.method(concurrency_group="logs")
    def logs(self) -> list[dict[str, Any]] | None:
        """The log records since the last call, at least one; None at the end."""
        records = []
        record = self._records.get()
        while record is not None:
            records.append(record)
            try:
                record = self._records.get_nowait()
            except queue.Empty:
                return records
        if records:
            self._records.put(_END)
        return records or None


MOST_CALLS = 16
"""The calls for batches that may be outstanding. With more the last ones would begin late, so the batches that they
report as taken would be known late, and the actor may wait for that."""

GROUPS = {"start": 1, "batches": MOST_CALLS, "control": 1, "life": 1, "logs": 1}
"""The groups of calls, and the threads of each."""
