"""The header of a safetensors file: its tensors and the ranges of their bytes. All of it is checked.

8 bytes, the header's length N; N bytes of JSON, name -> {dtype, shape, data_offsets}; then the tensors' bytes, without a gap.
See https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import pairwise
from math import prod
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from loaderkit._internal.garbage import collector_off
from loaderkit.errors import FormatError

_MAX_HEADER = 100_000_000  # as safetensors' own reader
_MAX_NUMBER = 2**62
_MAX_DIMS = 64
Read = Callable[[int, memoryview], None]

_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16", "U16": "uint16", "F16": "float16", "BF16": "bfloat16", "I32": "int32", "U32": "uint32",
    "F32": "float32", "F64": "float64", "I64": "int64", "U64": "uint64", "C64": "complex64",
}  # fmt: skip
DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {name: getattr(torch, of_torch) for name, of_torch in _NAMES.items() if hasattr(torch, of_torch)}
)


class HeaderEntry(NamedTuple):
    """One tensor: its bytes are [start, end) of the file, in C order, little-endian."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


def looks_like_safetensors(head: bytes, size: int) -> bool:
    """True if a file of `size` bytes that begins with `head` (9 bytes or more) may be one."""
    return size >= 9 and len(head) >= 9 and head[8:9] == b"{"


def header_end(head: bytes) -> int:
    """The end of the header, in bytes, of a file that begins with `head`; 8 if `head` is too short to tell."""
    return 8 + (int.from_bytes(head[:8], "little") if len(head) >= 8 else 0)


def read_header(read: Read, size: int) -> tuple[list[HeaderEntry], dict[str, str]]:
    """The tensors of a file of `size` bytes in the order of their bytes, and the header's metadata.

    `read(start, buffer)` fills the buffer. Two reads. Raises FormatError.
    """
    if size < 8:
        raise FormatError(f"truncated safetensors: {size} bytes do not hold the header's length")
    first = bytearray(8)
    read(0, memoryview(first))
    length = int.from_bytes(first, "little")
    if length > _MAX_HEADER:
        raise FormatError(f"the safetensors header claims {length} bytes, and none has more than {_MAX_HEADER}")
    if 8 + length > size:
        raise FormatError(f"truncated safetensors: its header ends at byte {8 + length}, the file at {size}")
    text = bytearray(length)
    read(8, memoryview(text))
    return _entries(bytes(text), 8 + length, size)


@collector_off()
def _entries(text: bytes, data_start: int, size: int) -> tuple[list[HeaderEntry], dict[str, str]]:
    fields = _parse(text)
    metadata = fields.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FormatError("the safetensors header's __metadata__ is not a table of texts")
    entries = sorted((_entry(*item, data_start) for item in fields.items()), key=attrgetter("start", "end"))
    _check_places(entries, data_start, size)
    return entries, metadata


def _parse(text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) < len(pairs):
            twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
            raise FormatError(f"the safetensors header names {twice!r:.200} twice")
        return table

    try:
        fields = json.loads(text, object_pairs_hook=unique)
    except FormatError:
        raise
    except (ValueError, RecursionError) as error:
        raise FormatError(f"the safetensors header is no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise FormatError(f"the safetensors header is no table of tensors, but {type(fields).__name__}")
    return fields


def _entry(name: str, value: Any, data_start: int) -> HeaderEntry:
    where = f"tensor {name!r:.200} of the safetensors header"
    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= value.keys():
        raise FormatError(f"{where} has no dtype, shape and data_offsets")
    dtype = DTYPES.get(value["dtype"]) if isinstance(value["dtype"], str) else None
    if dtype is None:
        raise FormatError(f"{where} is of type {value['dtype']!r:.100}, which is none of {', '.join(DTYPES)}")
    shape, offsets = value["shape"], value["data_offsets"]
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise FormatError(f"{where} has shape {shape!r:.100} at {offsets!r:.100}: not lists of whole numbers")
    if len(shape) > _MAX_DIMS:
        raise FormatError(f"{where} has {len(shape)} dimensions, and torch makes no tensor of more than {_MAX_DIMS}")
    num_bytes = prod(shape) * dtype.itemsize
    # A dimension of size 0 does not save the others: torch computes strides from them.
    if prod(max(size, 1) for size in shape) * dtype.itemsize > _MAX_NUMBER or offsets[1] - offsets[0] != num_bytes:
        raise FormatError(
            f"{where} takes {num_bytes} bytes as {value['dtype']} {shape}, and its data_offsets {offsets} hold "
            f"{offsets[1] - offsets[0]}"
        )
    return HeaderEntry(name, dtype, tuple(shape), data_start + offsets[0], data_start + offsets[1])


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= _MAX_NUMBER for value in values)


def _check_places(entries: list[HeaderEntry], data_start: int, size: int) -> None:
    for before, after in pairwise(entries):
        if after.start < before.end:
            raise FormatError(
                f"the bytes of {before.name!r} and {after.name!r} overlap: the safetensors header is wrong"
            )
        if after.start > before.end:
            raise FormatError(f"no tensor has the bytes between {before.name!r} and {after.name!r}: a hole in the file")
    if entries and entries[0].start != data_start:
        raise FormatError(f"the first tensor, {entries[0].name!r}, does not begin where the safetensors header ends")
    end = entries[-1].end if entries else data_start
    if end > size:
        raise FormatError(f"truncated safetensors: {entries[-1].name!r} ends at byte {end}, the file at {size}")
    if end < size:
        raise FormatError(f"the safetensors file has {size - end} bytes after its last tensor: it is damaged")
