"""Stores of Zarr, files of HDF5 and folders of DeepSpeed, of which one file is damaged."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
import zarr
from deepspeed_folders import write_zero
from mutate import OPERATORS as PLAIN
from mutate_formats import JSON, PICKLE, ZIP, Operator, of_member, whole_number, zip_bomb

import loaderkit
from loaderkit import Pipeline
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.errors import LoaderkitError

OF_TORCH: tuple[Operator, ...] = (*ZIP, *[of_member("data.pkl", PICKLE)] * 9, of_member("", PLAIN), zip_bomb)


def first_batches(pipeline: Any, objects: dict[str, bytes]) -> None:
    """Load a pipeline whose data lie in memory; more rows than there were may be billions now, all of the fill value."""
    with loaderkit.build(pipeline, connectors={"memory": MemoryConnector(objects)}) as loader:
        for _ in islice(loader, 8):
            pass


def container_kinds() -> Iterator[tuple[Any, ...]]:
    """What `Kind` of mutants.py is made of."""
    numbers = np.arange(480, dtype=np.float32).reshape(20, 6, 4)

    def reading(kind: str, name: str, key: str, others: dict[str, bytes], samples: str) -> Callable[[bytes], None]:
        begun = getattr(Pipeline, kind)(f"memory://{name}", samples=samples, fields={"x": "a/x"}).shuffle("none").read()
        cut = begun.random_volume_crop([2, 3], fields=["x"], pad_if_needed=True) if samples == "rows" else begun
        pipeline = cut.batch(4, ragged={"x": "list"}).prefetch(concurrency=2)
        return lambda data: first_batches(pipeline, {**others, key: data})

    def made(
        name: str, kind: str, key: str, files: dict[str, bytes], operators: tuple[Operator, ...]
    ) -> tuple[Any, ...]:
        whole, rows = (reading(kind, key.partition("/")[0], key, files, samples) for samples in ("whole", "rows"))
        return name, files[key], operators, whole, (rows,), LoaderkitError

    with tempfile.TemporaryDirectory() as folder:
        for version, shards in ((3, None), (3, (8, 6, 4)), (2, None)):
            path = Path(folder, f"{version}{shards is not None}.zarr")
            given: dict[str, Any] = {"chunks": (2, 6, 4), "shards": shards, "zarr_format": version}
            zarr.create_array(path, name="a/x", data=numbers, **given)
            files = {
                f"x.zarr/{file.relative_to(path)}": file.read_bytes() for file in path.rglob("*") if file.is_file()
            }
            name = f"zarr-{version}" if shards is None else "zarr-shards"
            yield made(name, "zarr", f"x.zarr/a/x/{'zarr.json' if version == 3 else '.zarray'}", files, JSON)
            if version == 3:
                yield made(f"{name}-chunk", "zarr", "x.zarr/a/x/c/1/0/0", files, (*PLAIN, whole_number))
    file = io.BytesIO()
    with h5py.File(file, "w") as written:
        written.create_dataset("a/x", data=numbers, chunks=(2, 6, 4), compression="gzip", shuffle=True, fletcher32=True)
    yield made("hdf5", "hdf5", "x.h5", {"x.h5": file.getvalue()}, (*PLAIN, whole_number))


def deepspeed_kinds() -> Iterator[tuple[Any, ...]]:
    """Likewise of folders as ZeRO 1 and 3 write them."""
    weights = [{"a": torch.arange(12.0).reshape(3, 4), "b": torch.ones(5)}, {"c": torch.arange(6.0)}]
    states = {
        kind: {name: value + 1 for one in weights for name, value in one.items()} for kind in ("exp_avg", "step_size")
    }
    for stage in (1, 3):
        with tempfile.TemporaryDirectory() as folder:
            frozen = {"f": torch.arange(3.0)}
            write_zero(Path(folder, "c"), stage, 2, weights, states, frozen=frozen, buffers={}, tied={"t": "a"})
            files = {f"c/{path.name}": path.read_bytes() for path in Path(folder, "c").iterdir()}
        for part in ("optim_states.pt", "model_states.pt"):
            key = min(name for name in files if name.endswith(part))
            whole, partly = partial(restored, files, key, None), partial(restored, files, key, {"a": torch.zeros(3, 4)})
            yield (f"zero-{stage}-{part.partition('_')[0]}", files[key], OF_TORCH, whole, (partly,), LoaderkitError)


def restored(files: dict[str, bytes], key: str, module: Any, data: bytes) -> None:
    into = None if module is None else {"module": module}
    connectors = {"memory": MemoryConnector({**files, key: data})}
    loaderkit.restore("memory://c", into, strict=into is None, nested=into is None, connectors=connectors)
