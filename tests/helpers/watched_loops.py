"""DataLoaders whose limit is known, as it was put there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

import loaderkit
from loaderkit.profile.report import Report


def burn(seconds: float) -> None:
    """Use a CPU for so long, however many others want it."""
    end_s = time.thread_time() + seconds
    value = 0
    while time.thread_time() < end_s:
        value += sum(range(500))


class Samples(Dataset[Any]):
    """Each sample takes `cpu_s` of a CPU and a wait of `wait_s`; each `slow_each`th one waits for `slow_s` instead."""

    def __init__(
        self,
        number: int,
        cpu_s: float = 0.0,
        wait_s: float = 0.0,
        size: int = 8,
        slow_each: int = 0,
        slow_s: float = 0.0,
    ) -> None:
        self._number, self._cpu_s, self._wait_s, self._size = number, cpu_s, wait_s, size
        self._slow_each, self._slow_s = slow_each, slow_s

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        burn(self._cpu_s)
        is_slow = self._slow_each and index % self._slow_each == self._slow_each - 1
        time.sleep(self._slow_s if is_slow else self._wait_s)
        return torch.full((self._size,), float(index)), index


def slow_collate(samples: list[Any]) -> Any:
    """Takes 20 ms of a CPU."""
    burn(0.02)
    return default_collate(samples)


def to_arrays(samples: list[Any]) -> dict[str, Any]:
    """Arrays of NumPy, which are pickled."""
    return {"x": np.stack([np.asarray(x) for x, _ in samples])}


def to_list(samples: list[Any]) -> list[Any]:
    """Each sample in a tensor of its own."""
    return [x for x, _ in samples]


@dataclass(frozen=True)
class Case:
    """A loop, and what its report has to name: stage and kind, of which there may be several on a machine that is busy."""

    samples: dict[str, Any]
    loader: dict[str, Any]
    expected: set[tuple[str | None, str]]
    step_s: float = 0.005
    epochs: int = 1
    changes: frozenset[str] = frozenset()  # arguments that the change may name
    says: str = ""  # in the evidence or the change
    is_touchy: bool = False  # where CPUs are short it is limited by what may be


CASES: dict[str, Case] = {
    "computes, 1 worker": Case(
        {"number": 240, "cpu_s": 0.003}, {"num_workers": 1}, {("dataset", "computing")}, changes=frozenset({"num_workers"})
    ),
    "computes, 2 workers": Case(
        {"number": 400, "cpu_s": 0.003}, {"num_workers": 2}, {("dataset", "computing")}, step_s=0.001,
        changes=frozenset({"num_workers"}),
    ),
    "waits, 1 worker": Case(
        {"number": 160, "wait_s": 0.005}, {"num_workers": 1}, {("dataset", "waiting")}, changes=frozenset({"num_workers"})
    ),
    "waits, 4 workers": Case(
        {"number": 1280, "wait_s": 0.008}, {"num_workers": 4}, {("dataset", "waiting")}, step_s=0.001,
        changes=frozenset({"num_workers"}), says="every 4th batch comes late",
    ),
    "computes, no worker": Case(
        {"number": 160, "cpu_s": 0.003}, {"num_workers": 0}, {("dataset", "computing")}, changes=frozenset({"num_workers"})
    ),
    "waits, no worker": Case(
        {"number": 160, "wait_s": 0.005}, {"num_workers": 0}, {("dataset", "waiting")}, changes=frozenset({"num_workers"})
    ),
    "collate, no worker": Case(
        {"number": 160}, {"num_workers": 0, "collate_fn": slow_collate}, {("collate", "computing")},
        changes=frozenset({"num_workers"}),
    ),
    "collate, 1 worker": Case(
        {"number": 320}, {"num_workers": 1, "collate_fn": slow_collate}, {("dataset", "computing")},
        changes=frozenset({"num_workers"}),
    ),
    "slow step": Case(
        {"number": 96, "wait_s": 0.001}, {"num_workers": 2}, {(None, "training"), ("start", "start")}, step_s=0.4,
        is_touchy=True,
    ),
    "short epochs": Case(
        {"number": 32}, {"num_workers": 2}, {("epoch change", "start")}, epochs=12, changes=frozenset({"persistent_workers"})
    ),
    "stragglers": Case(
        {"number": 1600, "slow_each": 160, "slow_s": 0.2}, {"num_workers": 2},
        {("dataset", "stragglers"), ("dataset", "depth")}, step_s=0.006, changes=frozenset({"prefetch_factor"}),
    ),
    "large batches": Case(
        {"number": 160, "size": 1_500_000}, {"num_workers": 2}, {("dataset", "computing")}, step_s=0.0, says="the kernel",
        changes=frozenset({"num_workers"}),
    ),
    "arrays through a pipe": Case(
        {"number": 240, "size": 600_000}, {"num_workers": 2, "collate_fn": to_arrays}, {("handover", "computing")}, step_s=0.0,
        says="torch.from_numpy", is_touchy=True,
    ),
    "many tensors": Case(
        {"number": 4000}, {"num_workers": 2, "collate_fn": to_list, "batch_size": 100}, {("handover", "computing")}, step_s=0.0,
        says="fewer tensors", is_touchy=True,
    ),
}  # fmt: skip


def make(case: Case, **changed: Any) -> DataLoader[Any]:
    """The DataLoader of a case."""
    return DataLoader(Samples(**case.samples), **{"batch_size": 8, **case.loader, **changed})


def run(loader: Iterable[Any], case: Case, name: str = "drawn") -> tuple[Report, float, float]:
    """A loop over it: its report, and by a clock of this function's own how long it waited and took."""
    watched = loaderkit.watch(loader, name=name)
    clock: Callable[[], float] = time.perf_counter
    waited_s = 0.0
    with watched.profile() as report:
        begin_s = clock()
        for _ in range(case.epochs):
            asked_s = clock()
            for _ in watched:
                waited_s += clock() - asked_s
                time.sleep(case.step_s)  # the work of the step, which is data here
                asked_s = clock()
            waited_s += clock() - asked_s
        took_s = clock() - begin_s
    return report.result, waited_s, took_s
