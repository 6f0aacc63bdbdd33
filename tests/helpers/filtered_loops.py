"""Training by Lightning and the Trainer of transformers with batches that a filter emptied, or none: a program.

It writes down what was trained, or the error:

python filtered_loops.py lightning|transformers FOLDER
"""

from __future__ import annotations

import importlib
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from filtering import keep_but, numbers
from waiting import messages_with

import loaderkit
from loaderkit.errors import LoaderkitError

NUM_EPOCHS = 2
RESUMED_STEPS = 1, 3, 5, 6, 7


def built(on_empty_batch: Literal["raise", "skip"] = "raise", *, empties: bool = True) -> Any:
    """A loader of six batches an epoch, of which the filter empties the second if it `empties` any."""
    filtered = numbers(24).filter(keep_but, args={"low": 4, "high": 8 if empties else 6}, on_empty_batch=on_empty_batch)
    return loaderkit.build(filtered.batch(4))


def by_lightning(folder: Path) -> dict[str, Any]:
    lightning: Any = importlib.import_module("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(1, 1)
            self.num_trained = self.num_validated = 0

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            self.num_trained += 1
            loss: torch.Tensor = self.linear(batch["x"].float()[:, None]).sum()
            return loss

        def validation_step(self, batch: dict[str, torch.Tensor], _: int) -> None:
            pass

        def on_validation_epoch_end(self) -> None:
            self.num_validated += 1

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 1e-3)

    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)

    def fit(loader: Any, validation: Any, *callbacks: Any) -> dict[str, Any]:
        settings = quiet | {"enable_checkpointing": bool(callbacks), "callbacks": list(callbacks)}
        trainer = lightning.Trainer(
            accelerator="cpu", max_epochs=NUM_EPOCHS, num_sanity_val_steps=0, default_root_dir=folder, **settings
        )
        module, error = Module(), None
        try:
            trainer.fit(module, loader, validation)
        except LoaderkitError as raised:
            error = str(raised)
        return {"trained": module.num_trained, "validated": module.num_validated, "error": error}

    def said_of_checkpoints() -> list[int]:
        """The numbers of warnings where it saves within epochs, and at their ends."""
        saving = lightning.pytorch.callbacks.ModelCheckpoint
        said = []
        for when in {"every_n_train_steps": 2}, {"every_n_epochs": 1}:
            with messages_with("resumed from this checkpoint it leaves that batch out") as messages:
                fit(built("skip"), None, saving(folder, "{step}", save_top_k=-1, **when))
            said.append(messages.qsize())
        return said

    return {
        "none empty": fit(built(empties=False), built(empties=False)),
        "raise": fit(built("raise"), built(empties=False)),
        "skip": fit(built("skip"), built(empties=False)),
        "skip in validation": fit(built(empties=False), built("skip")),
        "said of a checkpoint": said_of_checkpoints(),
    }


def by_transformers(folder: Path) -> dict[str, Any]:
    transformers: Any = importlib.import_module("transformers")

    class Trainer(transformers.Trainer):  # type: ignore[misc]
        loader: Any

        def get_train_dataloader(self) -> Any:
            self.trained: list[list[int]] = []
            return self.loader

        def compute_loss(self, model: Any, inputs: dict[str, torch.Tensor], *_: Any, **__: Any) -> torch.Tensor:
            self.trained.append(inputs["x"].tolist())
            loss: torch.Tensor = model(inputs["x"].float()[:, None]).sum()
            return loss

    def train(loader: Any, into: Path, resumed: str | None = None, max_steps: int = -1) -> list[list[int]] | str:
        arguments = transformers.TrainingArguments(
            str(into),
            num_train_epochs=NUM_EPOCHS,
            max_steps=max_steps,
            save_strategy="no" if resumed else "steps",
            save_steps=1,
            report_to=[],
            use_cpu=True,
        )
        trainer = Trainer(model=torch.nn.Linear(1, 1), args=arguments)
        trainer.loader = loader
        try:
            trainer.train(resume_from_checkpoint=resumed)
        except ValueError as raised:  # also loaderkit's
            return str(raised)
        except LoaderkitError as raised:
            return str(raised)
        return trainer.trained

    runs: dict[str, Any] = {"raise": train(built("raise"), folder), "without max_steps": train(built("skip"), folder)}
    for name, loader, max_steps in (
        ("none empty", partial(built, empties=False), -1),
        ("skip", partial(built, "skip"), 10),
    ):
        into = folder / name
        runs[name] = {"whole": train(loader(), into, None, max_steps)}
        runs[name]["resumed"] = [
            train(loader(), into, str(into / f"checkpoint-{step}"), max_steps) for step in RESUMED_STEPS
        ]
    return runs


if __name__ == "__main__":
    library, place = sys.argv[1], Path(sys.argv[2])
    made = {"lightning": by_lightning, "transformers": by_transformers}[library](place)
    (place / "runs.json").write_text(json.dumps(made))
