"""A function that fails by chance, and numbers to try it on: named by pipelines of the tests."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

numbers = list(range(40))


def unlucky(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    drawn = rng.random()
    if drawn < 0.1:
        raise ValueError(f"drew {drawn}")
    return sample


def hang_once(sample: dict[str, Any]) -> None:
    """Takes 1.5 s for sample 3, and no time for the others."""
    if sample["x"] == 3:
        time.sleep(1.5)
