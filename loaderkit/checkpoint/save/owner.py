"""Knows which process saves a checkpoint, and whether it still runs, so that only what dead processes left is cleared."""

from __future__ import annotations

import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from loaderkit._internal.system.machine import machine
from loaderkit._internal.system.program_end import ProgramEndsError, start_thread
from loaderkit.errors import ConnectorError

MAX_SILENCE_S = 900.0
"""How long a save on another machine counts as running after it was last heard of."""


class Owner(NamedTuple):
    """A process: its host, the machine and its namespace of process numbers, its process number, and when it started."""

    host: str
    machine: str
    pid: int
    started: int

    def is_alive(self) -> bool | None:
        """False if it has ended; None if this process cannot know."""
        if self.machine != this_process().machine:
            return None
        started = _started(self.pid)
        if started is None:
            return False
        return started == self.started if started and self.started else None


def this_process() -> Owner:
    """The process that calls."""
    namespace = "?"
    with suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return Owner(socket.gethostname(), f"{machine()} {namespace}", os.getpid(), _started(os.getpid()) or 0)


def _started(pid: int) -> int | None:
    """When a process started, in ticks since the machine did; None if it has ended, 0 if this process cannot know."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:  # it may be another user's, which /proc can be mounted to hide
        try:
            with suppress(PermissionError):
                os.kill(pid, 0)
        except ProcessLookupError:
            return None
        return 0
    return None if fields[0] in "ZX" else int(fields[19])  # it is dead, and its parent has not heard of it


class Heartbeat:
    """Says that a save is running, until it is stopped or nothing refers to it, or the process ends."""

    def __init__(self, attempt: str, renew: Callable[[], Any], every_s: float = MAX_SILENCE_S / 3) -> None:
        """`renew` is called in a thread, again after each interval; its errors are ignored."""
        self._thread = _Renewal(attempt, renew, every_s)
        with suppress(ProgramEndsError):  # the save is soon over, and on this machine the process says that it runs
            start_thread(self._thread)
        finalizer = weakref.finalize(self, self._thread.stopped.set)
        finalizer.atexit = False

    def stop(self) -> None:
        """The save is running no longer."""
        self._thread.stopped.set()
        if self._thread.ident is not None:
            self._thread.join(10.0)


class _Renewal(threading.Thread):
    def __init__(self, attempt: str, renew: Callable[[], Any], every_s: float) -> None:
        super().__init__(name=f"loaderkit-saving-{attempt}", daemon=True)
        self.attempt = attempt
        self.stopped = threading.Event()
        self._renew, self._every_s = renew, every_s

    def run(self) -> None:
        while not self.stopped.wait(self._every_s):
            with suppress(ConnectorError):
                self._renew()


def is_running(owner: Owner, attempt: str, renewed_s: float) -> bool:
    """True if that process may still be saving; `renewed_s` is when it was last heard of, in seconds of Unix time."""
    if owner == this_process():
        return any(
            isinstance(thread, _Renewal) and thread.attempt == attempt and not thread.stopped.is_set()
            for thread in threading.enumerate()
        )
    is_alive = owner.is_alive()
    return time.time() - renewed_s < MAX_SILENCE_S if is_alive is None else is_alive
