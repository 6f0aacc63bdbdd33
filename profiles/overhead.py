"""What the accounts and the profiler cost: python -m profiles.overhead [--rounds 20] [--turns 10] [--out profiles/results]

CPU time a sample with accounts, statistics and the monitor against the same engine with all of that taken out, in turns in
one process: a round is so many short turns of each, as other programs come and go. Reported is the mean of the ratios of the
rounds, and its upper 95 % confidence limit. Two works: pictures from
files to 224 (of `profiles.peers`' data, or loaderkit's demo pictures), and one-element tensors of a data set. And the same of a
loop that trains a small network on the pictures, within `loader.profile()` against the same loop without it; and by itself: how
long the calls take that the profiler adds to a loop, in shares of 60 such steps. And both works of three sources, counted by
source and not.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import loaderkit
from loaderkit import Pipeline
from loaderkit._internal.system.user_cache import default_cache_dir
from loaderkit.cli.demo.photos import demo_data
from loaderkit.engine.metrics import stalls
from loaderkit.engine.metrics.worker_clock import WorkerClock
from profiles.record import record


class Silent(WorkerClock):
    """Keeps no account."""

    def enter(self, state: int) -> float:
        return 0.0

    def served(self, stage: int, num_items: int, num_bytes: int, chunk: object = None) -> None:
        pass


class Uncounted:
    """Tells the source of each sample, which batches have, and counts nothing."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def count(self, work_item: Any, kept: Any) -> Any:
        return self._source.numbers_of(work_item.indices)


class Numbers:
    def __len__(self) -> int:
        return 10**5

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index])


def photos_of_peers() -> Pipeline:
    photos = default_cache_dir() / "peers" / "photos"
    if not photos.is_dir():
        photos = demo_data(default_cache_dir() / "demo", 2000)
    return Pipeline.files(photos, include="**/*.jpg", label="parent")


def shrunk(source: Pipeline) -> Pipeline:
    return (
        source.read().decode().random_resized_crop(224).random_horizontal_flip().batch(64, drop_last=True).normalize()
    )


def pictures() -> Pipeline:
    return shrunk(photos_of_peers())


def numbers() -> Pipeline:
    return Pipeline.dataset(Numbers(), fields=["x"])


def tensors() -> Pipeline:
    return numbers().read().batch(64, drop_last=True)


def silenced(pipeline: Pipeline, overrides: dict[str, Any]) -> Any:
    """A loader whose engine keeps no accounts and attributes no waits."""
    loader: Any = loaderkit.build(pipeline, overrides=overrides)
    loader._make_monitor = lambda engine: None
    with patch("loaderkit.engine.base.WorkerClock", Silent):
        next(iter(loader))  # all workers are there now
    loader._executors.executor.attribute = lambda begin_s, end_s, way: {stalls.WAKEUP: end_s - begin_s}
    return loader


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def turn(batches: Iterator[Any], seconds: float) -> tuple[float, int]:
    """CPU seconds, and batches. Before it begins the other one has read ahead again what was taken from it."""
    for _ in range(8):
        next(batches)
    begin_s, cpu_s, count = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - begin_s < seconds:
        next(batches)
        count += 1
    return time.process_time() - cpu_s, count


def cpu_s_a_batch(pair: Mapping[str, Iterator[Any]], num_turns: int, seconds: float) -> dict[str, float]:
    """What a batch costs in one round, for each of the two."""
    spent, count = dict.fromkeys(pair, 0.0), dict.fromkeys(pair, 0)
    for number in range(num_turns):
        for name in list(pair)[:: 1 if number % 2 else -1]:
            cpu_s, num_batches = turn(pair[name], seconds)
            spent[name] += cpu_s
            count[name] += num_batches
    return {name: spent[name] / count[name] for name in pair}


def worker_clocks(pipeline: Pipeline, stack: ExitStack, executor: str = "thread") -> dict[str, Iterator[Any]]:
    """Batches with accounts and without them."""
    overrides = {"prefetch.executor": executor, "prefetch.concurrency": 2}
    whole = stack.enter_context(loaderkit.build(pipeline, overrides=overrides))
    return {"with": endless(whole), "without": endless(stack.enter_context(silenced(pipeline, overrides)))}


def mixed(source: Callable[[], Pipeline]) -> Pipeline:
    """Three sources, each with all of the data."""
    return Pipeline.mix({name: source() for name in ("web", "code", "books")}, {"web": 5, "code": 3, "books": 2})


