"""What the accounts cost: python -m profiles.overhead [--rounds 20] [--seconds 1.5] [--out profiles]

CPU time a sample with accounts, statistics and the monitor against the same engine with all of that taken out, in turns in
one process. Reported is the mean of the ratios of the pairs, and its upper 95 % confidence limit. Two works: pictures from
files to 224 (of `profiles.peers`' data, or loaderkit's demo pictures), and one-element tensors of a data set.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import loaderkit
from loaderkit import Pipeline
from loaderkit.formats.tar_index import default_cache_dir
from loaderkit.prefetch import stalls
from loaderkit.prefetch.accounts import Account
from loaderkit.prefetch.cpus import num_cpus
from loaderkit.types import Chunk


class Silent(Account):
    """Keeps no account."""

    def enter(self, state: int) -> float:
        self.open_state = state
        return 0.0

    def served(self, stage: int, num_items: int, num_bytes: int, chunk: Chunk | None = None) -> None:
        pass


class Numbers:
    def __len__(self) -> int:
        return 10**5

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index])


def pictures() -> Pipeline:
    photos = default_cache_dir() / "peers" / "photos"
    source = Pipeline.files(photos if photos.is_dir() else default_cache_dir() / "demo" / "photos", include="**/*.jpg")
    return (
        source.read().decode().random_resized_crop(224).random_horizontal_flip().batch(64, drop_last=True).normalize()
    )


def tensors() -> Pipeline:
    return Pipeline.dataset(Numbers(), fields=["x"]).read().batch(64, drop_last=True)


WORKS: dict[str, Callable[[], Pipeline]] = {"pictures": pictures, "one-element tensors": tensors}


def silenced(pipeline: Pipeline) -> Any:
    """A loader whose engine keeps no accounts and attributes no waits."""
    loader: Any = loaderkit.build(pipeline, overrides={"prefetch.concurrency": 2})
    loader._make_monitor = lambda engine: None
    with patch("loaderkit.prefetch.engine.Account", Silent):
        next(iter(loader))  # all workers are there now
    loader._engine.attribute = lambda begin_s, end_s, way: {stalls.WAKEUP: end_s - begin_s}
    return loader


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def cpu_s_a_sample(batches: Iterator[Any], seconds: float) -> float:
    for _ in range(8):
        next(batches)
    begin_s, cpu_s, count = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - begin_s < seconds:
        next(batches)
        count += 64
    return (time.process_time() - cpu_s) / count


def measure(pipeline: Pipeline, rounds: int, seconds: float) -> dict[str, Any]:
    ratios = []
    with loaderkit.build(pipeline, overrides={"prefetch.concurrency": 2}) as whole, silenced(pipeline) as silent:
        turns = {"with": endless(whole), "without": endless(silent)}
        for number in range(rounds + 1):
            order = list(turns) if number % 2 else list(turns)[::-1]
            took = {name: cpu_s_a_sample(turns[name], seconds) for name in order}
            if number:  # the first warms up
                ratios.append(took["with"] / took["without"])
    mean, error = statistics.mean(ratios), statistics.stdev(ratios) / math.sqrt(rounds)
    return {"mean": mean, "median": statistics.median(ratios), "upper_limit": mean + 1.73 * error, "ratios": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = {name: measure(make(), arguments.rounds, arguments.seconds) for name, make in WORKS.items()}
    for name, one in found.items():
        print(f"{name}: {100 * (one['mean'] - 1):+.1f} %, at most {100 * (one['upper_limit'] - 1):+.1f} %")
    if arguments.out is not None:
        path = arguments.out / f"overhead-{num_cpus()}cpu-{datetime.now(UTC).date().isoformat()}.json"
        facts = {"cpus": num_cpus(), "machine": platform.machine(), "python": platform.python_version()}
        path.write_text(json.dumps({**facts, "rounds": arguments.rounds, "works": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
