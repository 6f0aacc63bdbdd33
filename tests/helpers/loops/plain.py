"""A plain loop, which sums its gradients by itself."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from loops.common import Rank, loss_of, make_model, make_optimizer, train_with_manager
from loops.common import scalars_in as logged  # noqa: F401 - called by the program


def train(rank: Rank) -> None:
    model, loader = make_model(), rank.loader()
    optimizer = make_optimizer(model)

    def descend(batch: Any) -> list[torch.Tensor]:
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        average([parameter.grad for parameter in model.parameters()])
        optimizer.step()
        return [loss]

    train_with_manager(rank, loader, loader, {"model": model, "optimizer": optimizer, "loader": loader}, descend)


def average(gradients: list[torch.Tensor | None]) -> None:
    for gradient in gradients:
        assert gradient is not None
        dist.all_reduce(gradient)
        gradient.div_(dist.get_world_size())
