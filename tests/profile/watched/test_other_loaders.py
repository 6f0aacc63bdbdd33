"""Loaders of other libraries around a DataLoader, or without one: they work as ever, and it is seen what is inside."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import loaderkit


def pairs(number: int = 32) -> TensorDataset:
    return TensorDataset(torch.arange(number * 4).reshape(number, 4).float(), torch.arange(number))


def with_accelerate() -> None:
    accelerate = importlib.import_module("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    prepared = accelerator.prepare(DataLoader(pairs(), batch_size=4, num_workers=1))
    watched: Any = loaderkit.watch(prepared)
    assert [batch[1].tolist() for batch in watched] == [batch[1].tolist() for batch in prepared]
    assert watched.stats().arguments.num_workers == 1
    # The other way round it is not lost that it is a DataLoader.
    other: Any = loaderkit.watch(DataLoader(pairs(), batch_size=4))
    assert len([*accelerator.prepare(other)]) == 8
    assert other.stats().num_batches == 0


def with_lightning() -> None:
    lightning: Any = importlib.import_module("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, number: int) -> Any:
            return self.layer(batch[0]).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    watched: Any = loaderkit.watch(DataLoader(pairs(), batch_size=4, num_workers=1))
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    lightning.Trainer(accelerator="cpu", max_epochs=2, **quiet).fit(Module(), watched)
    stats = watched.stats()
    assert (stats.num_batches, stats.watched.num_epochs, stats.arguments.num_workers) == (16, 2, 1)


def with_webdataset() -> None:
    webdataset = importlib.import_module("webdataset")
    watched: Any = loaderkit.watch(webdataset.WebLoader(pairs(), batch_size=4, num_workers=2).slice(6))
    assert len([*watched]) == 6
    stats = watched.stats()
    assert (stats.num_samples, stats.arguments.num_workers) == (24, 2)
    assert [row.name for row in stats.stages] == ["dataset", "handover"]


def with_datasets() -> None:
    datasets = importlib.import_module("datasets")
    rows = datasets.Dataset.from_dict({"x": [*range(12)]})
    watched: Any = loaderkit.watch(rows)
    assert [row["x"] for row in watched] == [*range(12)]
    assert (len(watched), watched[3], watched.column_names) == (12, {"x": 3}, ["x"])
    stats = watched.stats()
    assert (stats.num_samples, stats.kind) == (12, "datasets.arrow_dataset.Dataset")
    inside: Any = loaderkit.watch(DataLoader(rows.with_format("torch"), batch_size=4))
    assert len([*inside]) == 3
    assert inside.stats().num_samples == 12


def with_dali() -> None:
    dali: Any = importlib.import_module("nvidia.dali")
    plugin: Any = importlib.import_module("nvidia.dali.plugin.pytorch")

    @dali.pipeline_def(batch_size=4, num_threads=1, device_id=None)  # type: ignore[untyped-decorator]
    def numbers() -> Any:
        return dali.fn.random.uniform(range=[0.0, 1.0], shape=[3])

    iterator = plugin.DALIGenericIterator([numbers()], ["x"], size=20)
    watched: Any = loaderkit.watch(iterator)
    assert [tuple(batch[0]["x"].shape) for batch in watched] == [(4, 3)] * 5
    stats = watched.stats()
    assert (stats.num_batches, stats.num_samples) == (5, 20)
    assert stats.kind.startswith("nvidia.dali")
    assert [row.name for row in stats.stages] == ["iterable"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "run",
    [
        with_webdataset,
        with_dali,
        *(pytest.param(run, marks=pytest.mark.integration) for run in (with_accelerate, with_lightning, with_datasets)),
    ],
)
def test_they_work_as_ever(run: Callable[[], None]) -> None:
    run()


class Numbers(IterableDataset[int]):
    """Each worker gives all of them."""

    def __iter__(self) -> Any:
        for number in range(24):
            torch.randn(200, 200) @ torch.randn(200, 200)
            yield number


def test_more_workers_of_an_iterable_dataset_come_with_a_warning() -> None:
    watched = loaderkit.watch(DataLoader(Numbers(), batch_size=2))
    for _ in watched:
        pass
    verdict = watched.stats().verdict()
    assert verdict.stage == "dataset"
    if "num_workers=" in verdict.change:
        assert "if it splits its samples by get_worker_info()" in verdict.change
