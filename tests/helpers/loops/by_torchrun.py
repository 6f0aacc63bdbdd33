"""DDP and FSDP2 under torchrun itself, which gets SIGTERM in the place of its ranks and passes it on.

python -m loops.by_torchrun FOLDER RUN          # RUN: the fields of a Run, as JSON; a rank
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from loaderkit.checkpoint.manager.notice import SignalNotice
from loops.common import Rank, Run, loss_of, make_model, make_optimizer, train_with_manager
from loops.common import scalars_in as logged  # noqa: F401 - called by the program


class Launched(Rank):
    def __post_init__(self) -> None:
        super().__post_init__()
        self.seen = None if self.run.signalled_at is None else SignalNotice(["SIGTERM"])

    def signal(self) -> None:
        """The ranks wait for it in this step: torchrun passes it on when it gets to it, by which time they may have ended."""
        assert self.seen is not None
        if self.number == 0:
            os.kill(os.getppid(), signal.SIGTERM)
        deadline = time.monotonic() + 60
        while self.seen.name is None:
            assert time.monotonic() < deadline, "torchrun has passed on nothing"
            time.sleep(0.01)


def run_ranks(run: Run, folder: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(run.num_ranks)]
    patient = ["--shutdown-timeout", "600"]  # until then ranks save, also where everything is slow
    command = [*launcher, *patient, "-m", "loops.by_torchrun", str(folder), json.dumps(asdict(run))]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if done.returncode != 0 and run.signalled_at is None:
        raise RuntimeError(f"{run.name}: {done.stderr}")


def train(rank: Rank) -> None:
    """Two models on the same batches: one has all weights on all ranks, the other is sharded."""
    replicated, sharded = DistributedDataParallel(make_model()), make_model()
    fully_shard(sharded)
    models: dict[str, Any] = {"replicated": replicated, "sharded": sharded}
    optimizers = {name: make_optimizer(model) for name, model in models.items()}
    loader = rank.loader()

    def descend(batch: Any) -> list[torch.Tensor]:
        losses = []
        for name, model in models.items():
            loss = loss_of(model, batch)
            optimizers[name].zero_grad()
            loss.backward()
            optimizers[name].step()
            losses.append(loss.detach())
        return losses

    train_with_manager(rank, loader, loader, {"models": models, "optimizers": optimizers, "loader": loader}, descend)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(Launched(run=Run(**json.loads(sys.argv[2])), number=dist.get_rank(), folder=Path(sys.argv[1])))
    dist.destroy_process_group()
