"""Shows a watched DataLoader as a pipeline of loaderkit, in a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from loaderkit._internal.units import say_count
from loaderkit.profile.port.parts import PortedLoader, SampleCheck
from loaderkit.profile.render.summary import facts_table, short, titled


def ported_section(ported: PortedLoader | None) -> Iterator[RenderableType]:
    """What it would bring, or what has no counterpart. Nothing where it was not asked for."""
    if ported is None:
        return
    facts = [(name, value) for name, value in say_ported(ported) if value is not None]
    unported = [Text(f"- {one}") for one in ported.unported]
    yield from titled("With loaderkit", Group(facts_table(facts), *unported))


def say_ported(ported: PortedLoader) -> list[tuple[str, str | None]]:
    """(name, text) of what is known, or None if it is not known."""
    before, after = ported.before, ported.after
    return [
        ("now", None if before is None else _say_speed(before, ported.before_stall_percent)),
        ("expected", _expected(ported)),
        ("step", None if after is None else _say_step(ported)),
        ("pipeline", ported.path or (None if ported.pipeline is None else "was not written")),
        ("checked", None if ported.checked is None else say_check(ported.checked)),
        ("not run", ported.why_not_run or None),
        ("notes", "; ".join(ported.notes) or None),
    ]


def _say_speed(samples_per_s: float, stall_percent: float | None) -> str:
    return f"{samples_per_s:.4g} samples/s, waiting {stall_percent or 0:.0f} % of the time"


def _expected(ported: PortedLoader) -> str | None:
    if ported.after is None:
        return None
    speed = _say_speed(ported.after.samples_per_s, ported.after_stall_percent)
    times = "" if ported.speedup is None else f": {ported.speedup:.2f} times as fast"
    return f"{speed} (+- {ported.after.interval_percent:.0f} %, from {ported.after.seconds:.0f} s){times}"


def _say_step(ported: PortedLoader) -> str:
    if ported.step_s is None:
        return "the script had none between two batches, so the pipeline ran alone"
    return f"{short(ported.step_s)} on {ported.step_cpus or 0:.2g} CPUs, as the script's was, imitated"


def say_check(checked: SampleCheck) -> str:
    """What was compared, and how alike it is."""
    files = f"{say_count(checked.num_listed, 'file')} and their classes are the same; " if checked.num_listed else ""
    pixels = "" if checked.most_levels is None else f", pixels within {checked.most_levels:.1f} levels of 255"
    values = " (values are drawn)" if checked.is_random else "" if pixels else ", values the same"
    return f"{files}{say_count(checked.num_samples, 'sample')}: labels, types and shapes the same{pixels}{values}"
