"""Threads for calls that may hang: the caller can cancel one and continue without it.

A call in C, or a user's function, cannot be stopped from outside. So a pool thread makes it, and writes results only under a
lock and only until the call is cancelled. A thread stuck in a cancelled call is abandoned; it ends when the call does.

Where the program is ending and no thread can be started any more, the caller makes the call itself, and no time limit holds.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from loaderkit._internal.system.forks import ending_forks
from loaderkit._internal.system.program_end import ProgramEndsError, start_thread
from loaderkit.errors import ClosedError

T = TypeVar("T")
_MOST_ABANDONED = 64
_CLOSED = "it was closed before the call ended"


class CallCancelled(Exception):  # noqa: N818 - a signal to the thread, not an error
    """Raised in the thread of a call that was cancelled."""


class Call(Generic[T]):
    """One call. Its function gets it as an argument, to write results and to report progress."""

    def __init__(self, function: Callable[[Call[T]], T], call_pool: CallPool, origin: object = None) -> None:
        self.origin = origin  # `CallPool.fail` fails all calls of one origin
        self.timeout_s: float | None = None  # without progress for this long it is stuck, even if nothing waits for it
        self.keeps_turn = False  # the function returned without its whole result
        self.others: deque[Call[T]] | None = None  # queued behind this call; None once the next of them was started
        self._function: Callable[[Call[T]], T] | None = function
        self._call_pool = call_pool
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._is_cancelled = False
        self._has_ended = False
        self._touched_s: float | None = None  # its start or its last progress, or None before its start
        self._result: T | None = None
        self._error: BaseException | None = None

    def write(self, target: Any, source: Any) -> None:
        """`target[:] = source`. Raises `CallCancelled` after `cancel`: the memory may serve another purpose by then."""
        with self._lock:
            if self._is_cancelled:
                raise CallCancelled
            target[:] = source
            self._touched_s = self._call_pool.clock()

    def check_cancelled(self) -> None:
        """Report progress, which restarts the timeout. Raises `CallCancelled` after `cancel`."""
        self.write([], [])

    def wait(self, timeout_s: float) -> T:
        """The result. Raises the call's error, or TimeoutError after `timeout_s` without progress, and cancels the call."""
        self._call_pool.run_if_short(self)
        while not self._done.wait(max(0.0, self._left_s(timeout_s))):
            if self._touched_s is None:
                try:
                    self._call_pool.replace_stuck_threads()
                except BaseException:
                    self.cancel()
                    raise
                self._call_pool.run_if_short(self)
            elif self._left_s(timeout_s) <= 0 and self.cancel():
                self._call_pool.count_timeout()
                raise TimeoutError
        error, self._error = self._error, None  # its traceback holds the buffers
        if error is not None:
            try:
                raise error
            finally:
                del error  # the traceback holds this frame, which would hold the error
        return self._result  # type: ignore[return-value]

    def cancel(self, error: BaseException | None = None) -> bool:
        """Forbid further writes; `wait` raises `error`. Returns False if the call is done already."""
        with self._lock:
            if self._done.is_set():
                return False
            self._is_cancelled = True
            if error is not None:
                self._error = error
                self._done.set()
            return True

    @property
    def is_cancelled(self) -> bool:
        """True after `cancel`, and after a timeout in `wait`."""
        return self._is_cancelled

    @property
    def is_abandoned(self) -> bool:
        """True while a thread is stuck in the cancelled call."""
        return self._is_cancelled and self._touched_s is not None and not self._has_ended

    @property
    def is_overdue(self) -> bool:
        """True after `timeout_s` without progress."""
        return self._touched_s is not None and self.timeout_s is not None and self._left_s(self.timeout_s) <= 0

    def _left_s(self, timeout_s: float) -> float:
        touched_s = self._touched_s
        return timeout_s if touched_s is None else touched_s + timeout_s - self._call_pool.clock()

    def run(self) -> None:
        """Make the call, in a thread of the pool or in the caller's."""
        with self._lock:
            if self._is_cancelled:
                return
            self._touched_s = self._call_pool.clock()
        result, error = None, None
        try:
            if self._function is not None:
                result = ending_forks(self._function)(self)
            if self.others and not self.keeps_turn:
                self._call_pool.pass_on(self, wakes=False)  # this thread takes the next call
        except BaseException as raised:
            error = raised
        self._function = None  # what it holds is free when the waiter continues
        with self._lock:
            self._has_ended = True
            if not self._is_cancelled:
                self._result, self._error = result, error
                self._done.set()
        del error  # its traceback holds this frame


