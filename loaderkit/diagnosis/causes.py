"""Combines the verdicts on each of a loop's waits into one. The longest wait is the headline and the others follow it,
with settings for all waits that are nearly as long.

Settings never contradict one another. Of two values for a key, the one for the longer wait is taken. What runs side by
side in one pool (workers, processes, executors) is one decision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from loaderkit.diagnosis.interval import Interval
from loaderkit.diagnosis.verdict import Cause, Setting, Verdict, named_together

Conflicts = Callable[[Verdict, Verdict, Setting], bool]
"""Whether a setting of the second verdict contradicts the first verdict."""

OF_ALL_POOLS = frozenset({"prefetch.executor", "prefetch.processes", "prefetch.concurrency"})
"""Settings of how much runs side by side, except a pool's own workers."""

_LEAST = 0.01  # share of the time; shorter waits are no cause
_MOST = 5  # causes
_IN_TWO_MINDS = 0.6  # times the confidence, where another kind fits about as well


def ranked(interval: Interval) -> list[str]:
    """What the loop waited for, the longest first, without waits that are too short to matter."""
    stall_s = interval.stall_s
    names = sorted(stall_s, key=stall_s.__getitem__, reverse=True)
    return [name for name in names if stall_s[name] > _LEAST * interval.stats.wall_s or name == names[0]][:_MOST]


def verdict_of(
    names: Sequence[str],
    conclude: Callable[[str], Verdict],
    conflicts: Conflicts = lambda *_: False,
    *,
    is_inline: bool = False,
) -> Verdict:
    """The verdict on an interval from the verdicts on its waits; `names` are the waits, the longest first. `is_inline`:
    the loop makes its batches itself, so that all that could be changed is one decision."""
    found = [conclude(name) for name in names]
    causes = tuple(cause for one in found for cause in one.causes or (cause_of(one),))
    named = [one.stage for one in named_together(causes)]
    verdict = found[0]
    for other in found[1:]:
        if other.stage in named:
            verdict = _with_other(verdict, other, conflicts, is_inline=is_inline)
    return verdict._replace(causes=causes)


def undecided(first: Verdict, other: Verdict) -> Verdict:
    """The verdict if two kinds fit the figures of one wait about equally well: it names both, and has no setting that
    only one of them would ask for."""
    asked = [(one.key, one.value) for one in other.settings]
    settings = tuple(one for one in first.settings if (one.key, one.value) in asked)
    change = first.change
    if change != other.change:
        change = f"if it is {first.kind}: {change}. If it is {other.kind}: {other.change}"
    evidence = f"{first.evidence}; the figures are near the border to {other.kind}"
    first, other = (one._replace(confidence=round(_IN_TWO_MINDS * one.confidence, 2)) for one in (first, other))
    causes = (cause_of(first), cause_of(other._replace(percent=first.percent)))
    is_exact = first.is_exact and other.is_exact
    return first._replace(
        evidence=evidence, change=change, settings=settings, is_exact=is_exact, or_kind=other.kind, causes=causes
    )


def cause_of(verdict: Verdict) -> Cause:
    """A verdict as one of several causes."""
    return Cause(
        stage=verdict.stage,
        kind=verdict.kind,
        percent=verdict.percent,
        confidence=verdict.confidence,
        change=verdict.change,
        settings=[*verdict.settings],
    )


def is_parallelism(setting: Setting) -> bool:
    """True if the setting says how much runs side by side."""
    return setting.key in OF_ALL_POOLS or setting.key.endswith(".workers")


def _with_other(verdict: Verdict, other: Verdict, conflicts: Conflicts, *, is_inline: bool) -> Verdict:
    """The verdict with another wait that was nearly as long, and with its settings as far as they do not conflict."""
    kind = other.kind if other.or_kind is None else f"{other.kind} or {other.or_kind}"
    evidence = f"{verdict.evidence}; nearly as long for {other.stage}: {other.percent:.1f} %, {kind}"
    keys = {one.key for one in verdict.settings}
    if any(one.key in keys for one in other.settings):
        change, settings = f"{verdict.change}; that is for {other.stage} as well", verdict.settings
    elif is_inline or any(conflicts(verdict, other, one) for one in other.settings):
        change, settings = f"{verdict.change}; and then for {other.stage}, see what is left", verdict.settings
    else:
        change, settings = f"{verdict.change}; and for {other.stage}: {other.change}", verdict.settings + other.settings
    is_exact = verdict.is_exact and (other.is_exact or settings is verdict.settings)
    return verdict._replace(evidence=evidence, change=change, settings=settings, is_exact=is_exact)
