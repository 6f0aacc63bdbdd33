"""A loop by Accelerate: `register_for_checkpointing`, `save_state`, `load_state`, and a tracker."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import loaderkit
from loops.common import NUM_EPOCHS, Rank, loss_of, make_model, make_optimizer, scalars_in

accelerate: Any = importlib.import_module("accelerate")


class Position:
    """How many steps were trained."""

    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def train(rank: Rank) -> None:
    run = rank.run
    accelerator = accelerate.Accelerator(cpu=True, log_with="tensorboard" if run.logs else None, project_dir=rank.logs)
    if run.logs:
        accelerator.init_trackers("training")
    model, position = make_model(), Position()
    model, optimizer, loader = accelerator.prepare(model, make_optimizer(model), rank.loader())
    accelerator.register_for_checkpointing(loader, position)
    with loader, rank.notice() as notice:
        if run.resumes:
            accelerator.load_state(rank.checkpoints)
        for _ in range(loader.epoch, NUM_EPOCHS):
            for batch in loader:
                position.step += 1
                loss = loss_of(model, batch)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                rank.trained(position.step, batch, loss)
                if run.logs:
                    rank.logged(position.step, loaderkit.metrics.log(loader, accelerator, position.step))
                is_told = notice.reached_preemption(position.step)
                if is_told or position.step == run.saves_at:
                    accelerator.save_state(rank.checkpoints)
                if is_told:
                    return
    if run.logs:
        accelerator.end_training()


def logged(folder: Path) -> dict[int, dict[str, float]]:
    return scalars_in(folder)
