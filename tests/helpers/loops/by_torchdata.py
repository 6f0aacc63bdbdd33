"""A plain loop over a graph of torchdata.nodes, whose state is saved in the place of the loader's."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from loops.common import Rank, loss_of, make_model, make_optimizer, train_with_manager
from loops.common import scalars_in as logged  # noqa: F401 - called by the program

nodes: Any = importlib.import_module("torchdata.nodes")


def train(rank: Rank) -> None:
    model, loader = DistributedDataParallel(make_model()), rank.loader()
    optimizer, graph = make_optimizer(model), nodes.Loader(loader.as_node())

    def descend(batch: Any) -> list[torch.Tensor]:
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return [loss]

    train_with_manager(rank, loader, graph, {"model": model, "optimizer": optimizer, "graph": graph}, descend)
