"""A loader's stats as text: two tables and a verdict, readable at 80 columns and without colour."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import StringIO
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from loaderkit._internal.units import say_seconds
from loaderkit.errors import printable

SOURCE_TIMES = "The time of their samples, of all workers together"
_COUNTS = {"num_dropped": "dropped", "num_skipped": "skipped", "num_replaced": "replaced"}


class PlainConsole(Console):
    """Shows texts as they are: names in brackets or between colons are no markup, and control characters are escaped."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **settings)

    def render_str(self, text: str, **settings: Any) -> Text:
        """Texts are escaped here already, so that a table's columns have room for the result."""
        return super().render_str(printable(text), **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The same for what was made into `Text` already."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


def print_summary(console: Console, stats: Mapping[str, Any]) -> None:
    """Print `summary`. `stats` is what `loader.stats().to_dict()` returns."""
    console.print(summary(stats))


def summary(stats: Mapping[str, Any]) -> RenderableType:
    """What the loop waited for, by stage, and how the workers of each stage spent their time."""
    stall = stats["stall"]
    title = f"Waiting for batches: {stall['total_s']:.2f} s of {stats['wall_s']:.2f} s ({stall['percent']:.1f} %)"
    parts: list[RenderableType] = [Text(title, style="bold"), stall_table(stats)]
    parts += [Text("\nSlot time in seconds", style="bold"), slot_table(stats)]
    if stats.get("bad_shards"):
        parts += [Text("\nBad shards, left out", style="bold"), *map(Text, stats["bad_shards"])]
    if stats.get("sources"):
        given, times = sources_tables(stats["sources"])
        parts += [Text("\nSources", style="bold"), given, Text("\n" + SOURCE_TIMES, style="bold"), times]
    if stats.get("nodes"):
        parts += [Text("\nNodes", style="bold"), nodes_table(stats["nodes"])]
    if stats["tuning"].get("decisions"):
        parts += [Text("\nTuned", style="bold"), tuning_table(stats)]
    return Group(*parts)


def stall_table(stats: Mapping[str, Any]) -> Table:
    """The waits of the loop by cause, the longest first; the rows sum to the whole."""
    table = table_of("waited for", "stall_s", "of the time")
    for cause, seconds in stats["stall"]["by_stage"].items():
        if seconds > 0:
            table.add_row(cause, f"{seconds:.2f}", f"{100 * seconds / stats['wall_s']:.1f} %")
    return table


def slot_table(stats: Mapping[str, Any]) -> Table:
    """Workers x wall time of every stage: busy (of it computing: cpu), starved, blocked and idle."""
    table = table_of("stage", "workers", "items", "busy", "of it cpu", "starved", "blocked", "idle")
    for stage in stats["stages"]:
        seconds = (f"{stage[name]:.2f}" for name in ("busy_s", "cpu_s", "starved_s", "blocked_s", "idle_s"))
        table.add_row(stage["name"], str(stage["workers"]), str(stage["num_items"]), *seconds)
    return table


def sources_tables(rows: Sequence[Mapping[str, Any]]) -> tuple[Table, Table]:
    """What the loop got of each of several sources, and the time in `read` and own stages; of `SourceStats`."""
    shown = {name: title for name, title in _COUNTS.items() if any(row[name] for row in rows)}
    has_tokens = any(row["num_tokens"] is not None for row in rows)
    counted = ("samples", "tokens") if has_tokens else ("samples",)
    given = table_of("source", *counted, "share", "weight", "per s", "MB/s", "bad", *shown.values(), "passes")
    times = table_of("source", "read", "own stages", "cpu", "waiting", "late", "waited for")
    for row in rows:
        tokens = [str(row["num_tokens"])] if has_tokens else []
        given.add_row(
            row["name"],
            str(row["num_samples"]),
            *tokens,
            f"{100 * row['share']:.1f} %",
            f"{100 * row['weight']:.1f} %",
            f"{row['samples_per_s']:.0f}",
            f"{row['bytes_per_s'] / 1e6:.3g}" if row["num_bytes"] else "",
            str(row["num_bad"] or ""),
            *(str(row[name] or "") for name in shown),
            _passes(row),
        )
        seconds = (row[name] for name in ("read_s", "stages_s", "cpu_s", "waiting_s", "delayed_s"))
        times.add_row(row["name"], *(short(value or None) for value in seconds), _waited(row))
    return given, times


def nodes_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """What the workers of each node did, and how its batches came from there; rows as `Nodes.to_dicts` gives them."""
    table = table_of("node", "workers", "cpu", "batches", "MB/s", "on the way", "a batch", "restarts")
    for row in rows:
        is_away, used = not row["is_trainers"], f"{row['cpus_used']:.2f}"
        each_s = row["way_s"] / row["num_batches"] if row["num_batches"] else 0.0
        table.add_row(
            f"{row['name']}{'' if is_away else ' (training)'}",
            str(row["num_workers"]),
            used if row["cpus"] is None else f"{used} of {row['cpus']:.3g}",
            str(row["num_batches"]),
            f"{row['network_bytes_per_s'] / 1e6:.3g}" if is_away else "",
            f"{100 * row['carrying_share']:.0f} %" if is_away else "",
            short(each_s or None) if is_away else "",
            str(row["num_restarts"] or ""),
        )
    return table


def _passes(row: Mapping[str, Any]) -> str:
    """How often all of a source's samples have come, and whether more will come in this epoch."""
    return f"{row['num_passes']:.2f}{', used up' if row['is_used_up'] else ''}"


def _waited(row: Mapping[str, Any]) -> str:
    return f"{say_seconds(row['stall_s'])}, {row['stall_percent']:.1f} %" if row["stall_s"] else ""


def short(seconds: float | None) -> str:
    """A time for a table's cell; empty where it is not known."""
    return "" if seconds is None else say_seconds(seconds).replace(" ", "")


def tuning_table(stats: Mapping[str, Any]) -> Table:
    """The decisions of the tuner and their effects."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for name in ("after s", "of", "to", "because", "effect"):
        table.add_column(name, overflow="fold")
    for decision in stats["tuning"]["decisions"]:
        kept = {True: "", False: ", taken back", None: "not known yet"}[decision["kept"]]
        change = f"{decision['before']} -> {decision['after']}"
        effect = f"{decision['effect']}{kept}"
        table.add_row(f"{decision['at_s']:.0f}", decision["knob"], change, decision["reason"], effect)
    return table


def reading(stats: Mapping[str, Any]) -> str:
    """The verdict in one line: what is the limit, how sure that is, the evidence, and what to change."""
    if not stats["num_batches"]:
        return "No batch was delivered, so there is nothing to read from the accounts."
    verdict = stats["verdict"]
    sure = f"confidence {verdict['confidence']:.2f}"
    if verdict["stage"] is not None:
        sure = f"{verdict['percent']:.0f} % of the time lost to it, {sure}"
    return f"Verdict: {verdict['headline']} ({sure}). {_sentence(verdict['evidence'])} To change: {verdict['change']}."


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def as_text(renderable: RenderableType, width: int = 80) -> str:
    """The text of a terminal with `width` columns, without colour; no line ends in blanks."""
    file = StringIO()
    PlainConsole(file=file, width=width, no_color=True, color_system=None).print(renderable)
    return "".join(f"{line.rstrip()}\n" for line in file.getvalue().rstrip().splitlines())


def titled(title: str, body: RenderableType) -> Iterator[RenderableType]:
    """A part of a report, below a blank line and its title."""
    yield Text("")
    yield Text(title, style="bold")
    yield body


def facts_table(facts: Iterable[tuple[str, str | None]] = ()) -> Table:
    """Two columns: names, and their facts over as many lines as needed; None is left out."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, fact in facts:
        if fact is not None:
            table.add_row(name, fact)
    return table


def verdict_section(
    head: str, limit: str, facts: Iterable[tuple[str, str | None]], *, is_good: bool
) -> Iterator[RenderableType]:
    """What a report begins with."""
    yield Text(head, style="bold")
    yield Text(limit, style="green" if is_good else "yellow")
    yield facts_table(facts)


def table_of(first: str, *numbers: str, folds: bool = False) -> Table:
    """A table without lines: a column that may be folded, and columns of numbers, which are only with `folds`."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    table.add_column(first, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=not folds, overflow="fold" if folds else "ellipsis")
    return table
