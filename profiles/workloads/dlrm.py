"""Rows of 40 int32, 131 MB of them, in batches of 2,048.

The peers map the file or read it: `by item` indexes row by row, and the default collate function stacks; `by batch` takes the
rows of a batch by one list of numbers, as NumPy can; `unshuffled` reads a batch as one piece, in the order of the file, as the
CriteoBinDataset of Facebook's DLRM does. The last two also without workers, whose hand-off a batch this small may not be worth:
DLRM has none. What is unshuffled is compared with `shuffle: none`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from profiles.workloads.work import WORKERS, Like, Work

BATCH, COLUMNS, BATCHES = 2048, 40, 400


def write(folder: Path, scale: float) -> int:
    rng, num = np.random.default_rng(0), max(1, round(BATCHES * scale))
    with open(folder / "clicks.bin", "wb") as file:
        for _ in range(num):
            rows = np.empty((BATCH, COLUMNS), "<i4")
            rows[:, 0] = rng.random(BATCH) < 0.03
            rows[:, 1:14] = rng.geometric(0.1, (BATCH, 13)) - 1
            rows[:, 14:] = rng.zipf(1.3, (BATCH, 26)).clip(max=10**6) % 40_000
            file.write(rows.tobytes())
    return num


class Rows(Dataset[dict[str, Any]]):
    """A row for a number, rows for a list of numbers."""

    def __init__(self, folder: Path) -> None:
        self.rows = np.memmap(folder / "clicks.bin", "<i4", "r").reshape(-1, COLUMNS)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> dict[str, Any]:
        return {"row": torch.from_numpy(np.array(self.rows[index]))}


class Pieces(Dataset[dict[str, torch.Tensor]]):
    """A batch for a number, in the order of the file."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "clicks.bin"
        self.file: Any = None
        self.num_bytes = BATCH * COLUMNS * 4

    def __len__(self) -> int:
        return self.path.stat().st_size // self.num_bytes

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if self.file is None:  # each worker opens it
            self.file = open(self.path, "rb")  # noqa: SIM115 - closed with its worker
        self.file.seek(index * self.num_bytes)
        rows = np.frombuffer(self.file.read(self.num_bytes), "<i4").reshape(BATCH, COLUMNS)
        return {"row": torch.from_numpy(rows.copy())}


def peers(folder: Path) -> dict[str, Iterable[Any]]:
    rows, pieces = Rows(folder), Pieces(folder)
    sampler = BatchSampler(RandomSampler(rows), BATCH, drop_last=True)
    return {
        "by item": DataLoader(rows, BATCH, shuffle=True, drop_last=True, **WORKERS),
        "by batch": DataLoader(rows, batch_size=None, sampler=sampler, **WORKERS),
        "by batch, no workers": DataLoader(rows, batch_size=None, sampler=sampler),
        "unshuffled": DataLoader(pieces, batch_size=None, **WORKERS),
        "unshuffled, no workers": DataLoader(pieces, batch_size=None),
    }


VARIANTS = {"unshuffled": {"order.shuffle": "none"}}
WORK = Work("DLRM", BATCH, {"row": Like(torch.int32, (BATCH, COLUMNS), 0, 40_000)}, write, peers, VARIANTS)
