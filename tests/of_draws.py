"""A function that fails by chance, and numbers to try it on: named by pipelines of the tests."""

from __future__ import annotations

from typing import Any

import numpy as np

numbers = list(range(40))


def unlucky(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    drawn = rng.random()
    if drawn < 0.1:
        raise ValueError(f"drew {drawn}")
    return sample
