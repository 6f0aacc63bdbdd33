"""Threads for calls that may hang: whoever waits for one can give it up and go on.

A call in C cannot be stopped from outside. So it is made by a thread of its own, which writes its results only under a lock
and only while somebody still wants them; if it is given up, the thread is written off, and ends when the call does.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from loaderkit._internal.forks import ending_forks
from loaderkit.errors import ClosedError

T = TypeVar("T")
_MOST_LOST = 64
_CLOSED = "it was closed while it was read"


class CallCancelled(Exception):  # noqa: N818 - not an error, but how a thread learns that nobody waits
    """Raised in the thread of a call that nobody waits for any more."""


class Call(Generic[T]):
    """One call on its way. The function gets it as its argument, to write results and to say that it goes on."""

    def __init__(self, function: Callable[[Call[T]], T], call_pool: CallPool, origin: object = None) -> None:
        self.origin = origin  # what is true of one call may be true of all with the same
        # It hangs if it says nothing for longer, also where nobody waits for it yet.
        self.timeout_s: float | None = None
        self.keeps_turn = False  # it has come to its end, but not done what it was for
        # Those begun with it, of which one has its turn once this is done; None: that has been so.
        self.others: deque[Call[T]] | None = None
        self._function = function
        self._call_pool = call_pool
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._is_given_up = False
        self._has_ended = False
        self._touched_s: float | None = None  # when it was begun, or last went on; None: not begun
        self._result: T | None = None
        self._error: BaseException | None = None

    def write(self, target: Any, source: Any) -> None:
        """`target[:] = source`, unless nobody waits any more: then the memory may be another one's. Raises `CallCancelled`."""
        with self._lock:
            if self._is_given_up:
                raise CallCancelled
            target[:] = source
            self._touched_s = self._call_pool.clock()

    def check_cancelled(self) -> None:
        """Say so, for what is waited for with a time limit. Raises `CallCancelled` if nobody waits any more."""
        self.write([], [])

    def wait(self, timeout_s: float) -> T:
        """Its result. Raises its error, or TimeoutError once it has given no sign of life for `timeout_s`."""
        while not self._done.wait(max(0.0, self._left_s(timeout_s))):
            if self._touched_s is None:
                try:
                    self._call_pool.look_after()
                except BaseException:
                    self.give_up()
                    raise
            elif self._left_s(timeout_s) <= 0 and self.give_up():
                self._call_pool.count_timeout()
                raise TimeoutError
        error, self._error = self._error, None  # its traceback holds the buffers
        if error is not None:
            try:
                raise error
            finally:
                del error  # and would be held by itself
        return self._result  # type: ignore[return-value]

    def give_up(self, error: BaseException | None = None) -> bool:
        """From now on it writes nothing; who waits gets `error`. False if it is done already."""
        with self._lock:
            if self._done.is_set():
                return False
            self._is_given_up = True
            if error is not None:
                self._error = error
                self._done.set()
            return True

    @property
    def is_lost(self) -> bool:
        """Whether it was given up while a thread was in it that has not come out again."""
        return self._is_given_up and self._touched_s is not None and not self._has_ended

    @property
    def is_silent(self) -> bool:
        """Whether it has given no sign of life for longer than it may."""
        return self._touched_s is not None and self.timeout_s is not None and self._left_s(self.timeout_s) <= 0

    def _left_s(self, timeout_s: float) -> float:
        touched_s = self._touched_s
        return timeout_s if touched_s is None else touched_s + timeout_s - self._call_pool.clock()

    def run(self) -> None:
        """Make the call, in the thread that has taken it."""
        with self._lock:
            if self._is_given_up:
                return
            self._touched_s = self._call_pool.clock()
        result, error = None, None
        try:
            result = ending_forks(self._function)(self)
            if self.others and not self.keeps_turn:
                self._call_pool.pass_on(self, wakes=False)  # this thread comes for it
        except BaseException as raised:
            error = raised
        with self._lock:
            self._has_ended = True
            if not self._is_given_up:
                self._result, self._error = result, error
                self._done.set()
        del error  # its traceback holds this frame


