"""A training of 12 steps that saves every second one: `training_with_checkpoints.py FOLDER KILL_AT`; prints the losses by step.

With KILL_AT > 0 it kills itself after that step, while a checkpoint may be being written.
"""

from __future__ import annotations

import json
import os
import signal
import sys

import numpy as np
import torch

import loaderkit
from loaderkit.checkpoint import RngState


class Numbers:
    """40 vectors."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"x": np.random.default_rng(index).standard_normal(16, dtype=np.float32)}


def main(folder: str, kill_at: int) -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Dropout(0.3), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 8])
    losses: dict[int, float] = {}
    pipeline = loaderkit.Pipeline.dataset(Numbers()).shuffle(seed=3).read().batch(8, drop_last=True)
    with (
        loaderkit.build(pipeline) as loader,
        loaderkit.CheckpointManager(folder, every=2, keep={"last": 2}) as checkpoints,
    ):
        state = {
            "model": model,
            "optimizer": optimizer,
            "scheduler": scheduler,
            "loader": loader,
            "rng": RngState(),
            "note": "it is mine",
        }
        step = checkpoints.restore(state) or 0
        while step < 12:
            for batch in loader:
                step += 1
                loss = model(batch["x"]).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                losses[step] = loss.item()
                checkpoints.save(step, state)
                if step == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                if step == 12:
                    break
    print(json.dumps(losses))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
