"""What each rank does in the tests of notices at random moments: it trains on batches of a loader, sharded, and notes each."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import rank_programs
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import loaderkit
from loaderkit.checkpoint import RngState

GLOBAL_BATCH = 12


class Signalled:
    """Counts calls of functions, of Python and of C; at number `last` the process gets SIGTERM, and from then on has `within_s`
    to end by itself: then SIGALRM ends it."""

    def __init__(self, last: int, within_s: float) -> None:
        self.num, self._last, self._within_s = 0, last, within_s

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        self.num += event in ("call", "c_call")
        if self.num == self._last:
            self.num += 1
            signal.setitimer(signal.ITIMER_REAL, self._within_s)
            os.kill(os.getpid(), signal.SIGTERM)


def made(rank: int, num_ranks: int) -> dict[str, Any]:
    """A sharded model, its optimizer, and a loader whose global batch is the same for any number of ranks."""
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(8, 24), torch.nn.Dropout(0.1), torch.nn.Linear(24, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (num_ranks,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.utils.data.TensorDataset(torch.arange(960.0).reshape(120, 8) / 960, torch.arange(120.0) / 120)
    pipeline = loaderkit.Pipeline.dataset(data, fields=["x", "y"]).shuffle(seed=1).read()
    loader = loaderkit.build(pipeline.batch(GLOBAL_BATCH // num_ranks, drop_last=True), rank=rank, world_size=num_ranks)
    torch.manual_seed(50 + rank)
    return {"model": model, "optimizer": optimizer, "loader": loader, "rng": RngState()}


def train(
    rank: int,
    num_ranks: int,
    folder: Path,
    name: str,
    victim: int,
    call: int,
    steps: int,
    within: str,
    budget_s: float,
) -> None:
    """From what is restored up to `steps`, or until the notice that rank `victim` gets at its call number `call`, upon which it
    must have ended in `budget_s`.

    Adds a line for each step to lines-<rank>.txt: step, loss and a digest of the batch; writes where it stopped, what was saved
    then, and how many calls it has made.
    """
    rank_programs.begin(rank, num_ranks, folder, f"store-{name}")
    signalled = Signalled(call if rank == victim else -1, budget_s)
    state = made(rank, num_ranks)
    notice = {"signals": ["SIGTERM"], "within": within}
    settings: dict[str, Any] = {"every": 4, "keep": {"last": 2}, "notice": notice, "timeout_s": 60.0}
    with state["loader"] as loader, loaderkit.CheckpointManager(folder / "run", **settings) as checkpoints:
        step = checkpoints.restore(state) or 0
        stopped = None
        sys.setprofile(signalled)
        with open(folder / f"lines-{rank}.txt", "a") as lines:
            while step < steps and stopped is None:
                for batch in loader:
                    step += 1
                    loss = (state["model"](batch["x"]).squeeze(1) - batch["y"]).pow(2).mean()
                    state["optimizer"].zero_grad()
                    loss.backward()
                    state["optimizer"].step()
                    digest = hashlib.sha256(batch["x"].numpy().tobytes()).hexdigest()[:16]
                    print(step, loss.item().hex(), digest, file=lines, flush=True)
                    checkpoints.save(step, state, force=step == steps)
                    if checkpoints.reached_preemption(step):
                        stopped = step
                    if step == steps or stopped is not None:
                        break
    sys.setprofile(None)
    last = checkpoints.stats()["last"] or {}
    said = {
        "stopped": stopped,
        "newest": checkpoints.latest_step(),
        "extent": last.get("extent"),
        "calls": signalled.num,
    }
    (folder / f"said-{rank}.json").write_text(json.dumps(said))
    dist.destroy_process_group()
    signal.setitimer(signal.ITIMER_REAL, 0.0)
