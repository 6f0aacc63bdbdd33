"""Makes a verdict of what a rule has found: the share of the time, how sure it is, and the evidence that all verdicts
have."""

from __future__ import annotations

from loaderkit.diagnosis.evidence import host_facts, waited
from loaderkit.diagnosis.interval import Interval
from loaderkit.diagnosis.stage_facts import StageFacts
from loaderkit.diagnosis.verdict import Remedy, Verdict

BUSY = 0.75  # share of their time; workers that are busy for more are the limit


def conclude(interval: Interval, cause: str, kind: str, evidence: str, remedy: Remedy, *, sure: float = 1.0) -> Verdict:
    """The verdict where the loop waited longest for `cause`; it is less sure where several causes share the waiting."""
    seconds = interval.stall_s[cause]
    confidence = interval.confidence(0.6 + 0.4 * seconds / max(interval.waited_s, 1e-9), sure)
    percent, text = interval.percent(seconds), remedy.text
    return Verdict(cause, percent, confidence, evidence, text, kind, None, remedy.settings, remedy.is_exact)


def without_stage(
    interval: Interval, cause: str, evidence: str, remedy: Remedy, *, sure: float = 1.0, kind: str | None = None
) -> Verdict:
    """The verdict where the loop waited longest for something other than a stage."""
    return conclude(interval, cause, kind or cause, f"{waited(interval, cause)}{evidence}", remedy, sure=sure)


def of_stage(
    interval: Interval,
    facts: StageFacts,
    kind: str,
    evidence: str,
    remedy: Remedy,
    *,
    sure: float = 1.0,
    agrees: bool = False,
) -> Verdict:
    """The verdict where the loop waited longest for a stage. It is less sure where its workers are not busy, unless it
    `agrees` with that."""
    name, use = facts.stage.name, facts.pool.use
    busy = f"the workers were busy for {100 * use:.0f} % of their time"
    if facts.pool.works_one_at_a_time:
        busy = f"the one worker that ran was busy for {100 * use:.0f} % of its time"
    parts = [waited(interval, name), busy, evidence]
    parts += host_facts(interval, facts)
    # Workers are as busy as a limit's are, or idle for a reason.
    agrees = agrees or use >= BUSY or interval.is_inline or kind in ("depth", "memory", "stragglers")
    return conclude(interval, name, kind, "; ".join(parts), remedy, sure=sure if agrees else 0.7 * sure)


def confidence_of_comparison(facts: StageFacts) -> float:
    """Less than 1: the less, the nearer the slowdown is to the middle between side by side and one at a time."""
    if facts.slowdown is None or (facts.slowdown > facts.serial_slowdown) != facts.is_serial:
        return 0.8
    return min(1.0, 0.7 + 1.5 * abs(1 - facts.slowdown / facts.serial_slowdown))
