"""Files of tokens, written as their formats say, and the documents they hold."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}
Documents = list[NDArray[np.generic]]


def megatron_index(lengths: Sequence[int], bounds: Sequence[int], dtype: str, gap: int = 0) -> bytes:
    """An .idx: sequences of these lengths one behind another, `gap` bytes apart, and the first of every document."""
    size = np.dtype(dtype).itemsize
    starts = np.cumsum([0, *(length * size + gap for length in lengths)])[:-1]
    parts = [b"MMIDIDX\x00\x00", struct.pack("<QBQQ", 1, CODES[dtype], len(lengths), len(bounds))]
    parts += [np.array(lengths, "<i4").tobytes(), np.array(starts, "<i8").tobytes(), np.array(bounds, "<i8").tobytes()]
    return b"".join(parts)


def write_megatron(path: Path, documents: Documents, dtype: str) -> Path:
    """`path`.bin and `path`.idx, a sequence a document."""
    data = np.concatenate([*documents, np.zeros(0)]).astype(np.dtype(dtype).newbyteorder("<"))
    data.tofile(path.with_suffix(".bin"))
    lengths = [len(document) for document in documents]
    path.with_suffix(".idx").write_bytes(megatron_index(lengths, range(len(documents) + 1), dtype))
    return path.with_suffix(".bin")


def random_documents(rng: np.random.Generator, num: int, mean: float, dtype: str = "uint16", end: int = 0) -> Documents:
    """Documents of lognormal lengths, at least 1, that end with `end` and have it nowhere else."""
    lengths = np.maximum(1, rng.lognormal(np.log(mean), 0.9, num).astype(int))
    documents = [rng.integers(1, 100, length).astype(dtype) for length in lengths]
    for document in documents:
        document[-1] = end
    return documents


def tokenized(sample: dict[str, Any]) -> dict[str, Any]:
    """The bytes of a text, as tokens."""
    return {"tokens": torch.from_numpy(np.frombuffer(sample["text"], np.uint8).copy())}
