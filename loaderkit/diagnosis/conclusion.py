"""From what a rule has found to its verdict: the share of the time, how sure it is, and the evidence that all verdicts have."""

from __future__ import annotations

from loaderkit.diagnosis import words
from loaderkit.diagnosis.interval import Interval
from loaderkit.diagnosis.stage_facts import StageFacts
from loaderkit.diagnosis.verdict import Remedy, Verdict

BUSY = 0.75  # share of their time; workers that are busy for more are the limit


def without_stage(
    interval: Interval, cause: str, evidence: str, change: Remedy, *, sure: float = 1.0, kind: str | None = None
) -> Verdict:
    """The verdict where the loop waited longest for something other than a stage."""
    return Verdict(
        stage=cause,
        percent=interval.percent(interval.stats.stall_s[cause]),
        confidence=interval.confidence(sure, _clear(interval, cause)),
        evidence=f"{words.waited(interval, cause)}{evidence}",
        change=change.text,
        kind=kind or cause,
        settings=change.settings,
        is_exact=change.is_exact,
    )


def of_stage(
    interval: Interval,
    facts: StageFacts,
    kind: str,
    evidence: str,
    change: Remedy,
    *,
    sure: float = 1.0,
    agrees: bool = False,
) -> Verdict:
    """The verdict where the loop waited longest for a stage. It is less sure where its workers are not busy, unless it
    `agrees` with that."""
    name, use = facts.stage.name, facts.pool.use
    parts = [words.waited(interval, name), f"the workers were busy for {100 * use:.0f} % of their time", evidence]
    parts += words.host_facts(interval, facts)
    # Workers are as busy as a limit's are, or idle for a reason.
    agrees = agrees or use >= BUSY or interval.is_inline or kind in ("depth", "memory", "stragglers")
    return Verdict(
        stage=name,
        percent=interval.percent(interval.stats.stall_s[name]),
        confidence=interval.confidence(_clear(interval, name), 1.0 if agrees else 0.7, sure),
        evidence="; ".join(parts),
        change=change.text,
        kind=kind,
        settings=change.settings,
        is_exact=change.is_exact,
    )


def _clear(interval: Interval, cause: str) -> float:
    """A factor for the confidence: 1 where all of the waiting is charged to one cause, less where it is shared."""
    return 0.6 + 0.4 * interval.stats.stall_s[cause] / max(interval.waited_s, 1e-9)


def confidence_of_comparison(facts: StageFacts) -> float:
    """Less than 1, the nearer the slowdown is to the middle between side by side and one at a time."""
    if facts.slowdown is None or (facts.slowdown > facts.serial_slowdown) != facts.is_serial:
        return 0.8
    return min(1.0, 0.7 + 1.5 * abs(1 - facts.slowdown / facts.serial_slowdown))
