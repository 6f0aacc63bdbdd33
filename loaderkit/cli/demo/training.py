"""What the demo trains: a small network, on a pipeline in which a slow function was left."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from loaderkit.pipeline.config.builder import Pipeline

SLOW = "ask_server"
ANSWER_S = 0.08


def ask_server(sample: dict[str, Any]) -> None:
    """Stands for a request to a server, left in by mistake: its answer is not used."""
    time.sleep(ANSWER_S)


def training_pipeline(train: Path, batch_size: int, *, slow: bool) -> Pipeline:
    """The usual pipeline over class folders, as in pipelines/imagenet-files.yaml, with two workers."""
    source = Pipeline.files(train, include="**/*.jpg", label="parent").named("demo").shuffle(seed=0)
    samples = source.read().decode().random_resized_crop(224).random_horizontal_flip()
    samples = samples.call(ask_server, name=SLOW, thread_safe=True) if slow else samples
    return samples.batch(batch_size, drop_last=True).normalize(mean="imagenet", std="imagenet").prefetch(concurrency=2)


class SmallNet(nn.Sequential):
    """Three convolutions for images float32 [B, 3, 224, 224]; about 2 ms an image and thread, forth and back."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(
            *(nn.Conv2d(3, 24, 4, 4), nn.BatchNorm2d(24), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(24, 48, 3, 2, 1), nn.BatchNorm2d(48), nn.ReLU()),
            *(nn.Conv2d(48, 96, 3, 2, 1), nn.BatchNorm2d(96), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, num_classes)),
        )


def train_on(model: nn.Module, batch: Mapping[str, Any]) -> float:
    """One step of gradient descent; its loss. Without torch.optim, whose import would take longer than all of the steps."""
    loss = nn.functional.cross_entropy(model(batch["image"]), batch["label"].long())
    model.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for weights in model.parameters():
            assert weights.grad is not None
            weights.sub_(weights.grad, alpha=0.05)
    return loss.item()
