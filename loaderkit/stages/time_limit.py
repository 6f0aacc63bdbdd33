"""Time limits for users' functions.

Python cannot stop a thread. So a function with a limit runs in a thread of a `CallPool`, and after the limit the worker
continues without it: the thread is abandoned, and ends when the function does. Each worker has a pool of one thread, so what
a function keeps in `threading.local` is made once a worker, and again after a call was abandoned. A call costs two thread
switches, 25 to 75 us. Its CPU time is not part of the stage's `cpu_s`, which counts the worker's thread, so the stage appears
to wait.
"""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

from loaderkit._internal.torch_threads import ONE_AT_A_TIME, new_thread_default_kept
from loaderkit._internal.units import format_seconds
from loaderkit.connectors.call_pool import Call, CallPool

logger = logging.getLogger("loaderkit")


class NotCalledError(TimeoutError):
    """The function was not called: an earlier call of it, abandoned, still runs. It says nothing of its sample."""


class TimeLimit:
    """Calls the functions of one stage, for `limit_s` seconds at most. Any number of threads at once."""

    def __init__(self, stage: str, limit_s: float, *, is_alone: bool = False) -> None:
        """`is_alone`: one call runs at a time, so the next one also waits for an abandoned one, for as long as its own
        limit."""
        self._stage = stage
        self._limit_s = limit_s
        self._is_alone = is_alone
        self._abandoned: tuple[Call[Any], threading.Event] | None = (
            None  # and when it has ended, if one call at a time runs
        )
        self._lock = threading.Lock()
        self._warn_at = 10
        self._of_worker = threading.local()
        self._call_pools: weakref.WeakSet[CallPool] = weakref.WeakSet()

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The function's result or error. Raises TimeoutError after the limit; the function may still be running."""
        self._wait_for_abandoned()
        has_ended = threading.Event()

        def run(call: Call[Any]) -> Any:
            try:
                return function(*arguments)
            finally:
                has_ended.set()

        call = self._pool_of_worker().begin(run)
        try:
            return call.wait(self._limit_s)
        except TimeoutError:
            if not call.is_cancelled:  # raised by the function itself
                raise
            self._abandoned = (call, has_ended)
            self._warn_of_many()
            raise TimeoutError(
                f"the function did not return within {format_seconds(self._limit_s)} (stages.{self._stage}.timeout); its "
                "thread is abandoned"
            ) from None
        finally:
            call.cancel()

    def _wait_for_abandoned(self) -> None:
        abandoned = self._abandoned
        if not self._is_alone or abandoned is None:
            return
        call, has_ended = abandoned
        if call.is_abandoned and not has_ended.wait(self._limit_s):
            raise NotCalledError(
                f"an earlier call, abandoned after {format_seconds(self._limit_s)} (stages.{self._stage}.timeout), still "
                "runs, and one call at a time may: set a timeout on what the function waits for, or declare `thread_safe: "
                "true` if it stands several at once"
            )
        self._abandoned = None

    def _pool_of_worker(self) -> CallPool:
        """The pool of the calling thread; it ends with that thread, or with this limit."""
        worker: _Worker | None = getattr(self._of_worker, "worker", None)
        if worker is None:
            worker = self._of_worker.worker = _Worker(self._stage)
            with self._lock:
                self._call_pools.add(worker.call_pool)
        return worker.call_pool

    def _warn_of_many(self) -> None:
        with self._lock:
            num_abandoned = sum(call_pool.num_abandoned for call_pool in self._call_pools)
            if num_abandoned < self._warn_at:
                return
            self._warn_at *= 10
        logger.warning(
            "%d calls of stages.%s hang at once, each in a thread that cannot be stopped, with its sample in memory: set a "
            "timeout on what the function waits for",
            num_abandoned,
            self._stage,
        )

    def close(self) -> None:
        """End all threads; those that hang end when their functions return. The limit can be used again."""
        with self._lock:
            call_pools = list(self._call_pools)
        for call_pool in call_pools:
            call_pool.close()


class _Worker:
    """Owns the pool of one worker, which ends with it: only the worker's `threading.local` refers to it."""

    def __init__(self, stage: str) -> None:
        self.call_pool = CallPool(
            self,
            1,
            f"loaderkit-{stage}-limited"[:64],
            most_abandoned=sys.maxsize,
            prepare_thread=_compute_alone,
            join_s=0.0,
        )


def _compute_alone() -> None:
    """Limit torch to one thread in each of these threads, as in the workers."""
    with ONE_AT_A_TIME, new_thread_default_kept() as compute_alone:
        compute_alone()
