"""What `loaderkit.metrics.log` writes, read back from the writers' own files."""

from __future__ import annotations

import csv
import gc
import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import ref

import pytest

import loaderkit
from loaderkit import Loader, Pipeline
from loaderkit.metrics import log, writers


def built(name: str = "numbers", **overrides: Any) -> Loader:
    pipeline = Pipeline.dataset(list(range(60))).read().call(plus_one).batch(5).named(name)
    return loaderkit.build(pipeline, overrides=overrides)


def plus_one(sample: dict[str, Any]) -> None:
    sample["0"] = sample["0"] + 1


class Run:
    """`log` as W&B's runs and an Accelerator have it."""

    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, float], int]] = []

    def log(self, data: dict[str, float], step: int | None = None, commit: bool | None = None) -> None:
        assert step is not None
        assert commit is None
        self.logged.append((data, step))


class Scalars:
    """`add_scalar` as SummaryWriter has it."""

    def __init__(self) -> None:
        self.scalars: dict[tuple[str, int], float] = {}

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.scalars[tag, global_step] = scalar_value


@pytest.mark.parametrize("executor", ["inline", "thread"])
def test_values_are_those_since_this_writer_was_last_written_to(executor: str) -> None:
    often, seldom = Run(), Run()
    with built(**{"prefetch.executor": executor}) as loader:
        assert log(loader, often, 0) == {}, "nothing was waited for yet"
        batches = iter(loader)
        for step in range(1, 11):
            next(batches)
            if step % 2 == 0:
                log(loader, often, step)
            if step == 4:
                middle = loader.stats()
                log(loader, seldom, step)
        values = log(loader, seldom, 10)
        now = loader.stats(since=middle)
    assert [step for _, step in often.logged] == [2, 4, 6, 8, 10]
    assert [step for _, step in seldom.logged] == [4, 10]
    assert seldom.logged[1] == (values, 10)
    assert values["loaderkit/numbers/stall_percent"] == pytest.approx(
        sum(value for name, value in values.items() if "stall_percent_" in name)
    )
    assert 0 < values["loaderkit/numbers/stall_percent"] <= 100
    assert values["loaderkit/numbers/samples_per_second"] == pytest.approx(
        5 * values["loaderkit/numbers/batches_per_second"]
    )
    seconds = 6 / values["loaderkit/numbers/batches_per_second"]  # batches since step 4
    assert 0 < seconds <= now.wall_s * 1.0001
    assert values["loaderkit/numbers/ahead_batches"] == 4
    waited = 0.01 * seconds * values["loaderkit/numbers/stall_percent"]
    assert waited == pytest.approx(sum(now.waits_s.values()), abs=1e-4)


def test_two_loaders_do_not_share_names() -> None:
    writer = Scalars()
    with built("train") as train, built("validation") as validation:
        list(train)
        next(iter(validation))
        log(train, writer, 7)
        log(validation, writer, 7)
    assert {tag.split("/")[1] for tag, _ in writer.scalars} == {"train", "validation"}
    assert {step for _, step in writer.scalars} == {7}


@dataclass
class Unhashable:
    """Equal to all others of its class."""

    def add_scalar(self, tag: str, value: float, step: int) -> None: ...


class Slotted:
    """Cannot be weakly referenced."""

    __slots__ = ()
    add_scalar = Unhashable.add_scalar


@pytest.mark.parametrize("make", [Unhashable, Slotted])
def test_each_writer_has_an_account_of_its_own_and_none_that_is_gone_is_kept(make: type[Any]) -> None:
    with built() as loader:
        batches = iter(loader)
        first, second = make(), make()
        next(batches)
        speed = "loaderkit/numbers/batches_per_second"
        assert log(loader, first, 0)[speed] > 0
        assert log(loader, second, 0)[speed] > 0, "it was not written to yet"
        assert log(loader, first, 0)[speed] == 0, "no batch has come since"
        next(batches)
        for _ in range(20):
            assert log(loader, make(), 1)
        kept, writer = writers._LAST[loader], ref(loader)
        assert len(kept) <= 3 or make is Slotted
    del loader, batches
    gc.collect()
    assert writer() is None, "its accounts keep the loader"


