"""Python's cyclic garbage collector, kept from looking through objects that are only being made."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def collected_later(function: Callable[P, R]) -> Callable[P, R]:
    """A function that makes many objects at once and waits for nobody: the collector looks for cycles when it is done.

    It looks again and again at all there is while objects become more, and finds nothing: half of the time of restoring
    10,000 small tensors. It stays off where it was off.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        was_on = gc.isenabled()
        try:
            gc.disable()
            return function(*args, **kwargs)
        finally:
            if was_on:
                gc.enable()

    return run
