"""The verdicts on eighty pipelines with one bottleneck each: python -m profiles.verdicts [--out FOLDER] [--only WORDS]

Prints a line for each, and with --out writes verdicts-<machine>-<date>.json and .md there.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from profiles.bottlenecks import BOTTLENECKS, CASES, Case, is_right, measure

_NUM_TRIES = 3
_QUIET_CPUS = 0.3


def run(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Every case once: what was built in, the verdict, whether it is right."""
    found = []
    for case in cases:
        begin = time.perf_counter()
        stats = min(_tries(case), key=lambda stats: float(stats["others_cpus"]))
        verdict = stats["verdict"]
        found.append(
            {
                "case": case.name,
                "bottleneck": case.bottleneck,
                "expected": case.expected[0],
                "is_right": is_right(case, verdict),
                "took_s": round(time.perf_counter() - begin, 2),
                "others_cpus": stats["others_cpus"],
                "stall_percent": round(stats["stall"]["percent"], 1),
                "verdict": verdict,
            }
        )
    return found


def _tries(case: Case) -> Iterator[dict[str, Any]]:
    """Measured until other programs leave the machine alone, or three times: then the quietest counts, right or wrong."""
    for _ in range(_NUM_TRIES):
        stats = measure(case)
        yield stats
        if stats["others_cpus"] < _QUIET_CPUS:
            return


def tell(row: dict[str, Any]) -> str:
    verdict = row["verdict"]
    mark = "right" if row["is_right"] else "WRONG"
    said = f"{verdict['stage']} ({verdict['kind']}, {verdict['percent']} %, {verdict['confidence']})"
    return f"{mark}  {row['case']}: {said}; {verdict['evidence']} -> {verdict['change']}"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The result as Markdown."""
    num_right = sum(row["is_right"] for row in rows)
    lines = [
        "# Verdicts on pipelines with one bottleneck",
        "",
        f"{num_right} of {len(rows)} right ({100 * num_right / len(rows):.1f} %), on {os.cpu_count()} CPUs, "
        f"torch {torch.__version__}. "
        f"Other programs used {statistics.median(row['others_cpus'] for row in rows):.1f} of them in the median, and up to "
        f"{max(row['others_cpus'] for row in rows):.1f}. "
        "Made by `python -m profiles.verdicts`; the pipelines are in [bottlenecks.py](../bottlenecks.py).",
        "",
        "| bottleneck | right | verdict of each: stage, kind, confidence |",
        "|---|---|---|",
    ]
    for bottleneck in BOTTLENECKS:
        own = [row for row in rows if row["bottleneck"] == bottleneck]
        said: dict[str, list[float]] = {}
        for row in own:
            verdict = row["verdict"]
            said.setdefault(f"{verdict['stage']}, {verdict['kind']}", []).append(verdict["confidence"])
        each = "; ".join(f"{len(sure)} x {what} ({min(sure):.2f} to {max(sure):.2f})" for what, sure in said.items())
        if own:
            lines.append(f"| {bottleneck} | {sum(row['is_right'] for row in own)} of {len(own)} | {each} |")
    wrong = [row for row in rows if not row["is_right"]]
    if wrong:
        lines += ["", "Wrong:", ""] + [f"- {tell(row)}" for row in wrong]
    examples = {row["bottleneck"]: row for row in reversed(rows) if row["is_right"]}
    lines += ["", "One of each in full:", ""]
    lines += [
        f"- **{row['case']}**: {row['verdict']['evidence']}. *{row['verdict']['change']}*"
        for row in reversed(examples.values())
    ]
    return "\n".join(lines) + "\n"


def record(rows: Sequence[dict[str, Any]], folder: Path) -> Path:
    """Write the result; returns where the table is."""
    name = f"verdicts-{os.cpu_count()}cpu-{datetime.date.today().isoformat()}"
    (folder / f"{name}.json").write_text(json.dumps(list(rows), indent=1) + "\n")
    path = folder / f"{name}.md"
    path.write_text(table(rows))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="a folder to write the result to")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    options = parser.parse_args()
    rows = []
    for case in CASES:
        if options.only in case.name:
            rows += run([case])
            print(tell(rows[-1]), flush=True)
    print(f"{sum(row['is_right'] for row in rows)} of {len(rows)} right")
    if options.out is not None:
        print(record(rows, options.out))


if __name__ == "__main__":
    main()
