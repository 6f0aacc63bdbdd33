"""Shards of MDS, written from the format's description, without mosaicml-streaming."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Rng = random.Random
_CODES = {
    "uint8": 8,
    "int8": 9,
    "uint16": 16,
    "int16": 17,
    "float16": 18,
    "int32": 33,
    "float32": 34,
    "int64": 65,
    "float64": 66,
}
_SIZES = {"int": 8, "uint8": 1, "int16": 2, "uint32": 4, "int64": 8, "float16": 2, "float32": 4, "float64": 8}


def _array(value: np.ndarray[Any, Any], has_type: bool, has_shape: bool) -> bytes:
    parts = [] if has_type else [bytes([_CODES[value.dtype.name]])]
    if not has_shape:
        size = next(size for size in (1, 2, 4, 8) if max(value.shape) < 256**size)
        parts += [bytes([value.ndim << 2 | (size.bit_length() - 1)]), np.array(value.shape, f"<u{size}").tobytes()]
    return b"".join([*parts, value.tobytes()])


def _several(first: bytes, items: list[bytes]) -> bytes:
    return b"".join([first, struct.pack("<I", len(items)), np.array([*map(len, items)], "<u4").tobytes(), *items])


def encoded(encoding: str, value: Any) -> bytes:
    """The bytes of a value."""
    name, _, details = encoding.partition(":")
    if name == "ndarray":
        return _array(value, bool(details), ":" in details)
    if name in ("jpeg_array", "jpegarray"):
        return _several(b"", value)
    if name.startswith("list["):
        return _several(bytes(4), value)
    if name in ("json", "str", "str_int", "str_float"):
        return (json.dumps(value) if name == "json" else str(value)).encode()
    if name in _SIZES:
        return bytes(np.dtype("int64" if name == "int" else name).type(value).tobytes())
    data: bytes = value
    return data


def size_of(encoding: str) -> int | None:
    """The bytes of every value; None: they differ."""
    name, _, details = encoding.partition(":")
    if name == "ndarray" and ":" in details:
        dtype, shape = details.split(":")
        return np.dtype(dtype).itemsize * int(np.prod([*map(int, shape.split(","))]))
    return _SIZES.get(name)


def shard(columns: dict[str, str], samples: list[dict[str, Any]]) -> bytes:
    """One shard."""
    names = sorted(columns)
    written = []
    for sample in samples:
        parts = [encoded(columns[name], sample[name]) for name in names]
        sizes = [len(part) for name, part in zip(names, parts, strict=True) if size_of(columns[name]) is None]
        written.append(np.array(sizes, "<u4").tobytes() + b"".join(parts))
    config = json.dumps({"columns": names}).encode()
    first = 4 * (len(written) + 2) + len(config)
    offsets = np.cumsum([first, *map(len, written)]).astype("<u4")
    return struct.pack("<I", len(written)) + offsets.tobytes() + config + b"".join(written)


def mds_files(columns: dict[str, str], samples: list[dict[str, Any]], shard_samples: int) -> dict[str, bytes]:
    """The files of a folder."""
    names = sorted(columns)
    files, shards = dict[str, bytes](), []
    for number, first in enumerate(range(0, len(samples), shard_samples)):
        some = samples[first : first + shard_samples]
        key = f"shard.{number:05}.mds"
        files[key] = shard(columns, some)
        shards.append(
            {
                "column_encodings": [columns[name] for name in names],
                "column_names": names,
                "column_sizes": [size_of(columns[name]) for name in names],
                "compression": None,
                "format": "mds",
                "hashes": [],
                "raw_data": {"basename": key, "bytes": len(files[key]), "hashes": {}},
                "samples": len(some),
                "size_limit": 1 << 26,
                "version": 2,
                "zip_data": None,
            }
        )
    files["index.json"] = json.dumps({"shards": shards, "version": 2}).encode()
    return files


def write_mds(folder: Path, columns: dict[str, str], samples: list[dict[str, Any]], shard_samples: int) -> None:
    """Write them."""
    folder.mkdir(parents=True)
    for name, data in mds_files(columns, samples, shard_samples).items():
        (folder / name).write_bytes(data)


def _drawn_array(dtype: str, *shape: int) -> Callable[[Rng], Any]:
    def draw(rng: Rng) -> Any:
        sizes = shape or tuple(rng.randint(1, 300 if rng.random() < 0.2 else 3) for _ in range(rng.randint(1, 3)))
        return np.frombuffer(rng.randbytes(int(np.prod(sizes))), "u1").astype(dtype).reshape(sizes)

    return draw


VALUES: dict[str, Callable[[Rng], Any]] = {
    "int": lambda rng: rng.randint(-(2**63), 2**63 - 1),
    "uint8": lambda rng: rng.randint(0, 255),
    "int16": lambda rng: rng.randint(-(2**15), 2**15 - 1),
    "uint32": lambda rng: rng.randint(0, 2**32 - 1),
    "float16": lambda rng: rng.randint(-100, 100) / 4,
    "float32": lambda rng: rng.randint(-100, 100) / 8,
    "float64": lambda rng: rng.random(),
    "str": lambda rng: "".join(rng.choices("abc äß日", k=rng.randint(0, 9))),
    "bytes": lambda rng: rng.randbytes(rng.randint(0, 20)),
    "jpeg": lambda rng: rng.randbytes(12),
    "jpeg:90": lambda rng: rng.randbytes(12),
    "str_int": lambda rng: rng.randint(-(10**15), 10**15),
    "str_float": lambda rng: rng.random(),
    "json": lambda rng: {"a": rng.randint(0, 9), "b": [None, "x"]},
    "ndarray": _drawn_array("int16"),
    "ndarray:float32": _drawn_array("float32"),
    "ndarray:uint8:2,3": _drawn_array("uint8", 2, 3),
    "jpeg_array": lambda rng: [rng.randbytes(5) for _ in range(rng.randint(1, 3))],
    "list[png]": lambda rng: [rng.randbytes(rng.randint(0, 5)) for _ in range(rng.randint(0, 3))],
}
"""How a value of each encoding is drawn."""