class CallPool:
    """At most `num_threads` daemon threads, started when there is something to do, and kept until `close`, or until `owner` is
    gone, or the program ends. A child of the process begins with none."""

    def __init__(self, owner: object, num_threads: int, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.num_timeouts = 0
        self._num_threads = num_threads
        self._name = name
        self._begin_anew()
        _ALL.add(self)
        # At exit, too: a thread that comes out of a call in C when there is no Python any more may end in a panic.
        weakref.finalize(owner, self.close)

    def _begin_anew(self) -> None:
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._waiting: deque[Call[Any]] = deque()
        self._threads: dict[threading.Thread, Call[Any] | None] = {}  # and what each is at
        self._num_resting = 0
        self._number = 0
        self._is_closed = False

    def begin(self, function: Callable[[Call[T]], T], origin: object = None) -> Call[T]:
        """Have `function` called by the next thread that is free."""
        call = Call(function, self, origin)
        self.begin_all([call], 1)
        return call

    def begin_all(self, calls: Sequence[Call[T]], at_once: int) -> None:
        """Have calls made, `at_once` of them at a time: a thread that has made one sees to the next, so that none has to wait
        for whoever waits for them in order. For one that fails, or is given up, the next has no turn until `pass_on`. If this
        raises, or is interrupted, some may have begun: give them all up."""
        others = deque(calls[at_once:])
        with self._lock:
            self._is_closed = False
            for call in calls[:at_once]:
                call.others = others
                self._put(call)

    def pass_on(self, call: Call[Any], *, wakes: bool = True) -> None:
        """Let one of the calls that were begun with `call` have its turn, unless it has had it."""
        if not call.others:
            return
        with self._lock:
            others, call.others = call.others, None
            if others and not self._is_closed:
                others[0].others = others
                self._put(others.popleft(), wakes=wakes)
                return
        for other in others or ():
            other.give_up(ClosedError(_CLOSED))

    def _put(self, call: Call[Any], *, wakes: bool = True) -> None:
        self._waiting.append(call)
        if not wakes:
            return
        self._changed.notify()
        if self._num_resting < len(self._waiting):
            try:
                self._start_thread()
            except BaseException:
                self._waiting.remove(call)
                raise

    def count_timeout(self) -> None:
        """A call was given up because it took too long."""
        with self._lock:
            self.num_timeouts += 1

    def fail(self, error: Callable[[], BaseException], origin: object = None) -> None:
        """End all calls of `origin` that are under way: what one of them was told is true of all. Each gets its own error."""
        for call in self._all():
            if call.origin is origin:
                call.give_up(error())

    def _all(self) -> list[Call[Any]]:
        """Those under way, and those that have no turn yet."""
        with self._lock:
            begun = [call for call in (*self._waiting, *self._threads.values()) if call is not None]
            return [each for call in begun for each in (call, *(call.others or ()))]

    def look_after(self) -> None:
        """Something waits for long: replace threads that are stuck, also in calls that nobody waits for yet. Raises
        TimeoutError when too many are."""
        with self._lock:
            for call in list(self._threads.values()):
                if call is not None and call.is_silent and call.give_up(TimeoutError()):
                    self.count_timeout()
            if self.num_lost > _MOST_LOST:
                self.count_timeout()
                raise TimeoutError(f"{self.num_lost} threads hang in calls that do not end")
            self._start_thread()

    @property
    def num_lost(self) -> int:
        """Threads stuck in calls that were given up."""
        return sum(call is not None and call.is_lost for call in list(self._threads.values()))

    def _start_thread(self) -> None:
        if self._waiting and len(self._threads) < self._num_threads + min(self.num_lost, _MOST_LOST):
            self._number += 1
            thread = threading.Thread(target=self._work, name=f"{self._name}-{self._number}", daemon=True)
            self._threads[thread] = None
            try:
                thread.start()
            except BaseException:  # the system has no more threads, or Ctrl-C
                if thread.ident is None:
                    del self._threads[thread]
                raise

    def _work(self) -> None:
        me = threading.current_thread()
        try:
            while (call := self._next(me)) is not None:
                call.run()
                del call
        finally:
            with self._lock:
                self._threads.pop(me, None)

    def _next(self, me: threading.Thread) -> Call[Any] | None:
        with self._lock:
            self._threads[me] = None
            while not self._waiting:
                # `_is_closed` last: to count may run the collector, which may close.
                if len(self._threads) > self._num_threads + self.num_lost or self._is_closed:
                    return None  # one that was stuck, and another took its place
                self._num_resting += 1
                self._changed.wait()
                self._num_resting -= 1
            call = self._threads[me] = self._waiting.popleft()
            return call

    def close(self, join_s: float = 1.0) -> None:
        """Give up all calls and let the threads go; those stuck end with their calls. Idempotent; `begin` starts others."""
        with self._lock:
            self._is_closed = True
            for call in self._all():
                call.give_up(ClosedError(_CLOSED))
            self._waiting.clear()
            threads = list(self._threads)
            self._changed.notify_all()
        deadline_s = time.monotonic() + join_s
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline_s - time.monotonic()))


_ALL: weakref.WeakSet[CallPool] = weakref.WeakSet()


def _begin_anew_in_child() -> None:
    """The threads are not here, and one of them may have held a lock."""
    for call_pool in list(_ALL):
        call_pool._begin_anew()


os.register_at_fork(after_in_child=_begin_anew_in_child)
