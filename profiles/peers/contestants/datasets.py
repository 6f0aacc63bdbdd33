"""Map-style data sets for torch: what a user would write for each work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, RandomSampler

from profiles.peers.places import WINDOW, Places, labelled


class Photographs(Dataset[tuple[torch.Tensor, int]]):
    """JPEG files in class folders."""

    def __init__(self, folder: Path, augment: Callable[[Path], torch.Tensor]) -> None:
        self._samples = labelled(folder)
        self._augment = augment

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self._samples[index]
        return self._augment(path), label


class Numbers(Dataset[torch.Tensor]):
    """One-element tensors: nothing but the framework's own cost."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index])


class Records(Dataset[Any]):
    """Rows of a memory-mapped array, mapped by each process for itself."""

    def __init__(self, places: Places) -> None:
        self._path = places.records
        self._length = len(np.load(self._path, mmap_mode="r"))
        self._rows: Any = None

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        if self._rows is None:
            self._rows = np.load(self._path, mmap_mode="r")
        return np.array(self._rows[index])


class LargeArrays(Dataset[torch.Tensor]):
    """One large array a file."""

    def __init__(self, folder: Path) -> None:
        self._paths = sorted(folder.iterdir())

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        loaded = np.load(self._paths[index])
        return torch.from_numpy(loaded if isinstance(loaded, np.ndarray) else loaded["data"])


class TokenWindows(Dataset[torch.Tensor]):
    """Windows of a file of tokens, from any token on, as programs that train language models cut them."""

    def __init__(self, places: Places) -> None:
        self._path = places.tokens
        self._length = self._path.stat().st_size // 2 - WINDOW + 1
        self._tokens: Any = None

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._tokens is None:
            self._tokens = np.memmap(self._path, np.uint16, mode="r")
        return torch.from_numpy(np.array(self._tokens[index : index + WINDOW]))


def plain(work: str, places: Places) -> Dataset[Any]:
    """The data set of a work without pictures."""
    if work == "dataset":
        return Numbers()
    if work in ("records", "dataset-records"):
        return Records(places)
    if work == "tokens":
        return TokenWindows(places)
    return LargeArrays(places.npy if work == "large-npy" else places.npz)


BATCH = {"dataset": 64, "dataset-records": 64, "records": 64, "tokens": 16, "large-npy": 2, "large-npz": 2}


_PASSES = 1000  # over the data set before the iterator ends


def at_random(dataset: Dataset[Any]) -> RandomSampler:
    """Indexes pass after pass, each a permutation; drawn with replacement where one would take minutes, of half a billion
    windows of tokens: programs that train on such draw so as well."""
    length = len(dataset)  # type: ignore[arg-type]
    is_huge = length > 10_000_000
    return RandomSampler(dataset, replacement=is_huge, num_samples=length if is_huge else _PASSES * length)  # type: ignore[arg-type]
