"""The Trainer of Transformers. All ranks agree on the step after which they save and end upon SIGTERM, by a callback."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import torch

import loaderkit
from loops.common import GLOBAL_BATCH, NUM_EPOCHS, Rank, loss_of, make_model

transformers: Any = importlib.import_module("transformers")


class Trainer(transformers.Trainer):  # type: ignore[misc]
    def __init__(self, rank: Rank, **given: Any) -> None:
        self.rank = rank
        super().__init__(model=make_model(), **given)

    def get_train_dataloader(self) -> loaderkit.Loader:
        return self.rank.loader()

    def compute_loss(self, model: Any, inputs: dict[str, torch.Tensor], *_: Any, **__: Any) -> Any:
        loss = loss_of(model, inputs)
        self.rank.trained(self.state.global_step + 1, inputs, loss.detach())
        return loss


class Preemption(transformers.TrainerCallback):  # type: ignore[misc]
    """Save and end after the step that all ranks agree on."""

    def __init__(self, notice: loaderkit.CheckpointManager) -> None:
        self.notice = notice

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.notice.reached_preemption(state.global_step):
            control.should_save = control.should_training_stop = True


class Stalls(transformers.TrainerCallback):  # type: ignore[misc]
    """Adds the loader's values to those that the Trainer logs."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def log(self, values: dict[str, float], step: int) -> None:
        self.trainer.log(values)

    def on_step_end(self, args: Any, state: Any, control: Any, train_dataloader: Any, **_: Any) -> None:
        values = loaderkit.metrics.log(train_dataloader, self, state.global_step)
        self.trainer.rank.logged(state.global_step, values)


def train(rank: Rank) -> None:
    run = rank.run
    with loaderkit.CheckpointManager(rank.folder / "notices", notice={"signals": ["SIGTERM"]}) as notice:
        arguments = transformers.TrainingArguments(
            str(rank.checkpoints),
            num_train_epochs=NUM_EPOCHS,
            per_device_train_batch_size=GLOBAL_BATCH // run.num_ranks,
            save_strategy="steps" if run.saves_at else "no",
            save_steps=run.saves_at or 1000,
            learning_rate=0.01,
            report_to=[],
            use_cpu=True,
            ddp_backend="gloo",
            disable_tqdm=True,
        )
        trainer = Trainer(rank, args=arguments, callbacks=[Preemption(notice)])
        if run.logs:
            trainer.add_callback(Stalls(trainer))
        trainer.train(resume_from_checkpoint=checkpoint_of(rank) if run.resumes else None)
        if run.logs and rank.number == 0:
            rank.logs.mkdir()
            (rank.logs / "history.json").write_text(json.dumps(trainer.state.log_history))


def checkpoint_of(rank: Rank) -> str:
    steps = {int(path.name.partition("-")[2]): path for path in rank.checkpoints.glob("checkpoint-*")}
    return str(steps[rank.run.resumes_at or max(steps)])


def logged(folder: Path) -> dict[int, dict[str, float]]:
    """The Trainer's log history."""
    lines = json.loads((folder / "history.json").read_text())
    return {
        line["step"]: values
        for line in lines
        if (values := {name: value for name, value in line.items() if name.startswith("loaderkit/")})
    }
