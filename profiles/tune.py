"""Whether `loaderkit tune` finds what is better, and makes nothing worse: python -m profiles.tune [--busy 0,1] [--out FOLDER]

Pipelines with one setting that is known to be wrong are drawn at random, and tuned beside N busy programs. Then three
variants run in turns once more: the file as it was, what was written or offered, and the setting known to be right. A setting
that was found makes it worse if it is slower by 3 % in most pairs of windows and in the median.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import loaderkit
from loaderkit.profile.experiments.decide import GAIN, PairedGains, num_lost, num_won
from loaderkit.profile.experiments.interleave import Variant, interleave, ratio_of
from loaderkit.profile.experiments.search import tune
from profiles.mistuned import KINDS, Case
from profiles.record import record

_BUSY = "while True: pass"
_CHECK_ROUNDS = 7


@contextmanager
def busy_programs(number: int) -> Iterator[None]:
    with ExitStack() as stack:
        for _ in range(number):
            program = stack.enter_context(subprocess.Popen([sys.executable, "-c", _BUSY]))
            stack.callback(program.kill)
        yield


def measure(case: Case, seconds: float) -> dict[str, Any]:
    """Tune a case; compare what was found, and what is known to be right, with the file as it was."""

    def make(overrides: Any, slowdown: Any) -> loaderkit.Loader:
        return loaderkit.build(case.pipeline, overrides={**case.wrong, **overrides}, rank=0, world_size=1)

    config = case.pipeline.with_overrides(case.wrong).config
    tuned = tune(make, case.step, config, seconds=seconds)
    settings = {one.key: one.value for one in tuned.found}
    with ExitStack() as stack:
        old, new, right = (
            Variant(stack.enter_context(make(overrides, None)), case.step) for overrides in ({}, settings, case.right)
        )
        interleave([old, new, right], rounds=_CHECK_ROUNDS, window_s=0.3, most_s=10.0)
    checked = PairedGains.of(new.windows, old.windows)
    speedup = ratio_of(new, old)[0]
    return {
        "wrong": case.wrong,
        "outcome": tuned.outcome,
        "settings": settings,
        "speedup": tuned.speedup,
        "interval": tuned.interval,
        "pairs": [tuned.num_faster, tuned.num_waiting_less, tuned.num_pairs],
        "waiting": [tuned.stall_before_percent, tuned.stall_after_percent],
        "checked_speedup": speedup,
        "checked_waiting": [old.stall_percent, new.stall_percent],
        "is_worse": bool(settings) and speedup < 1 - GAIN and num_lost(checked.speed) > 2 * num_won(checked.speed),
        "right_speedup": ratio_of(right, old)[0],
        "seconds": tuned.seconds,
        "load": os.getloadavg()[0],
        "trials": [trial.model_dump(mode="json") for trial in tuned.trials],
    }


def main() -> None:
    """Draw pipelines, tune them, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=20, help="of pipelines")
    parser.add_argument("--seconds", type=float, default=30.0, help="for each search")
    parser.add_argument(
        "--busy", default="0", help="busy programs beside: one or two for half of the pipelines each: 1,2"
    )
    parser.add_argument("--only", default="", help="kinds whose name contains this")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    busy = [int(number) for number in options.busy.split(",")]
    draw = random.Random(options.seed)
    kinds = [kind for kind in KINDS if options.only in kind.__name__]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.number):
            kind = kinds[number % len(kinds)]
            case, num_busy = kind(draw, Path(folder)), busy[number // len(kinds) % len(busy)]
            with busy_programs(num_busy):
                rows.append({"kind": kind.__name__, "busy": num_busy, **measure(case, options.seconds)})
            row = rows[-1]
            print(
                f"{row['kind']:20} {num_busy} busy  {row['outcome']:10} {row['speedup']:5.2f} +- {row['interval']:.2f} "
                f"{row['pairs']}, again {row['checked_speedup']:.2f}{' WORSE' if row['is_worse'] else ''}, right "
                f"{row['right_speedup']:.2f}, {row['settings']}",
                flush=True,
            )
    found = {
        "seed": options.seed,
        "num_found": sum(row["outcome"] != "no better" for row in rows),
        "num_sure": sum(row["outcome"] == "sure" for row in rows),
        "num_right_is_better": sum(row["right_speedup"] >= 1 + GAIN for row in rows),
        "num_worse": sum(row["is_worse"] for row in rows),
        "median_load": statistics.median(row["load"] for row in rows),
        "median_speedup": statistics.median(row["checked_speedup"] for row in rows),
    }
    print(found)
    record(options.out, "tune-busy" if any(busy) else "tune", **found, rows=rows)


if __name__ == "__main__":
    main()
