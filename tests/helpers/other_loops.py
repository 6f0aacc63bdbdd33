"""Training by Lightning, Accelerate and the Trainer of transformers: a program, as users write it.

It writes down what was trained:

python other_loops.py lightning|accelerate|transformers FOLDER dataset|iterable
"""

from __future__ import annotations

import importlib
import json
import random
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import loaderkit
from loaderkit import Pipeline

NUM_SAMPLES, BATCH_SIZE, NUM_EPOCHS = 13, 2, 3
NUM_BATCHES = 7
KINDS = ("dataset", "iterable")


class Shuffled:
    """An iterable of the numbers from 0 on, in another order in each epoch; it has a state."""

    def __init__(self) -> None:
        self.epoch = self.num_read = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        return {"num_read": self.num_read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_read = state["num_read"]

    def __iter__(self) -> Iterator[int]:
        order = random.Random(self.epoch).sample(range(NUM_SAMPLES), NUM_SAMPLES)
        while self.num_read < NUM_SAMPLES:
            self.num_read += 1
            yield order[self.num_read - 1]


def built(rank: int | None = None, world_size: int | None = None, *, kind: str = "dataset") -> Any:
    """A loader of the numbers from 0 on."""
    if kind == "iterable":
        pipeline = Pipeline.iterable(Shuffled(), length=NUM_SAMPLES).read().batch(BATCH_SIZE)
    else:
        pipeline = Pipeline.dataset(list(range(NUM_SAMPLES))).read().batch(BATCH_SIZE).shuffle("global", seed=1)
    return loaderkit.build(pipeline, rank=rank, world_size=world_size)


def numbers(batches: Any) -> list[list[int]]:
    """Those in each batch."""
    return [batch["0"].tolist() for batch in batches]


def fit(kind: str, checkpoints: Path, resumed: Path | None, **when: Any) -> list[list[int]]:
    """Train by Lightning, saving after every step or epoch, or resume; the numbers that the module got."""
    lightning: Any = importlib.import_module("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(1, 1)
            self.trained: list[Any] = []

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            self.trained.append(batch)
            loss: torch.Tensor = self.linear(batch["0"].float()[:, None]).sum()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 1e-3)

    saving = lightning.pytorch.callbacks.ModelCheckpoint(checkpoints, "{step}", save_top_k=-1, **when)
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    module = Module()
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=NUM_EPOCHS, callbacks=[saving], **quiet)
    trainer.fit(module, built(kind=kind), ckpt_path=resumed)
    return numbers(module.trained)


def by_lightning(folder: Path, kind: str) -> dict[str, Any]:
    runs: dict[str, Any] = {"whole": fit(kind, folder / "steps", None, every_n_train_steps=1)}
    fit(kind, folder / "epochs", None, every_n_epochs=1)
    runs["resumed"] = [
        [int(path.stem.partition("=")[2]), fit(kind, folder / "ignored", path)]
        for path in [*folder.glob("steps/*.ckpt"), *folder.glob("epochs/*.ckpt")]
    ]
    return runs


def by_transformers(folder: Path, kind: str) -> dict[str, Any]:
    transformers: Any = importlib.import_module("transformers")

    class Trainer(transformers.Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            self.trained: list[Any] = []
            return built(kind=kind)

        def compute_loss(self, model: Any, inputs: dict[str, torch.Tensor], *_: Any, **__: Any) -> torch.Tensor:
            self.trained.append(inputs)
            loss: torch.Tensor = model(inputs["0"].float()[:, None]).sum()
            return loss

    def train(resumed: str | None, saving: str) -> list[list[int]]:
        arguments = transformers.TrainingArguments(
            str(folder), num_train_epochs=NUM_EPOCHS, save_strategy=saving, save_steps=1, report_to=[], use_cpu=True
        )
        trainer = Trainer(model=torch.nn.Linear(1, 1), args=arguments)
        trainer.train(resume_from_checkpoint=resumed)
        return numbers(trainer.trained)

    runs: dict[str, Any] = {"whole": train(None, "steps")}
    runs["resumed"] = [
        [step, train(str(folder / f"checkpoint-{step}"), "no")] for step in range(1, NUM_EPOCHS * NUM_BATCHES)
    ]
    return runs


def by_accelerate(folder: Path, kind: str) -> dict[str, Any]:
    accelerate: Any = importlib.import_module("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    loader = built(kind=kind)
    _, prepared = accelerator.prepare(torch.nn.Linear(1, 1), loader)
    assert prepared is loader
    by_hand = importlib.import_module("accelerate.data_loader").prepare_data_loader
    for prepare in (accelerator.prepare_data_loader, partial(by_hand, num_processes=2, process_index=1)):
        with pytest.raises(AttributeError, match="Iterate over the loader itself"):
            prepare(loader)
    accelerator.register_for_checkpointing(loader)
    whole: list[list[int]] = []
    for _ in range(NUM_EPOCHS):
        for batch in loader:
            whole += numbers([batch])
            accelerator.save_state(folder / f"{len(whole)}")
    runs: dict[str, Any] = {"whole": whole, "resumed": []}
    for step in range(NUM_EPOCHS * NUM_BATCHES):
        epoch, num_done = divmod(step, NUM_BATCHES)
        loader.set_epoch(epoch)
        trained = numbers(accelerate.skip_first_batches(loader, num_done))
        runs["resumed"].append([step, trained + [one for _ in range(epoch + 1, NUM_EPOCHS) for one in numbers(loader)]])
        if step:
            accelerator.load_state(folder / f"{step}")
            loaded = [one for _ in range(loader.epoch, NUM_EPOCHS) for one in numbers(loader)]
            runs["resumed"].append([step, loaded])
    return runs


if __name__ == "__main__":
    library, place, source_kind = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    run = {"lightning": by_lightning, "transformers": by_transformers, "accelerate": by_accelerate}[library]
    made = run(place, source_kind)
    (place / "runs.json").write_text(json.dumps(made))
