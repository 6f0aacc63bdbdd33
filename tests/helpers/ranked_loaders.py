"""Training processes that build their loader early, late or with half an environment: a module that they import."""

from __future__ import annotations

import importlib
import json
import os
import sys
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import loaderkit
from loaderkit import Pipeline
from loaderkit.errors import ConfigError

NUM_SAMPLES = 22


def built(rank: int | None = None, world_size: int | None = None, *, drop_last: bool = False) -> Any:
    """A loader of the numbers from 0 on."""
    pipeline = Pipeline.dataset(list(range(NUM_SAMPLES))).read().batch(2, drop_last=drop_last).shuffle("global", seed=1)
    return loaderkit.build(pipeline, rank=rank, world_size=world_size)


def save_samples(loader: Any, folder: Path, rank: int) -> None:
    """Write the samples of an epoch to the file of this rank."""
    samples = [sample for batch in loader for sample in batch["0"].tolist()]
    (folder / f"samples-{rank}").write_text(json.dumps(samples))


def init(rank: int, num_ranks: int, folder: Path, name: str = "store") -> None:
    """Initialise the process group over a file."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/{name}", rank=rank, world_size=num_ranks)


def build_then_init(rank: int, num_ranks: int, folder: Path, environment: dict[str, str] | None = None) -> None:
    """What `mp.spawn` runs in training scripts. With Lightning's environment it is a process that its `ddp` strategy started:
    the script builds the loader, and `fit` initialises the process group."""
    os.environ.update(environment or {})
    loader = built()
    init(rank, num_ranks, folder)
    save_samples(loader, folder, rank)
    assert len(loader) == len(built())
    leave()


def build_then_fork(_: int, __: int, folder: Path, num_ranks: int) -> None:
    """Lightning's `ddp_notebook` and `ddp_fork`: the loader is built in the process that forks the ranks."""
    loader = built()
    context = get_context("fork")
    processes = [context.Process(target=_forked, args=(rank, num_ranks, folder, loader)) for rank in range(num_ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in processes))


def _forked(rank: int, num_ranks: int, folder: Path, loader: Any) -> None:
    init(rank, num_ranks, folder)
    save_samples(loader, folder, rank)
    leave()


def leave() -> None:
    """Together: another rank may still be connecting to this one."""
    dist.barrier()
    dist.destroy_process_group()


def init_too_late(rank: int, num_ranks: int, folder: Path, how: str) -> None:
    """The process group is initialised once an epoch has begun, or `len` was asked."""
    loader = built()
    iterator = None
    if how == "len":
        len(loader)
    else:
        iterator = iter(loader)
        next(iterator)
    init(rank, num_ranks, folder)
    rest = [] if iterator is None else [value for batch in iterator for value in batch["0"].tolist()]
    said = []
    for ask in (iter, len, type(loader).start):
        try:
            ask(loader)
        except ConfigError as error:
            said.append(str(error))
    (folder / f"said-{rank}").write_text(json.dumps([rest, said]))
    leave()


def given(rank: int, num_ranks: int, folder: Path) -> None:
    """`rank` and `world_size` of `build` against a process group, and an environment, that say otherwise."""
    os.environ.update(RANK="0", WORLD_SIZE="7")
    loader = built(rank=0, world_size=1)
    early = built(rank=rank, world_size=num_ranks + 1)
    next(iter(early))
    init(rank, num_ranks, folder)
    early.set_epoch(0)
    assert len([value for batch in loader for value in batch["0"].tolist()]) == NUM_SAMPLES
    save_samples(early, folder, rank)
    leave()


def fit_by_lightning(folder: Path, strategy: str) -> None:
    """A script as Lightning's users write it. `ddp` starts it again for every further rank."""
    lightning: Any = importlib.import_module("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(1, 1)
            self.samples: list[int] = []

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            self.samples += batch["0"].tolist()
            loss: torch.Tensor = self.linear(batch["0"].float()[:, None]).sum()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 1e-3)

        def on_train_end(self) -> None:
            (folder / f"samples-{self.global_rank}").write_text(json.dumps(self.samples))

    loader, quiet = built(), dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, **quiet)
    trainer.fit(Module(), loader)


def train_under_torchrun(folder: Path) -> None:
    """torchrun sets RANK and WORLD_SIZE: the loader knows its rank before the process group does."""
    loader = built()
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    assert len(loader) == -(-NUM_SAMPLES // (num_ranks * 2))
    dist.init_process_group("gloo")
    save_samples(loader, folder, rank)
    leave()


if __name__ == "__main__":
    if sys.argv[2] == "torchrun":
        train_under_torchrun(Path(sys.argv[1]))
    else:
        fit_by_lightning(Path(sys.argv[1]), sys.argv[2])
