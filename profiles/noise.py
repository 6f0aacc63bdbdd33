"""How often two runs of the same pipeline are told apart by `--baseline`, and how often two unlike ones are.

    python -m profiles.noise [--runs 12] [--steps 80] [--out profiles/results]

Runs alternate between a pipeline and one whose samples take 15 % longer, so that what else the machine does falls on both.
Every run is compared with the next one of its own kind (these should not be told apart: 5 % may) and with the one between
(these should).
"""

from __future__ import annotations

import argparse
import json
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

import loaderkit
from loaderkit.profile.compare import compare_reports
from loaderkit.profile.report import Report

_STEP_S = 0.004
_SAMPLE_S = 0.6e-3
_SLOWER = 1.15
_SEVERAL = 5


class Slow:
    """Samples that take so long to have, waiting: what else runs here disturbs them as it disturbs reads."""

    def __init__(self, sample_s: float) -> None:
        self._sample_s = sample_s

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> Any:
        time.sleep(self._sample_s)
        return {"x": np.full(64, index)}


def one_run(sample_s: float, num_steps: int) -> Report:
    """One report."""
    pipeline = loaderkit.Pipeline.dataset(Slow(sample_s)).read().batch(16)
    overrides = {"prefetch.concurrency": 1, "prefetch.batches": 4}
    with loaderkit.build(pipeline, overrides=overrides) as loader, loader.profile() as report:
        for number, _ in enumerate(loader):
            if number >= num_steps:
                break
            time.sleep(_STEP_S)
    found: Report = report.result
    return found


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=12, help="of each kind")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    alike: list[str] = []
    unlike: list[str] = []
    changes: list[float] = []
    alike_of_several: list[str] = []
    unlike_of_several: list[str] = []
    before: tuple[list[Report], list[Report]] = ([], [])
    for _ in range(args.runs):
        runs = [one_run(_SAMPLE_S, args.steps), one_run(_SLOWER * _SAMPLE_S, args.steps)]
        quick, slow = runs
        found = compare_reports([quick], slow).rows[0]
        unlike.append(found.outcome)
        changes.append(found.change or 0.0)
        for kind, run in zip(before, runs, strict=True):
            alike += [compare_reports(kind[-1:], run).rows[0].outcome] if kind else []
            alike_of_several += (
                [compare_reports(kind[-_SEVERAL:], run).rows[0].outcome] if len(kind) >= _SEVERAL else []
            )
        if len(before[0]) >= _SEVERAL:
            unlike_of_several.append(compare_reports(before[0][-_SEVERAL:], slow).rows[0].outcome)
        for kind, run in zip(before, runs, strict=True):
            kind.append(run)
    text = f"{args.steps} steps a run, {os.cpu_count()} CPUs, samples that take 15 % longer in the slower kind.\n\n"
    text += "| compared with | same, told apart | slower, said to be slower |\n|---|---|---|\n"
    for name, same, other in (
        ("one run before", alike, unlike),
        (f"{_SEVERAL} runs before", alike_of_several, unlike_of_several),
    ):
        num_false, num_found = sum(one != "noise" for one in same), sum(one == "worse" for one in other)
        text += f"| {name} | {num_false} of {len(same)} | {num_found} of {len(other)} |\n"
    text += f"\nThe slower kind's throughput differs by {np.median(changes):.1f} % in the median.\n"
    print(text, end="")
    if args.out is not None:
        stem = args.out / f"noise-{os.cpu_count()}cpu-{datetime.now(UTC):%Y-%m-%d}"
        stem.with_suffix(".md").write_text(text)
        stem.with_suffix(".json").write_text(
            json.dumps(
                {
                    "steps": args.steps,
                    "alike": alike,
                    "unlike": unlike,
                    "alike_of_several": alike_of_several,
                    "unlike_of_several": unlike_of_several,
                    "changes": changes,
                }
            )
            + "\n"
        )


if __name__ == "__main__":
    main()
