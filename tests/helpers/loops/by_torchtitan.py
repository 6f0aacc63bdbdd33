"""The loader of the page on torchtitan, with torchtitan's own contract, checkpoint manager and logger, in the order of its
trainer: build, load, then a batch and `save` a step. Upon SIGTERM it ends, and resumes after its last checkpoint.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

import loaderkit
from loops.common import NUM_STEPS, Rank, loss_of, make_model, make_optimizer, scalars_in

sys.path.append(f"{sys.prefix}/torchtitan")  # beside the environment, as it wants an older `datasets`
dataloader: Any = importlib.import_module("torchtitan.components.dataloader")
checkpointer: Any = importlib.import_module("torchtitan.components.checkpointer")
metrics: Any = importlib.import_module("torchtitan.components.metrics")


class TitanLoader:
    def __init__(self, rank: Rank) -> None:
        self.loader = rank.loader()

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            for batch in self.loader:
                yield {"x": batch["x"]}, batch["number"]

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            self.loader.load_state_dict(state)

    def close(self) -> None:
        self.loader.close()


class Loaderkit(TitanLoader, dataloader.BaseDataLoader):  # type: ignore[misc]
    @dataclass(kw_only=True, slots=True)
    class Config(dataloader.BaseDataLoader.Config):  # type: ignore[misc]
        rank: Rank

    def __init__(self, config: Config, *, dp_rank: int, dp_world_size: int) -> None:
        assert (dp_rank, dp_world_size) == (config.rank.number, config.rank.run.num_ranks)
        super().__init__(config.rank)


class Trainer:
    """What torchtitan's trainer saves of itself is its step."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step, dtype=torch.int32)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"].item())


class Optimizers:
    """As torchtitan's: flat names of the model's."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.optimizer = model, make_optimizer(model)

    def state_dict(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, self.optimizer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.model, self.optimizer, state)


def train(rank: Rank) -> None:
    run, trainer, model = rank.run, Trainer(), make_model()
    fully_shard(model)
    optimizers = Optimizers(model)
    loader = Loaderkit.Config(rank=rank).build(dp_rank=rank.number, dp_world_size=run.num_ranks)
    config = checkpointer.CheckpointManager.Config(
        enable=True, folder=run.checkpoints, interval=run.saves_at or 1000, keep_latest_k=0
    )
    saving = config.build(
        dataloader=loader,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=torch.optim.lr_scheduler.StepLR(optimizers.optimizer, 1000),
        states={"train_state": trainer},
        sd_adapter=None,
        base_folder=str(rank.folder),
    )
    logger = metrics.LoggerContainer()
    if run.logs and rank.number == 0:
        logger.add_logger(metrics.TensorBoardLogger(str(rank.logs)))
    if run.resumes:
        saving.load(step=run.resumes_at or -1)
    batches = iter(loader)
    while trainer.step < NUM_STEPS:
        trainer.step += 1
        inputs, number = next(batches)
        loss = loss_of(model, inputs)
        optimizers.optimizer.zero_grad()
        loss.backward()
        optimizers.optimizer.step()
        if run.logs:
            rank.logged(trainer.step, loaderkit.metrics.log(loader.loader, logger, trainer.step))
        rank.trained(trainer.step, {"number": number}, loss.detach())
        saving.save(trainer.step)
    saving.close()
    logger.close()
    loader.close()


def logged(folder: Path) -> dict[int, dict[str, float]]:
    return scalars_in(folder)
