"""The random generators that a whole process shares: torch's of the CPU, NumPy's `np.random` and Python's `random`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def global_states() -> dict[str, Any]:
    """The state of each, by its name."""
    return {"torch": torch.get_rng_state().numpy(), "np.random": np.random.get_state(), "random": random.getstate()}


@contextmanager
def seeded_by(rng: np.random.Generator) -> Iterator[None]:
    """Seed all of them from `rng`, 0.1 ms, and put their states back at the end. Nothing else may draw meanwhile."""
    before = global_states()
    try:
        # Three seeds, as NumPy and Python make the same numbers of one. `torch.manual_seed` would seed CUDA's, too.
        torch.default_generator.manual_seed(int(rng.integers(2**63)))
        np.random.seed(int(rng.integers(2**32)))
        random.seed(int(rng.integers(2**63)))
        yield
    finally:
        torch.set_rng_state(torch.from_numpy(before["torch"]))
        np.random.set_state(before["np.random"])
        random.setstate(before["random"])
