"""A small data set of numbers, and loaders of it in another process: what the tests of `executor: process` share."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from typing import Any

import numpy as np
import torch

import loaderkit
from loaderkit import Pipeline

PROCESS = {"prefetch.executor": "process", "prefetch.concurrency": 2}
TWO_PROCESSES = {**PROCESS, "prefetch.processes": 2}


class Numbers:
    """Sample i holds the number i, and eight thousand bytes that say so. All of it has a type: no others are looked at to
    learn it. Without the text where Ctrl-C comes at any moment: NumPy drops the exception while it makes an np.str_."""

    def __init__(self, size: int = 64, *, has_text: bool = True) -> None:
        self.size, self.has_text = size, has_text

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        text = {"text": np.str_(f"number {index}")} if self.has_text else {}
        return {"x": torch.tensor(index), "filling": torch.full((1000,), index), **text}


def numbers(size: int = 64, batch: int = 8, *, has_text: bool = True) -> Pipeline:
    return Pipeline.dataset(Numbers(size, has_text=has_text)).shuffle("none").read().batch(batch)


def build(pipeline: Pipeline, **overrides: Any) -> loaderkit.Loader:
    return loaderkit.build(pipeline, overrides={**PROCESS, **overrides})


def pid_of(loader: loaderkit.Loader) -> int:
    return pids_of(loader)[0]


def pids_of(loader: loaderkit.Loader) -> list[int]:
    return list(loader.stats().tuning.pids or ())


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def hang(sample: dict[str, Any]) -> None:
    """Never comes back from sample 20."""
    if sample["__key__"] == "20":
        threading.Event().wait(600)


def shout(batch: dict[str, Any]) -> None:
    """Writes to stdout and stderr as a C library would, past Python's `sys.stdout`."""
    for descriptor in (1, 2):
        with suppress(OSError):
            os.write(descriptor, b"loads" * 2000)
