"""Stores of Zarr and files of HDF5, drawn, and what loaderkit reads of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import zarr
from executors import EXECUTORS
from numpy.typing import NDArray

import loaderkit

Array = NDArray[Any]
Arrays = Mapping[str, Array]
KINDS = ("zarr", "zarr 2", "sharded", "hdf5", "hdf5 plain")
INLINE = EXECUTORS["inline"]


def write(kind: str, path: Path, arrays: Arrays, rng: np.random.Generator) -> Path:
    """A store of a kind, in chunks of any shape; returns its path."""
    path = path.with_suffix(".h5" if kind.startswith("hdf5") else ".zarr")
    if kind.startswith("hdf5"):
        with h5py.File(path, "w") as file:
            for name, array in arrays.items():
                packing: dict[str, Any] = {}
                if kind == "hdf5":
                    packing = {
                        "chunks": chunks_of(array, rng),
                        "compression": "gzip",
                        "shuffle": True,
                        "fletcher32": True,
                    }
                file.create_dataset(name, data=array, **packing)
        return path
    group = zarr.open_group(path, mode="w", zarr_format=2 if kind == "zarr 2" else 3)
    for name, array in arrays.items():
        chunks = chunks_of(array, rng)
        shards = tuple(2 * length for length in chunks) if kind == "sharded" else None
        group.create_array(name, shape=array.shape, dtype=array.dtype, chunks=chunks, shards=shards)[...] = array
    return path


def chunks_of(array: Array, rng: np.random.Generator) -> tuple[int, ...]:
    return tuple(int(rng.integers(1, length + 1)) for length in array.shape)


def source_of(kind: str, url: Path | str, samples: str, names: Any = ("image", "label")) -> dict[str, Any]:
    return {
        "kind": kind.split(maxsplit=1)[0].replace("sharded", "zarr"),
        "url": str(url),
        "samples": samples,
        "fields": {name: f"data/{name}" for name in names},
    }


def epochs(
    source: dict[str, Any], *stages: Any, order: Any = None, num: int = 1, overrides: Any = None
) -> list[dict[str, Any]]:
    description = {"source": source, "stages": ["read", *stages], "order": {"seed": 4, "epochs": num, **(order or {})}}
    with loaderkit.build(description, overrides=INLINE | (overrides or {})) as loader:
        return [batch for _ in range(num) for batch in loader]
