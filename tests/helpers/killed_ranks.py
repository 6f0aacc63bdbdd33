"""Ranks that are killed at a counted operation of a save: a module of its own, as other processes import it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
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
from loaderkit.connectors.base import Connector
from loaderkit.connectors.config import RetryArgs, S3Args
from loaderkit.connectors.file import FileConnector
from loaderkit.connectors.s3 import S3Connector
from loaderkit.errors import LoaderkitError

_PATIENCE_S = 2.0


class Killing(Clock):
    """Calls `kill` at the operation after which a share of the operations of the save before are done."""

    def __init__(self, kill: Callable[[], None]) -> None:
        super().__init__()
        self._kill = kill
        self._at: int | None = None

    def arm(self, share: float) -> None:
        self._at = int(share * len(self.names))
        self.names.clear()

    def run(self, name: str, operation: Callable[[], Any]) -> Any:
        if len(self.names) == self._at:
            self._kill()
        return super().run(name, operation)


def store_of(kind: str, where: str) -> Connector:
    """The store of a run; `where` is a folder, or the URL and the endpoint of a bucket."""
    if kind == "s3":
        url, endpoint = where.split()
        return S3Connector(url, S3Args(endpoint=endpoint), RetryArgs(total=5.0))
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
) -> None:
    """Save up to step 2, and then 2 again or 3, in which `victim` kills itself, or all, at its operation."""
    # This process is a copy of one that began before the test.
    os.environ |= {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
    rank_programs.begin(rank, num_ranks, folder, "store")
    numbers: list[Any] = [None] * num_ranks
    dist.all_gather_object(numbers, os.getpid())

    def kill() -> None:
        # Itself last, and at once: no operation comes after it.
        others = [number for number in numbers if number != os.getpid()] if kills_all else []
        for number in (*others, os.getpid()):
            with suppress(ProcessLookupError):  # it has ended: rank 0 alone removes old checkpoints
                os.kill(number, signal.SIGKILL)

    clock = Killing(kill)
    store = Mortal(store_of(kind, where), clock)
    checkpoints = loaderkit.CheckpointManager(
        "given://", keep={"last": 2}, timeout_s=_PATIENCE_S, connectors={"given": store}
    )
    # The last of them as that in which it happens.
    for step in (1, 2, 2) if again else (0, 1, 2):
        clock.names.clear()
        checkpoints.save(step, state_of(step), force=True, wait=True)
        dist.barrier()
    if rank == victim:
        clock.arm(share)
    with suppress(LoaderkitError):
        checkpoints.save(2 if again else 3, state_of(3), force=True)
        checkpoints.close()
    os._exit(0)
