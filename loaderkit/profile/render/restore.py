"""The report on a restore for a terminal, readable at 80 columns and without colour."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table

from loaderkit._internal.units import say_seconds, say_size
from loaderkit.profile.render.summary import table_of, titled, verdict_section
from loaderkit.profile.report import RestoreReport


def restore_sections(report: RestoreReport) -> Iterator[RenderableType]:
    """The parts of the report, the verdict first."""
    verdict = report.verdict
    size, rate = say_size(report.num_bytes), f"{say_size(report.bytes_per_s)}/s"
    partial = f" (partial: {report.partial})" if report.partial else ""
    head = f"{report.name}: {size} in {say_seconds(report.wall_s)}, {rate}{partial}"
    is_good, bare, note = verdict.limit == "store", None, f", {report.note}" if report.note else ""
    if report.bare_bytes_per_s is not None:
        bare = f"{say_size(report.bare_bytes_per_s)}/s by {report.threads} threads{note}"
    checked = "every block compared with the manifest" if report.verified else "no manifest: nothing was compared"
    more = report.fetched_bytes / max(report.num_bytes, 1)
    facts = [
        ("evidence", verdict.evidence),
        ("change", verdict.change),
        ("bare read", bare),
        ("reads", f"{report.num_reads}, {more:.3f} bytes for each one needed; {checked}"),
        ("opening", f"{say_seconds(report.open_s)} to list it and to read its description"),
    ]
    limit = "The store is the limit" if is_good else f"{verdict.limit} is the limit"
    yield from verdict_section(head, limit, facts, is_good=is_good)
    yield from titled("What the loop waited for", _waits(report))
    yield from titled("What the threads did, in seconds of all together", _stages(report))
    yield from titled("Objects that took longest, in seconds of all threads together", _objects(report))


def _waits(report: RestoreReport) -> Table:
    table = table_of("cause", "s", "of the time")
    for cause, seconds in report.waited.items():
        if seconds > 0:
            table.add_row(cause, f"{seconds:.2f}", f"{100 * seconds / max(report.wall_s, 1e-9):.0f} %")
    return table


def _stages(report: RestoreReport) -> Table:
    table = table_of("stage", "threads", "busy", "computing", "no work")
    for row in report.stages:
        table.add_row(row.name, str(row.workers), *(f"{value:.2f}" for value in (row.busy_s, row.cpu_s, row.starved_s)))
    return table


def _objects(report: RestoreReport) -> Table:
    table = table_of("object", "size", "reads", "read", "1st byte", "verify", "copy", "cast")
    for row in report.objects:
        first = "" if row.first_byte_s is None else f"{row.first_byte_s:.2f}"
        times = [f"{row.read_s:.2f}", first, *(f"{value:.2f}" for value in (row.verify_s, row.copy_s, row.cast_s))]
        table.add_row(row.object.rpartition("/")[2], say_size(row.num_bytes), str(row.num_reads), *times)
    return table