class Holding:
    """Has no weak references, and refers to what it writes of."""

    __slots__ = ("loader",)
    add_scalar = Unhashable.add_scalar

    def __init__(self, loader: loaderkit.Loader) -> None:
        self.loader = loader


def test_a_writer_that_holds_the_loader_does_not_keep_it() -> None:
    with built() as loader:
        next(iter(loader))
        assert log(loader, Holding(loader), 0)
        kept = ref(loader)
    del loader
    gc.collect()
    assert kept() is None


class Failing(Unhashable):
    """Fails at its first write."""

    num_calls = 0

    def log_metrics(self, values: dict[str, float], step: int) -> None:
        self.num_calls += 1
        if self.num_calls == 1:
            raise OSError("no network")


def test_what_could_not_be_written_comes_with_the_next_write() -> None:
    writer = Failing()
    with built() as loader:
        next(iter(loader))
        with pytest.raises(OSError, match="no network"):
            log(loader, writer, 0)
        assert log(loader, writer, 1)["loaderkit/numbers/batches_per_second"] > 0


def test_what_is_watched_is_refused() -> None:
    watched: Any = loaderkit.watch([1, 2])
    with pytest.raises(TypeError, match=r"loaderkit\.watch"):
        log(watched, Unhashable(), 3)


def test_after_an_error_values_are_those_of_the_new_run() -> None:
    writer = Run()
    with loaderkit.build(Pipeline.dataset(list(range(9))).read().call(bad_at_five).batch(3)) as loader:
        with pytest.raises(loaderkit.errors.StageError):
            for _ in loader:
                log(loader, writer, 1)
        loader.set_epoch(0)
        next(iter(loader))
        values = log(loader, writer, 2)
    assert values["loaderkit/pipeline/batches_per_second"] > 0


def bad_at_five(sample: dict[str, Any]) -> None:
    if sample["0"] == 5:
        raise ValueError("five")


def test_sources_have_their_shares() -> None:
    mixed = Pipeline.mix({"a": Pipeline.dataset([0] * 40), "b": Pipeline.dataset([1] * 40)}, {"a": 3, "b": 1}).read()
    with loaderkit.build(mixed.batch(20)) as loader:
        next(iter(loader))
        values = log(loader, Run(), 0)
    shares = {name.rpartition("/")[2]: value for name, value in values.items() if "share_" in name}
    assert shares == {"share_a": 0.75, "share_b": 0.25}


def test_what_is_no_writer() -> None:
    class Module(Run):
        def log_dict(self) -> None: ...

    with built() as loader:
        with pytest.raises(TypeError, match="not dict: it has none of these"):
            log(loader, {}, 0)
        with pytest.raises(TypeError, match="not Module: it logs single values: give its `logger`"):
            log(loader, Module(), 0)


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore")
def test_tensorboard_reads_it_back(tmp_path: Path) -> None:
    events: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    for module in ("torch.utils.tensorboard", "tensorboardX"):
        written: dict[int, dict[str, float]] = {}
        writer = importlib.import_module(module).SummaryWriter(str(tmp_path / module))
        with built() as loader:
            for step, _ in enumerate(loader):
                written[step] = log(loader, writer, step)
        writer.close()
        read = events.EventAccumulator(str(tmp_path / module)).Reload()
        assert len(written) == 12
        assert {*read.Tags()["scalars"]} == written[0].keys()
        for tag in written[0]:
            found = {event.step: event.value for event in read.Scalars(tag)}
            assert found == pytest.approx({step: values[tag] for step, values in written.items()}, rel=1e-6)


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore")
def test_lightnings_loggers(tmp_path: Path) -> None:
    logger = importlib.import_module("lightning.pytorch.loggers").CSVLogger(tmp_path)
    with built() as loader:
        next(iter(loader))
        values = log(loader, logger, 3)
    logger.save()
    with (Path(logger.log_dir) / "metrics.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert float(row["loaderkit/numbers/samples_per_second"]) == values["loaderkit/numbers/samples_per_second"]
    assert row["step"] == "3"
