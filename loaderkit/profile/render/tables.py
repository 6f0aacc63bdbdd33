"""Two runs, or the ranks of one, side by side in a terminal: readable at 80 columns and without colour."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from loaderkit.profile.compare import say
from loaderkit.profile.ranks import Merged
from loaderkit.profile.render.summary import short, table_of
from loaderkit.profile.report_parts import Comparison


def comparison(compared: Comparison) -> RenderableType:
    """Two runs."""
    table = table_of("", "before", "now", "change", "95 % interval", "beyond noise", folds=True)
    for row in compared.rows:
        if row.outcome == "unknown" and row.name.endswith("of a sample"):
            continue  # in the JSON and the page
        said = say(row)
        table.add_row(said.name, said.before, said.after, said.change, said.interval, said.outcome)
    lines = [Text(f"- {line}") for line in compared.differences]
    return Group(
        Text(""),
        Text(title(compared), style="bold"),
        Text(compared.summary[:1].upper() + compared.summary[1:] + "."),
        table,
        *([Text("What was different:"), *lines] if lines else []),
        Text(compared.method, style="dim"),
    )


def title(compared: Comparison) -> str:
    """What is compared with."""
    return f"Against {'the run' if compared.num_runs == 1 else f'{compared.num_runs} runs, the last one'} of {compared.made_at}"


def merged(job: Merged) -> RenderableType:
    """The ranks of a job."""
    table = table_of(
        "rank", "samples/s", "waiting", "a step", "more", "95 % interval, ms", "last in", "limit", folds=True
    )
    for row in job.ranks:
        interval = (
            "" if row.low_s is None or row.high_s is None else f"{1e3 * row.low_s:+.1f} to {1e3 * row.high_s:+.1f}"
        )
        table.add_row(
            f"{row.rank} {'<<' if row.is_straggler else ''}",
            f"{row.samples_per_s:.0f}",
            f"{row.stall_percent:.1f} %",
            short(row.stall_s),
            f"{1e3 * row.extra_s:+.1f}",
            interval,
            f"{row.last_percent:.0f} %",
            row.verdict.stage or "training",
        )
    head = f"{job.name}: {len(job.ranks)} ranks of {job.world_size}, {job.samples_per_s:.0f} samples/s together"
    return Group(
        Text(head, style="bold"),
        Text(job.summary[:1].upper() + job.summary[1:] + "."),
        Text(""),
        table,
        Text(
            "a step: waiting for data in it; more: than the other ranks' median, in ms; last in: of the steps, those in which "
            "it waited longest; <<: keeps the others waiting",
            style="dim",
        ),
    )
