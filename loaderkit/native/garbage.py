"""Python's cyclic garbage collector, kept from looking through objects that are only being made."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from loaderkit.native import kernels

P = ParamSpec("P")
R = TypeVar("R")

if kernels is not None:
    os.register_at_fork(after_in_child=kernels.forget_pauses)


def collected_later(function: Callable[P, R]) -> Callable[P, R]:
    """A function that makes many objects at once and waits for nobody: the collector looks for cycles when it is done.

    It looks again and again at all there is while objects become more, and finds nothing: a quarter to two fifths of the time
    of restoring 10,000 small tensors. Off as long as anybody is inside, it is then what it was before the first one went in.
    Without the C module it stays as it is.
    """
    if kernels is None:
        return function

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        pause = kernels.Pause()
        try:
            return function(*args, **kwargs)
        finally:
            del pause  # a traceback would keep it

    return run
