"""A pipeline with everything random there is, and digests of what it delivers."""

from __future__ import annotations

import gc
import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from waiting import join_threads

import loaderkit
from loaderkit import Pipeline


def augmented(photos: Path, batch_size: int = 8, *, drop_last: bool = False, seed: int = 3) -> Pipeline:
    """Everything random there is, so that one wrong draw changes bytes."""
    return (
        Pipeline.files(photos, include="**/*.jpg", label="parent")
        .shuffle(seed=seed)
        .read()
        .decode()
        .random_resized_crop(32)
        .random_horizontal_flip()
        .color_jitter(brightness=0.3, contrast=0.3, saturation=0.3, hue=0.1)
        .batch(batch_size, drop_last=drop_last)
        .transfer("cpu")
        .normalize()
    )


def digest(batch: dict[str, Any]) -> str:
    found = hashlib.blake2b(digest_size=16)
    for name, value in batch.items():
        found.update(name.encode())
        found.update(value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode())
    return found.hexdigest()


def digests(loader: loaderkit.Loader, num_epochs: int = 1) -> list[str]:
    return [digest(batch) for _ in range(num_epochs) for batch in loader]


@pytest.fixture(autouse=True)
def nothing_left_running() -> Iterator[None]:
    """Every test here must leave no thread of ours behind."""
    before = set(threading.enumerate())  # a test of another file may have abandoned a call that hangs
    yield
    gc.collect()
    join_threads("loaderkit", before)


@pytest.fixture(scope="module", name="reference")
def _reference(photos: Path) -> list[str]:
    """Three epochs of the augmented pipeline, without threads."""
    with loaderkit.build(augmented(photos), overrides={"prefetch.executor": "inline"}) as loader:
        return digests(loader, 3)
