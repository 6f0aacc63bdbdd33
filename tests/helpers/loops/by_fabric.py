"""A loop of one's own by Lightning Fabric, which saves as its page shows."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import loaderkit
from loops.common import NUM_EPOCHS, Rank, loss_of, make_model, make_optimizer, scalars_in

lightning: Any = importlib.import_module("lightning")
loggers: Any = importlib.import_module("lightning.fabric.loggers")


def train(rank: Rank) -> None:
    run = rank.run
    logs = loggers.TensorBoardLogger(rank.logs) if run.logs and rank.number == 0 else None
    fabric = lightning.Fabric(accelerator="cpu", devices=run.num_ranks, strategy="ddp", loggers=logs)
    fabric.launch()
    model = make_model()
    model, optimizer = fabric.setup(model, make_optimizer(model))
    saved = rank.checkpoints.with_suffix(".ckpt")
    with rank.loader() as loader, rank.notice() as notice:
        state = {"model": model, "optimizer": optimizer, "loader": loader, "step": 0}
        if run.resumes:
            fabric.load(saved, state)
        for _ in range(loader.epoch, NUM_EPOCHS):
            for batch in loader:
                state["step"] += 1
                loss = loss_of(model, batch)
                optimizer.zero_grad()
                fabric.backward(loss)
                optimizer.step()
                rank.trained(state["step"], batch, loss)
                if logs is not None:
                    rank.logged(state["step"], loaderkit.metrics.log(loader, fabric.logger, state["step"]))
                is_told = notice.reached_preemption(state["step"])
                if is_told or state["step"] == run.saves_at:
                    fabric.save(saved, state)
                if is_told:
                    return
    if logs is not None:
        logs.finalize("success")


def logged(folder: Path) -> dict[int, dict[str, float]]:
    return scalars_in(folder)
