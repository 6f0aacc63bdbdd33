"""A time limit for functions of the user's.

Python cannot stop a thread. So a function with a limit runs in a companion of the worker's thread, and a worker that has
waited long enough goes on without it: the companion is left behind with the function it hangs in, and ends when that ends.
A call through a companion costs two thread switches, some 20 to 50 us; without a limit nothing. What it computes is not in its
stage's `cpu_s`, which is the worker's: with a limit the stage looks as if it waited.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any
from weakref import WeakSet

from loaderkit._internal.units import format_seconds
from loaderkit.engine.torch_threads import ONE_AT_A_TIME, threads_to_come_kept

logger = logging.getLogger("loaderkit")
Order = tuple[Callable[..., Any], tuple[Any, ...]]
Answer = tuple[Any, BaseException | None]


class TimeLimit:
    """Calls functions of one stage, each from the thread that asks for it, for `limit_s` seconds at most."""

    def __init__(self, stage: str, limit_s: float) -> None:
        self._stage = stage
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._own = threading.local()
        self._companions: WeakSet[_Companion] = WeakSet()
        self._left_behind: list[threading.Thread] = []
        self._num_to_warn_of = 10

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What the function returns or raises. Raises TimeoutError if it does neither in time; it may go on then."""
        own = self._own
        companion: _Companion | None = getattr(own, "companion", None)
        if companion is None:
            companion = own.companion = _Companion(f"loaderkit-{self._stage}-limited")
            with self._lock:
                self._companions.add(companion)
        try:
            result, error = companion.call(function, arguments, self._limit_s)
        except BaseException as interruption:  # its answer may come later, and is nobody's
            del own.companion
            companion.end()
            if not isinstance(interruption, Empty):
                raise
            self._count_left_behind(companion.thread)
            raise TimeoutError(
                f"the function did not return within {format_seconds(self._limit_s)} (stages.{self._stage}.timeout); its "
                "thread is left behind"
            ) from None
        if error is not None:
            raise error
        return result

    def _count_left_behind(self, thread: threading.Thread) -> None:
        with self._lock:
            self._left_behind = [one for one in self._left_behind if one.is_alive()] + [thread]
            count = len(self._left_behind)
        if count >= self._num_to_warn_of:
            self._num_to_warn_of *= 10
            logger.warning(
                "%d calls of stages.%s hang at once, each in a thread that cannot be ended from outside, with its sample in "
                "memory: give what the function waits for a time limit of its own",
                count,
                self._stage,
            )

    def close(self) -> None:
        """End all companions, those that hang once they come back. It may be called again after that."""
        with self._lock:
            for companion in self._companions:
                companion.end()
            self._companions.clear()
            self._own = threading.local()


class _Companion:
    """A thread that calls one function after another. It ends with this object, or once it comes back from where it hangs."""

    def __init__(self, name: str) -> None:
        self._orders: SimpleQueue[Order | None] = SimpleQueue()
        self._answers: SimpleQueue[Answer] = SimpleQueue()
        # It must not know this object, or neither would ever end.
        arguments = (self._orders, self._answers)
        self.thread = threading.Thread(target=_serve, args=arguments, name=name[:64], daemon=True)
        self.thread.start()

    def call(self, function: Callable[..., Any], arguments: tuple[Any, ...], limit_s: float) -> Answer:
        """What came of it. Raises Empty if nothing has by then."""
        self._orders.put((function, arguments))
        return self._answers.get(timeout=limit_s)

    def end(self) -> None:
        """Let the thread end once it has done what it does."""
        self._orders.put(None)

    __del__ = end


def _serve(orders: SimpleQueue[Order | None], answers: SimpleQueue[Answer]) -> None:
    with ONE_AT_A_TIME, threads_to_come_kept() as compute_alone:
        compute_alone()  # as in the workers
    while (order := orders.get()) is not None:
        function, arguments = order
        try:
            answers.put((function(*arguments), None))
        except BaseException as error:
            answers.put((None, error))
        del order, function, arguments  # or it would keep a batch's memory while it waits
