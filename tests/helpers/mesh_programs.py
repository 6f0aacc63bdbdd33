"""What each rank of a mesh does in tests of shared batches: a module of its own, as other processes import it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rank_programs import begin
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import loaderkit
from loaderkit import Pipeline
from loaderkit.connectors.base import ConnectorTraits
from loaderkit.connectors.memory import MemoryConnector

NUM_SAMPLES = 90
NAMES = ("pp", "dp", "tp")
BROADCAST = {"ranks.share": "broadcast"}


class Store(MemoryConnector):
    """A remote store, as far as the loader knows, that counts the bytes read of it."""

    traits = ConnectorTraits(is_remote=True)

    def __init__(self) -> None:
        super().__init__({f"{n:03}.bin": bytes([n]) * (100 + 37 * n) for n in range(NUM_SAMPLES)})
        self.num_bytes = 0

    def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        super().read_into(key, start, buffer, etag=etag)
        self.num_bytes += len(buffer)


def to_values(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Of a file: a tensor, a number, text, and a random one."""
    data = sample["bin"]
    return {
        "first": torch.full((40, 70), data[0], dtype=torch.int32),
        "size": len(data),
        "text": f"file {data[0]}",
        "random": torch.from_numpy(rng.random(3)),
    }


def files(**batch: Any) -> Pipeline:
    pipeline = Pipeline.files("store://x", include="*.bin").shuffle("global", seed=3).epochs(2)
    return pipeline.read().call(to_values).batch(**{"size": 4, **batch})


def digest(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A batch as JSON values."""
    values = {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    return values | {"bin": [data.hex() for data in batch["bin"]]}


@contextmanager
def as_rank(rank: int, world_size: int) -> Iterator[None]:
    """A process group of one process that stands for rank `rank`: no rank hears of another."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def mesh_of(rank: int, num_ranks: int, folder: Path, shape: tuple[int, ...], name: str = "store") -> DeviceMesh:
    """Join the group, and the mesh of `shape` with the dimensions pp, dp and tp."""
    begin(rank, num_ranks, folder, name)
    return init_device_mesh("cpu", shape, mesh_dim_names=NAMES)


def read_all(rank: int, num_ranks: int, folder: Path, shape: tuple[int, ...], overrides: dict[str, Any]) -> None:
    """Write down the batches of two epochs, what was read for them, and the state behind each."""
    mesh, store = mesh_of(rank, num_ranks, folder, shape), Store()
    batches, states = [], []
    with loaderkit.build(
        files(), mesh=mesh, data_dims="dp", connectors={"store": store}, overrides=overrides
    ) as loader:
        for _ in range(2):
            for batch in loader:
                batches.append(digest(batch))
                states.append(loader.state_dict())
        stats = loader.stats()
        rows = {row["name"]: row["num_items"] for row in stats.to_dict()["stages"]}
        told = {
            "batches": batches,
            "states": states,
            "num_bytes": store.num_bytes,
            "rows": rows,
            "num_batches": stats.num_batches,
            "waited": sorted(stats.waits_s),
        }
    (folder / f"told-{rank}").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


def told(folder: Path, num_ranks: int) -> list[Any]:
    """What the ranks wrote down; None for one that did not."""
    paths = [folder / f"told-{rank}" for rank in range(num_ranks)]
    return [json.loads(path.read_text()) if path.exists() else None for path in paths]


def write_error(folder: Path, rank: int, act: Callable[[], None]) -> None:
    """Write down the error that `act` ends with."""
    try:
        act()
    except Exception as error:
        said = [type(error).__name__, str(error), getattr(error, "ranks", None), getattr(error, "__notes__", [])]
        (folder / f"told-{rank}").write_text(json.dumps(said))


def die(rank: int, num_ranks: int, folder: Path, victim: int, num_before: int) -> None:
    """Rank `victim` is killed after `num_before` batches; the others write down what they are told."""
    mesh = mesh_of(rank, num_ranks, folder, (2, 2, 2))
    loader = loaderkit.build(
        files(),
        mesh=mesh,
        data_dims="dp",
        connectors={"store": Store()},
        overrides=BROADCAST | {"prefetch.timeout": 20},
    )

    def loop() -> None:
        for _ in range(3):
            for number, _ in enumerate(loader):
                if rank == victim and number == num_before:
                    os.kill(os.getpid(), 9)

    write_error(folder, rank, loop)
    os._exit(0)


def stop_answering(rank: int, num_ranks: int, folder: Path) -> None:
    """Rank 1 is stopped, as a machine is that is lost; the others write down what they are told."""
    mesh = mesh_of(rank, num_ranks, folder, (1, 1, num_ranks))
    overrides = BROADCAST | {"prefetch.timeout": 8, "prefetch.on_timeout": "raise"}
    loader = loaderkit.build(files(), mesh=mesh, data_dims="dp", connectors={"store": Store()}, overrides=overrides)

    def loop() -> None:
        for _ in loader:
            if rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)

    write_error(folder, rank, loop)
    os._exit(0)
