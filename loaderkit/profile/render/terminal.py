"""The report for a terminal: the verdict first, then where the time goes; readable at 80 columns and without colour."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from loaderkit._internal.units import say_count, say_seconds
from loaderkit.diagnosis.verdict import say
from loaderkit.profile.render.lines import lines_section
from loaderkit.profile.render.ported import ported_section
from loaderkit.profile.render.restore import restore_sections
from loaderkit.profile.render.saves import saves_table, saving_advice
from loaderkit.profile.render.start import start_sections
from loaderkit.profile.render.summary import (
    SOURCE_TIMES,
    as_text,
    facts_table,
    nodes_table,
    short,
    sources_tables,
    table_of,
    titled,
    tuning_table,
    verdict_section,
)
from loaderkit.profile.render.tables import comparison
from loaderkit.profile.report import Report, RestoreReport, StartReport
from loaderkit.profile.report_parts import Headroom, Rate, SlowItem, StageRow, VerdictPart, WhatIf

_BAR = 20
_WORTH_TELLING = 5.0  # percent of the time


def to_text(report: Report | RestoreReport | StartReport, width: int = 80) -> str:
    """The report without colour."""
    return as_text(render(report), width)


def render(report: Report | RestoreReport | StartReport) -> RenderableType:
    """What a reader needs first; the rest is in the JSON."""
    if isinstance(report, StartReport):
        return Group(*start_sections(report))
    return Group(*(restore_sections(report) if isinstance(report, RestoreReport) else _sections(report)))


def _sections(report: Report) -> Iterator[RenderableType]:
    yield from _verdict(report)
    yield from titled("In short", Text(report.summary))
    yield from titled("Where the time goes", _loop(report))
    if report.stall.total_s > 0:
        yield from titled("What the loop waited for", _stalls(report))
    yield from titled("What the workers did, in percent of their time", _stages(report.stages))
    yield from lines_section(report.lines)
    yield from ported_section(report.ported)
    if report.sources:
        given, times = sources_tables([row.model_dump() for row in report.sources])
        yield from titled("Sources", given)
        yield from titled(SOURCE_TIMES, times)
    if report.nodes:
        yield from titled("Nodes", nodes_table([row.model_dump() for row in report.nodes]))
    if report.saves:
        yield from titled("Checkpoints saved", saves_table(report.saves))
    if report.slowest:
        yield from titled("Slowest samples", _slowest(report.slowest))
    if report.first_batch is not None:
        yield from titled("The first batch", _first_batch(report))
    if report.headspace is not None:
        yield from titled("Headroom", headroom_table(report.headspace))
    if report.what_if or report.num_unsure:
        title = "What if"
        if report.model_error_percent is not None:
            title += f" (the model is {report.model_error_percent:+.0f} % off for the pipeline as it is)"
        yield from titled(title, _what_if(report.what_if, report.num_unsure))
    if report.tuning.get("decisions"):
        yield from titled("Tuned", tuning_table({"tuning": report.tuning}))
    if report.baseline is not None:
        yield comparison(report.baseline)


def _verdict(report: Report) -> Iterator[RenderableType]:
    verdict = report.verdict
    rank = f", rank {report.rank} of {report.world_size}" if report.world_size > 1 else ""
    head = f"{report.name}{rank}: the loop waited {report.stall.percent:.1f} % of {say_seconds(report.wall_s)}"
    if report.partial:
        head += f" (partial: {report.partial})"
    later = report.stall.after_start_percent
    if later is not None and report.stall.percent - later >= _WORTH_TELLING:
        head += f", {later:.1f} % after the start"
    limit = f"{verdict.headline} ({100 * verdict.confidence:.0f} % sure)"
    facts = [
        ("evidence", verdict.evidence),
        ("also", _other_causes(verdict)),
        ("source", verdict.source),
        ("tried", None if verdict.tried is None else f"{say(verdict.tried.settings)}: {verdict.tried}"),
        ("checked", None if verdict.check is None else verdict.check.evidence),
        ("machine", report.host.get("numa") or None),
        ("change", verdict.change),
        ("saving", saving_advice(report)),
    ]
    yield from verdict_section(head, limit, facts, is_good=verdict.kind == "training")
    if report.patch:
        yield Text("")
        yield Text("To set:", style="bold")
        yield Text(report.patch.rstrip())


def _other_causes(verdict: VerdictPart) -> str | None:
    """What else the loop waited for."""
    others = [one for one in verdict.causes if one.stage != verdict.stage]
    return ", ".join(f"{one.stage} {one.percent:.1f} % ({one.kind})" for one in others) or None


def _loop(report: Report) -> RenderableType:
    steps = report.steps
    rows = [(name, _share(seconds, percent)) for name, _, seconds, percent in steps.parts()]
    rows.append(("before, after, between", f"{steps.outside_s:8.2f} s"))
    speed = f"{report.throughput['samples_per_s']:.0f} samples/s, {_rate(report.throughput['bytes_per_s'])}"
    dropped = f", {report.num_dropped} more dropped by filter" if report.num_dropped else ""
    rows.append(("speed", f"{report.num_samples} samples in {report.num_batches} batches{dropped}, {speed}"))
    rows += [("bad shard", shard) for shard in report.bad_shards]
    if steps.p50_s is not None and steps.p99_s is not None:
        computing = f", of it computing {short(steps.compute_p50_s)} and {short(steps.compute_p99_s)}"
        rows.append(("a step", f"{short(steps.p50_s)} (p50), {short(steps.p99_s)} (p99){computing}"))
    if report.utilisation is not None:
        marks = ", ".join(
            f"{'passes' if mark.passes else 'below'} {mark.at_least_percent:.0f} %" for mark in report.utilisation.marks
        )
        used = f"{report.utilisation.percent:.1f} % (MLPerf Storage's: {marks})"
        if (whole := report.utilisation.whole_run_percent) is not None:
            used += f"; {whole:.1f} % with the first steps of epochs"
        rows.append(("utilisation", used))
    return facts_table(rows)


def _stalls(report: Report) -> RenderableType:
    waits = ((cause, s, 100 * s / report.wall_s) for cause, s in report.stall.by_stage.items())
    return facts_table((cause, _share(s, percent)) for cause, s, percent in waits if percent >= 0.05)


def _share(seconds: float, percent: float) -> str:
    return f"{seconds:8.2f} s  {percent:5.1f} %  {'#' * round(_BAR * percent / 100)}"


def _stages(stages: Sequence[StageRow]) -> RenderableType:
    """Two tables: the time of the workers, and what the stage does in it."""
    times = table_of("stage", "workers", "cpu", "i/o", "gil", "late", "starved", "blocked", "idle")
    speeds = table_of("stage", "p50", "p99", "items/s", "MB/s", "queue", "waited for")
    pools: dict[int, float] = {}
    for row in stages:
        pools[row.pool] = pools.get(row.pool, 0.0) + row.slot_s
    for row in stages:
        whole_s = max(pools[row.pool], 1e-9)
        spent = (row.cpu_s, row.io_s, row.gil_s, row.delayed_s, row.starved_s, row.blocked_s, row.idle_s)
        times.add_row(row.name, str(row.workers), *(f"{100 * s / whole_s:.0f}" if s else "" for s in spent))
        speeds.add_row(
            row.name,
            short(row.p50_s),
            short(row.p99_s),
            f"{row.items_per_s:.0f}",
            f"{row.bytes_per_s / 1e6:.3g}" if row.num_bytes else "",
            f"{row.queued_mean:.0f}" if row.queued_mean else "",
            f"{row.stall_percent:.0f} %",
        )
    return Group(times, Text(""), speeds)


def _slowest(items: Sequence[SlowItem]) -> RenderableType:
    table = table_of("sample", "stage", "took", "usual")
    for item in items:
        more = f" and {item.num_together - 1} with it" if item.num_together > 1 else ""
        table.add_row(
            f"{'' if item.source is None else f'{item.source}: '}{item.key}{more}",
            item.stage,
            short(item.seconds),
            short(item.usual_s),
        )
    return table


def _first_batch(report: Report) -> RenderableType:
    first = report.first_batch
    assert first is not None
    parts = [("import", first.import_s), ("list", first.list_s), ("index", first.index_s), ("workers", first.workers_s)]
    parts += [*first.by_stage.items(), ("in all", first.total_s)]
    return facts_table((name, f"{seconds:8.3f} s") for name, seconds in parts if seconds or name == "in all")


def headroom_table(headroom: Headroom) -> RenderableType:
    """The speed of each side alone."""
    rates = {"training alone": headroom.consumer, "data warm": headroom.warm, "data cold": headroom.cold}
    unknown = [name for name in rates if any(one.startswith(f"{name}:") for one in headroom.unknown)]
    said = [
        (name, "unknown" if name in unknown else None if rate is None else say_rate(rate))
        for name, rate in rates.items()
    ]
    return facts_table([*said, ("", headroom.cold_note or None), ("", headroom.summary)])


def say_rate(rate: Rate) -> str:
    """A speed with its interval."""
    return f"{rate.samples_per_s:8.0f} samples/s, +- {rate.interval_percent:.0f} %"


def _what_if(rows: Sequence[WhatIf], num_unsure: int) -> RenderableType:
    is_measured = any(row.measured is not None for row in rows)
    names = ("change", "samples/s", "faster", "stall", *(("found", "error") if is_measured else ("limit then",)))
    table = table_of(*names)
    for row in rows:
        faster = f"{row.speedup:.2f}x"
        if row.interval_percent is not None:
            faster += f" +-{row.interval_percent:.0f}%"
        cells = [row.name, f"{row.samples_per_s:.0f}", faster, f"{row.stall_percent:.0f} %"]
        if not is_measured:
            cells.append(row.limit)
        elif row.measured is None:
            cells += ["", ""]
        else:
            measured = row.measured
            faster = f"{measured.samples_per_s:.0f}/s" if measured.speedup is None else f"{measured.speedup:.2f}x"
            cells += [faster, f"{measured.error_percent:+.0f} %"]
        table.add_row(*cells)
    notes = [f"{row.name}: what the verdict says to change" for row in rows if row.is_advised]
    notes += [f"{row.name}: {row.note}" for row in rows if row.note]
    if num_unsure:
        notes.append(f"{say_count(num_unsure, 'change')} left out: the error is over half, or not known")
    return Group(*([table] if rows else []), *(Text(note, style="dim") for note in notes))


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:.3g} MB/s"
