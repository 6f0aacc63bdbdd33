"""The gate of a pool: it lets all workers take chunks, or only one."""

from __future__ import annotations

import threading
from collections.abc import Callable

from loaderkit.engine.metrics.worker_clock import WorkerClock


class SoloGate:
    """While `is_solo`, the first worker that comes takes all chunks, and the others wait."""

    def __init__(self) -> None:
        self.is_solo = False
        self._change = threading.Condition()
        self._chosen: WorkerClock | None = None  # the worker that takes the chunks while only one does
        self._is_closed = False

    def wait(self, worker_clock: WorkerClock, idle: int, pass_on: Callable[[], None] = lambda: None) -> None:
        """Return when this worker may take a chunk; its time until then counts as `idle`. `pass_on` wakes another worker that
        waits for work, since this one may have been woken in its place."""
        if not self.is_solo:
            return
        with self._change:
            while self.is_solo and not self._is_closed and self._chosen not in (None, worker_clock):
                if worker_clock.open_state != idle:
                    worker_clock.enter(idle)
                    pass_on()
                self._change.wait()
            self._chosen = worker_clock if self.is_solo else None

    def leave(self, worker_clock: WorkerClock) -> None:
        """This worker takes no more chunks; another one may be chosen."""
        with self._change:
            if self._chosen is worker_clock:
                self._chosen = None
                self._change.notify_all()

    def let_one(self) -> None:
        """Let one worker take chunks."""
        self.is_solo = True

    def let_all(self) -> None:
        """Let all workers take chunks."""
        with self._change:
            self.is_solo = False
            self._chosen = None  # else the next solo waits for the worker of this one
            self._change.notify_all()

    def close(self) -> None:
        """Let every worker pass from now on."""
        with self._change:
            self._is_closed = True
            self._change.notify_all()
