"""The elements of a whole tensor, in C order, from chunks of the tensor that lie in several places."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray

from loaderkit.checkpoint.save.file_plan import ElementSource
from loaderkit.checkpoint.tensor_boxes import Box, boxes_in

_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Shape = tuple[int, ...]


def count_before(box: Box, shape: Shape, end: int) -> int:
    """How many of the first `end` elements of a tensor of that shape, in C order, lie in a box."""
    count = 0
    offsets, sizes = box
    for dim, (offset, size, whole) in enumerate(zip(offsets, sizes, shape, strict=True)):
        row = prod(shape[dim + 1 :])
        index = min(end // row, whole) if row else 0
        count += min(max(index - offset, 0), size) * prod(sizes[dim + 1 :])
        if not offset <= index < offset + size:
            return count
        end -= index * row
    return count + (end > 0)


class AssembledElements:
    """The elements of a tensor of `shape`, each `itemsize` bytes, from `chunks`: boxes that cover it, and their elements."""

    def __init__(self, shape: Shape, itemsize: int, chunks: Sequence[tuple[Box, ElementSource]]) -> None:
        self.num_bytes = prod(shape) * itemsize
        self.device = next((source.device for _, source in chunks if source.device.type != "cpu"), torch.device("cpu"))
        self._shape, self._itemsize, self._chunks = shape, itemsize, chunks

    def copy(self, start: int, target: NDArray[np.uint8]) -> None:
        """Fill `target` with the bytes from `start` on; both begin and end with an element."""
        item, shape = self._itemsize, self._shape
        first, end = start // item, (start + len(target)) // item
        row = prod(shape[1:])
        for box, source in self._chunks:
            lo, hi = count_before(box, shape, first), count_before(box, shape, end)
            if lo == hi:
                continue
            if box.sizes[1:] == shape[1:]:  # whole rows
                at = ((box.offsets[0] if shape else 0) * row + lo - first) * item
                source.copy(lo * item, target[at : at + (hi - lo) * item])
                continue
            data = np.empty((hi - lo) * item, np.uint8)
            source.copy(lo * item, data)
            self._scatter(data, box, first, end, target)

    def _scatter(self, data: NDArray[np.uint8], chunk: Box, first: int, end: int, target: NDArray[np.uint8]) -> None:
        """Put a chunk's elements among [first, end) of the tensor, which follow one another in `data`, in their places."""
        dtype = _OF_SIZE[self._itemsize]
        elements, places = torch.from_numpy(data).view(dtype), torch.from_numpy(target).view(dtype)
        done = at = 0
        for box in boxes_in(self._shape, first, end):
            lows = [max(lo, offset) for lo, offset in zip(box.offsets, chunk.offsets, strict=True)]
            highs = [min(lo + size, offset + count) for lo, size, offset, count in zip(*box, *chunk, strict=True)]
            common = Box(
                tuple(low - lo for low, lo in zip(lows, box.offsets, strict=True)),
                tuple(max(high - low, 0) for low, high in zip(lows, highs, strict=True)),
            )
            count = prod(box.sizes)
            if num_common := prod(common.sizes):
                place = places[at : at + count].view(box.sizes)[common.slices]
                place.copy_(elements[done : done + num_common].view(common.sizes))
                done += num_common
            at += count
