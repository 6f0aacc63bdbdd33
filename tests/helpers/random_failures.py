"""A function that fails by chance, and numbers to try it on: named by pipelines of the tests."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import torch

numbers = list(range(40))
tensors = list(torch.arange(40))


def unlucky(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    drawn = rng.random()
    if drawn < 0.1:
        raise ValueError(f"drew {drawn}")
    return sample


def hang_once(sample: dict[str, Any]) -> None:
    """Takes 1.5 s for sample 3, and no time for the others."""
    if sample["x"] == 3:
        time.sleep(1.5)


IS_FREE = threading.Event()


def held(sample: dict[str, Any], key: str) -> None:
    """Returns for one sample when it is freed."""
    if sample["__key__"] == key:
        IS_FREE.wait(60)
