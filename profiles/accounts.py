"""Accounts as files, so that rules are tested on what machines said: python -m profiles.accounts NAME [--only WORDS]

Runs the pipelines of bottlenecks.py, and writes what the verdict reads of their accounts to
tests/diagnosis/recorded/NAME.json, a line for each. With --one-cpu all threads of a pipeline run on one CPU while
the others are idle: then a thread that gets the GIL is ready to run, and waits behind the one that gave it away,
as it does on some virtual machines. (Where a pipeline computes side by side that is another bottleneck: those are left
out then.)
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from loaderkit.diagnosis.stats import Stats
from loaderkit.engine.metrics.contention import ContentionResult
from loaderkit.engine.metrics.histogram import Histogram
from loaderkit.engine.metrics.host import HostStats
from loaderkit.engine.metrics.snapshot import StageStats
from loaderkit.engine.metrics.tuning import PoolTuning, Tuning
from loaderkit.pipeline.config.registry import STAGES
from profiles.bottlenecks import CASES, Case, run

FOLDER = Path(__file__).parent.parent / "tests" / "diagnosis" / "recorded"
_SIDE_BY_SIDE = ("CPU-bound decode", "batch assembly")
_PLAIN = ("wall_s", "num_batches", "num_samples", "waits_s", "memory")


def to_json(stats: Stats) -> dict[str, Any]:
    """What a verdict reads, as JSON values."""
    rows = []
    for row in stats.stages:
        values = {field.name: getattr(row, field.name) for field in fields(row) if field.name != "services"}
        known = {name: value for name, value in values.items() if value}
        rows.append({**known, "workers": row.workers, "services": sorted(row.services.counts.items())})
    return {
        **{name: getattr(stats, name) for name in _PLAIN},
        "tuning": stats.tuning.to_dict(),
        "stages": rows,
        "host": asdict(stats.host),
        "trials": {stage: trial._asdict() for stage, trial in stats.trials.items()},
    }


def _may_wait(kind: str) -> bool:
    return kind in STAGES and not STAGES[kind].only_computes


def from_json(values: Mapping[str, Any]) -> Stats:
    """The accounts that `to_json` wrote."""
    rows = [
        StageStats(**{**row, "services": Histogram.of(dict(row["services"])), "waits": _may_wait(row["kind"])})
        for row in values["stages"]
    ]
    return replace(
        Stats.empty(rows, values["memory"].get("budget_bytes", 0)),
        **{name: values[name] for name in _PLAIN},
        tuning=_tuning(values["tuning"]),
        host=HostStats(**values["host"]),
        trials={stage: ContentionResult(**trial) for stage, trial in values["trials"].items()},
    )


def _tuning(values: Mapping[str, Any]) -> Tuning:
    pools = tuple(
        PoolTuning(tuple(pool["stages"]), pool["workers"], is_trainers="process" in pool) for pool in values["pools"]
    )
    known = {field.name for field in fields(Tuning)} & values.keys()
    return Tuning(**{**{name: values[name] for name in known}, "pools": pools})


def read(path: Path) -> Iterator[tuple[Case, Stats]]:
    """The recorded accounts of every pipeline in a file."""
    cases = {case.name: case for case in CASES}
    for line in path.read_text().splitlines():
        values = json.loads(line)
        yield cases[values["case"]], from_json(values["accounts"])


def rounded(value: Any) -> Any:
    """JSON values whose numbers have no more digits than were measured."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    return [rounded(one) for one in value] if isinstance(value, list | tuple) else value


def put_on_one_cpu() -> None:
    """All threads of this process but the one that calls."""
    for thread in map(int, os.listdir("/proc/self/task")):
        if thread != os.getpid():
            os.sched_setaffinity(thread, {min(os.sched_getaffinity(0))})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("name", help="of the file: what machine this is, and what else runs on it")
    parser.add_argument("--only", default="", help="only pipelines whose name contains this")
    parser.add_argument("--one-cpu", action="store_true", help="let all threads but the loop's run on one CPU")
    options = parser.parse_args()
    lines = []
    for case in CASES:
        if options.only in case.name and not (options.one_cpu and case.bottleneck in _SIDE_BY_SIDE):
            stats, _ = run(case, put_on_one_cpu if options.one_cpu else None)
            found = stats.verdict()
            print(f"{case.name}: {found.stage} ({found.kind}); {found.evidence}", flush=True)
            lines.append(json.dumps({"case": case.name, "accounts": rounded(to_json(stats))}, separators=(",", ":")))
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{options.name}.json").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
