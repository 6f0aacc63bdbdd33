"""Cuts a range of a tensor's elements, in C order, into boxes. In a contiguous tensor each box is contiguous memory."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple


class Box(NamedTuple):
    """Part of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """Indexes a tensor: its part, with as many dimensions."""
        return tuple(slice(offset, offset + size) for offset, size in zip(self.offsets, self.sizes, strict=True))


def boxes_in(shape: tuple[int, ...], first: int, end: int) -> Iterator[Box]:
    """The elements [first, end) of a tensor of that shape as boxes, which follow one another in C order."""
    if first >= end:
        return
    if not shape:
        yield Box((), ())
        return
    row = prod(shape[1:])
    number, begin = divmod(first, row)
    if begin or end - first < row:
        last = min(end, (number + 1) * row)
        for offsets, sizes in boxes_in(shape[1:], begin, last - number * row):
            yield Box((number, *offsets), (1, *sizes))
        first, number = last, number + 1
    if first >= end:
        return
    num_rows, rest = divmod(end - first, row)
    if num_rows:
        yield Box((number, *[0] * (len(shape) - 1)), (num_rows, *shape[1:]))
    for offsets, sizes in boxes_in(shape[1:], 0, rest):
        yield Box((number + num_rows, *offsets), (1, *sizes))
