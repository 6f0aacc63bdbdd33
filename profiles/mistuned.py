"""Pipelines with settings that are known to be wrong, drawn at random, for `profiles.tune`. What takes time is as in
`profiles.bottlenecks`; everything here can be sent to another process."""

from __future__ import annotations

import io
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from loaderkit import Pipeline
from loaderkit.profile.experiments.loops import Step, sleep_step


def work_in_python(turns: int) -> int:
    """Hold the GIL for a loop of `turns` turns."""
    value = 1
    for _ in range(turns):
        value = (value * 1103515245 + 12345) & 0x7FFFFFFF
    return value


@dataclass
class Items:
    """A data set. An item waits for `latency_s`, one in `one_in` for `straggler_s` instead; with more than `most_at_once` the
    store gets slower; then `turns` of Python."""

    latency_s: float = 0.0
    turns: int = 0
    straggler_s: float = 0.0
    one_in: int = 50
    most_at_once: int | None = None
    num_active: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, lock=threading.Lock())

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> dict[str, Any]:
        seconds = self.straggler_s if self.straggler_s and index % self.one_in == 7 else self.latency_s
        if self.most_at_once is not None:
            with self.lock:
                self.num_active += 1
                seconds *= max(1.0, self.num_active / self.most_at_once) ** 2
        if seconds:
            time.sleep(seconds)
        if self.most_at_once is not None:
            with self.lock:
                self.num_active -= 1
        return {"x": torch.tensor([index, work_in_python(self.turns)])}


def wait(sample: dict[str, Any], seconds: float) -> None:
    """A `call` that waits for something."""
    time.sleep(seconds)


def busy_step(turns: int) -> Step:
    """A training step that is busy in Python."""
    return lambda batch: work_in_python(turns)


def no_step(batch: Any) -> None:
    """The pipeline is the limit."""


@dataclass(frozen=True)
class Case:
    """A pipeline, its wrong settings, the ones known to be right, and what the loop does with a batch."""

    pipeline: Pipeline
    wrong: dict[str, Any]
    right: dict[str, Any]
    step: Step = no_step


def data(size: int, **items: Any) -> Pipeline:
    return Pipeline.dataset(Items(**items)).shuffle("none").read().batch(size)


def photographs(folder: Path, size: int) -> Pipeline:
    """JPEGs of `size` pixels squared, in files."""
    folder = folder / f"photographs-{size}"
    folder.mkdir(exist_ok=True)
    for number in range(64):
        coarse = Image.fromarray(np.random.default_rng(number).integers(0, 255, (size // 8, size // 8, 3), np.uint8))
        data = io.BytesIO()
        coarse.resize((size, size), Image.Resampling.BICUBIC).save(data, "JPEG", quality=90)
        (folder / f"{number:03}.jpg").write_bytes(data.getvalue())
    return Pipeline.files(str(folder), include="*.jpg").read().decode().center_crop(128).batch(8)


def slow_store(draw: random.Random, folder: Path) -> Case:
    wrong = {"prefetch.concurrency": draw.choice([1, 2])}
    return Case(data(8, latency_s=draw.uniform(2e-3, 1e-2)), wrong, {"prefetch.concurrency": 16})


def slow_store_trained(draw: random.Random, folder: Path) -> Case:
    latency_s = draw.uniform(4e-3, 1e-2)
    step = sleep_step(8 * latency_s * draw.uniform(0.4, 0.7))
    return Case(data(8, latency_s=latency_s), {"prefetch.concurrency": 1}, {"prefetch.concurrency": 4}, step)


def slow_call(draw: random.Random, folder: Path) -> Case:
    pipeline = Pipeline.dataset(Items()).read().call(wait, args={"seconds": draw.uniform(2e-3, 8e-3)}).batch(8)
    wrong = {"stages.call.workers": 1, "prefetch.concurrency": 3}
    return Case(pipeline, wrong, {"stages.call.workers": 6, "prefetch.concurrency": 8})


def holds_the_gil(draw: random.Random, folder: Path) -> Case:
    wrong = {"prefetch.concurrency": draw.choice([2, 4])}
    right = {"prefetch.executor": "process", "prefetch.processes": 2, "prefetch.concurrency": 2}
    return Case(data(8, turns=draw.randint(20_000, 80_000)), wrong, right)


def pictures(draw: random.Random, folder: Path) -> Case:
    right = {"prefetch.concurrency": 2}
    return Case(photographs(folder, draw.choice([256, 384, 512])), {"prefetch.concurrency": 1}, right)


def stragglers(draw: random.Random, folder: Path) -> Case:
    times = {"latency_s": 1e-3, "straggler_s": draw.uniform(0.1, 0.3), "one_in": draw.randint(40, 60)}
    return Case(data(8, **times), {"prefetch.batches": 1, "prefetch.concurrency": 8}, {"prefetch.batches": 16})


def tiny_batches(draw: random.Random, folder: Path) -> Case:
    wrong = {"prefetch.executor": "process", "prefetch.concurrency": draw.choice([2, 4])}
    right = {"prefetch.executor": "inline", "prefetch.concurrency": "auto"}
    return Case(data(draw.choice([1, 2, 4])), wrong, right)


def crowded_store(draw: random.Random, folder: Path) -> Case:
    wrong = {"prefetch.concurrency": draw.choice([32, 64])}
    return Case(data(8, latency_s=draw.uniform(2e-3, 6e-3), most_at_once=8), wrong, {"prefetch.concurrency": 8})


def busy_consumer(draw: random.Random, folder: Path) -> Case:
    turns = draw.randint(20_000, 60_000)
    right = {"prefetch.executor": "process"}
    return Case(data(8, turns=turns), {"prefetch.concurrency": 2}, right, busy_step(8 * turns))


def without_workers(draw: random.Random, folder: Path) -> Case:
    pipeline = data(8, latency_s=draw.uniform(1e-3, 4e-3))
    right = {"prefetch.executor": "thread", "prefetch.concurrency": 8}
    return Case(pipeline, {"prefetch.executor": "inline"}, right, sleep_step(draw.uniform(2e-3, 1e-2)))


KINDS: Sequence[Callable[[random.Random, Path], Case]] = (
    slow_store,
    slow_store_trained,
    slow_call,
    holds_the_gil,
    pictures,
    stragglers,
    tiny_batches,
    crowded_store,
    busy_consumer,
    without_workers,
)
