"""The `.idx` of Megatron's indexed data sets: where in the `.bin` beside it each document lies.

    magic, version, type, counts | tokens of every sequence | first byte of every sequence | first sequence of every document

A document is a run of sequences, usually one. All numbers are little-endian. Every error is a `FormatError` without the file's
name, which the caller adds.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from loaderkit.errors import FormatError

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}


class Documents(NamedTuple):
    """The dtype of the tokens, and for every document its first byte and its number of tokens: int64 [documents]."""

    dtype: np.dtype[Any]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]


def parse_megatron_index(data: bytearray) -> Documents:
    """The documents of an `.idx` file. Raises `FormatError`."""
    if len(data) < _HEADER.size or not data.startswith(_MAGIC):
        raise FormatError(
            f"it does not begin with {_MAGIC!r} and a header of {_HEADER.size} bytes, as Megatron's .idx do"
        )
    _, version, code, num_sequences, num_bounds = _HEADER.unpack_from(data)
    if version != 1:
        raise FormatError(f"it has version {version} of the format, and only version 1 is known")
    dtype = _DTYPES.get(code)
    if dtype is None:
        raise FormatError(f"its type of tokens has the code {code}, which is none of integers ({_DTYPES})")
    needed = _HEADER.size + num_sequences * 12 + num_bounds * 8
    if len(data) < needed:
        raise FormatError(
            f"it has {len(data)} bytes, and {num_sequences} sequences with {num_bounds} bounds of documents take {needed}: it "
            "is truncated"
        )
    lengths = np.frombuffer(data, "<i4", num_sequences, _HEADER.size).astype(np.int64)
    starts = np.frombuffer(data, "<i8", num_sequences, _HEADER.size + 4 * num_sequences).astype(np.int64)
    bounds = np.frombuffer(data, "<i8", num_bounds, _HEADER.size + 12 * num_sequences).astype(np.int64)
    _check(starts, lengths, bounds, np.dtype(dtype).itemsize)
    ends = np.concatenate(([0], np.cumsum(lengths)))
    of_documents = ends[bounds[1:]] - ends[bounds[:-1]]
    # A document without sequences begins anywhere.
    firsts = starts[np.minimum(bounds[:-1], num_sequences - 1)] if num_sequences else np.zeros(0, np.int64)
    return Documents(np.dtype(dtype).newbyteorder("<"), firsts, of_documents)


def _check(starts: NDArray[np.int64], lengths: NDArray[np.int64], bounds: NDArray[np.int64], item_bytes: int) -> None:
    num_sequences = len(starts)
    if not len(bounds) or bounds[0] != 0 or bounds[-1] != num_sequences or np.any(np.diff(bounds) < 0):
        raise FormatError(f"the bounds of its documents do not go up from 0 to its {num_sequences} sequences")
    if num_sequences and (lengths.min() < 0 or starts.min() < 0):
        raise FormatError("it has sequences of negative length, or that begin before the file")
    is_apart = starts[1:] != starts[:-1] + lengths[:-1] * item_bytes
    is_apart[np.setdiff1d(bounds[1:-1], (0, num_sequences)) - 1] = False  # between two documents
    if np.any(is_apart):
        raise FormatError(
            f"sequence {int(np.argmax(is_apart)) + 1} does not begin where the one before it ends, and both are of one "
            "document, which would not be one range of the .bin"
        )
