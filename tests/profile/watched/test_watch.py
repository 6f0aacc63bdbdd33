"""`loaderkit.watch` gives what is watched, unchanged: the same objects in the same order, and everything else that it has."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import loaderkit
from loaderkit import Pipeline


def pairs(number: int = 12) -> TensorDataset:
    return TensorDataset(torch.arange(number), torch.arange(number) * 2)


def test_the_very_same_objects_come_in_order(rng: random.Random) -> None:
    batches = [object() for _ in range(rng.randrange(1, 50))]
    watched: Any = loaderkit.watch(batches)
    for _ in range(3):
        assert all(one is other for one, other in zip(watched, batches, strict=True))
    assert len(watched) == len(batches)
    assert watched[0] is batches[0]
    assert watched.stats().num_batches == 3 * len(batches)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_dataloader_gives_what_it_gives_alone(num_workers: int) -> None:
    made = []
    for watch in (False, True):
        torch.manual_seed(7)
        loader: Any = DataLoader(pairs(), batch_size=4, shuffle=True, num_workers=num_workers)
        loader = loaderkit.watch(loader) if watch else loader
        made.append(
            [[field.tolist() for field in batch] for _ in range(2) for batch in loader] + [torch.rand(1).item()]
        )
    assert made[0] == made[1]  # and the generators were drawn from as often


def test_all_else_is_that_of_the_loader() -> None:
    sampler: Any = DistributedSampler(pairs(), num_replicas=2, rank=1)
    loader = DataLoader(pairs(), batch_size=3, sampler=sampler)
    watched: Any = loaderkit.watch(loader)
    is_one = isinstance(watched, DataLoader)
    assert is_one
    assert watched.dataset is loader.dataset
    watched.sampler.set_epoch(3)
    assert sampler.epoch == 3
    watched.mark = 5
    assert loader.mark == 5  # type: ignore[attr-defined]
    del watched.mark
    assert not hasattr(loader, "mark")
    assert {"batch_size", "stats", "profile", "close"} <= {*dir(watched)}
    with pytest.raises(AttributeError, match="no_such"):
        _ = watched.no_such
    with pytest.raises(ValueError, match="batch_size"):
        watched.batch_size = 5  # as a DataLoader has it
    with pytest.raises(TypeError, match="cannot be pickled"):
        watched.__reduce_ex__(2)


def test_what_has_no_length_has_none_when_watched() -> None:
    watched: Any = loaderkit.watch(iter([1, 2]))
    assert not hasattr(watched, "__len__")
    assert next(watched) == 1
    assert [*watched] == [2]
    assert watched.stats().num_batches == 2
    assert not hasattr(iter(watched), "__len__")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_iterator_of_a_loader_has_the_length_that_it_has_alone(num_workers: int) -> None:
    loader = DataLoader(pairs(), batch_size=2, num_workers=num_workers)
    iterator: Any = iter(loaderkit.watch(loader))
    assert len(iterator) == len(loader)
    assert len([*iterator]) == len(loader)


def test_watches_may_be_nested_and_left_early() -> None:
    inner = loaderkit.watch(DataLoader(pairs(), batch_size=2, num_workers=2))
    outer = loaderkit.watch(inner)
    assert isinstance(outer, DataLoader)
    for batch in outer:
        assert batch[0].tolist() == [0, 1]
        break
    assert len([*outer]) == 6
    for watched in (inner, outer):
        stats = watched.stats()
        assert (stats.num_batches, stats.num_samples, stats.watched.num_epochs) == (7, 14, 2)
        assert [row.name for row in stats.stages] == ["dataset", "handover"]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_stateful_loader_goes_on_where_it_was() -> None:
    def make() -> Any:
        return loaderkit.watch(StatefulDataLoader(pairs(), batch_size=2, num_workers=1))

    watched, given = make(), []
    for batch in watched:
        given.append(batch[0].tolist())
        if len(given) == 2:
            break
    state = watched.state_dict()
    other = make()
    other.load_state_dict(state)
    given += [batch[0].tolist() for batch in other]
    assert given == [batch[0].tolist() for batch in DataLoader(pairs(), batch_size=2)]
    assert other.stats().arguments.num_workers == 1


def test_errors_pass_and_the_loop_may_go_on() -> None:
    class Broken:
        def __init__(self) -> None:
            self.num = 0

        def __iter__(self) -> Iterator[int]:
            return self

        def __next__(self) -> int:
            self.num += 1
            if self.num == 2:
                raise KeyError("lost")
            return self.num

    watched = loaderkit.watch(Broken())
    iterator = iter(watched)
    assert next(iterator) == 1
    with pytest.raises(KeyError, match="lost"):
        next(iterator)
    assert next(iterator) == 3
    assert watched.stats().num_batches == 2


def test_close_closes_what_is_watched() -> None:
    closed = []

    def generate() -> Iterator[int]:
        try:
            yield 1
            yield 2
        finally:
            closed.append(True)

    with loaderkit.watch(generate()) as watched:
        assert next(iter(watched)) == 1
    watched.close()
    assert closed == [True]


def test_a_loader_of_ours_is_returned_as_it_is_and_a_number_refused() -> None:
    number: Any = 5
    with loaderkit.build(Pipeline.dataset([1, 2]).read().batch(1)) as loader:
        same: Any = loaderkit.watch(loader)
        assert same is loader
    with pytest.raises(TypeError, match="a int cannot be iterated over"):
        loaderkit.watch(number)


def test_workers_end_as_early_as_they_do_alone() -> None:
    watched = loaderkit.watch(DataLoader(pairs(), batch_size=2, num_workers=1))
    iterator: Any = iter(watched)
    next(iterator)
    worker = iterator._workers[0]
    assert worker.is_alive()
    del iterator
    assert not worker.is_alive()
    assert watched.stats().num_batches == 1  # and nothing is lost


def test_a_report_is_one_as_of_a_loader_and_leaves_out_what_is_not_known() -> None:
    watched = loaderkit.watch(DataLoader(pairs(), batch_size=2), name="mine")
    with watched.profile() as report:
        for _ in watched:
            pass
    found = type(report.result).from_json(report.result.to_json())
    assert found.name == "mine"
    assert found.num_samples == 12
    assert [row.name for row in found.stages] == ["dataset", "collate"]
    assert (found.slowest, found.what_if, found.patch, found.stages[0].p50_s) == ([], [], None, None)
    assert found.config["num_workers"] == 0
    assert "mine: the loop waited" in str(report)
    with pytest.raises(TypeError, match="another kind of loader"):
        watched.stats(since=None).since(object())  # type: ignore[arg-type]


@pytest.mark.prove
def test_an_iterator_that_is_open_when_python_ends_goes_without_a_word() -> None:
    program = """
import torch, loaderkit
from torch.utils.data import DataLoader, TensorDataset
stream = iter(loaderkit.watch(DataLoader(TensorDataset(torch.arange(8)), num_workers=1)))
next(stream)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stderr) == (0, "")
