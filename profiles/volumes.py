"""Volumes of unequal shape against volumes of one shape and the same mean size: speed and page faults.

    python -m profiles.volumes [--executor thread] [--rounds 7] [--least-mb 8] [--most-mb 64] [--out profiles/results]

Float32 `.npy` from the page cache, two a batch, shuffled; delivered as lists and stacked. The loop touches every page. The two
loaders take turns, an epoch each, each first in every other round, after some epochs that are not counted. Page faults are
those of the training process and of those that load, in pages delivered.
"""

from __future__ import annotations

import argparse
import json
import mmap
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import loaderkit
from loaderkit import Loader, Pipeline
from profiles.record import record

BATCH = 2
SETTINGS = {"prefetch.concurrency": 2, "prefetch.batches": 4}  # tuned ones would differ
NUM_WARM = 3  # epochs: the shapes that meet in memory differ from epoch to epoch


def write(folder: Path, sizes: Iterator[int], rng: np.random.Generator) -> int:
    """A volume of about each size in bytes; returns their mean size."""
    folder.mkdir()
    written = []
    for number, size in enumerate(sizes):
        depth, height = (int(n) for n in rng.integers(50, 200, 2))
        volume = np.empty((depth, height, max(1, size // (4 * depth * height))), np.float32)
        volume.reshape(-1).view(np.uint8)[:] = number
        np.save(folder / f"{number:03}.npy", volume)
        written.append(volume.nbytes)
    return int(np.mean(written))


def write_equal(folder: Path, size: int, num: int) -> None:
    folder.mkdir()
    for number in range(num):
        np.save(folder / f"{number:03}.npy", np.full((64, size // 4 // 64), number, np.float32))


def faults_of(loader: Loader) -> int:
    """Minor page faults so far, of this process and of those that load."""
    pids = ["self", *map(str, loader.stats().tuning.pids or ())]
    return sum(int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[7]) for pid in pids)


def epoch(loader: Loader) -> dict[str, float]:
    """One epoch: bytes a second, and page faults a page that was delivered."""
    num_bytes, before = 0, faults_of(loader)
    begin_s = time.perf_counter()
    for batch in loader:
        for volume in batch["npy"]:
            num_bytes += volume.nbytes
            volume.reshape(-1)[:: mmap.PAGESIZE // 4].sum()
    took_s = time.perf_counter() - begin_s
    return {"bytes_per_s": num_bytes / took_s, "faults": (faults_of(loader) - before) / (num_bytes / mmap.PAGESIZE)}


def measure(executor: str, num_rounds: int, least: int, most: int, num_files: int) -> dict[str, Any]:
    rng = np.random.default_rng()
    turns: dict[str, list[dict[str, float]]] = {"unequal": [], "equal": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        mean = write(folder / "unequal", iter(rng.integers(least, most, num_files).tolist()), rng)
        write_equal(folder / "equal", mean, num_files)
        loaders = {}
        for kind in turns:
            pipeline = Pipeline.files(folder / kind).shuffle(seed=0).read().decode()
            pipeline = pipeline.batch(BATCH, ragged={"npy": "list"} if kind == "unequal" else {})
            loaders[kind] = loaderkit.build(pipeline, overrides={"prefetch.executor": executor, **SETTINGS})
        for _ in range(NUM_WARM):
            for loader in loaders.values():
                epoch(loader)
        for number in range(num_rounds):
            for kind in sorted(loaders, reverse=number % 2 == 1):
                turns[kind].append(epoch(loaders[kind]))
        memory = {kind: loader.stats().memory for kind, loader in loaders.items()}
        for loader in loaders.values():
            loader.close()
    ratios = [a["bytes_per_s"] / b["bytes_per_s"] for a, b in zip(turns["unequal"], turns["equal"], strict=True)]
    return {
        "executor": executor,
        "mean_bytes": mean,
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "faults": {kind: statistics.median(turn["faults"] for turn in found) for kind, found in turns.items()},
        "turns": turns,
        "memory": memory,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--executor", action="append", choices=("inline", "thread", "process"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--files", type=int, default=24)
    parser.add_argument("--least-mb", type=int, default=8)
    parser.add_argument("--most-mb", type=int, default=64)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = []
    for executor in options.executor or ("inline", "thread", "process"):
        one = measure(executor, options.rounds, options.least_mb * 10**6, options.most_mb * 10**6, options.files)
        found.append(one)
        print(
            json.dumps({name: one[name] for name in ("executor", "mean_bytes", "ratio", "faults", "memory")}, indent=1)
        )
    record(options.out, "volumes", rounds=options.rounds, found=found)


if __name__ == "__main__":
    main()
