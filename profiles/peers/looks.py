"""Looking at batches: enough to force the work and to see that it is the same work, the same for every contestant.

A contestant's batch is, by the kind of look:
    pixels    (images float32 [B, 3, H, W], labels [B])
    array     one array [B, ...]: of a tuple or dict with one item, that item
    raw       lists of bytes, one list a field: as a tuple or dict
    nothing   anything; only counted
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from profiles.peers.places import RECORD_BASE, TOKEN_STEP

_STRIDE = 1009  # elements looked at: one in so many


class Look:
    """Counts samples, and remembers what was seen. `every`: look into one batch in so many, count all."""

    every = 1

    def __init__(self) -> None:
        self.num_batches = 0
        self.num_samples = 0
        self.seen: dict[str, Any] = {}

    def __call__(self, batch: Any) -> int:
        """The number of samples in the batch."""
        self.num_batches += 1
        num_samples = self.count(batch)
        self.num_samples += num_samples
        if self.num_batches % self.every == 0:
            self.look(batch)
        return num_samples

    def count(self, batch: Any) -> int:
        return len(_only(batch))

    def look(self, batch: Any) -> None:
        """Into the batch itself; raises ValueError if it cannot be right."""

    def result(self) -> dict[str, Any]:
        return {"num_samples": self.num_samples, **self.seen}

    def describe(self, name: str, array: np.ndarray[Any, Any]) -> None:
        """Remember dtype and shape; they must stay the same (a short last batch aside)."""
        found = f"{array.dtype} {list(array.shape)}"
        if self.seen.setdefault(name, found) != found:
            raise ValueError(f"{name} was {self.seen[name]} and is {found} now")


class Pixels(Look):
    """Mean and spread of one pixel in a thousand."""

    def __init__(self) -> None:
        super().__init__()
        self._sums = np.zeros(3)
        self._labels: set[int] = set()

    def count(self, batch: Any) -> int:
        return len(batch[0])

    def look(self, batch: Any) -> None:
        images, labels = (_array(item) for item in batch)
        self.describe("images", images)
        # Raveled in memory's order, so that no layout is copied.
        looked = images.ravel("K")[::_STRIDE].astype(np.float64)
        self._sums += (looked.size, looked.sum(), (looked * looked).sum())
        self._labels.update(labels.ravel().tolist())
        if labels.size != len(images):
            raise ValueError(f"{labels.size} labels of {len(images)} images")

    def result(self) -> dict[str, Any]:
        count, total, squares = self._sums.tolist()
        mean = total / max(1, count)
        spread = max(0.0, squares / max(1, count) - mean * mean) ** 0.5
        return {**super().result(), "mean": mean, "std": spread, "labels": sorted(self._labels)}


class Records(Look):
    """Rows of `records.npy`, each of which says which it is."""

    every = 16

    def look(self, batch: Any) -> None:
        rows = _array(_only(batch))
        self.describe("records", rows)
        number, low, high, seven = rows[0].tolist()
        if number != high * RECORD_BASE + low or seven != 7:
            raise ValueError(f"no record is {rows[0].tolist()}")


class Tokens(Look):
    """Windows of the tokens, which rise by a known step."""

    every = 4

    def look(self, batch: Any) -> None:
        windows = _array(_only(batch))
        self.describe("tokens", windows)
        first = windows[0].astype(np.uint16)
        if np.any(first[1:] - first[:-1] != np.uint16(TOKEN_STEP)):
            raise ValueError("these are not neighbouring tokens")


class Items(Look):
    """The one-element tensors [i]."""

    every = 16

    def look(self, batch: Any) -> None:
        self.describe("items", _array(_only(batch)))


class Arrays(Look):
    """The large arrays: one element in a thousand, and what the first and last row must be."""

    def look(self, batch: Any) -> None:
        arrays = _array(_only(batch))
        self.describe("arrays", arrays)
        arrays.ravel("K")[::_STRIDE].sum()
        for array in arrays:
            span = float(array[-1, -1] - array[0, 0])
            if float(array[0, 0]) not in range(64) or abs(span - (len(array) - 1) / 2**20) > 1e-3:
                raise ValueError(f"no array begins with {array[0, 0]} and ends with {array[-1, -1]}")


class Raw(Look):
    """Bytes as they were stored: how many a sample, on average."""

    def __init__(self) -> None:
        super().__init__()
        self._num_bytes = 0

    def count(self, batch: Any) -> int:
        fields = list(batch.values()) if isinstance(batch, Mapping) else batch
        self._num_bytes += sum(len(value) for field in fields for value in field)
        return len(fields[0])

    def result(self) -> dict[str, Any]:
        return {**super().result(), "bytes": self._num_bytes / max(1, self.num_samples)}


class Nothing(Look):
    """For limits, which hand over no data: a batch is its number of samples."""

    def count(self, batch: Any) -> int:
        return int(batch)


LOOKS: dict[str, Callable[[], Look]] = {
    "pixels": Pixels,
    "records": Records,
    "tokens": Tokens,
    "items": Items,
    "arrays": Arrays,
    "raw": Raw,
    "nothing": Nothing,
}


def differences(reference: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """What shows that two contestants did not do the same work; empty if nothing does.

    Means and spreads may differ by 0.05, and by the chance of random crops where few images were seen.
    """
    off = []
    num_images = min(reference["num_samples"], found["num_samples"])
    allowed = {"mean": max(0.05, 4 / max(1, num_images) ** 0.5), "bytes": 32.0}
    allowed["std"] = allowed["mean"]
    for key in reference.keys() | found.keys():
        ours, theirs = reference.get(key), found.get(key)
        if key == "num_samples" or (key == "labels" and num_images < 640):
            continue
        if key in allowed and ours is not None and theirs is not None:
            if abs(ours - theirs) > allowed[key]:
                off.append(f"{key} {theirs:.3f} where loaderkit's is {ours:.3f}")
        elif ours != theirs:
            off.append(f"{key} {theirs} where loaderkit's is {ours}")
    return off


def _only(batch: Any) -> Any:
    """The batch, or the one thing in it besides what a loader says about it (`__key__`)."""
    while isinstance(batch, (tuple, list, dict)):
        named = batch.items() if isinstance(batch, dict) else ((" ", value) for value in batch)
        items: Iterable[Any] = [value for name, value in named if name[:2] != "__"]
        (batch,) = items
    return batch


def _array(value: Any) -> np.ndarray[Any, Any]:
    """As NumPy, without a copy: torch's and TensorFlow's tensors on the CPU lend their memory."""
    return value if isinstance(value, np.ndarray) else np.asarray(value)
