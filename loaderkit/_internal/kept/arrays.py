"""Files of arrays that are mapped, so that all processes of a machine share one copy of them in memory.

magic, 8 bytes | the header's length, 8 bytes | digest of header and arrays, 16 bytes
JSON {made_of, facts, arrays: {name: [dtype, first byte, bytes]}}, the header | data
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from loaderkit._internal.system.user_cache import keep

_MAGIC = b"lkarrays"
_MAX_HEADER = 2**26
_ALIGNMENT = 64
_START, _DIGEST_BYTES = 32, 16  # where the header begins
_DTYPES = {"|u1", "<i4", "<i8"}

Arrays = Mapping[str, NDArray[Any]]
"""Arrays by name, of one dimension: uint8, int32 or int64."""


def save_arrays(path: Path, made_of: str, facts: Any, arrays: Arrays) -> bool:
    """Create or replace a file, whole or not at all; False if the disk does not take it. `facts` are JSON values."""
    places: dict[str, tuple[str, int, int]] = {}
    end = 0
    for name, array in arrays.items():
        assert array.ndim == 1, name
        assert array.dtype.str in _DTYPES, name
        places[name] = (array.dtype.str, end, array.nbytes)
        end = -(-(end + array.nbytes) // _ALIGNMENT) * _ALIGNMENT
    header = json.dumps({"made_of": made_of, "facts": facts, "arrays": places}).encode()
    header += b" " * (-(len(header) + _START) % _ALIGNMENT)
    if len(header) > _MAX_HEADER:
        return False
    digest = blake2b(header, digest_size=_DIGEST_BYTES)
    for array in arrays.values():
        digest.update(np.ascontiguousarray(array).data)

    def write(file: IO[bytes]) -> None:
        file.write(_MAGIC + len(header).to_bytes(8, "little") + digest.digest() + header)
        for array in arrays.values():
            file.write(np.ascontiguousarray(array).data)
            file.write(bytes(-array.nbytes % _ALIGNMENT))

    return keep(path, write)


def load_arrays(path: Path, made_of: str) -> tuple[Any, dict[str, NDArray[Any]]] | None:
    """The facts, and the arrays, which are read-only memory of the file; None if it is missing, damaged, or made of something
    else."""
    try:
        with open(path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        size = int.from_bytes(mapped[8:16], "little")
        if mapped[:8] != _MAGIC or size > min(_MAX_HEADER, len(mapped) - _START):
            return None
        header = mapped[_START : _START + size]
        about = json.loads(header)
        if about["made_of"] != made_of:
            return None
        data = memoryview(mapped)[_START + size :]
        digest, arrays = blake2b(header, digest_size=_DIGEST_BYTES), {}
        for name, (dtype, start, num_bytes) in about["arrays"].items():
            part = data[start : start + num_bytes]
            if dtype not in _DTYPES or len(part) != num_bytes:
                return None
            digest.update(part)
            arrays[name] = np.frombuffer(part, np.dtype(dtype))
        return (about["facts"], arrays) if digest.digest() == mapped[16:_START] else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # of JSON that is something else, too
        return None
