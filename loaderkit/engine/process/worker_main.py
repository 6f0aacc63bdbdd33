"""The main function of a worker process: its start, its commands and its end.

    trainer ──spec, seek, taken, released, ask, close──> control thread ──> BatchSender ──> engine
            <──answers────────────────────────────────┘                    │
            <──batches, failures, log records──────────────────────────────┘

It begins in `main`, in a fresh interpreter that runs nothing of the user's `__main__`, and imports torch while the spec is
on its way; so this module imports nothing heavy at its top. It never outlives the trainer: the kernel kills it
with the thread that started it, and the end of the control socket ends it as well.
"""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NoReturn

from loaderkit._internal.system.child_process import bind_to
from loaderkit._internal.system.forks import ending_forks
from loaderkit._internal.system.log_records import forward_logs
from loaderkit.engine.remote import error_transport
from loaderkit.errors import RemoteError

if TYPE_CHECKING:
    from loaderkit.engine.process.batch_sender import BatchSender

_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_MESSAGE_BYTES = 2**18
_TEXT_CHARACTERS = 2**14
ORDERS = ("resize", "set_depth")  # questions that are also executed, even if they come before the engine exists

BOOT = """import json, os, pickle, sys
*numbers, start, size = map(int, sys.argv[1:])
try:
    sys.path[:], sys.argv[:], preload = json.loads(os.pread(numbers[3], size, start))
    from loaderkit.engine.process.worker_main import main
    main(numbers, preload)
except BaseException as error:
    os.write(numbers[1], pickle.dumps(f"{type(error).__name__}: {error}"[:1000]))
    raise"""
"""The interpreter's -c program. Its arguments are the arguments of `main`, and the span of the arena that holds the
rest, which may be too long for a command line. An error at the start is sent as text."""


def main(numbers: Sequence[int], preload: str) -> NoReturn:
    """Run until the trainer ends the process. `numbers`: the trainer's pid, then the descriptors of outbox (batches), control
    socket and arena; `preload`: the module to import while the spec is on its way."""
    parent, outbox, control, arena = numbers
    bind_to(parent)
    worker = WorkerMain(
        socket.socket(fileno=outbox),  # both are packet sockets: one message, one packet
        socket.socket(fileno=control),
        arena,
    )
    threading.Thread(target=worker.listen, name="loaderkit-control", daemon=True).start()
    worker.run(preload)


def _import(name: str) -> None:
    """Import a module that imports torch, in 1.8 s instead of 2: without garbage collection, since imports leave no garbage,
    and without plugins for other devices, which this process does not use."""
    given = os.environ.get(_AUTOLOAD)
    os.environ[_AUTOLOAD] = "0"
    gc.disable()
    try:
        importlib.import_module(name)
    finally:
        gc.enable()
        if given is None:
            del os.environ[_AUTOLOAD]
        else:
            os.environ[_AUTOLOAD] = given


class WorkerMain:
    """Holds the sockets; hands the trainer's messages to the `BatchSender` once it exists."""

    def __init__(self, outbox: socket.socket, control: socket.socket, arena: int) -> None:
        self._outbox = outbox
        self._control = control
        self._arena = arena
        # Pickled: to open it imports modules, which the main thread imports just now.
        self._specs: SimpleQueue[bytes] = SimpleQueue()
        self._lock = threading.Lock()
        self._sender: BatchSender | None = None
        self._early: list[tuple[Any, ...]] = []  # messages that came before the BatchSender existed

    def run(self, preload: str) -> NoReturn:
        """Import `preload`, take the spec, and send batches until the control thread ends the process."""
        try:
            ending_forks(_import)(preload)
            from loaderkit.engine.process import messages
            from loaderkit.engine.process.batch_sender import BatchSender
            from loaderkit.native.identity import Identity, check_same

            spec = pickle.loads(self._specs.get())  # noqa: S301 - of our own process
            forward_logs(self._forward_log, spec.pop("log_level"))
            check_same(Identity(*spec.pop("program")))
            sender = ending_forks(BatchSender)(self._outbox, self._arena, **spec)
            with self._lock:
                for name, *arguments in self._early:
                    getattr(sender, name)(*arguments)
                self._sender = sender
            self._outbox.send(pickle.dumps(messages.ReadyMessage(), 5))
            sender.run()
        except BaseException as error:
            self._fail(error)
        threading.Event().wait()
        raise AssertionError("the event is never set")

    def _fail(self, error: BaseException) -> None:
        from loaderkit.engine.process import messages

        packet = pickle.dumps(messages.FailureMessage(error_transport.pack_error(error)), 5)
        if len(packet) > _MESSAGE_BYTES // 2:
            short = RemoteError(f"{type(error).__name__}: {str(error)[:_TEXT_CHARACTERS]} ...")
            packet = pickle.dumps(messages.FailureMessage(error_transport.pack_error(short)), 5)
        with suppress(OSError):  # the trainer has ended, and this process will
            self._outbox.send(packet)

    def listen(self) -> None:
        """Execute the trainer's commands, from the start on."""
        while True:
            try:
                packet = self._control.recv(_MESSAGE_BYTES)
            except OSError:
                packet = b""
            if not packet:  # the trainer has ended, or closed the connection
                self._end(None)
            name, *arguments = pickle.loads(packet)  # noqa: S301 - of our own process
            try:
                self._do(name, arguments)
            except Exception as error:
                self._fail(error)

    def _do(self, name: str, arguments: list[Any]) -> None:
        if name == "close":
            self._end(*arguments)
        elif name == "ask":
            self._answer(*arguments)
        elif name == "spec":
            self._specs.put(arguments[0])
        else:
            with self._lock:
                if self._sender is None:
                    self._early.append((name, *arguments))
                    return
            getattr(self._sender, name)(*arguments)

    def _answer(self, serial: int, question: str, *arguments: Any) -> None:
        with self._lock:
            sender = self._sender
            if sender is None and question in ORDERS:
                self._early.append((question, *arguments))
        answer = getattr(sender, question)(*arguments) if sender is not None else None
        self._control.send(pickle.dumps((serial, answer), 5))

    def _end(self, join_s: float | None) -> NoReturn:
        if self._sender is not None and join_s is not None:
            self._sender.close(join_s)
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        with suppress(OSError):
            self._outbox.shutdown(socket.SHUT_WR)  # shutdown, since forks of this process have copies of the socket
        os._exit(0)  # an orderly exit of torch takes 0.1 s, and the user's threads may never end

    def _forward_log(self, attributes: dict[str, Any]) -> None:
        from loaderkit.engine.process.messages import LogMessage

        # Never block: the thread may hold the engine's lock, and the trainer reads only when it waits for a batch.
        self._outbox.send(pickle.dumps(LogMessage(attributes), 5), socket.MSG_DONTWAIT)
