"""Results as JSON, and as a Markdown table made from it. Works measured earlier on the same day stay."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from datetime import date, datetime
from pathlib import Path
from typing import Any

from profiles.peers.rounds import Entry, ratios, reference_of, summary, value_of
from profiles.peers.works import Work


def num_cpus() -> int:
    """CPUs this process may use."""
    return len(os.sched_getaffinity(0))


def target(out: Path) -> Path:
    """Where results go, without the suffix."""
    return out / f"peers-{num_cpus()}cpu-{date.today().isoformat()}"


def work_report(work: Work, entries: Sequence[Entry]) -> dict[str, Any]:
    """A work's results as they stand in the JSON."""
    return {
        "title": work.title,
        "unit": work.unit,
        "measured": datetime.now().astimezone().isoformat(timespec="seconds"),
        "contestants": {entry.contestant.name: _entry_report(work, entry, entries) for entry in entries},
    }


def _entry_report(work: Work, entry: Entry, entries: Sequence[Entry]) -> dict[str, Any]:
    values = [value_of(work, entry.turns[number]) for number in sorted(entry.turns)]
    reference = reference_of(entry, entries)
    # A contestant that failed on the way has figures, but they are not to be compared.
    compared = reference is not None and reference is not entry and entry.error is None
    return {
        "version": entry.version,
        "settings": dict(entry.contestant.settings),
        "error": entry.error,
        "not_the_same_work": entry.off,
        "figure": summary(values),
        "against": reference.contestant.name if reference is not None and compared else None,
        "ratio": summary(ratios(work, entry, reference)) if reference is not None and compared else None,
        "checks": entry.checks,
        "turns": [{"round": number + 1, **entry.turns[number]} for number in sorted(entry.turns)],
    }


def write(out: Path, command: str, works: dict[str, dict[str, Any]]) -> Path:
    """Write `peers-<cpus>cpu-<date>.json` and `.md`; returns the path of the table."""
    path = target(out)
    json_path = path.with_name(path.name + ".json")
    earlier = json.loads(json_path.read_text())["works"] if json_path.exists() else {}
    found = {
        "machine": {"cpus": num_cpus(), "model": _cpu_model(), "python": platform.python_version()},
        "works": {**earlier, **{name: {"command": command, **work} for name, work in works.items()}},
    }
    out.mkdir(parents=True, exist_ok=True)
    _replace(json_path, json.dumps(found, indent=1) + "\n")
    table_path = path.with_name(path.name + ".md")
    _replace(table_path, table(found))
    return table_path


def table(found: dict[str, Any]) -> str:
    """The Markdown of a results file."""
    machine = found["machine"]
    lines = [
        f"# loaderkit and its peers, {machine['cpus']} CPUs ({machine['model']}), Python {machine['python']}",
        "",
        "Medians over the rounds, in brackets the least and the most. A ratio is how many times as good loaderkit was, round",
        "by round: above 1 loaderkit was faster, or needed less time or memory. How: [peers/](../peers/README.md).",
    ]
    for name, work in found["works"].items():
        lines += [
            "",
            f"## {name}: {work['title']}",
            "",
            f"| contestant | {work['unit']} | ratio | version |",
            "|---|---|---|---|",
        ]
        lines += [_row(contestant, entry) for contestant, entry in work["contestants"].items()]
        lines += _notes(work["contestants"])
    return "\n".join(lines) + "\n"


def _row(name: str, entry: dict[str, Any]) -> str:
    figure = "failed" if entry["error"] else spread(entry["figure"])
    ratio = spread(entry["ratio"]) if entry["ratio"] else ""
    if entry["ratio"] and entry["against"] != "loaderkit":
        ratio += f" of {entry['against']}"
    return f"| {name} | {figure} | {ratio} | {entry['version']} |"


def _notes(contestants: dict[str, Any]) -> list[str]:
    """Failures, and what was not the same work, below the table."""
    notes = []
    for name, entry in contestants.items():
        if entry["error"]:
            notes.append(f"- {name} failed: {entry['error'].splitlines()[0]}")
        notes += [f"- {name} did not do the same work: {what}" for what in entry["not_the_same_work"]]
    return ["", *notes] if notes else []


def spread(values: dict[str, float] | None) -> str:
    """Median, least and most as text; nothing of None."""
    if values is None:
        return ""
    return f"{number(values['median'])} ({number(values['least'])} to {number(values['most'])})"


def number(value: float) -> str:
    """A figure with three digits or all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
