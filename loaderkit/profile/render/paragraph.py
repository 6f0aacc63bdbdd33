"""Summarises a report in one paragraph, to be forwarded: what was waited for, how sure that is, what was tried, what it
costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from loaderkit._internal.units import say_count, say_seconds, say_size
from loaderkit.diagnosis.verdict import Setting, say
from loaderkit.profile.report_parts import StallPart, VerdictPart

_MEANS: Mapping[str, str] = {
    "bandwidth": "the store or the link gives no more bytes",
    "computing": "its workers compute",
    "depth": "too few batches are read ahead",
    "gil": "its workers wait for Python's GIL, which one thread holds at a time",
    "latency": "its workers wait for answers, each at its own pace",
    "lock": "its workers wait for one another, as for a lock",
    "memory": "there is no memory for more batches ahead",
    "oversubscription": "libraries run more threads than there are CPUs",
    "quota": "a CPU quota holds it back",
    "stragglers": "a few samples take many times as long as most",
    "waiting": "its workers wait, and not for a CPU",
}
_LITTLE = 0.05  # CPUs that are not worth telling


def paragraph(verdict: VerdictPart, stall: StallPart, wall_s: float, samples_per_s: float, batch_bytes: int) -> str:
    """Plain sentences, of what a report has in figures. `batch_bytes`: the memory of one batch, or 0 if not known."""
    sentences = [_waited(verdict, stall, wall_s, samples_per_s), _sure(verdict)]
    if verdict.kind != "training":
        sentences += [_tried(verdict), _cost(verdict, batch_bytes)]
    return " ".join(one for one in sentences if one)


def _waited(verdict: VerdictPart, stall: StallPart, wall_s: float, samples_per_s: float) -> str:
    whole = (
        f"In {say_seconds(wall_s)} the loop took {samples_per_s:.4g} samples/s, and waited for data {stall.percent:.1f} % of "
        "the time"
    )
    if verdict.kind in ("unknown", "failed"):
        return f"{whole}. {verdict.headline}."
    if verdict.stage is None:
        return f"{whole}: loading does not hold it up."
    means = _MEANS.get(verdict.kind, "")
    if verdict.or_kind is not None and verdict.or_kind in _MEANS and means:
        means += f", or {_MEANS[verdict.or_kind]}: the figures do not tell which"
    return f"{whole}, longest for {verdict.stage} ({verdict.percent:.1f} %){': ' if means else ''}{means}."


def _sure(verdict: VerdictPart) -> str:
    said = f"This is {100 * verdict.confidence:.0f} % sure"
    if verdict.check is None or verdict.check.agrees is None:
        return f"{said}."
    if verdict.check.agrees:
        return f"{said}: slowed down on purpose, {verdict.check.stage} slowed the loop as expected."
    return f"{said}: slowed down on purpose, {verdict.check.stage} did not slow the loop as expected."


def _tried(verdict: VerdictPart) -> str:
    trial = verdict.tried
    if trial is None:
        why = "" if verdict.settings else ", as there is no setting to try"  # an older version tried nothing
        return f"Nothing was tried{why}; to change: {verdict.change}."
    text = f"{say(trial.settings)}: {trial}."
    return text if trial.is_suggested else f"{text} To change instead: {verdict.change}."


def _cost(verdict: VerdictPart, batch_bytes: int) -> str:
    """What the settings take, as measured in their trial, or by what they are."""
    trial = verdict.tried
    if not verdict.settings or trial is None:
        return ""
    costs = _by_what_they_are(verdict.settings, batch_bytes if trial.extra_bytes is None else 0)
    if trial.extra_cpus is not None and trial.extra_cpus > _LITTLE:
        costs.append(f"{trial.extra_cpus:.1f} CPUs more")
    if trial.extra_bytes is not None and trial.extra_bytes > 0:
        costs.append(f"{say_size(trial.extra_bytes)} of memory more")
    return f"It costs {', '.join(costs)}." if costs else "It costs nothing that was measured."


def _by_what_they_are(settings: Sequence[Setting], batch_bytes: int) -> list[str]:
    costs = []
    for one in settings:
        more = _more(one.before, one.value)
        if more <= 0:
            continue
        if one.key == "prefetch.processes":
            costs.append(f"{more} more loading process{'es' if more > 1 else ''}, each with what the pipeline imports")
        elif one.key == "prefetch.concurrency" or one.key.endswith(".workers"):
            costs.append(say_count(more, "more worker"))
        elif one.key == "prefetch.batches" and batch_bytes:
            costs.append(f"up to {say_size(more * batch_bytes)} of memory more")
    return costs


def _more(before: Any, value: Any) -> int:
    """By how much a number grows; the whole number if it was nothing or `auto` before."""
    if not isinstance(value, int):
        return 0
    return value - before if isinstance(before, int) else value
