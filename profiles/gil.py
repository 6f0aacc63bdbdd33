"""What another process, and a second one, are worth when `call` computes in Python.

    python -m profiles.gil [--rounds 7] [--milliseconds 5] [--step 0] [--out profiles/results]

All loaders live at once. In each round each of them delivers the same number of batches, after those that it had read ahead
were taken uncounted. Speeds are ratios to `executor: thread` in the same round.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import loaderkit

CONTESTANTS: dict[str, dict[str, Any]] = {
    "thread": {"executor": "thread"},
    "process": {"executor": "process"},
    "processes: 2": {"executor": "process", "processes": 2},
    "inline": {"executor": "inline"},
}
BATCH = 8
NUM_BATCHES = 40
AHEAD = 4


class Empty:
    """A data set whose items cost nothing."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": index}


def compute(sample: dict[str, Any], loops: int) -> None:
    """Compute in Python, without ever giving up the GIL."""
    total = 0
    for number in range(loops):
        total += number & 7
    sample["y"] = total


def loops_for(seconds: float) -> int:
    """The loops that `compute` does in `seconds` while nothing else runs."""
    loops = 10_000
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        compute({}, loops)
        times.append(time.perf_counter() - begin)
    return int(loops * seconds / min(times))


def measure(batches: Any, loops_in_step: int) -> float:
    """Samples/s over one round."""
    time.sleep(0.5)  # the loader before fills up its queue meanwhile
    for _ in range(AHEAD + 1):
        next(batches)
    begin = time.perf_counter()
    for _ in range(NUM_BATCHES):
        next(batches)
        compute({}, loops_in_step)
    return NUM_BATCHES * BATCH / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--milliseconds", type=float, default=5, help="of Python a sample")
    parser.add_argument("--step", type=float, default=0, help="milliseconds of Python between two batches")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    loops, loops_in_step = loops_for(options.milliseconds / 1000), loops_for(options.step / 1000)
    speeds: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    with ExitStack() as stack:
        streams = {}
        for name, prefetch in CONTESTANTS.items():
            config = {
                "source": {"kind": "dataset", "object": "profiles.gil:Empty"},
                "stages": [
                    "read",
                    {"call": {"function": "profiles.gil:compute", "args": {"loops": loops}}},
                    {"batch": {"size": BATCH}},
                ],
                "prefetch": {"batches": AHEAD, "concurrency": 2, **prefetch},
            }
            streams[name] = iter(stack.enter_context(loaderkit.build(config)))
            next(streams[name])
        for _ in range(options.rounds):
            for name, batches in streams.items():
                speeds[name].append(measure(batches, loops_in_step))
    ratios = {name: [a / b for a, b in zip(rates, speeds["thread"], strict=True)] for name, rates in speeds.items()}
    best = {name: max(rates) / max(speeds["thread"]) for name, rates in speeds.items()}  # the least disturbed rounds
    lines = ["| | samples a second, to `thread` (least to most) | best round to best round |", "|---|---|---|"]
    lines += [
        f"| {name} | {statistics.median(rates):.2f} ({min(rates):.2f} to {max(rates):.2f}) | {best[name]:.2f} |"
        for name, rates in ratios.items()
    ]
    print("\n".join(lines))
    if options.out is not None:
        name = f"gil-{len(os.sched_getaffinity(0))}cpu-{datetime.date.today()}"
        title = f"# {options.milliseconds:g} ms of Python a sample, {options.step:g} ms a step, {options.rounds} rounds"
        (options.out / f"{name}.md").write_text("\n".join([title, "", "`python -m profiles.gil`", "", *lines, ""]))
        (options.out / f"{name}.json").write_text(json.dumps({"options": str(vars(options)), "ratios": ratios}) + "\n")


if __name__ == "__main__":
    main()
