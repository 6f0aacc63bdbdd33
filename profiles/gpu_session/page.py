"""A session's lines as a page of Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Line = Mapping[str, Any]


def page(lines: Sequence[Line]) -> str:
    """Of each step the last line: a step may have been run again."""
    last = list({line["name"]: line for line in lines}.values())
    facts: Mapping[str, Any] = next((line.get("figures", {}) for line in last if line["name"] == "facts"), {})
    parts = [f"# A session on {facts.get('device', 'a machine with a GPU')}", ""]
    parts += _table(("step", "outcome", "s", "bars"), map(_summary, last))
    bars = [(line["name"], bar) for line in last for bar in line.get("bars", ())]
    if bars:
        parts += ["", "## Bars", "", *_table(("step", "figure", "value", "bar", ""), [_bar(*one) for one in bars])]
    for line in last:
        if line.get("figures") or _is_bad(line):
            parts += ["", f"## {line['name']}", ""]
        if line.get("figures"):
            parts += _table(("figure", "value"), ((name, _text(value)) for name, value in line["figures"].items()))
        if _is_bad(line) and line.get("stderr"):
            parts += ["", "```text", line["stderr"].strip().replace("```", "'''"), "```"]
    return "\n".join(parts) + "\n"


def _is_bad(line: Line) -> bool:
    return line["outcome"] not in ("passed", "skipped")


def _summary(line: Line) -> tuple[str, ...]:
    bars = line.get("bars", ())
    met = f"{sum(bar['met'] for bar in bars)} of {len(bars)} met" if bars else ""
    why = line.get("skipped") or line.get("why")
    return (line["name"], line["outcome"] + (f": {why}" if why else ""), _text(line.get("seconds", "")), met)


def _bar(step: str, bar: Line) -> tuple[str, ...]:
    limit = ", ".join(f"at {key} {bar[key]:g}" for key in ("least", "most") if key in bar)
    return (step, bar["name"], _text(bar["value"]), limit, "met" if bar["met"] else "**not met**")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    cells = [list(head), ["---"] * len(head), *rows]
    return [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in cells]


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1e6 else f"{value:g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value).replace("\n", " ")
