"""Samples that hold the GIL, which several processes make in less time; and what a batch holds, in short."""

from __future__ import annotations

import ctypes
import hashlib
from typing import Any

from dying import frozen
from numbers_dataset import Numbers

from loaderkit import Pipeline


def hold(sample: dict[str, Any], seconds: float) -> None:
    """Keep the GIL, and no CPU, which others may need: a `PyDLL` does not release it."""
    ctypes.PyDLL(None).usleep(int(1e6 * seconds))


def held(seconds: float, size: int = 100_000) -> Pipeline:
    """One epoch of samples that hold the GIL for so long each."""
    pipeline = Pipeline.dataset(Numbers(size)).shuffle("global", seed=5).epochs(1).read()
    return pipeline.call(hold, args={"seconds": seconds}).batch(16)


def digest(batch: dict[str, Any]) -> str:
    """Of all that a batch holds."""
    return hashlib.sha256(repr(frozen(batch)).encode()).hexdigest()
