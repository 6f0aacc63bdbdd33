"""`python -m loaderkit.cli.demo.child FOLDER`: trains from FOLDER's checkpoint, if there is one, until it is killed.

It prints a line of JSON for every batch. A process that starts from the beginning saves once, after SAVED_BATCHES.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from hashlib import blake2b
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch

import loaderkit
from loaderkit.cli.demo.training import SmallNet, train_on

SAVED_BATCHES = 5


def main(folder: Path) -> None:
    """Train, save, tell of every batch."""
    checkpoint = folder / "checkpoint.pt"
    with loaderkit.build(folder / "pipeline.yaml") as loader:
        model = SmallNet(len(loader.classes or ()))
        num_done = 0
        if checkpoint.exists():
            saved = torch.load(checkpoint, weights_only=True)
            model.load_state_dict(saved["model"])
            loader.load_state_dict(saved["loader"])
            num_done = SAVED_BATCHES
        for number, batch in enumerate(chain.from_iterable(repeat(loader)), num_done + 1):  # epoch after epoch
            record = {"batch": number, "digest": digest(batch), "loss": train_on(model, batch)}
            sys.stdout.write(json.dumps(record) + "\n")
            sys.stdout.flush()
            if number == SAVED_BATCHES:
                torch.save({"model": model.state_dict(), "loader": loader.state_dict()}, folder / "checkpoint.tmp")
                os.replace(folder / "checkpoint.tmp", checkpoint)  # never half of one


def digest(batch: Mapping[str, Any]) -> str:
    """16 hexadecimal digits from every byte of the batch's images and labels, and from its keys."""
    hasher = blake2b("\0".join(batch["__key__"]).encode(), digest_size=8)
    for name in ("image", "label"):
        hasher.update(batch[name].contiguous().numpy().tobytes())
    return hasher.hexdigest()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
