"""The report on a start for a terminal, readable at 80 columns and without colour."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from loaderkit._internal.units import say_seconds
from loaderkit.profile.render.summary import facts_table, table_of, titled
from loaderkit.profile.report import StartReport

_WIDTH = 36


def start_sections(report: StartReport) -> Iterator[RenderableType]:
    """The parts of the report, what came out first."""
    step = "no checkpoint" if report.step is None else f"step {report.step}"
    yield Text(f"{report.name}: first batch after {say_seconds(report.total_s)}, {step}", style="bold")
    longest = max((part for part in report.parts if part.is_critical), key=lambda part: part.end_s - part.begin_s)
    took = say_seconds(longest.end_s - longest.begin_s)
    yield facts_table(
        [
            ("longest", f"{longest.name}, {took} of the path that the first step waits for"),
            ("one by one", f"{say_seconds(report.one_by_one_s)} for all parts, had none run beside another"),
            ("listing", f"{say_seconds(report.list_s)}, indexes {say_seconds(report.index_s)}"),
        ]
    )
    yield from titled("What ran when; * the first step waited for it", _bars(report))


def _bars(report: StartReport) -> Table:
    table = table_of("part", "from", "s", "")
    scale = _WIDTH / max(report.total_s, 1e-9)
    for part in report.parts:
        first = min(int(part.begin_s * scale), _WIDTH - 1)
        bar = " " * first + "=" * max(1, round(part.end_s * scale) - first)
        mark = "*" if part.is_critical else " "
        table.add_row(
            f"{mark} {part.name}", f"{part.begin_s:.2f}", f"{part.end_s - part.begin_s:.2f}", f"{bar:<{_WIDTH + 1}}"
        )
    return table
