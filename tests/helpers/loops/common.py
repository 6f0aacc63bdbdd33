"""What the programs of all loops share: the data, the model, and what a rank writes down of its steps.

python -m loops LOOP FOLDER ──> a process that imports the loop's library once ──> forks of it, which are the ranks of each run
"""

from __future__ import annotations

import importlib
import json
import os
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Dataset

import loaderkit

GLOBAL_BATCH, STEPS_OF_EPOCH, NUM_EPOCHS = 12, 7, 2
NUM_STEPS = STEPS_OF_EPOCH * NUM_EPOCHS
NUM_FEATURES = 8


class Rows(Dataset[dict[str, Any]]):
    """Number i with a vector of its own; the last rows make no whole batch."""

    def __len__(self) -> int:
        return GLOBAL_BATCH * STEPS_OF_EPOCH + 5

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"number": index, "x": np.random.default_rng(index).standard_normal(NUM_FEATURES, dtype=np.float32)}


@dataclass(frozen=True, kw_only=True)
class Run:
    """What the ranks of one run do: train up to the last step, or until they are told to end."""

    name: str
    num_ranks: int
    saves_at: int | None = None
    """After this step it saves to `checkpoints`."""
    resumes: bool = False
    """It begins with what `checkpoints` has: the step `resumes_at`, or the newest."""
    resumes_at: int | None = None
    signalled_at: int | None = None
    """In this step SIGTERM comes; what is saved then, or was before, is in `checkpoints`."""
    checkpoints: str
    logs: bool = False


@dataclass(kw_only=True)
class Rank:
    """A rank of a run, and the account of its steps."""

    run: Run
    number: int
    folder: Path
    lines: Any = field(init=False)

    def __post_init__(self) -> None:
        self.lines = open(self.folder / f"{self.run.name}-{self.number}.jsonl", "w")  # noqa: SIM115 - as long as the process

    @property
    def checkpoints(self) -> Path:
        """Where the run saves, and what it resumes from."""
        return self.folder / self.run.checkpoints

    @property
    def logs(self) -> Path:
        """Where the loop's own logger writes."""
        return self.folder / "logs"

    def trained(self, step: int, batch: Mapping[str, Any], *losses: torch.Tensor) -> None:
        """Write a step down, and let the signal come where it is due."""
        self.write({"step": step, "numbers": batch["number"].tolist(), "losses": [loss.item() for loss in losses]})
        if step == self.run.signalled_at:
            self.signal()

    def logged(self, step: int, values: Mapping[str, float]) -> None:
        """What `loaderkit.metrics.log` has returned."""
        self.write({"step": step, "logged": dict(values)})

    def write(self, line: dict[str, Any]) -> None:
        print(json.dumps(line), file=self.lines, flush=True)

    def signal(self) -> None:
        """SIGTERM to all ranks, wherever they are, as launchers send it."""
        if self.number == 0:
            os.killpg(os.getpgrp(), signal.SIGTERM)

    def loader(self) -> loaderkit.Loader:
        """Its global batch is the same for any number of ranks."""
        pipeline = loaderkit.Pipeline.dataset(Rows()).shuffle(seed=3).read()
        return loaderkit.build(pipeline.batch(GLOBAL_BATCH // self.run.num_ranks, drop_last=True).named("rows"))

    def notice(self) -> loaderkit.CheckpointManager:
        """By which all ranks agree on the step after which they end."""
        return loaderkit.CheckpointManager(self.checkpoints, every=1000, notice={"signals": ["SIGTERM"]})

    def begin_group(self) -> None:
        """For libraries that take a process group that is there already. Without a port that others might take."""
        place = f"file://{self.folder}/{self.run.name}.store"
        dist.init_process_group("gloo", init_method=place, rank=self.number, world_size=self.run.num_ranks)


def train_with_manager(
    rank: Rank,
    loader: loaderkit.Loader,
    epochs: Iterable[Any],
    state: dict[str, Any],
    descend: Callable[[Any], Sequence[torch.Tensor]],
) -> None:
    """A loop of one's own: `epochs` gives the batches of the next epoch each time, `descend` takes a step and returns its
    losses."""
    writer: Any = None
    if rank.run.logs and rank.number == 0:
        writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(rank.logs)
    with loader, rank.notice() as checkpoints:
        step = (checkpoints.restore(state, step=rank.run.resumes_at) or 0) if rank.run.resumes else 0
        while step < NUM_STEPS:
            for batch in epochs:
                step += 1
                rank.trained(step, batch, *descend(batch))
                if writer is not None:
                    rank.logged(step, loaderkit.metrics.log(loader, writer, step))
                checkpoints.save(step, state, force=step == rank.run.saves_at)
                if checkpoints.reached_preemption(step):
                    return
    if writer is not None:
        writer.close()


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)  # the same weights on all ranks
    return torch.nn.Sequential(torch.nn.Linear(NUM_FEATURES, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def loss_of(model: Any, batch: Mapping[str, torch.Tensor]) -> Any:
    """A scalar tensor."""
    return (model(batch["x"]).squeeze(1) - batch["x"].sum(1)).square().mean()


def scalars_in(folder: Path) -> dict[int, dict[str, float]]:
    """The loader's scalars in the event files of TensorBoard below a folder, by step."""
    events: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    found: dict[int, dict[str, float]] = {}
    for place in {path.parent for path in folder.rglob("events.out.tfevents.*")}:
        read = events.EventAccumulator(str(place)).Reload()
        for tag in read.Tags()["scalars"]:
            if tag.startswith("loaderkit/"):
                for event in read.Scalars(tag):
                    found.setdefault(event.step, {})[tag] = event.value
    return found
