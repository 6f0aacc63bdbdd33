"""Executors compared: speed, first batch, and what a training step that is busy in Python leaves of either.

    python profiles/executors.py [--rounds 7] [--images 1500] [--out profiles/]

Work: the JPEG files of first_look.py (56 kB) from the page cache -> random resized crop to 224 -> flip -> normalised
float32 [64, 3, 224, 224], two threads, in the trainer's process or in another. `free`: the loop looks at a pixel in a
thousand. `busy`: it also computes 4 x 10 ms in pure Python a batch, holding the GIL as a step that launches small kernels
does. Rounds take the executors in turns; an epoch pair a round, behind the first 8 batches; medians over the rounds.
`first_batch_s` is from build() to the first batch, in a process that has imported torch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from first_look import BATCH, NUM_SKIPPED, recompress, settle

import loaderkit
from loaderkit.demo.photos import demo_data
from loaderkit.formats.tar_index import default_cache_dir

EXECUTORS = ("thread", "process")
STEPS, STEP_S = 4, 0.01


def busy(seconds: float) -> None:
    """Hold the GIL, but for what the interpreter takes away."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def measure(loader: loaderkit.Loader, step: Callable[[], None]) -> float:
    """Batches per second of two epochs behind their first batches, which were read ahead before."""
    num_batches = 0
    begin = 0.0
    for _ in range(2):
        for image, _ in loader:
            float(image.flatten()[::1009].mean())
            step()
            num_batches += 1
            if num_batches == NUM_SKIPPED:
                begin = time.perf_counter()
    return (num_batches - NUM_SKIPPED) / (time.perf_counter() - begin)


def first_batch_s(pipeline: loaderkit.Pipeline, executor: str) -> float:
    begin = time.perf_counter()
    with loaderkit.build(pipeline, overrides={"prefetch.executor": executor, "prefetch.concurrency": 2}) as loader:
        next(iter(loader))
        return time.perf_counter() - begin


def run(folder: Path, rounds: int) -> dict[str, Any]:
    pipeline = (
        loaderkit.Pipeline.files(folder, include="**/*.jpg", label="parent")
        .read()
        .decode()
        .random_resized_crop(224)
        .random_horizontal_flip()
        .batch(BATCH, drop_last=True)
        .normalize()
        .output("image", "label")
    )
    steps: dict[str, Callable[[], None]] = {
        "free": lambda: None,
        "busy": lambda: busy(STEPS * STEP_S),
    }
    found: dict[str, dict[str, list[float]]] = {name: {each: [] for each in EXECUTORS} for name in steps}
    first: dict[str, list[float]] = {each: [] for each in EXECUTORS}
    for _ in range(3):
        for each in EXECUTORS:
            first[each].append(first_batch_s(pipeline, each))
    loaders = {
        each: loaderkit.build(pipeline, overrides={"prefetch.executor": each, "prefetch.concurrency": 2})
        for each in EXECUTORS
    }
    for loader in loaders.values():
        measure(loader, steps["free"])
    for number in range(rounds):
        for name, step in steps.items():
            for each in EXECUTORS if number % 2 else reversed(EXECUTORS):
                for loader in loaders.values():  # whoever is not measured must not take CPU
                    settle(loader)
                found[name][each].append(measure(loaders[each], step))
        print(
            f"round {number + 1}: " + ", ".join(f"{n} {e} {v[-1]:.1f}" for n, s in found.items() for e, v in s.items())
        )
    for loader in loaders.values():
        loader.close()
    return {
        "img_per_s": {each: [BATCH * value for value in values] for each, values in found["free"].items()},
        "busy_steps_per_s": {each: [STEPS * value for value in values] for each, values in found["busy"].items()},
        "first_batch_s": first,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--images", type=int, default=1500)
    parser.add_argument("--data", type=Path, default=default_cache_dir() / "demo")
    parser.add_argument("--out", type=Path, help="write executors-<machine>-<date>.json here")
    arguments = parser.parse_args()
    folder = demo_data(arguments.data, arguments.images, print).train
    folder = recompress(folder, folder.parent / "quality-93", 93)
    found = run(folder, arguments.rounds)
    medians = {name: {each: statistics.median(v) for each, v in sides.items()} for name, sides in found.items()}
    ratios = {
        name: statistics.median(a / b for a, b in zip(sides["process"], sides["thread"], strict=True))
        for name, sides in found.items()
    }
    for name, sides in medians.items():
        print(
            f"{name:<18}"
            + "".join(f"{each:>10} {value:8.2f}" for each, value in sides.items())
            + f"   {ratios[name]:.2f}"
        )
    if arguments.out is not None:
        machine = f"{torch.get_num_threads()}cpu"
        target = arguments.out / f"executors-{machine}-{date.today().isoformat()}.json"
        command = f"python profiles/executors.py --rounds {arguments.rounds} --images {arguments.images}"
        found = {"command": command, "rounds": found, "median": medians, "ratio_process_to_thread": ratios}
        target.write_text(json.dumps(found, indent=1) + "\n")
        print(f"written to {target}")


if __name__ == "__main__":
    main()
