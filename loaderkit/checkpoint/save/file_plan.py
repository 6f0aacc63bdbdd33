"""The contents of a file of a checkpoint: items one after the other, each a tensor's archive or bytes as they are."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from loaderkit.checkpoint.formats.torch_archive import archive_of
from loaderkit.checkpoint.save.crc import PieceCrc
from loaderkit.checkpoint.save.tensor_bytes import TensorBytes

ALIGNMENT = 64  # of items in a file, and so of tensors: no element lies in two parts
PAGE = 4096  # of memory and place of a write past the page cache
WORTH_ALIGNING = 2**20


class TensorItem:
    """A tensor as torch.save writes it."""

    def __init__(self, name: str, tensor: torch.Tensor, *, is_fixed: bool = False) -> None:
        """`is_fixed`: the caller does not change the tensor while it is being saved."""
        self.name = name
        self.archive = archive_of(tensor.dtype, tuple(tensor.shape))
        self.data = TensorBytes(tensor, is_fixed=is_fixed)
        self.crc = PieceCrc(self.data.num_bytes)

    @property
    def size(self) -> int:
        """Its bytes in the file."""
        return self.archive.size

    @property
    def data_begin(self) -> int:
        """Where in the archive the elements begin."""
        return len(self.archive.head)

    @property
    def data_end(self) -> int:
        """Where in the archive the elements end."""
        return len(self.archive.head) + self.archive.num_bytes


class BytesItem:
    """Bytes that are written as they are."""

    def __init__(self, name: str, data: bytes) -> None:
        self.name = name
        self.data = data

    @property
    def size(self) -> int:
        """Its bytes in the file."""
        return len(self.data)


class ElementSource(Protocol):
    """A tensor's elements as bytes, in C order; any range of them can be copied."""

    num_bytes: int
    device: torch.device

    def copy(self, start: int, target: NDArray[np.uint8]) -> None:
        """Fill `target` with the bytes from `start` on; both begin and end with an element."""


class ElementsItem:
    """The elements of a tensor, as they are; it begins where the item before it ends."""

    def __init__(self, name: str, data: ElementSource) -> None:
        self.name = name
        self.data = data

    @property
    def size(self) -> int:
        """Its bytes in the file."""
        return self.data.num_bytes


Item = TensorItem | BytesItem | ElementsItem


def _start_of(item: Item, end: int) -> int:
    """Where an item begins if the one before it ends at `end`: a large tensor that can be written from where it lies
    begins at the same place in a page as in memory."""
    if isinstance(item, ElementsItem):
        return end
    start = -(-end // ALIGNMENT) * ALIGNMENT
    if isinstance(item, BytesItem) or item.data.fixed is None or item.data.num_bytes < WORTH_ALIGNING:
        return start
    gap = (address_of(item.data.fixed) - start - item.data_begin) % PAGE
    return start if gap % ALIGNMENT else start + gap


def address_of(memory: NDArray[np.uint8]) -> int:
    """The address of its first byte."""
    address: int = memory.ctypes.data
    return address


class ItemSlice(NamedTuple):
    """The bytes [lo, hi) of an item that lie in a part, at the offset `at` of the part."""

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
            self.starts.append(_start_of(item, end))
            end = self.starts[-1] + item.size
        self.size = end

    def fixed(self, begin: int, end: int) -> NDArray[np.uint8] | None:
        """The memory of [begin, end), if it is a range of a tensor that can be written from where it lies."""
        number = bisect_right(self.starts, begin) - 1
        item = self.items[number]
        if not isinstance(item, TensorItem) or item.data.fixed is None:
            return None
        start, size = begin - self.starts[number] - item.data_begin, end - begin
        memory = item.data.fixed[start : start + size] if start >= 0 else None
        return memory if memory is not None and len(memory) == size and address_of(memory) % PAGE == 0 else None

    def pieces(self, begin: int, end: int) -> Iterator[ItemSlice]:
        """The pieces of items in [begin, end), in order."""
        for number in range(max(0, bisect_right(self.starts, begin) - 1), len(self.items)):
            item, start = self.items[number], self.starts[number]
            if start >= end:
                return
            lo, hi = max(begin - start, 0), min(end - start, item.size)
            if lo < hi:
                yield ItemSlice(item, lo, hi, start + lo - begin)
