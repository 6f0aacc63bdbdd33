"""Ranks that are killed at a counted operation of a save: a module of its own, as other processes import it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import rank_programs
import torch
import torch.distributed as dist
from crashing import Clock, Mortal
from power_cut import DroppingConnector
from seaweed import ACCESS_KEY, SECRET_KEY
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import loaderkit
from loaderkit.checkpoint.save.safetensors import layout
from loaderkit.connectors.base import Connector
from loaderkit.connectors.config import RetryArgs, S3Args
from loaderkit.connectors.file import FileConnector
from loaderkit.connectors.s3 import S3Connector
from loaderkit.errors import LoaderkitError


class Killing(Clock):
    """Kills processes, and this one, at an operation. What the file `orders` says changes before each save: a number, and
    after which share of the operations of the save before. Whatever process it is sent to counts its own."""

    def __init__(self, orders: Path, victims: Sequence[int]) -> None:
        super().__init__()
        self._settings = orders, victims
        self._reading = threading.Lock()
        self._said = ""
        self._at: int | None = None
        layout.MIN_FILE_BYTES = 1  # so that every rank writes a file, also as safetensors

    def __reduce__(self) -> Any:
        return Killing, self._settings

    def run(self, name: str, operation: Callable[[], Any]) -> Any:
        orders, victims = self._settings
        with self._reading:
            said = orders.read_text()
            if said != self._said:
                share = said.partition(" ")[2]
                self._said, self._at = said, int(float(share) * len(self.names)) if share else None
                self.names.clear()
        if len(self.names) == self._at:
            for number in (*victims, os.getpid()):
                with suppress(ProcessLookupError):  # it has ended: rank 0 alone removes old checkpoints
                    os.kill(number, signal.SIGKILL)
        return super().run(name, operation)


def store_of(kind: str, where: str) -> Connector:
    """The store of a run; `where` is a folder, or the URL and the endpoint of a bucket."""
    if kind == "s3":
        url, endpoint = where.split()
        return S3Connector(url, S3Args(endpoint=endpoint), RetryArgs(total=60.0))
    return DroppingConnector(f"{where}/run", f"{where}/durable") if kind == "power" else FileConnector(f"{where}/run")


def whole(number: int) -> dict[str, torch.Tensor]:
    """The state with that number, as one process has it."""
    generator = torch.Generator().manual_seed(number)
    return {"rows": torch.randn(97, 301, generator=generator), "same": torch.randn(3001, generator=generator)}


def state_of(number: int) -> dict[str, Any]:
    """Rows over the ranks, and a tensor and values that are the same on all."""
    tensors = whole(number)
    rows = distribute_tensor(tensors["rows"], init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])
    return {"model": {"rows": rows, "same": tensors["same"]}, "number": number, "names": ["a", str(number)]}


def save_and_be_killed(
    rank: int,
    num_ranks: int,
    folder: Path,
    kind: str,
    where: str,
    victim: int,
    kills_all: bool,
    again: bool,
    share: float,
    settings: dict[str, Any],
) -> None:
    """Save up to step 2, and then 2 again or 3, in which `victim` kills itself, or all, at its operation."""
    # This process is a copy of one that began before the test.
    os.environ |= {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
    is_apart = settings["flush"] == "process"
    (rank_programs.begin_by_address if is_apart else rank_programs.begin)(rank, num_ranks, folder, "store")
    numbers: list[Any] = [None] * num_ranks
    dist.all_gather_object(numbers, os.getpid())
    # Itself last, and at once: no operation comes after it. With it ends the process that writes for it.
    others = [number for number in numbers if number != os.getpid()] if kills_all else []
    orders = folder / f"orders-{rank}"
    orders.write_text("")
    store = Mortal(store_of(kind, where), Killing(orders, [*others, os.getpid()]))
    patience_s = 300.0 if is_apart else 20.0  # one process may start long after the other, or be slow on a busy machine
    checkpoints = loaderkit.CheckpointManager(
        "given://", keep={"last": 2}, timeout_s=patience_s, connectors={"given": store}, **settings
    )
    # The last of them as that in which it happens.
    for number, step in enumerate((1, 2, 2) if again else (0, 1, 2)):
        orders.write_text(f"{number}")
        checkpoints.save(step, state_of(step), force=True, wait=True)
        dist.barrier()
    if rank == victim:
        orders.write_text(f"{number + 1} {share}")
    with suppress(LoaderkitError):
        checkpoints.save(2 if again else 3, state_of(3), force=True)
        checkpoints.close()
    os._exit(0)
