"""A plain loop, which sums its gradients by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.tensorboard import SummaryWriter

import loaderkit
from loops.common import NUM_EPOCHS, Rank, loss_of, make_model, make_optimizer, scalars_in


def train(rank: Rank) -> None:
    model = make_model()
    optimizer, loader = make_optimizer(model), rank.loader()
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader}
    writer: Any = SummaryWriter(rank.logs) if rank.run.logs and rank.number == 0 else None
    with loader, rank.notice() as checkpoints:
        step = (checkpoints.restore(state, step=rank.run.resumes_at) or 0) if rank.run.resumes else 0
        for _ in range(loader.epoch, NUM_EPOCHS):
            for batch in loader:
                step += 1
                loss = loss_of(model, batch)
                optimizer.zero_grad()
                loss.backward()
                average([parameter.grad for parameter in model.parameters()])
                optimizer.step()
                rank.trained(step, batch, loss)
                if writer is not None:
                    rank.logged(step, loaderkit.metrics.log(loader, writer, step))
                checkpoints.save(step, state, force=step == rank.run.saves_at)
                if checkpoints.reached_preemption(step):
                    return
    if writer is not None:
        writer.close()


def average(gradients: list[torch.Tensor | None]) -> None:
    for gradient in gradients:
        assert gradient is not None
        dist.all_reduce(gradient)
        gradient.div_(dist.get_world_size())


def logged(folder: Path) -> dict[int, dict[str, float]]:
    return scalars_in(folder)
