"""Shows in a terminal what saving checkpoints took: the loop's pauses, and the work behind the loop."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from loaderkit._internal.units import say_seconds
from loaderkit.profile.render.summary import short, table_of
from loaderkit.profile.report import Report
from loaderkit.profile.report_parts import SaveRow

_MOST_SAVES = 10
_MUCH = 5.0  # percent of the loop's time


def saving_advice(report: Report) -> str | None:
    """What saving cost the loop and what to change, if it was 5 % of its time or more; None if it was less."""
    steps = report.steps
    waited, staged = (100 * part_s / report.wall_s for part_s in (steps.save_waiting_s, steps.save_staging_s))
    if waited + staged < _MUCH:
        return None
    said = f"saves held the loop up for {waited + staged:.1f} % of its time: "
    if waited >= staged:
        flushes = [row.flush_s for row in report.saves]
        took = f", which took {say_seconds(sum(flushes) / len(flushes))} each" if flushes else ""
        return f"{said}{waited:.1f} % waiting for the save before{took}; save less often, or set when_busy: skip"
    return f"{said}{staged:.1f} % copying the state; save less often"


def saves_table(saves: Sequence[SaveRow]) -> RenderableType:
    """The last saves, and the files of the last one. Of all threads together: hashing, writing, syncing."""
    table = table_of("step", "MB", "waited", "copied", "flush", "hashing", "writing", "syncing", "commit")
    for row in saves[-_MOST_SAVES:]:
        parts = [sum(getattr(item, name) for item in row.objects) for name in ("hashing_s", "writing_s", "syncing_s")]
        times = [row.waiting_s, row.staging_s, row.flush_s, *parts, row.commit_s]
        table.add_row(str(row.step), f"{row.num_bytes / 1e6:.3g}", *(short(seconds) for seconds in times))
    failed = [Text(f"step {row.step} is not saved: {row.error}") for row in saves if row.error is not None]
    return Group(table, *failed)
