"""Pipelines of `pipelines/`, as they are, against what one would write in their field, in a DataLoader with two workers.

    python -m profiles.workloads [--kind detection] [--rounds 7] [--out profiles/results]

The module of each kind says what its data are, and what its peers do. The transforms are torchvision's v2; `make integration`
puts a torchvision into a folder that nothing else has on its path. All from the page cache, on the CPU. DataLoaders keep their
workers. The loaders take turns, an epoch each, each first in every other round, after one that is not counted, whose first
batches must have the same fields, types, shapes and ranges. Of an epoch the first batches are not counted: ours are made ahead
while the others have their turn. `--scale` makes more or less data.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterable
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import loaderkit
from profiles.record import record
from profiles.workloads import detection, dlrm, image_text, segmentation

WORKS = {
    "dlrm": dlrm.WORK,
    "detection": detection.WORK,
    "segmentation": segmentation.WORK,
    "image-text": image_text.WORK,
}
_AHEAD = 8  # batches; more than any of the loaders has ready
PIPELINES = Path(__file__).parents[2] / "pipelines"


def rate_of(batches: Iterable[Any], num: int) -> float:
    """Batches a second of an epoch of `num`, without the first ones, which a loader may have made during another's turn."""
    iterator = iter(batches)
    ahead = sum(1 for _ in islice(iterator, _AHEAD))
    begin_s = time.perf_counter()
    found = sum(1 for _ in iterator)
    seconds = time.perf_counter() - begin_s
    assert ahead + found == num, f"{ahead + found} batches, not {num}"
    return found / seconds


def measure(kind: str, num_rounds: int, scale: float) -> dict[str, Any]:
    work = WORKS[kind]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        num = work.write(folder, scale)
        os.environ[work.variable] = str(folder)
        peers = work.peers(folder)
        against = {
            one: next((f"loaderkit, {word}" for word in work.variants if one.startswith(word)), "loaderkit")
            for one in peers
        }
        loaders = dict(peers)
        with ExitStack() as stack:
            for word, settings in {"": {}, **work.variants}.items():
                built = loaderkit.build(PIPELINES / f"{kind}.yaml", overrides=settings)
                loaders[f"loaderkit, {word}".rstrip(", ")] = stack.enter_context(built)
            turns: dict[str, list[float]] = {one: [] for one in loaders}
            for one, loader in loaders.items():
                work.first_epoch(one, loader)
            for number in range(num_rounds):
                for one in sorted(loaders, reverse=number % 2 == 1):
                    turns[one].append(work.batch * rate_of(loaders[one], num))
        peers.clear()  # ends the workers while their files are there
        loaders.clear()
    ratios = {one: [a / b for a, b in zip(turns[ours], turns[one], strict=True)] for one, ours in against.items()}
    return {
        "kind": kind,
        "ratio": {one: statistics.median(values) for one, values in ratios.items()},
        "samples_per_s": {one: statistics.median(values) for one, values in turns.items()},
        "ratios": ratios,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", action="append", choices=WORKS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
    found = []
    for kind in options.kind or WORKS:
        found.append(measure(kind, options.rounds, options.scale))
        print(json.dumps({key: value for key, value in found[-1].items() if key != "ratios"}, indent=1), flush=True)
    record(options.out, "workloads", rounds=options.rounds, scale=options.scale, found=found)


if __name__ == "__main__":
    main()
