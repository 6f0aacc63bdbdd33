"""A plain loop over a graph of torchdata.nodes, whose state is saved in the place of the loader's."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from torch.nn.parallel import DistributedDataParallel
from torch.utils.tensorboard import SummaryWriter

import loaderkit
from loops.common import NUM_STEPS, Rank, loss_of, make_model, make_optimizer, scalars_in

nodes: Any = importlib.import_module("torchdata.nodes")


def train(rank: Rank) -> None:
    model = DistributedDataParallel(make_model())
    optimizer, loader = make_optimizer(model), rank.loader()
    graph = nodes.Loader(loader.as_node())
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "graph": graph}
    writer: Any = SummaryWriter(rank.logs) if rank.run.logs and rank.number == 0 else None
    with loader, rank.notice() as checkpoints:
        step = (checkpoints.restore(state, step=rank.run.resumes_at) or 0) if rank.run.resumes else 0
        while step < NUM_STEPS:
            for batch in graph:
                step += 1
                loss = loss_of(model, batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                rank.trained(step, batch, loss)
                if writer is not None:
                    rank.logged(step, loaderkit.metrics.log(loader, writer, step))
                checkpoints.save(step, state, force=step == rank.run.saves_at)
                if checkpoints.reached_preemption(step):
                    return
    if writer is not None:
        writer.close()


def logged(folder: Path) -> dict[int, dict[str, float]]:
    return scalars_in(folder)
