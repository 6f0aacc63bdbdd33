"""Accounts of watched loops as files, so that rules are tested on what machines said.

    PYTHONPATH=.:tests/helpers python tests/helpers/watched_accounts.py NAME

runs the loops of watched_loops.py, and writes what the verdict reads of each to tests/diagnosis/watched/recorded/NAME.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

from watched_loops import CASES, Case, make, run

from loaderkit.diagnosis.stats import Stats
from loaderkit.diagnosis.watched.counters import LoaderArguments, WatchedCounters
from loaderkit.diagnosis.watched.rules import diagnose_watched
from loaderkit.diagnosis.watched.stats import WatchedStats
from loaderkit.profile.watched import subject
from profiles import accounts

FOLDER = Path(__file__).parents[1] / "diagnosis" / "watched" / "recorded"


def to_json(stats: WatchedStats) -> dict[str, Any]:
    """What a verdict reads, as JSON values."""
    return {
        **accounts.to_json(stats),
        "arguments": None if stats.arguments is None else asdict(stats.arguments),
        "watched": {**asdict(stats.watched), "gaps": sorted(stats.watched.gaps.items())},
        # Their names are those of the machine on which this was recorded.
        "programs": [(f"program {number}", used_s) for number, (_, used_s) in enumerate(stats.programs, 1)],
        "shared_free_share": stats.shared_free_share,
        "kind": stats.kind,
    }


def from_json(values: Mapping[str, Any]) -> WatchedStats:
    """The accounts that `to_json` wrote."""
    common = accounts.from_json(values)
    watched, arguments = values["watched"], values["arguments"]
    return WatchedStats(
        **{field.name: getattr(common, field.name) for field in fields(Stats) if field.init},
        arguments=None if arguments is None else LoaderArguments(**arguments),
        watched=WatchedCounters(**{**watched, "gaps": dict(watched["gaps"])}),
        programs=tuple((name, used_s) for name, used_s in values["programs"]),
        shared_free_share=values["shared_free_share"],
        kind=values["kind"],
    )


def read(path: Path) -> Iterator[tuple[str, Case, WatchedStats]]:
    """The recorded accounts of every loop in a file."""
    for line in path.read_text().splitlines():
        values = json.loads(line)
        yield values["case"], CASES[values["case"]], from_json(values["accounts"])


def main() -> None:
    lines = []
    for name, case in CASES.items():
        with patch.object(subject, "diagnose_watched", wraps=diagnose_watched) as diagnosed:
            report, _, _ = run(make(case), case, name)
        (stats,) = diagnosed.call_args.args
        print(f"{name}: {report.verdict.stage} ({report.verdict.kind}); {report.verdict.evidence}", flush=True)
        lines.append(json.dumps({"case": name, "accounts": accounts.rounded(to_json(stats))}, separators=(",", ":")))
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{sys.argv[1]}.json").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
