"""Data sets and steps for the profiler's tests, to be named in a pipeline's file."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Waiting:
    """Items that take a wait each, as of a store with latency: how fast it is depends on the workers alone."""

    def __init__(self, seconds: float, num_items: int = 4000) -> None:
        self._seconds = seconds
        self._num_items = num_items

    def __len__(self) -> int:
        return self._num_items

    def __getitem__(self, index: int) -> dict[str, NDArray[np.int64]]:
        time.sleep(self._seconds)
        return {"x": np.array([index])}


def waiting(seconds: float) -> Waiting:
    return Waiting(seconds)


class WaitingInTurn(Waiting):
    """The same of a client that answers one request at a time."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self._lock = threading.Lock()

    def __getitem__(self, index: int) -> dict[str, NDArray[np.int64]]:
        with self._lock:
            return super().__getitem__(index)


def waiting_in_turn(seconds: float) -> WaitingInTurn:
    return WaitingInTurn(seconds)


def step(batch: Any) -> None:
    """A training step."""
    batch["x"].sum()


def popping(batch: Any) -> None:
    """A training step that takes its batch apart."""
    batch.pop("x").sum()


def failing(batch: Any) -> None:
    raise ArithmeticError("the loss is not a number")


not_callable = 3
