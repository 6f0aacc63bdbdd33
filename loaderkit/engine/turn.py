"""The turn of a stage that one worker at a time runs."""

from __future__ import annotations

import threading
from collections import deque


class Turn:
    """Taken by one worker at a time, in the order in which they come: whoever overtook others would read their items too."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_taken = False
        self._waiting: deque[threading.Lock] = deque()
        self.is_closed = False  # True: whoever gets the turn is to do nothing with it

    def take(self) -> threading.Lock | None:
        """Take the turn; else what to wait for, by acquiring it: then it is taken."""
        with self._lock:
            if not self._is_taken:
                self._is_taken = True
                return None
            own = threading.Lock()
            own.acquire()
            self._waiting.append(own)
            return own

    def close(self) -> None:
        """Let nobody wait any longer: the one that has the turn may never pass it on."""
        with self._lock:
            self.is_closed = True
            while self._waiting:
                self._waiting.popleft().release()

    def pass_on(self) -> None:
        """Give the turn to the first that waits, if any does."""
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._is_taken = False
