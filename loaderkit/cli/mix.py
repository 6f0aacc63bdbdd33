"""`loaderkit explain --mix`: shows how much each of several sources gives to an epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from loaderkit.cli.terminal import console
from loaderkit.errors import ConfigError

if TYPE_CHECKING:
    from loaderkit.pipeline.execution_plan import ExecutionPlan


def explain_mix(plan: ExecutionPlan, as_json: bool) -> None:
    """Show what an epoch takes from each source, segment by segment. Raises ConfigError for a single source."""
    order = plan.order.core
    if not order.sources:
        raise ConfigError(f"explain --mix: {plan.config.name} has one `source`, and nothing to mix: list `sources`")
    segments = order.explained()
    explained = {
        "pipeline": plan.config.name,
        "by": "tokens" if order.share_of == "tokens" else "sample",
        "num_samples": segments[-1]["end"],
        "sources": {source.name: source.num_samples for source in order.sources},
        "segments": segments,
    }
    if as_json:
        console.tell_json(explained)
    else:
        _tell(explained)


def _tell(explained: dict[str, Any]) -> None:
    num_samples = explained["num_samples"]
    console.tell(
        f"{explained['pipeline']}: an epoch {'has no end' if num_samples is None else f'of {num_samples} samples'}"
    )
    width = max(map(len, explained["sources"]))
    of_tokens = " of the tokens" if explained["by"] == "tokens" else ""
    for segment in explained["segments"]:
        until = "on" if segment["end"] is None else f"to {segment['end']}"
        console.tell(f"positions {segment['begin']} {until}")
        for name, row in segment["sources"].items():
            counted = ""
            if row["num_samples"] is not None:
                passes = f"{row['num_passes']:.2f} passes over {explained['sources'][name]} by then"
                tokens = f"{row['num_tokens']} tokens in " if "num_tokens" in row else ""
                counted = f"  {tokens}{row['num_samples']} samples, {passes}"
            used_up = ", used up" if name == segment["used_up"] else ""
            console.tell(f"  {name:<{width}}  {100 * row['share']:7.3f} %{of_tokens}{counted}{used_up}")
