"""The public face of the C extension: every kernel as a function, in C or, without a compiler, from `fallback`.

Call kernels as `native.NAME(...)`. The constants tell which kernels without a fallback exist.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from loaderkit._internal.hashing import address_of_hash
from loaderkit.native import fallback, fallback_serial

P = ParamSpec("P")
R = TypeVar("R")


def _load(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


_kernels: Any = _load("loaderkit.native._kernels")
_jpeg: Any = _load("loaderkit.native._jpeg")

HAS_KERNELS: bool = _kernels is not None
"""False if there was no compiler; then `StateClock`, `gil_wait`, `read_hashed` and `resample` are missing."""
HAS_JPEG: bool = _jpeg is not None
"""False if libjpeg-turbo's headers were missing; then JPEGs are decoded whole, and `decode_pieces` is missing."""
CAN_RESAMPLE: bool = HAS_KERNELS and _kernels.resample([])
"""True on a CPU with AVX2; then `resample` replaces torch's resize, within one level."""


def _choose(python: Callable[P, R], module: Any = _kernels) -> Callable[P, R]:
    """The C kernel with the name of its fallback; the fallback if there is none."""
    kernel: Callable[P, R] = getattr(module, python.__name__, python)
    return kernel


best_fit = _choose(fallback.best_fit)
crc32c = _choose(fallback_serial.crc32c)
cut = _choose(fallback.cut)
delayed = _choose(fallback.delayed)
gather_ranges = _choose(fallback.gather_ranges)
group_names = _choose(fallback.group_names)
interleave = _choose(fallback.interleave)
interleave_lengths = _choose(fallback.interleave_lengths)
mark_documents = _choose(fallback.mark_documents)
members = _choose(fallback.members)
parse_example = _choose(fallback_serial.parse_example)
permute = _choose(fallback.permute)
read_many = _choose(fallback.read_many)
read_range = _choose(fallback.read_range)
scan_lines = _choose(fallback_serial.scan_lines)
scatter_ranges = _choose(fallback.scatter_ranges)
take_pieces = _choose(fallback.take_pieces)
tar_run = _choose(fallback.tar_run)
texts = _choose(fallback.texts)
whole_jpeg_size = _choose(fallback.whole_jpeg_size)
write_normalized = _choose(fallback.write_normalized)
write_planes = _choose(fallback.write_planes)
is_cut = _choose(fallback.is_cut, _jpeg)

PACKED = frozenset({(3, 1), (-3, 1)})
"""The strides of RGB pixels, in rows that run forwards or backwards, that `write_normalized` and `write_planes` take in C. The
twins in `fallback` take all, and any number of channels."""

# These have no fallback: see the constants above.
StateClock: Any = getattr(_kernels, "StateClock", None)
gil_wait: Any = getattr(_kernels, "gil_wait", None)
read_hashed: Any = getattr(_kernels, "read_hashed", None)
resample: Any = getattr(_kernels, "resample", None)
decode_pieces: Any = getattr(_jpeg, "decode", None)
SPARE_COLUMNS: int = getattr(_jpeg, "BESIDE", 0)
"""The columns that `decode_pieces` may write beyond the part requested."""

ZEROS = 0
"""The address in a row of `fill_part` that stands for zeros."""
NO_CRC = -1
"""The checksum in a row of `fill_part` that is not wanted."""


def fill_part(
    memory: NDArray[np.uint8],
    rows: NDArray[np.int64],
    block: int,
    hashes: NDArray[np.uint64],
    is_hashed: NDArray[np.bool_],
) -> float:
    """Put memory, uint8 [N], together from pieces, and hash it; returns the seconds that the hashes took.

    Each row of `rows`, int64 [R, 4], is a piece: its begin and end in memory, the address from which it is copied, and the
    CRC-32 of what comes before it, in whose place that of both is put. Pieces are in order; what lies in none of them stays.
    The XXH3 of each block of `block` bytes that `is_hashed` has, bool [B], is put into `hashes`, uint64 [B]. The caller answers
    for the addresses. Raises ValueError.
    """
    address = address_of_hash()
    if HAS_KERNELS and address is not None:
        took_s: float | None = _kernels.fill_part(memory, rows, block, hashes, is_hashed, address)
        if took_s is not None:
            return took_s
    return fallback.fill_part(memory, rows, block, hashes, is_hashed)