class CallPool:
    """At most `num_threads` daemon threads, not counting abandoned ones. They are started on demand and kept until
    `close`, the end of `owner` or the end of the program. A forked child begins with none."""

    def __init__(
        self,
        owner: object,
        num_threads: int,
        name: str,
        clock: Callable[[], float] = time.monotonic,
        *,
        most_abandoned: int = _MOST_ABANDONED,
        prepare_thread: Callable[[], None] | None = None,
        join_s: float = 1.0,
    ) -> None:
        """`prepare_thread` is the first thing each thread calls; `join_s`: how long `close` waits for the threads."""
        self.clock = clock
        self.num_timeouts = 0
        self._num_threads = num_threads
        self._name = name
        self._most_abandoned = most_abandoned
        self._prepare_thread = prepare_thread
        self._join_s = join_s
        self._reset()
        _ALL.add(self)
        # Also at exit: a thread that returns from C after the interpreter's end may panic.
        weakref.finalize(owner, self.close)

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._waiting: deque[Call[Any]] = deque()
        self._threads: dict[threading.Thread, Call[Any] | None] = {}  # each with its current call
        self._num_idle = 0
        self._number = 0
        self._is_closed = False
        self._is_short = False  # the program ends, and a thread could not be begun

    def begin(self, function: Callable[[Call[T]], T], origin: object = None) -> Call[T]:
        """Call `function` in the next free thread."""
        call = Call(function, self, origin)
        self.begin_all([call], 1)
        return call

    def begin_all(self, calls: Sequence[Call[T]], at_once: int) -> None:
        """Make calls, `at_once` of them at a time: the thread that finishes one takes the next, however slowly the caller waits
        for them in order. After a call that fails or is cancelled, the next starts with `pass_on`. If this raises or is
        interrupted, some may have begun: cancel them all."""
        others = deque(calls[at_once:])
        with self._lock:
            self._is_closed = False
            for call in calls[:at_once]:
                call.others = others
                self._enqueue(call)

    def pass_on(self, call: Call[Any], *, wakes: bool = True) -> None:
        """Start one of the calls that were begun with `call`, unless one has followed it already."""
        if not call.others:
            return
        with self._lock:
            others, call.others = call.others, None
            if others and not self._is_closed:
                others[0].others = others
                self._enqueue(others.popleft(), wakes=wakes)
                return
        for other in others or ():
            other.cancel(ClosedError(_CLOSED))

    def _enqueue(self, call: Call[Any], *, wakes: bool = True) -> None:
        self._waiting.append(call)
        if not wakes:
            return
        self._changed.notify()
        if self._num_idle < len(self._waiting):
            try:
                self._start_thread()
            except BaseException:
                self._waiting.remove(call)
                raise

    def run_if_short(self, call: Call[Any]) -> None:
        """Make a queued call in this thread, if the pool may have no thread for it."""
        with self._lock:
            if not self._is_short or call not in self._waiting:
                return
            self._waiting.remove(call)
        call.run()

    def count_timeout(self) -> None:
        """Count a call that was cancelled because it took too long."""
        with self._lock:
            self.num_timeouts += 1

    def fail(self, error: Callable[[], BaseException], origin: object = None) -> None:
        """Fail all pending calls of `origin`, each with its own error: the cause of one holds for all."""
        for call in self._all():
            if call.origin is origin:
                call.cancel(error())

    def _all(self) -> list[Call[Any]]:
        """The calls in progress and those queued."""
        with self._lock:
            begun = [call for call in (*self._waiting, *self._threads.values()) if call is not None]
            return [each for call in begun for each in (call, *(call.others or ()))]

    def replace_stuck_threads(self) -> None:
        """Replace stuck threads, also in calls without a waiter yet. Raises TimeoutError if too many are stuck."""
        with self._lock:
            for call in list(self._threads.values()):
                if call is not None and call.is_overdue and call.cancel(TimeoutError()):
                    self.count_timeout()
            if self.num_abandoned > self._most_abandoned:
                self.count_timeout()
                raise TimeoutError(f"{self.num_abandoned} threads hang in calls that do not end")
            self._start_thread()

    @property
    def num_abandoned(self) -> int:
        """Threads stuck in calls that were cancelled."""
        return sum(call is not None and call.is_abandoned for call in list(self._threads.values()))

    def _start_thread(self) -> None:
        if self._waiting and len(self._threads) < self._num_threads + min(self.num_abandoned, self._most_abandoned):
            self._number += 1
            thread = threading.Thread(target=self._work, name=f"{self._name}-{self._number}", daemon=True)
            self._threads[thread] = None
            try:
                start_thread(thread)
            except ProgramEndsError:
                del self._threads[thread]
                self._is_short = True
            except BaseException:  # the system has no more threads, or Ctrl-C
                if thread.ident is None:
                    del self._threads[thread]
                raise

    def _work(self) -> None:
        me = threading.current_thread()
        try:
            if self._prepare_thread is not None:
                self._prepare_thread()
            was_cancelled = False
            while (call := self._next(me, was_cancelled)) is not None:
                call.run()
                was_cancelled = call.is_cancelled
                del call
        finally:
            with self._lock:
                self._threads.pop(me, None)

    def _next(self, me: threading.Thread, was_cancelled: bool) -> Call[Any] | None:
        """The next call; None if the thread is to end, because the pool is closed or the thread was replaced."""
        with self._lock:
            self._threads[me] = None
            while not self._waiting:
                # `_is_closed` last: counting may run the garbage collector, which may close.
                if was_cancelled or len(self._threads) > self._num_threads + self.num_abandoned or self._is_closed:
                    del self._threads[me]  # now, so that a call that comes next starts another thread
                    return None
                self._num_idle += 1
                self._changed.wait()
                self._num_idle -= 1
            call = self._threads[me] = self._waiting.popleft()
            return call

    def close(self) -> None:
        """Cancel all calls and end the threads; stuck ones end with their calls. Idempotent; `begin` starts new threads."""
        if os.getpid() != self._pid:
            return  # the owner's end in a forked child, before `_reset_in_child`: a thread that is not there may hold the lock
        with self._lock:
            self._is_closed = True
            for call in self._all():
                call.cancel(ClosedError(_CLOSED))
            self._waiting.clear()
            threads = list(self._threads)
            self._changed.notify_all()
        deadline_s = time.monotonic() + self._join_s
        if not self._join_s:  # `current_thread` in a thread that ends would leave a dummy thread
            return
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline_s - time.monotonic()))


_ALL: weakref.WeakSet[CallPool] = weakref.WeakSet()


def _reset_in_child() -> None:
    """A forked child has none of the threads, and a lock may be held by one of the parent's."""
    for call_pool in list(_ALL):
        call_pool._reset()


os.register_at_fork(after_in_child=_reset_in_child)
