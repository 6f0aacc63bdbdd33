"""The locks under which user code runs, if it is not declared to be safe in several threads.

    loader's lock ──> object's lock ──> the data set or function

The loader's lock keeps apart objects that share something which cannot be seen here, such as a tokenizer that two
functions use. The object's lock keeps apart loaders that were given the same object.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, ParamSpec, TypeVar
from weakref import WeakSet, WeakValueDictionary

P = ParamSpec("P")
R = TypeVar("R")
_LOOK_S = 0.1
_all_locks: WeakSet[FairLock] = WeakSet()


class _QueuePlace:
    """A thread's place in the queue for a `FairLock`. The thread holds `lock` from before it queues until it has left, and
    `inside` while its function runs. The thread behind it waits by taking `lock` for a moment; no other takes `inside`."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.inside = threading.Lock()
        self.thread = threading.get_ident()
        self.before: _QueuePlace | None = None  # that has to be through first


class FairLock:
    """A reentrant lock that threads get in the order in which they ask.

    A thread that takes `threading.RLock` again right after releasing it gets it before the threads that wait, chunk
    after chunk, and the loop may wait for one of theirs. So each waits for the one before it (the queue lock of Craig,
    and of Landin and Hagersten). A place is held by `with` alone, which Ctrl-C cannot break: an interrupted thread
    leaves its place, and the one behind it waits for the one before.
    """

    def __init__(self) -> None:
        self._begin_anew()
        _all_locks.add(self)

    def _begin_anew(self) -> None:
        """No thread holds the lock, and none waits for it."""
        self._queueing = threading.Lock()
        self._last: _QueuePlace | None = None
        self._current: _QueuePlace | None = None

    def is_held(self) -> bool:
        """Whether this thread has it."""
        place = self._current
        return place is not None and place.thread == threading.get_ident() and place.inside.locked()

    def run(self, function: Callable[[], R], look: Callable[[], None] | None = None) -> R:
        """Run the function with the lock held, and return its result. If there is a wait for the lock, `look` is called
        at its start, and several times a second except in the main thread; an error of `look` ends the wait."""
        if self.is_held():
            return function()
        place = _QueuePlace()
        with place.lock:
            self._wait(place, look)
            with place.inside:
                return function()

    def _wait(self, place: _QueuePlace, look: Callable[[], None] | None) -> None:
        with self._queueing:
            place.before, self._last = self._last, place
        # Ctrl-C may come between `acquire` and what follows, so the main thread does not call it.
        may_look = look is not None and threading.current_thread() is not threading.main_thread()
        while (before := place.before) is not None:
            if look is not None and before.lock.locked():
                look()
            if may_look and look is not None:
                while not before.lock.acquire(timeout=_LOOK_S):
                    look()
                before.lock.release()
            else:
                with before.lock:
                    pass
            place.before = before.before  # none, unless it left without its turn
        self._current = place


class _ObjectLock(FairLock):
    """The lock of one object. It keeps the object alive, so no other object can get the same id meanwhile."""

    def __init__(self, owner: Any) -> None:
        super().__init__()
        self.owner = owner


_of_objects: WeakValueDictionary[int, _ObjectLock] = WeakValueDictionary()
"""The locks by the ids of the objects: loaders of this process that were given the same object have to find the same lock."""
_finding = threading.Lock()


def _begin_anew() -> None:
    """In a fork's child: no thread of its parent's is there to let go of a lock."""
    global _finding  # noqa: PLW0603 - a property of the process
    _finding = threading.Lock()
    for lock in _all_locks:
        lock._begin_anew()


os.register_at_fork(after_in_child=_begin_anew)


def owner_of(function: Any) -> Any:
    """The object whose code runs: a bound method's object, or the function that a `partial` calls."""
    while isinstance(function, partial):
        function = function.func
    owner = getattr(function, "__self__", None)
    return function if owner is None or isinstance(owner, ModuleType) else owner


class UserLock:
    """Held while one stage's user code runs: the loader's lock, and the lock of `owner`."""

    def __init__(self, of_loader: FairLock, owner: Any = None) -> None:
        """Without an `owner` only the loader's is held."""
        self._of_loader = of_loader
        self._of_object: FairLock = of_loader
        if owner is not None:
            with _finding:
                of_object = _of_objects.get(id(owner))
                if of_object is None:
                    of_object = _of_objects[id(owner)] = _ObjectLock(owner)
            self._of_object = of_object

    def run(self, function: Callable[[], R], look: Callable[[], None] | None = None) -> R:
        """See `FairLock`."""
        return self._of_loader.run(lambda: self._of_object.run(function, look), look)

    def held(self, function: Callable[P, R]) -> Callable[P, R]:
        """The function, which runs with the locks held."""

        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            return self.run(partial(function, *args, **kwargs))

        return run

    def first_held(self, function: Callable[P, R]) -> Callable[P, R]:
        """The function, of which only the first call runs with the locks held: it may import modules, which another
        thread would find half imported."""
        guarded, has_returned = self.held(function), False

        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            nonlocal has_returned
            if has_returned:
                return function(*args, **kwargs)
            result = guarded(*args, **kwargs)
            has_returned = True
            return result

        return run
