"""Shows in a terminal which lines of a watched script make its batches."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from loaderkit.diagnosis.watched.lines import CostlyLine, LineTimes
from loaderkit.profile.render.summary import facts_table, titled

_MOST, _LEAST_PERCENT = 5, 2.0


def lines_section(times: LineTimes | None) -> Iterator[RenderableType]:
    """The longest lines; all of them are in the JSON and on the page. Empty if none was sampled."""
    if times is None:
        return
    shown = [line for line in times.lines[:_MOST] if line.percent >= _LEAST_PERCENT]
    table = facts_table((f"{line.percent:3.0f} %  {line.place}", _say(line)) for line in shown)
    groups = ", ".join(f"{group} {percent:.0f} %" for group, percent in times.groups.items())
    note = f"{groups}; {times.num_samples} samples, which took {times.cost_percent:.2f} % of a CPU"
    yield from titled(f"Which lines take {times.whose}", Group(table, Text(note, style="dim")))


def _say(line: CostlyLine) -> str:
    inside = f", in {line.inside}" if line.inside else ""
    return f"{line.source}\n{line.part}: {line.group}{inside}"
