"""Where chunks wait: bounded, ordered, and timed on both sides.

Every wait of a worker is in `put` or `get` of one of these; the wait is entered in the worker's account before it begins.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

from loaderkit.prefetch.accounts import Account, States

T = TypeVar("T")


class Buffer(Generic[T]):
    """A bounded first-in, first-out queue between two pools."""

    def __init__(self, capacity: int, states: States) -> None:
        self.capacity = capacity
        self._states = states
        self._items: deque[T] = deque()
        self._lock = threading.Lock()
        self._not_empty = threading.Condition(self._lock)
        self._not_full = threading.Condition(self._lock)
        self.is_closed = False

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T, account: Account) -> bool:
        """Wait for room (blocked) and append; False if the buffer was closed."""
        with self._lock:
            while len(self._items) >= self.capacity and not self.is_closed:
                account.enter(self._states.blocked)
                self._not_full.wait()
            if self.is_closed:
                return False
            self._items.append(item)
            self._not_empty.notify()
            return True

    def get(self, account: Account) -> T | None:
        """Wait for an item (starved) and take it; None once the buffer is closed, or this worker is not wanted."""
        with self._lock:
            while not self._items and account.is_wanted and not self.is_closed:
                account.enter(self._states.starved)
                self._not_empty.wait()
            if self.is_closed:
                return None
            if not account.is_wanted:
                self._not_empty.notify()  # it may have been woken in another one's place
                return None
            item = self._items.popleft()
            self._not_full.notify()
            return item

    def resize(self, capacity: int) -> None:
        """Hold so many items from now on; whoever waits looks again."""
        with self._lock:
            self.capacity = capacity
            self._not_empty.notify_all()
            self._not_full.notify_all()

    def close(self) -> None:
        """Wake everybody up; what is queued is dropped."""
        with self._lock:
            self.is_closed = True
            self._items.clear()
            self._not_empty.notify_all()
            self._not_full.notify_all()
