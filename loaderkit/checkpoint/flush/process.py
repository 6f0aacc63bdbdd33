"""The process that writes checkpoints, from the side of the training process."""

from __future__ import annotations

import fcntl
import json
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from loaderkit._internal.packing import pack
from loaderkit._internal.system.child_process import ChildProcess, how_it_ended
from loaderkit._internal.system.descriptors import FIRST_FREE, memory_file
from loaderkit._internal.system.log_records import relay
from loaderkit.checkpoint.flush import child
from loaderkit.checkpoint.flush.shared_pages import SharedPages
from loaderkit.checkpoint.flush.transport import pack_state
from loaderkit.engine.remote.error_transport import unpack_error
from loaderkit.errors import CheckpointError, ConfigError

_POLL_S = 1.0
_END_S = 5.0
_WHO = "the process that writes checkpoints"
logger = logging.getLogger("loaderkit")


class FlushProcess:
    """Calls a function in another process, which is started at the first call and kept; one call at a time."""

    def __init__(self, make: Callable[..., Callable[..., Any]], memory: SharedPages) -> None:
        """`make`, which is pickled, gets the MappedPages of the process, and returns the function. Raises ConfigError."""
        if not sys.executable:
            raise ConfigError("flush: process needs a Python interpreter of its own, and sys.executable is empty")
        stream, buffers = pack(make)
        self._make = pickle.dumps((stream, [bytes(buffer) for buffer in buffers]), 5)
        self._memory = memory
        self._running: _FlushChild | None = None
        self._calling = threading.Lock()
        self._is_closed = False

    def call(self, state: Any, *arguments: Any) -> Any:
        """Calls the function with a copied state, which lies in the given memory, and with arguments that can be
        pickled; returns its result.

        Raises what the function raises, and CheckpointError if the process ends meanwhile; the next call starts another one.
        """
        self._is_closed = False
        try:
            with self._calling:
                return self._call(state, arguments)
        finally:
            if self._is_closed:
                self.close()

    def _call(self, state: Any, arguments: tuple[Any, ...]) -> Any:
        stream, areas = pack_state(state, self._memory)
        if self._running is None or self._running.process.has_ended:
            self._end()
            self._running = _FlushChild(self._make, self._memory)
        try:
            outcome = self._running.call(stream, areas, arguments)
        except (EOFError, OSError) as error:
            message = self._running.death()
            self._end()
            raise CheckpointError(message) from error
        if not self._running.is_ready:  # what was to be called could not be made, and the process ends
            self._end()
        if outcome.error is not None:
            raise outcome.error
        return outcome.result

    def close(self) -> None:
        """End the process; if a thread is in a call, once that returns. Another call may follow. Idempotent."""
        self._is_closed = True  # first, as the thread looks when it has released the lock
        if self._calling.acquire(blocking=False):
            try:
                self._end()
            finally:
                self._calling.release()

    def _end(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.close()


class _Outcome(NamedTuple):
    """What a call returned or raised."""

    result: Any = None
    error: BaseException | None = None


class _FlushChild:
    """One process."""

    def __init__(self, make: bytes, memory: SharedPages) -> None:
        """Start it. Raises OSError, as the first call does if it could not be started."""
        self._memory = memory
        self._sent: set[int] = set()
        self.is_ready = False
        with ExitStack() as theirs:
            self._connection, other = _pipe()
            theirs.callback(other.close)
            settings = theirs.enter_context(memory_file("loaderkit-settings"))
            texts = [[one for one in sys.path if isinstance(one, str)], [str(one) for one in sys.argv]]
            os.pwrite(settings.fileno(), json.dumps(texts).encode(), 0)
            descriptors = (other.fileno(), settings.fileno())
            numbers = [str(number) for number in (os.getpid(), *descriptors)]
            self.process = ChildProcess(child.BOOT, numbers, descriptors, os.environ | child.ENVIRONMENT)
        with suppress(OSError):  # it has ended: the first call says how
            self._connection.send_bytes(pickle.dumps((make, logger.getEffectiveLevel()), 5))

    def call(self, stream: bytes, areas: set[int], arguments: tuple[Any, ...]) -> _Outcome:
        """Call the function. Raises EOFError, OSError if the process has ended."""
        if not self.is_ready:
            if (outcome := self._receive()).error is not None:
                return outcome
            self.is_ready = True
        kept = set(self._memory.numbers()) & self._sent | areas
        added = sorted(areas - self._sent)
        self._connection.send_bytes(pickle.dumps((sorted(kept), added, arguments), 5))
        for number in added:
            reduction.send_handle(self._connection, self._memory.file_of(number).fileno(), None)
        self._sent = kept
        self._connection.send_bytes(stream)
        return self._receive()

    def _receive(self) -> _Outcome:
        """The outcome of what the process does. Raises EOFError, OSError."""
        while True:
            # A fork of this process may hold the other end of the socket open, so look at the process, too.
            while not self._connection.poll(_POLL_S):
                if self.process.has_ended and not self._connection.poll(0):
                    raise EOFError
            kind, *content = pickle.loads(self._connection.recv_bytes())  # noqa: S301 - of our own process
            if kind == "failed":
                return _Outcome(error=unpack_error(content[0], _WHO))
            if kind != "log":
                return _Outcome(*content)
            relay(content[0])

    def death(self) -> str:
        """How the process has ended, and what to do."""
        pid = self.process.pid
        if not self.process.wait(_END_S):
            self.process.kill()
            self.process.wait(_END_S)
        code = self.process.exit_code
        how = how_it_ended(code)
        if not self.is_ready:
            how = f"could not start: it {how} before it was ready"
            fix = f"see its stderr; {sys.executable} must be able to import there what it imports here, or use flush: thread"
        elif code == -signal.SIGKILL:
            fix = "unless another program did that, the system was out of memory (see dmesg)"
        else:
            fix = "see its stderr"
        return (
            f"{_WHO} (pid {pid}) {how}: {fix}. The save has failed, the checkpoints before it stand, and the next save starts "
            "another process"
        )

    def close(self) -> None:
        """End the process."""
        # Closing is not enough: forks of this process may have copies of the socket.
        with suppress(OSError), socket.fromfd(self._connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as end:
            end.shutdown(socket.SHUT_RDWR)
        self._connection.close()
        if not self.process.wait(_END_S):
            self.process.kill()
            self.process.wait(_END_S)
        self.process.release(_END_S)


def _pipe() -> tuple[Connection[Any, Any], Connection[Any, Any]]:
    """Two ends, neither with the number of a closed stdin, stdout or stderr."""
    ends: list[Connection[Any, Any]] = []
    for low in multiprocessing.Pipe():
        with low:
            ends.append(Connection(fcntl.fcntl(low.fileno(), fcntl.F_DUPFD_CLOEXEC, FIRST_FREE)))
    return ends[0], ends[1]
