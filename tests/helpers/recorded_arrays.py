"""Connectors that note how arrays are read, and what a loader of arrays must deliver."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import loaderkit
from loaderkit import Pipeline
from loaderkit.connectors.base import BulkReads, Ranges
from loaderkit.connectors.file import FileConnector
from loaderkit.errors import ConnectorError


class Recording(FileConnector):
    """Notes what is read: (key, start, length) of every range, and the number of ranges of every `gather_into`."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reads: list[tuple[str, int, int]] = []
        self.gathered: list[int] = []

    def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        self.reads.append((key, start, len(buffer)))
        super().read_into(key, start, buffer, etag=etag)

    def gather_into(
        self, key: str, starts: NDArray[np.int64], length: int, buffer: memoryview, *, etag: str | None = None
    ) -> None:
        self.gathered.append(len(starts))
        super().gather_into(key, starts, length, buffer, etag=etag)

    def read_many(self, ranges: Ranges, offsets: Sequence[int], buffer: memoryview) -> Mapping[int, ConnectorError]:
        self.reads += zip(ranges.keys, ranges.starts, ranges.lengths, strict=True)
        return super().read_many(ranges, offsets, buffer)

    def bulk(self) -> BulkReads:
        return BulkReads(self.read_many, self.gather_into)


class Plain(FileConnector):
    """A connector that has neither `gather_into` nor `read_many`, as most have none."""

    def bulk(self) -> BulkReads:
        return BulkReads()


def recorded(pipeline: Pipeline, root: Path, **more: Any) -> tuple[loaderkit.Loader, Recording]:
    connector = Recording(root)
    loader = loaderkit.build(pipeline, connectors={"file": connector}, overrides={**INLINE, **more}, clock=lambda: 0.0)
    return loader, connector


def random_array(dtype: str, *shape: int, seed: int = 0) -> NDArray[Any]:
    """Random bits, so that there are all kinds of numbers in it; booleans are 0 or 1."""
    itemsize = np.dtype(dtype).itemsize
    count = int(np.prod(shape))
    bits = np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 256, count * itemsize, dtype=np.uint8)
    return bits.view(dtype).reshape(shape)


def same_bits(found: Any, wanted: NDArray[Any]) -> bool:
    assert str(found.dtype) == f"torch.{wanted.dtype.name}"
    assert tuple(found.shape) == wanted.shape
    return bool(found.numpy().tobytes() == wanted.tobytes())


def touch(sample: dict[str, Any]) -> None:
    """A stage in between, so that records take the longer way."""
    assert isinstance(sample["data"], torch.Tensor)


def assert_delivers(loader: loaderkit.Loader, wanted: Callable[[int], NDArray[Any]]) -> list[str]:
    keys = []
    for batch in loader:
        assert same_bits(batch["data"], np.stack([wanted(int(key)) for key in batch["__key__"]]))
        keys += batch["__key__"]
    return keys


INLINE = {"prefetch.executor": "inline"}
TYPES = [
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
]
