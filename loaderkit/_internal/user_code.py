"""The locks under which user code runs that is not declared to stand several threads.

    loader's lock ──> object's lock ──> the data set or function

The loader's keeps apart objects that share what cannot be seen here, such as a tokenizer that two functions use. The object's
keeps apart loaders that were given the same object.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, ParamSpec, TypeVar
from weakref import WeakValueDictionary

P = ParamSpec("P")
R = TypeVar("R")


class FairLock:
    """A reentrant lock that those who wait get in the order in which they came.

    A thread that takes `threading.RLock` again right after it let go gets it before those that wait, chunk after chunk, and
    the loop may wait for one of theirs. 0.4 us to take it and let it go where nobody waits, 0.1 for an RLock.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._holder = 0  # the thread that has it
        self._depth = 0
        self._queueing = threading.Lock()
        self._queue: deque[threading.Lock] = deque()  # of those that wait; the first waits for the lock itself

    def acquire(self, timeout_s: float = -1) -> bool:
        """True once it is taken; False after `timeout_s`, which may be 0; below 0: it is waited for."""
        thread = threading.get_ident()
        may_pass = not self._queue or self._holder == thread
        if not (may_pass and self._lock.acquire(blocking=False)) and (
            timeout_s == 0 or not self._wait_in_queue(timeout_s)
        ):
            return False
        self._holder = thread
        self._depth += 1
        return True

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()

    def _wait_in_queue(self, timeout_s: float) -> bool:
        gate = threading.Lock()
        with self._queueing:
            if self._queue:
                gate.acquire()
            self._queue.append(gate)
        # The first keeps its place until it has the lock, so that those who come meanwhile do not pass it.
        is_taken = gate.acquire(timeout=timeout_s) and self._lock.acquire(timeout=timeout_s)
        with self._queueing:
            was_first = self._queue[0] is gate
            self._queue.remove(gate)
            if was_first and self._queue:
                self._queue[0].release()
        return is_taken

    def release(self) -> None:
        """Let go; of the thread that has taken it."""
        self._depth -= 1
        if not self._depth:
            self._holder = 0
        self._lock.release()


class _ObjectLock(FairLock):
    """That of one object, which it keeps alive: its id is that of no other object meanwhile."""

    def __init__(self, owner: Any) -> None:
        super().__init__()
        self.owner = owner


_of_objects: WeakValueDictionary[int, _ObjectLock] = WeakValueDictionary()
"""By the ids of the objects: loaders of this process that were given the same object have to find the same lock."""
_finding = threading.Lock()


def _begin_anew() -> None:
    """In a fork's child: no thread of its parent's is there to let go of a lock."""
    global _finding  # noqa: PLW0603 - a property of the process
    _finding = threading.Lock()
    _of_objects.clear()


os.register_at_fork(after_in_child=_begin_anew)


def owner_of(function: Any) -> Any:
    """The object whose code runs: that of a bound method, and what a `partial` calls."""
    while isinstance(function, partial):
        function = function.func
    owner = getattr(function, "__self__", None)
    return function if owner is None or isinstance(owner, ModuleType) else owner


class UserLock:
    """Held while one stage's user code runs: the loader's lock, and that of its `owner`."""

    def __init__(self, of_loader: FairLock, owner: Any = None) -> None:
        """Without an `owner` only the loader's is held."""
        self._locks = [of_loader]
        self._thread = 0  # that holds it
        if owner is not None:
            with _finding:
                of_object = _of_objects.get(id(owner))
                if of_object is None:
                    of_object = _of_objects[id(owner)] = _ObjectLock(owner)
            self._locks.append(of_object)

    def acquire(self, timeout_s: float = -1) -> bool:
        """See `FairLock`."""
        first, *others = self._locks
        if not first.acquire(timeout_s):
            return False
        for lock in others:
            if not lock.acquire(timeout_s):
                first.release()
                return False
        self._thread = threading.get_ident()
        return True

    def release(self) -> None:
        """See `FairLock`."""
        self._thread = 0
        for lock in reversed(self._locks):
            lock.release()

    def held(self, function: Callable[P, R]) -> Callable[P, R]:
        """The function, which runs with the locks held, and takes them unless its thread has them."""

        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            if self._thread == threading.get_ident():
                return function(*args, **kwargs)
            self.acquire()
            try:
                return function(*args, **kwargs)
            finally:
                self.release()

        return run

    def first_held(self, function: Callable[P, R]) -> Callable[P, R]:
        """The function, whose first call alone runs with the locks held: it may import modules, which another thread would
        find half made."""
        guarded, has_returned = self.held(function), False

        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            nonlocal has_returned
            if has_returned:
                return function(*args, **kwargs)
            result = guarded(*args, **kwargs)
            has_returned = True
            return result

        return run
