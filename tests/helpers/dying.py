"""A pipeline whose functions end their process at given samples, once each; importable in worker processes."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from loaderkit import Pipeline

WAYS = ("SIGKILL", "SIGSEGV", "SIGABRT", "leave")
BATCH = 8


class Records:
    """Sample i holds i, and eight thousand bytes that say so; every 29th cannot be read."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index % 29 == 28:
            raise ValueError("unreadable")
        return {"x": index, "filling": torch.full((1000,), index)}


def die(how: str) -> None:
    """End this process: by a signal, or by `os._exit`."""
    if how == "leave":
        os._exit(3)
    os.kill(os.getpid(), signal.Signals[how])


def die_at(sample: dict[str, Any], folder: str, deaths: dict[str, str]) -> None:
    """`deaths` says by key how to die, the first time that sample comes by; `folder` is where that is noted."""
    how = deaths.get(sample["__key__"])
    if how is not None:
        with suppress(FileExistsError):
            (Path(folder) / sample["__key__"]).touch(exist_ok=False)
            die(how)


def die_always(sample: dict[str, Any], key: str, how: str) -> None:
    if sample["__key__"] == key:
        die(how)


def jitter(sample: dict[str, Any], rng: np.random.Generator) -> None:
    sample["y"] = float(rng.random())


def is_kept(sample: dict[str, Any]) -> bool:
    """Leaves out a run of samples, among them whole batches of the canonical order."""
    return not 40 <= sample["x"] < 60


def total(batch: dict[str, Any], rng: np.random.Generator) -> None:
    batch["total"] = int(batch["x"].sum()) + int(rng.integers(1000))


def records(size: int, folder: Path, deaths: dict[str, str], *, shuffle: bool = True) -> Pipeline:
    """Bad samples, random numbers, empty batches, and deaths."""
    args = {"folder": str(folder), "deaths": deaths}
    pipeline = Pipeline.dataset(Records(size)).shuffle("global" if shuffle else "none", seed=3)
    pipeline = pipeline.read().call(die_at, args=args).call(jitter).filter(is_kept, on_empty_batch="skip")
    return pipeline.batch(BATCH).call(total)


def frozen(batch: dict[str, Any]) -> dict[str, Any]:
    """The contents of a batch, to the byte."""
    return {
        name: (str(value.dtype), tuple(value.shape), value.numpy().tobytes())
        if isinstance(value, torch.Tensor)
        else value
        for name, value in batch.items()
    }
