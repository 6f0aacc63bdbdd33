"""`python -m loaderkit.cli.demo.resume FOLDER`: the new process that continues from the demo's checkpoint.

Prints one JSON object: the digest of the batch that comes first, where it stands, and the loss of a step on it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

import loaderkit
from loaderkit.cli.demo.photos import PHOTOGRAPHS
from loaderkit.cli.demo.training import Trainer, digest


def main(folder: Path) -> None:
    """Restore model, optimizer and loader from the checkpoint, and take one step."""
    trainer = Trainer(len(PHOTOGRAPHS))
    trainer.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
    with loaderkit.build(folder / "pipeline.yaml") as loader:
        loader.load_state_dict(json.loads((folder / "loader.json").read_text(encoding="utf-8")))
        batch = next(iter(loader))
        facts = {"digest": digest(batch), "epoch": loader.epoch, "first_key": batch["__key__"][0]}
        loss, _ = trainer.step(batch)
    sys.stdout.write(json.dumps({**facts, "loss": loss}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
