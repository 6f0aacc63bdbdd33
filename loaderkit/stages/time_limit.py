"""A time limit for functions of the user's.

Python cannot stop a thread. So a function with a limit runs in a thread of a `CallPool`, and a worker that has waited long
enough continues without it: the thread is abandoned with the function it hangs in, and ends when that ends. A call costs two
thread switches, 25 to 75 us. Its CPU time is not in the stage's `cpu_s`, which is the worker's: the stage looks as if
it waited.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from typing import Any

from loaderkit._internal.units import format_seconds
from loaderkit.connectors.call_pool import CallPool
from loaderkit.engine.torch_threads import ONE_AT_A_TIME, threads_to_come_kept

logger = logging.getLogger("loaderkit")


class TimeLimit:
    """Calls functions of one stage, for `limit_s` seconds at most. Any number of threads at once."""

    def __init__(self, stage: str, limit_s: float) -> None:
        self._stage = stage
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._num_to_warn_of = 10
        self._call_pool = CallPool(
            self,
            sys.maxsize,  # one for each worker that calls
            f"loaderkit-{stage}-limited"[:64],
            most_abandoned=sys.maxsize,
            prepare_thread=_compute_alone,
            join_s=0.0,
        )

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What the function returns or raises. Raises TimeoutError if it does neither in time; it may still be running."""
        call = self._call_pool.begin(lambda call: function(*arguments))
        try:
            return call.wait(self._limit_s)
        except TimeoutError:
            if not call.is_cancelled:  # the function's own
                raise
            self._warn_of_many()
            raise TimeoutError(
                f"the function did not return within {format_seconds(self._limit_s)} (stages.{self._stage}.timeout); its "
                "thread is left behind"
            ) from None
        finally:
            call.cancel()

    def _warn_of_many(self) -> None:
        with self._lock:
            num_abandoned = self._call_pool.num_abandoned
            if num_abandoned < self._num_to_warn_of:
                return
            self._num_to_warn_of *= 10
        logger.warning(
            "%d calls of stages.%s hang at once, each in a thread that cannot be ended from outside, with its sample in "
            "memory: give what the function waits for a time limit of its own",
            num_abandoned,
            self._stage,
        )

    def close(self) -> None:
        """End all threads; those that hang end once their functions return. The limit can be used again after that."""
        self._call_pool.close()


def _compute_alone() -> None:
    """Torch computes with one thread in each of these, as in the workers."""
    with ONE_AT_A_TIME, threads_to_come_kept() as compute_alone:
        compute_alone()
