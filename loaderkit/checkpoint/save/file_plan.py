"""Which bytes a file of a checkpoint consists of: items one after the other, each a tensor's archive or bytes as they are."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from loaderkit.checkpoint.formats.torch_archive import archive_of
from loaderkit.checkpoint.save.crc import PieceCrc
from loaderkit.checkpoint.save.tensor_bytes import TensorBytes

ALIGNMENT = 64  # of items in a file, and so of tensors: no element lies in two parts


class TensorItem:
    """A tensor as torch.save writes it."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name = name
        self.archive = archive_of(tensor.dtype, tuple(tensor.shape))
        self.data = TensorBytes(tensor)
        self.crc = PieceCrc(self.data.num_bytes)

    @property
    def size(self) -> int:
        """Its bytes in the file."""
        return self.archive.size


class BytesItem:
    """Bytes that are written as they are."""

    def __init__(self, name: str, data: memoryview) -> None:
        self.name = name
        self.data = data

    @property
    def size(self) -> int:
        """Its bytes in the file."""
        return len(self.data)


Item = TensorItem | BytesItem


class Piece(NamedTuple):
    """The bytes [lo, hi) of an item that lie in a part, from the offset `at` on in it."""

    item: Item
    lo: int
    hi: int
    at: int


class FilePlan:
    """A file `name` with items in order; the bytes between two of them are zeros."""

    def __init__(self, name: str, items: Sequence[Item]) -> None:
        self.name = name
        self.items = list(items)
        self.starts: list[int] = []
        end = 0
        for item in self.items:
            start = -(-end // ALIGNMENT) * ALIGNMENT
            self.starts.append(start)
            end = start + item.size
        self.size = end

    def pieces(self, begin: int, end: int) -> Iterator[Piece]:
        """The pieces of items in [begin, end), in order."""
        for number in range(max(0, bisect_right(self.starts, begin) - 1), len(self.items)):
            item, start = self.items[number], self.starts[number]
            if start >= end:
                return
            lo, hi = max(begin - start, 0), min(end - start, item.size)
            if lo < hi:
                yield Piece(item, lo, hi, start + lo - begin)
