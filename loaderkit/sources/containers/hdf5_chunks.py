"""Chunks of an HDF5 data set that loaderkit unpacks itself, within a bound, and without the lock under which h5py reads.

HDF5's own deflate filter takes memory for as long as there is more. What else packs a chunk is bounded by what it says, which
is compared before HDF5 unpacks it. Filters: HDF5 File Format Specification 3.0, IV.A.2.l; H5Zdeflate.c, H5Zszip.c,
H5Znbit.c, H5Zscaleoffset.c of HDF5, lzf_filter.c of h5py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from loaderkit.errors import FormatError
from loaderkit.sources.containers.unpacking import unpack_deflate

DEFLATE, SHUFFLE, FLETCHER32, SZIP, NBIT, SCALE_OFFSET, LZF = 1, 2, 3, 4, 5, 6, 32000
FILTERS = {DEFLATE, SHUFFLE, FLETCHER32, SZIP, NBIT, SCALE_OFFSET, LZF}
_OURS = {DEFLATE, SHUFFLE, FLETCHER32}
_MOST_HEADERS = 64 << 10


class Filter(NamedTuple):
    """A filter of a data set, with the numbers it was made by."""

    code: int
    values: tuple[int, ...]


class PackedChunks:
    """The chunks of a data set with filters. Raises FormatError for filters that would unpack to more than a chunk has."""

    def __init__(self, h5py: Any, data: Any) -> None:
        described = data.id.get_create_plist()
        self._data, self._chunks = data, tuple(data.chunks)
        self._filters = [
            Filter(code, values) for code, _, values, _ in map(described.get_filter, range(described.get_nfilters()))
        ]
        self._num_bytes = data.dtype.itemsize * prod(self._chunks)
        self._most = self._num_bytes + self._num_bytes // 16 + _MOST_HEADERS
        as_numpy = h5py.h5t.py_create(data.dtype, logical=True)
        self.is_ours = all(one.code in _OURS for one in self._filters) and data.id.get_type() == as_numpy
        self._is_looked_at = self.is_ours or not {DEFLATE, SZIP}.isdisjoint(one.code for one in self._filters)
        for one in self._filters:
            self._check_said(one)

    def _check_said(self, one: Filter) -> None:
        said = 0
        if one.code in (NBIT, SCALE_OFFSET) and len(one.values) > 4:
            said = one.values[2] * one.values[4]  # values, and the bytes of each
        elif one.code == LZF and len(one.values) > 2:
            said = one.values[2]
        if said > self._most:
            raise FormatError(f"its filter {one.code} says that a chunk has {said} bytes, and it has {self._num_bytes}")

    def read(self, selection: Any) -> Any:
        """The values at a selection: `...`, or a number or slice for each of the first dimensions."""
        spans = self._spans(selection)
        out = np.empty([end - begin for begin, end in spans], self._data.dtype)
        for place in self._places(spans):
            _copy(self._chunk(place), place, out, [begin for begin, _ in spans])
        return out[tuple(slice(None) if isinstance(part, slice) else 0 for part in _parts(selection))]

    def check(self, selection: Any) -> None:
        """Raise FormatError if a chunk of the selection, which HDF5 is about to unpack, says that it has more than it may."""
        for place in self._places(self._spans(selection)):
            self._unpacked(place)

    def _spans(self, selection: Any) -> list[tuple[int, int]]:
        parts = itertools.zip_longest(_parts(selection), self._data.shape, fillvalue=slice(None))
        return [_span(part, length) for part, length in parts]

    def _places(self, spans: Sequence[tuple[int, int]]) -> Iterator[tuple[int, ...]]:
        """Where the chunks begin that lie in spans."""
        return itertools.product(
            *(range(begin - begin % size, end, size) for (begin, end), size in zip(spans, self._chunks, strict=True))
        )

    def _chunk(self, place: tuple[int, ...]) -> Any:
        unpacked = self._unpacked(place)
        if unpacked is None:
            return np.broadcast_to(np.asarray(self._data.fillvalue, self._data.dtype), self._chunks)
        if len(unpacked) != self._num_bytes:
            raise FormatError(f"its chunk at {list(place)} has {len(unpacked)} bytes, and needs {self._num_bytes}")
        return np.frombuffer(unpacked, self._data.dtype).reshape(self._chunks)

    def _unpacked(self, place: tuple[int, ...]) -> Any:
        """The bytes of a chunk, or what a filter of HDF5's own would be given, checked; None: it was never written."""
        stored = self._data.id.get_chunk_info_by_coord(place)
        if stored.byte_offset is None:
            return None
        if stored.size > self._most:
            raise FormatError(
                f"its chunk at {list(place)} is {stored.size} bytes packed, and {self._num_bytes} unpacked"
            )
        if not self._is_looked_at:
            return None
        mask, data = self._data.id.read_direct_chunk(place)
        for number, one in reversed([*enumerate(self._filters)]):
            if mask >> number & 1:
                continue
            if one.code == SZIP and int.from_bytes(data[:4], "little") > self._most:
                raise FormatError(f"its chunk at {list(place)} says that it has more than {self._num_bytes} bytes")
            if one.code not in _OURS:
                return None
            data = self._undone(one, data)
        return data

    def _undone(self, one: Filter, data: Any) -> Any:
        from numcodecs.fletcher32 import Fletcher32
        from numcodecs.shuffle import Shuffle

        if one.code == DEFLATE:
            return unpack_deflate(memoryview(data), self._most)
        if one.code == SHUFFLE:
            size = max(1, *one.values)
            end = len(data) - len(data) % size  # the rest is not shuffled
            return bytes(Shuffle(size).decode(data[:end])) + data[end:]
        return memoryview(Fletcher32().decode(data)).cast("B")


def _parts(selection: Any) -> tuple[Any, ...]:
    return () if selection is Ellipsis else selection if isinstance(selection, tuple) else (selection,)


def _span(part: Any, length: Any) -> tuple[int, int]:
    """[begin, end) of a number or of a slice of step 1."""
    if isinstance(part, slice):
        begin, end, _ = part.indices(length)
        return begin, max(begin, end)
    return part, part + 1


def _copy(values: Any, place: Sequence[int], out: Any, first: Sequence[int]) -> None:
    """Copy what a chunk at a place and an output that begins at `first` have in common."""
    inside, outside = [], []
    for begin, size, at, length in zip(place, values.shape, first, out.shape, strict=True):
        low, high = max(begin, at), min(begin + size, at + length)
        inside.append(slice(low - begin, high - begin))
        outside.append(slice(low - at, high - at))
    out[tuple(outside)] = values[tuple(inside)]
