"""Whether `auto` finds what a search over the whole grid finds.

    python -m profiles.tuner [--seconds 30] [--turn 2] [--rounds 3] [--out profiles/results]

For each workload: a loader tunes itself for `--seconds`; then every number of workers is tried for a turn, at the depth to
begin with and at the one that was found; then the best three are measured again, in turns with what the tuner found. The
result is the tuner's share of the best of them, round by round. For the loop that is the bottleneck it is the number of
workers left, and what the loop still waits. For the store that turns slow it is the share before and after it did.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

import loaderkit
from loaderkit import Pipeline
from profiles.record import record

BATCH = 16
WORKERS = (1, 2, 4, 8, 16, 32, 64, 128)
_BLOB = bytes(10**6)


@dataclass(frozen=True)
class Work:
    """What an item costs."""

    latency_s: float = 0.0
    bytes_per_s: float | None = None  # of a link that all workers share; an item is 100 kB
    megabytes_hashed: int = 0  # with the GIL given away
    steps: int = 0  # of plain Python
    step_s: float = 0.0  # the loop's own time between batches
    later_latency_s: float | None = None  # after half of the time


WORKS = {
    "latency-bound": Work(latency_s=0.05),
    "bandwidth-bound": Work(latency_s=0.02, bytes_per_s=40e6),
    "cpu-bound": Work(megabytes_hashed=8),
    "gil-bound": Work(steps=40_000),
    "mixed": Work(latency_s=0.01, megabytes_hashed=4),
    "consumer-bound": Work(latency_s=0.002, step_s=0.05),
    "store-turns-slow": Work(latency_s=0.002, step_s=0.05, later_latency_s=0.05),
}


class Items:
    """Items of a store as `work` says; a data set by all its looks."""

    def __init__(self, work: Work) -> None:
        self.latency_s = work.latency_s
        self._work = work
        self._link = threading.Lock()
        self._free_s = 0.0

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> torch.Tensor:
        work = self._work
        if self.latency_s:
            time.sleep(self.latency_s)
        if work.bytes_per_s is not None:
            with self._link:
                now = time.perf_counter()
                self._free_s = max(self._free_s, now) + 1e5 / work.bytes_per_s
                wait_s = self._free_s - now
            time.sleep(wait_s)
        for _ in range(work.megabytes_hashed):
            zlib.crc32(_BLOB)
        value = 1
        for number in range(work.steps):
            value = (value * 31 + number) & 0xFFFF
        return torch.tensor([index])


def main() -> None:
    """Measure the works that were asked for, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--works", default=",".join(WORKS))
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--turn", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    found = {}
    for name in arguments.works.split(","):
        work = WORKS[name]
        found[name] = measure(work, arguments.seconds, arguments.turn, arguments.rounds)
        print(name, json.dumps({key: value for key, value in found[name].items() if key != "decisions"}), flush=True)
    record(arguments.out, "tuner", works=found)


def measure(work: Work, seconds: float, turn_s: float, rounds: int) -> dict[str, Any]:
    """A workload, tuned and searched."""
    tuned = tune(work, seconds)
    workers, batches = tuned["workers"], tuned["batches"]
    if work.step_s:
        return tuned
    grid = {(w, b): speed(work, w, b, turn_s) for w in WORKERS for b in sorted({4, batches})}
    rivals = sorted(grid, key=lambda sizes: -grid[sizes])[:3]
    speeds_of: dict[tuple[int, int], list[float]] = {sizes: [] for sizes in {(workers, batches), *rivals}}
    for _ in range(rounds):
        for sizes, speeds in speeds_of.items():
            speeds.append(speed(work, *sizes, turn_s))
    best = max(rivals, key=lambda sizes: median(speeds_of[sizes]))
    shares = [mine / other for mine, other in zip(speeds_of[workers, batches], speeds_of[best], strict=True)]
    return {**tuned, "best": best, "share_of_best": median(shares), "shares": shares}


def tune(work: Work, seconds: float) -> dict[str, Any]:
    """Let a loader find its own sizes; how it stands afterwards."""
    items = Items(work)
    overrides = {"prefetch.batches": "auto"}
    phases: list[dict[str, Any]] = []
    with loaderkit.build(pipeline(items), overrides=overrides) as loader:
        batches = endless(loader)
        next(batches)
        latencies = [work.latency_s, *([] if work.later_latency_s is None else [work.later_latency_s])]
        for items.latency_s in latencies:
            run(batches, work, seconds * 5 / 6)
            before = loader.stats()
            run(batches, work, seconds / 6)  # the end of it, which shows what was found
            passed = loader.stats(since=before)
            stats = passed.to_dict()
            phases.append(
                {
                    "workers": stats["tuning"]["concurrency"],
                    "batches": stats["tuning"]["batches"],
                    "stall_percent": stats["stall"]["percent"],
                    "samples_per_s": stats["throughput"]["samples_per_s"],
                }
            )
        decisions = loader.stats().to_dict()["tuning"]["decisions"]
    earlier = {"phases": phases} if len(phases) > 1 else {}
    return {**asdict(work), **phases[-1], **earlier, "decisions": decisions}


def speed(work: Work, workers: int, batches: int, seconds: float) -> float:
    """Samples/s at sizes that stay."""
    overrides = {"prefetch.concurrency": workers, "prefetch.batches": batches}
    with loaderkit.build(pipeline(Items(work)), overrides=overrides) as loader:
        source = endless(loader)
        run(source, work, seconds / 2)
        before = loader.stats()
        run(source, work, seconds)
        passed = loader.stats(since=before)
        # What has landed: batches that are filled side by side are complete several at a time, a tenth of a turn apart.
        return next(row.num_items for row in passed.stages if row.kind == "batch") / passed.wall_s


def pipeline(items: Items) -> Pipeline:
    return Pipeline.dataset(items, fields=["x"]).read().batch(BATCH, drop_last=True)


def endless(loader: loaderkit.Loader) -> Iterator[Any]:
    while True:
        yield from loader


def run(batches: Iterator[Any], work: Work, seconds: float) -> None:
    """Train for so long."""
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        next(batches)
        if work.step_s:
            time.sleep(work.step_s)


if __name__ == "__main__":
    main()
