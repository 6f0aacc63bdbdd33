"""The address of XXH3, the hash of checksums, for C code that hashes without Python."""

from __future__ import annotations

import ctypes
import importlib
from functools import cache

import xxhash

NAME = "xxh3_64"
_PROBE = bytes(range(256)) * 4


@cache
def address_of_hash() -> int | None:
    """The address of `uint64_t XXH3_64bits(const void *data, size_t length)`; None if the library does not export it, or its
    hashes differ."""
    try:
        library = ctypes.CDLL(importlib.import_module("xxhash._xxhash").__file__)
        # The first uses the CPU's vector instructions.
        function = getattr(library, "XXH3_64bits_dispatch", None) or library.XXH3_64bits
    except (ImportError, OSError, AttributeError, TypeError):
        return None
    function.restype, function.argtypes = ctypes.c_uint64, (ctypes.c_char_p, ctypes.c_size_t)
    if function(_PROBE, len(_PROBE)) != xxhash.xxh3_64_intdigest(_PROBE):
        return None
    return ctypes.cast(function, ctypes.c_void_p).value
