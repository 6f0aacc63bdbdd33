"""Lightning's Trainer. Its handler of SIGTERM calls a collective, so the signal comes to every rank in the same step."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import torch

import loaderkit
from loops.common import NUM_EPOCHS, Rank, loss_of, make_model, make_optimizer, scalars_in

lightning: Any = importlib.import_module("lightning")
loggers: Any = importlib.import_module("lightning.pytorch.loggers")


class Module(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> Any:
        return loss_of(self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.model)


class Account(lightning.Callback):  # type: ignore[misc]
    """Writes steps down, and to the Trainer's own logger what the page on Lightning shows."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, _: int) -> None:
        step = trainer.global_step
        if trainer.logger is not None:
            values = loaderkit.metrics.log(trainer.train_dataloader, trainer.logger, step)
            self.rank.logged(step, values)
        self.rank.trained(step, batch, outputs["loss"])


class SameStep(Rank):
    def signal(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


def train(rank: Rank) -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    run = rank.run
    rank.__class__ = SameStep
    saving = lightning.pytorch.callbacks.ModelCheckpoint(
        rank.checkpoints, "{step}", save_top_k=-1, every_n_train_steps=run.saves_at or 1000, save_on_exception=True
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=run.num_ranks,
        strategy="ddp",
        max_epochs=NUM_EPOCHS,
        logger=loggers.TensorBoardLogger(rank.logs) if run.logs else False,
        callbacks=[Account(rank)] if run.resumes else [Account(rank), saving],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=not run.resumes,
    )
    trainer.fit(Module(), rank.loader(), ckpt_path=checkpoint_of(rank) if run.resumes else None)


def checkpoint_of(rank: Rank) -> Path:
    steps = {int(path.stem.partition("=")[2]): path for path in rank.checkpoints.glob("*.ckpt")}
    return steps[rank.run.resumes_at or max(steps)]


def logged(folder: Path) -> dict[int, dict[str, float]]:
    return scalars_in(folder)
