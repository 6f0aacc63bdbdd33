"""A small network and a checkpoint: just enough training for loading to have something to keep up with."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import nn

from loaderkit.pipeline.config.builder import Pipeline
from loaderkit.pipeline.loader import Loader


class SmallNet(nn.Sequential):
    """Three convolutions for images float32 [B, 3, 224, 224]; about 2 ms an image and thread, forth and back."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(
            *(nn.Conv2d(3, 24, 4, 4), nn.BatchNorm2d(24), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(24, 48, 3, 2, 1), nn.BatchNorm2d(48), nn.ReLU()),
            *(nn.Conv2d(48, 96, 3, 2, 1), nn.BatchNorm2d(96), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, num_classes)),
        )


class Trainer:
    """A model and its optimizer."""

    def __init__(self, num_classes: int) -> None:
        torch.manual_seed(0)
        self.model = SmallNet(num_classes)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)

    def step(self, batch: Mapping[str, Any]) -> tuple[float, float]:
        """One step; the loss and the share of the batch that was classified rightly."""
        logits = self.model(batch["image"])
        loss = nn.functional.cross_entropy(logits, batch["label"].long())
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        num_right = (logits.argmax(1) == batch["label"]).sum().item()
        return loss.item(), num_right / len(batch["label"])

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def save_checkpoint(folder: Path, pipeline: Pipeline, trainer: Trainer, loader: Loader) -> None:
    """Write all that another process needs to continue: pipeline.yaml, model.pt and loader.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pipeline.yaml").write_text(pipeline.to_yaml(), encoding="utf-8")
    torch.save(trainer.state_dict(), folder / "model.pt.tmp")
    os.replace(folder / "model.pt.tmp", folder / "model.pt")
    (folder / "loader.json.tmp").write_text(json.dumps(loader.state_dict()), encoding="utf-8")
    os.replace(folder / "loader.json.tmp", folder / "loader.json")


def digest(batch: Mapping[str, Any]) -> str:
    """16 hexadecimal digits from every byte of the batch's images and labels, and from its keys."""
    hasher = blake2b("\0".join(batch["__key__"]).encode(), digest_size=8)
    for name in ("image", "label"):
        hasher.update(batch[name].contiguous().numpy().tobytes())
    return hasher.hexdigest()
