"""Starts a worker process, exchanges messages with it, and ends it.

The trainer and the worker share two pairs of packet sockets (which need no framing and show that the other end is closed) and
the arena.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import pickle
import select
import socket
import sys
import threading
import time
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np

from loaderkit._internal.config import keys
from loaderkit._internal.system.cgroups import oom_kills
from loaderkit._internal.system.child_process import ChildProcess
from loaderkit._internal.system.descriptors import FIRST_FREE
from loaderkit.engine.process import worker_main
from loaderkit.engine.process.exit_reason import exit_reason
from loaderkit.engine.process.shared_memory import Allocator, Block, SharedArena
from loaderkit.engine.restarts import Death
from loaderkit.errors import ConfigError

_MESSAGE_BYTES = 2**18  # a socket's default buffer holds less
_PATIENCE_S = 1.0  # the longest wait for an answer that should come at once
logger = logging.getLogger("loaderkit")


class WorkerConnection:
    """A worker process. `tell` and `ask` may be called from any thread, `receive` from one at a time."""

    def __init__(self, arena: SharedArena, allocator: Allocator, preload: str) -> None:
        """Start the process; it imports the module `preload` and then waits for its spec. Raises ConfigError, OSError."""
        if not sys.executable:
            raise ConfigError(
                f"{keys.EXECUTOR}: process needs a Python interpreter of its own, and sys.executable is empty"
            )
        self._asking = threading.Lock()
        # Held while a socket is polled: a descriptor closed meanwhile could be reused by another file.
        self._receiving = threading.RLock()
        self._serial = 0
        self._num_unanswered = 0
        self._is_closed = False
        self._has_heard = False
        self._oom_kills = oom_kills()  # before it was started
        self._reason = ""  # why it could not start, if it sent that
        with ExitStack() as ours, ExitStack() as theirs:
            self._outbox, theirs_out = _pair(ours, theirs)
            self._control, theirs_control = _pair(ours, theirs)
            descriptors = (theirs_out.fileno(), theirs_control.fileno(), arena.fileno())
            numbers = (os.getpid(), *descriptors, *_hand_over(arena, allocator, preload))
            self._child = ChildProcess(worker_main.BOOT, list(map(str, numbers)), descriptors)
            self.pid = self._child.pid
            ours.pop_all()

    # ------------------------------------------------------------------------------------------------- talking

    @property
    def is_awake(self) -> bool:
        """True once the process has sent a message. Until then it imports, and has no answers and no work to finish."""
        try:
            return self._has_heard or (not self._is_closed and _wait(self._outbox, 0.0))
        except ValueError:  # another thread has closed the socket
            return False

    def tell(self, name: str, *arguments: Any) -> None:
        """Send a command; ignored once the process has ended, which `receive` reports."""
        with suppress(OSError):
            self._control.send(pickle.dumps((name, *arguments), 5))

    def ask(self, question: str, *arguments: Any, timeout_s: float = _PATIENCE_S) -> Any:
        """The answer to a question; None if the process has none yet, has ended or does not answer in time.

        While an answer is outstanding only orders are sent: otherwise the socket would fill up with questions, and `close`
        would wait for room in it.
        """
        if not self.is_awake:
            return None
        is_ours: list[bool] = []
        try:
            # In one call: Ctrl-C cannot come between acquire and append.
            is_ours.extend(map(self._asking.acquire, (True,), (timeout_s,)))
            return self._ask(question, arguments, timeout_s) if is_ours[0] else None
        except (OSError, ValueError):  # ended, closed meanwhile, or its socket is full
            return None
        finally:
            if is_ours and is_ours[0]:
                self._asking.release()

    def _ask(self, question: str, arguments: tuple[Any, ...], timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        if question not in worker_main.ORDERS:
            while self._num_unanswered:
                if self._next_answer(deadline) is None:
                    return None
        self._serial += 1
        order = ("ask", self._serial, question, *arguments)
        self._control.send(pickle.dumps(order, 5), socket.MSG_DONTWAIT)
        self._num_unanswered += 1
        while (reply := self._next_answer(deadline)) is not None:
            serial, answer = reply
            if serial == self._serial:
                return answer
        return None

    def _next_answer(self, deadline: float) -> tuple[int, Any] | None:
        """(serial number of a question, its answer); None if none comes in time."""
        if self._is_closed or not _wait(self._control, deadline - time.monotonic()):
            return None
        packet = self._control.recv(_MESSAGE_BYTES)
        if not packet:
            return None
        self._num_unanswered -= 1
        reply: tuple[int, Any] = pickle.loads(packet)  # noqa: S301 - of our own process
        return reply

    def receive(self, timeout_s: float) -> Any:
        """The next message; None if none comes in time. Raises EOFError when the process has ended and all is read."""
        deadline = time.monotonic() + timeout_s
        with self._receiving:
            while True:
                if self._is_closed:
                    raise EOFError
                has_ended = self.has_ended
                # A fork of this process may hold the other end of the socket open, so check the process as well.
                if _wait(self._outbox, 0.0 if has_ended else min(_PATIENCE_S, deadline - time.monotonic())):
                    return self._read()
                if has_ended:
                    raise EOFError
                if time.monotonic() >= deadline:
                    return None

    def _read(self) -> Any:
        if self._is_closed:
            raise EOFError
        try:
            packet = self._outbox.recv(_MESSAGE_BYTES)
        except ConnectionResetError:
            packet = b""
        if not packet:
            raise EOFError
        message = pickle.loads(packet)  # noqa: S301 - of our own process
        if isinstance(message, str):
            self._reason = message
            raise EOFError
        self._has_heard = True
        return message

    # -------------------------------------------------------------------------------------------------- ending

    def death(self) -> Death:
        """How the process has ended by itself; one that has only closed its sockets is killed."""
        has_ended = self._child.wait(_PATIENCE_S)
        if not has_ended:
            self.kill()
            self._child.wait(_PATIENCE_S)
        return exit_reason(
            self.pid,
            self._child.exit_code if has_ended else None,
            has_ended=has_ended,
            is_early=not self._has_heard,
            reason=self._reason,
            num_oom_kills=_rise(self._oom_kills, oom_kills()),
        )

    @property
    def has_ended(self) -> bool:
        """True once the process has ended; messages of it may be left to read."""
        return self._child.has_ended

    def kill(self) -> None:
        """End the process at once."""
        self._child.kill()

    def begin_closing(self, join_s: float) -> None:
        """Tell the process to end within `join_s`, without waiting for it."""
        try:
            if self.is_awake:
                self._control.send(pickle.dumps(("close", join_s), 5), socket.MSG_DONTWAIT)
                return
        except BlockingIOError:  # its socket is full
            pass
        except OSError:  # it has ended
            return
        self.kill()

    def close(self, join_s: float) -> list[Any]:
        """After `begin_closing`: wait for the end, kill the process after `join_s`, and release sockets and thread. Returns the
        messages that were left."""
        messages: list[Any] = []
        is_ours: list[bool] = []
        deadline = time.monotonic() + join_s + _PATIENCE_S
        try:
            # A consumer that waits in another thread holds the lock; the shutdown below ends its wait.
            is_ours.extend(map(self._receiving.acquire, (False,)))
            while is_ours[0] and (message := self.receive(max(0.0, deadline - time.monotonic()))) is not None:
                messages.append(message)
        except (EOFError, OSError):
            pass
        finally:
            if is_ours and is_ours[0]:
                self._receiving.release()
            if not self._child.wait(max(0.0, deadline - time.monotonic())):
                self.kill()
            self._is_closed = True
            for end in (self._outbox, self._control):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            self._child.release(_PATIENCE_S)
            for end, lock in ((self._outbox, self._receiving), (self._control, self._asking)):
                if lock.acquire(timeout=_PATIENCE_S):  # after Ctrl-C the lock may never be released
                    end.close()
                    lock.release()
        return messages


def _pair(ours: ExitStack, theirs: ExitStack) -> tuple[socket.socket, socket.socket]:
    end, other_end = map(_beyond_stdio, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    return ours.enter_context(end), theirs.enter_context(other_end)


def _beyond_stdio(end: socket.socket) -> socket.socket:
    """The socket, or a duplicate if it has the number of a closed stdin, stdout or stderr."""
    if end.fileno() >= FIRST_FREE:
        return end
    with end:
        return socket.socket(fileno=fcntl.fcntl(end.fileno(), fcntl.F_DUPFD_CLOEXEC, FIRST_FREE))


def _hand_over(arena: SharedArena, allocator: Allocator, preload: str) -> Block:
    """Write sys.path, sys.argv and `preload` to the arena, for the worker's interpreter."""
    path = [folder for folder in sys.path if isinstance(folder, str)]
    text = json.dumps([path, [str(argument) for argument in sys.argv], preload]).encode()
    block = Block(allocator.take(len(text)).start, len(text))
    arena.view(block)[:] = np.frombuffer(text, np.uint8)
    return block


def _wait(end: socket.socket, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(end, select.POLLIN)
    return bool(poll.poll(max(0.0, timeout_s) * 1000))


def _rise(before: int | None, now: int | None) -> int | None:
    return None if before is None or now is None else now - before
