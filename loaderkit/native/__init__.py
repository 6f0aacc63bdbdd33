"""The public face of the C modules: every kernel as a function. Call them as `native.NAME(...)`.

`_kernels` is required: all code that decides bytes is in it, in one implementation. `_jpeg` is optional: without it
JPEGs are decoded whole, to the same pixels. Raises ImportError without `_kernels`.
"""

from __future__ import annotations

import ctypes
import importlib
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from loaderkit._internal.hashing import address_of_hash

try:
    from loaderkit.native import _kernels
except ImportError as error:
    raise ImportError(
        f"loaderkit in {Path(__file__).parents[1]} has no C module loaderkit.native._kernels that this Python can load "
        f"({error}), and makes no batch without: install a wheel of loaderkit, or a C compiler and the headers of Python (and "
        "of libjpeg-turbo, for crops of JPEGs), and `pip install` loaderkit again",
        name="loaderkit.native._kernels",
    ) from error
from loaderkit.native.jpegs import is_cut as _is_cut_by_simplejpeg
from loaderkit.native.pixels import packed, write_normalized, write_planes

__all__ = [
    "CAN_RESAMPLE",
    "HAS_JPEG",
    "NO_CRC",
    "SPARE_COLUMNS",
    "ZEROS",
    "StateClock",
    "best_fit",
    "crc32c",
    "cut",
    "decode_pieces",
    "delayed",
    "fill_part",
    "gather_ranges",
    "gil_wait",
    "group_names",
    "interleave",
    "interleave_lengths",
    "is_cut",
    "mark_documents",
    "members",
    "packed",
    "parse_example",
    "permute",
    "read_hashed",
    "read_many",
    "read_range",
    "resample",
    "scatter_ranges",
    "take_pieces",
    "take_sample",
    "tar_run",
    "texts",
    "wait_to_sample",
    "whole_jpeg_size",
    "write_normalized",
    "write_planes",
]

StateClock = _kernels.StateClock
best_fit = _kernels.best_fit
crc32c = _kernels.crc32c
cut = _kernels.cut
delayed = _kernels.delayed
gather_ranges = _kernels.gather_ranges
gil_wait = _kernels.gil_wait
group_names = _kernels.group_names
interleave = _kernels.interleave
interleave_lengths = _kernels.interleave_lengths
mark_documents = _kernels.mark_documents
members = _kernels.members
parse_example = _kernels.parse_example
permute = _kernels.permute
read_hashed = _kernels.read_hashed
read_many = _kernels.read_many
read_range = _kernels.read_range
resample = _kernels.resample
scatter_ranges = _kernels.scatter_ranges
take_pieces = _kernels.take_pieces
tar_run = _kernels.tar_run
take_sample = _kernels.take_sample
texts = _kernels.texts
wait_to_sample = _kernels.wait_to_sample
whole_jpeg_size = _kernels.whole_jpeg_size

CAN_RESAMPLE: bool = resample([])
"""True on a CPU with AVX2; then `resample` replaces torch's resize, within one level."""

_jpeg: Any
try:
    _jpeg = importlib.import_module("loaderkit.native._jpeg")
except ImportError:
    _jpeg = None

HAS_JPEG: bool = _jpeg is not None
"""False if libjpeg-turbo's headers were missing; then JPEGs are decoded whole, and `decode_pieces` is missing."""
is_cut: Callable[[memoryview], bool] = getattr(_jpeg, "is_cut", _is_cut_by_simplejpeg)
decode_pieces: Any = getattr(_jpeg, "decode", None)
SPARE_COLUMNS: int = getattr(_jpeg, "BESIDE", 0)
"""The columns that `decode_pieces` may write beyond the part requested."""

ZEROS = 0
"""The address in a row of `fill_part` that means zeros."""
NO_CRC = -1
"""The checksum in a row of `fill_part` that means that none is wanted."""


def fill_part(
    memory: NDArray[np.uint8],
    rows: NDArray[np.int64],
    block: int,
    hashes: NDArray[np.uint64],
    is_hashed: NDArray[np.bool_],
) -> float:
    """Put memory, uint8 [N], together from pieces, and hash it; returns the seconds that the hashes took.

    Each row of `rows`, int64 [R, 4], is a piece: its begin and end in memory, the address from which it is copied, and
    the CRC-32 of what comes before it, which is replaced by the CRC-32 of both. Pieces are in order; bytes in none of
    them stay as they are. For each block of `block` bytes that is True in `is_hashed`, bool [B], the XXH3 is put into
    `hashes`, uint64 [B]. The caller is responsible for valid addresses. Raises ValueError.
    """
    address = address_of_hash()
    if address is not None:
        took_s = _kernels.fill_part(memory, rows, block, hashes, is_hashed, address)
        if took_s is not None:
            return took_s
    return _fill_in_python(memory, rows, block, hashes, is_hashed)


def _fill_in_python(
    memory: NDArray[np.uint8],
    rows: NDArray[np.int64],
    block: int,
    hashes: NDArray[np.uint64],
    is_hashed: NDArray[np.bool_],
) -> float:
    """`fill_part` on a CPU without carry-less multiplication, or beside an xxhash that exports no function."""
    for row in rows:
        begin, end, source, crc = row.tolist()
        if source:
            ctypes.memmove(memory.ctypes.data + begin, source, end - begin)
        else:
            memory[begin:end] = 0
        if crc >= 0:
            row[3] = zlib.crc32(memory[begin:end].data, crc)
    begin_s = time.perf_counter()
    for number in np.flatnonzero(is_hashed).tolist():
        hashes[number] = xxhash.xxh3_64_intdigest(memory[number * block : (number + 1) * block].data)
    return time.perf_counter() - begin_s
