"""`processes: auto` against fixed numbers, under a loop whose need changes.

    python -m profiles.growing [--seconds 20] [--rounds 3] [--milliseconds 1] [--most 4] [--held] [--out profiles/results]

Each sample takes `--milliseconds` of pure Python. A loop takes all that comes for a while, then pauses behind each batch, so
that a process is enough, then takes all again. In each round every contestant runs by itself, one after another. Written down:
samples/s in the second half of each while, and for `auto` the number of processes at every second. With `--held` a sample takes
no CPU, but holds the GIL for as long, which stands in for CPUs that one does not have.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import loaderkit
from profiles.gil import Empty, compute, loops_for

BATCH = 16
CONTESTANTS = (1, "most", "auto")


def hold(sample: dict[str, Any], seconds: float) -> None:
    """Keep the GIL, and no CPU: a `PyDLL` does not release it."""
    ctypes.PyDLL(None).usleep(int(1e6 * seconds))
    sample["y"] = 0


class Course:
    """What one contestant did."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.processes: list[int] = []


def run(processes: int | str, most: int, work: tuple[Any, dict[str, Any]], seconds: float, pause_s: float) -> Course:
    """Three whiles of `seconds`."""
    pipeline = loaderkit.Pipeline.dataset(Empty()).read().call(work[0], args=work[1]).batch(BATCH)
    given = {"prefetch.executor": "process", "prefetch.processes": processes, "prefetch.batches": 2 * most}
    given |= {"prefetch.max_processes": most} if processes == "auto" else {}
    course = Course()
    with loaderkit.build(pipeline, overrides=given) as loader:
        batches = iter(loader)
        next(batches)
        for pausing_s in (0.0, pause_s, 0.0):
            begin, counted, looked = time.perf_counter(), 0, time.perf_counter()
            while (now := time.perf_counter()) < begin + seconds:
                next(batches)
                if pausing_s:
                    time.sleep(pausing_s)
                counted += BATCH * (now > begin + seconds / 2)
                if now > looked + 1:
                    looked = now
                    course.processes.append(loader.stats().tuning.processes or 0)
            course.rates.append(counted / (seconds / 2))
    return course


def main() -> None:
    """Run and write the result."""
    num_cpus = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--milliseconds", type=float, default=1.0)
    parser.add_argument("--most", type=int, default=num_cpus, help="processes; default: one a CPU")
    parser.add_argument("--held", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("profiles/results"))
    args = parser.parse_args()
    seconds = args.milliseconds / 1000
    work: tuple[Any, dict[str, Any]] = (
        ("profiles.growing:hold", {"seconds": seconds}) if args.held else (compute, {"loops": loops_for(seconds)})
    )
    pause_s = 2.5 * BATCH * args.milliseconds / 1000  # a process does 2.5 batches meanwhile
    found: dict[str, list[Course]] = {}
    for _ in range(args.rounds):
        for contestant in CONTESTANTS:
            processes = args.most if contestant == "most" else contestant
            course = run(processes, args.most, work, args.seconds, pause_s)
            found.setdefault(str(processes), []).append(course)
            print(processes, [round(rate) for rate in course.rates], course.processes, flush=True)
    result: dict[str, Any] = {
        "cpus": num_cpus,
        "load": os.getloadavg()[1],
        "arguments": {key: value for key, value in vars(args).items() if key != "out"},
        "samples_per_s": {
            name: [round(statistics.median(rates)) for rates in zip(*(one.rates for one in courses), strict=True)]
            for name, courses in found.items()
        },
        "processes_at_each_second": [course.processes for course in found["auto"]],
    }
    args.out.mkdir(parents=True, exist_ok=True)
    path = (
        args.out
        / f"growing{'-held' if args.held else ''}-{num_cpus}cpu-{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}.json"
    )
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(path)


if __name__ == "__main__":
    main()