def by_source(pipeline: Pipeline, stack: ExitStack, executor: str = "thread") -> dict[str, Iterator[Any]]:
    """Batches of several sources, counted by source and not."""
    loops = {}
    for name in ("with", "without"):
        overrides = {"prefetch.executor": executor, "prefetch.concurrency": 2}
        loader: Any = stack.enter_context(loaderkit.build(pipeline, overrides=overrides))
        if name == "without":
            next(iter(loader))
            loader._executors.executor.plan._assembler._counter = Uncounted(loader._plan.source)
            loader._sources.passed = lambda run, epoch, begin, end: None
        loops[name] = endless(loader)
    return loops


def profiled(stack: ExitStack, *, trace: bool) -> dict[str, Iterator[Any]]:
    """Steps of a loop that is profiled, and of one that is not."""
    loops = {}
    for name in ("with", "without"):
        loader = stack.enter_context(loaderkit.build(pictures(), overrides={"prefetch.concurrency": 2}))
        if name == "with":
            stack.enter_context(loader.profile(trace=trace))
        loops[name] = steps(endless(loader))
    return loops


def steps(batches: Iterator[Any]) -> Iterator[None]:
    """Train a small network."""
    layers = [torch.nn.Conv2d(3, 8, 5, stride=4), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(4), torch.nn.Flatten()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in batches:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(batch["image"]), batch["label"] % 10).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        yield


def profiler_calls(rounds: int) -> dict[str, Any]:
    """What the profiler adds to 60 steps of training: notes at every step, and the accounts read three times; in percent of
    the time of the steps. The report is made when the loop is over."""
    shares = []
    with ExitStack() as stack:
        loader: Any = stack.enter_context(loaderkit.build(pictures(), overrides={"prefetch.concurrency": 2}))
        trained = steps(endless(loader))
        for _ in range(8):
            next(trained)
        for _ in range(rounds):
            begin_s = time.perf_counter()
            for _ in range(60):
                next(trained)
            loop_s = time.perf_counter() - begin_s
            recording = loader.profile()
            begin_s = time.perf_counter()
            with recording:
                log = loader._executors.steps
                for _ in range(60):
                    log.on_request()
                    log.on_batch()
                loader.stats()
                added_s = time.perf_counter() - begin_s
            shares.append(100 * added_s / loop_s)
    return {"median_percent": statistics.median(shares), "most_percent": max(shares), "percent": shares}


# What makes the two, and how long a turn is, in s: a few batches, or hundreds.
WORKS: dict[str, tuple[Callable[[ExitStack], dict[str, Iterator[Any]]], float]] = {
    "accounts, pictures": (lambda stack: worker_clocks(pictures(), stack), 0.4),
    "accounts, one-element tensors": (lambda stack: worker_clocks(tensors(), stack), 0.1),
    # In one thread nobody hands Python's lock back and forth, which costs threads more than all else, now more and now less.
    "accounts, one-element tensors, inline": (lambda stack: worker_clocks(tensors(), stack, "inline"), 0.1),
    "by source, pictures": (lambda stack: by_source(shrunk(mixed(photos_of_peers)), stack), 0.4),
    "by source, one-element tensors, inline": (
        lambda stack: by_source(mixed(numbers).read().batch(64, drop_last=True), stack, "inline"),
        0.1,
    ),
    "profile, training": (lambda stack: profiled(stack, trace=False), 0.4),
    "profile with a trace, training": (lambda stack: profiled(stack, trace=True), 0.4),
}


def measure(pair: Mapping[str, Iterator[Any]], rounds: int, turns: int, seconds: float) -> dict[str, Any]:
    ratios = []
    for number in range(rounds + 1):
        took = cpu_s_a_batch(pair, turns, seconds)
        if number:  # the first warms up
            ratios.append(took["with"] / took["without"])
    mean, error = statistics.mean(ratios), statistics.stdev(ratios) / math.sqrt(rounds)
    return {"mean": mean, "median": statistics.median(ratios), "upper_limit": mean + 1.73 * error, "ratios": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--only", default="", help="only works whose name contains this")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    for name, (make, seconds) in WORKS.items():
        if arguments.only not in name:
            continue
        with ExitStack() as stack:
            one = found[name] = measure(make(stack), arguments.rounds, arguments.turns, seconds)
        print(f"{name}: {100 * (one['mean'] - 1):+.1f} %, at most {100 * (one['upper_limit'] - 1):+.1f} %", flush=True)
    if arguments.only in "profile":
        calls = profiler_calls(arguments.rounds)
        found["the profiler's own calls"] = calls
        print(
            f"the profiler's own calls: {calls['median_percent']:.3f} % of 60 steps, {calls['most_percent']:.3f} % at most"
        )
    record(arguments.out, "overhead", rounds=arguments.rounds, turns=arguments.turns, works=found)


if __name__ == "__main__":
    main()
