"""Samples drawn by the weight of their class, so that rare classes come as often as one wants."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from loaderkit.errors import ConfigError
from loaderkit.sampling.order import Int64, SampleOrder
from loaderkit.sampling.random import key_of, uniforms


class WeightedOrder(SampleOrder):
    """At every position a class is drawn by its weight, and one of its samples, each as likely: with replacement, as torch's
    WeightedRandomSampler draws. An epoch has as many positions as there are samples.

    `classes`: int64 [samples]. `weights` are by class number, and no class without a weight is drawn.
    """

    def __init__(self, classes: Int64, weights: Mapping[int, float], seed: int) -> None:
        self._seed = seed
        self._members = np.argsort(classes, kind="stable").astype(np.int64)  # class by class
        numbers, counts = np.unique(classes, return_counts=True)
        self._counts, self._starts = counts.astype(np.int64), np.cumsum(counts) - counts
        shares: NDArray[np.float64] = np.array([weights.get(number, 0.0) for number in numbers.tolist()], np.float64)
        self._ends = np.cumsum(shares / shares.sum())
        self._ends[np.flatnonzero(shares)[-1] :] = 1.0  # a draw is below 1, a rounded sum may be, too

    def num_positions(self, epoch: int) -> int:
        return len(self._members)

    def indices(self, epoch: int, positions: Int64) -> Int64:
        draws = uniforms(key_of("weighted", self._seed, epoch), positions.ravel(), 2)
        drawn = np.searchsorted(self._ends, draws[:, 0], side="right")
        places = self._starts[drawn] + (draws[:, 1] * self._counts[drawn]).astype(np.int64)
        samples: Int64 = self._members[places].reshape(positions.shape)
        return samples


def class_weights(
    given: Mapping[str, float] | None, classes: Int64, names: list[str] | None, where: str
) -> dict[int, float]:
    """The weight of every class that has samples, by its number: that `given` for its name (for its number without names); else
    1. Raises ConfigError, naming `where`, for a name that is no class, one left out, and for no weight at all."""
    present = np.unique(classes).tolist()
    if given is None:
        return dict.fromkeys(present, 1.0)
    name_of = {number: names[number] if names is not None else str(number) for number in present}
    known = {*name_of.values()} | {*(names or ())}
    if unknown := [name for name in given if name not in known]:
        raise ConfigError(f"{where}: {unknown[0]!r} is no class; there are: {', '.join(sorted(known)[:10])}")
    if missing := [name for name in name_of.values() if name not in given]:
        raise ConfigError(
            f"{where}: the class {missing[0]!r} has no weight: name all, and give 0 to what is to be left out"
        )
    found = {number: given[name] for number, name in name_of.items()}
    if not any(found.values()):
        raise ConfigError(f"{where}: no class that has samples has a weight above 0")
    return found
