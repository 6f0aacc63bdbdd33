"""Turns for a stage that only one worker at a time runs."""

from __future__ import annotations

import threading


class Turn:
    """The turn is taken by one worker at a time, in the order of the chunks' numbers. A worker that overtook another
    would read the other's items, and the other would wait for items that have been read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 0  # the number of the chunk whose turn it is
        self._done: set[int] = set()  # numbers from there on that need no turn any more
        self._waiting: dict[int, threading.Lock] = {}
        self.is_closed = False  # True: a worker that gets the turn must do nothing with it

    def take(self, number: int) -> threading.Lock | None:
        """Take the turn for that chunk. If it is not there yet, returns a lock: to acquire it is to wait for the turn
        and take it."""
        with self._lock:
            if number == self._next or self.is_closed:
                return None
            own = self._waiting[number] = threading.Lock()
            own.acquire()
            return own

    def pass_on(self, number: int) -> None:
        """That chunk needs no turn any more; it may not be its turn now."""
        with self._lock:
            self._done.add(number)
            while self._next in self._done:
                self._done.remove(self._next)
                self._next += 1
            waiting = self._waiting.pop(self._next, None)
            if waiting is not None:
                waiting.release()

    def close(self) -> None:
        """End all waits: the worker that has the turn may never pass it on."""
        with self._lock:
            self.is_closed = True
            for waiting in self._waiting.values():
                waiting.release()
            self._waiting.clear()
