"""Tests a verdict: the stage that it names is slowed down, and throughput must fall as far as that stage is the limit.

This is the virtual speed-up of Coz (Curtsinger and Berger, SOSP 2015) turned around: what a faster stage would gain is
read from what a slower one loses. `stages/slowed.py` slows the stage in the way in which the verdict says that it
limits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from loaderkit.profile.experiments.interleave import Make, Variant, interleave, ratio_of
from loaderkit.profile.experiments.loops import Step
from loaderkit.profile.report import Report
from loaderkit.profile.report_parts import CausalCheck, StageRow, VerdictPart
from loaderkit.stages.slowed import Manner, Slowdown

_SHARE = 0.5
_ROUNDS = 6
_FOLLOWS = 0.5  # of what was expected: it may be a little less, where other stages are nearly as slow
_MANNERS: Mapping[str, Manner] = {
    "computing": "compute",
    "gil": "gil",
    "latency": "wait",
    "waiting": "wait",
    "stragglers": "wait",
    "lock": "turns",
    "bandwidth": "turns",
}


def plan_check(
    verdict: VerdictPart, stages: Sequence[StageRow], inline_s: float | None = None
) -> tuple[Slowdown, float] | None:
    """The slowdown, and the percentage by which a sample takes longer if the verdict is right. None where the verdict
    names no stage: memory, depth, start, wakeup. `inline_s`: the wall time, if the loop's thread does all the work
    itself."""
    if verdict.stage is None and verdict.kind == "training":
        busiest = max((row for row in stages if row.num_items), key=lambda row: row.busy_s, default=None)
        return None if busiest is None else (Slowdown(busiest.name, _SHARE, "wait"), 0.0)
    row = next((row for row in stages if row.name == verdict.stage), None)
    manner = _MANNERS.get(verdict.kind)
    if row is None or manner is None:
        return None
    if inline_s is not None:  # loading and training take turns, and add up
        share = (row.cpu_s if manner == "compute" else row.busy_s) / max(inline_s, 1e-9)
    else:
        share = _share_of(row, manner, stages)
    return Slowdown(row.name, _SHARE, manner), 100.0 * _SHARE * share


def _share_of(row: StageRow, manner: Manner, stages: Sequence[StageRow]) -> float:
    """The stage's share of the limiting time: of its workers' time, of all CPU time, or all of it."""
    if manner == "turns" or row.in_turn:
        return 1.0
    if manner == "wait":
        return row.busy_s / max(sum(one.busy_s for one in stages if one.pool == row.pool), 1e-9)
    return row.cpu_s / max(sum(one.cpu_s for one in stages), 1e-9)


def check_verdict(make: Make, step: Step, report: Report, *, seconds: float) -> CausalCheck | None:
    """Run the pipeline with and without the slowdown, interleaved, for about `seconds`; None where the verdict names no
    stage."""
    stages = report.stages
    inline_s = report.wall_s if report.tuning.get("executor") == "inline" else None
    planned = plan_check(report.verdict, stages, inline_s)
    if planned is None:
        return None
    slowdown, expected = planned
    with ExitStack() as stack:
        whole = Variant(stack.enter_context(make({}, None)), step)
        slower = Variant(stack.enter_context(make({}, slowdown)), step)
        interleave([whole, slower], rounds=_ROUNDS, window_s=seconds / (4 * _ROUNDS))
    ratio, half = ratio_of(whole, slower)  # of the rates: how many times as long a sample took
    row = next(row for row in stages if row.name == slowdown.stage)
    return judge(slowdown, expected, 100.0 * (ratio - 1), 100.0 * half, row)


def judge(slowdown: Slowdown, expected: float, measured: float, half: float, row: StageRow) -> CausalCheck:
    """Compare the measured slowdown with the expected one, all in percent."""
    least = _FOLLOWS * expected if expected else 100.0 * _FOLLOWS * slowdown.share
    agrees: bool | None = None
    if measured - half >= least or (measured > half and abs(measured - expected) <= half):
        agrees = expected > 0
    elif measured + half < least:
        agrees = expected == 0
    elif half < least:  # the middle of the interval is the best guess, as long as it is not all noise
        agrees = (measured >= least) == (expected > 0)
    words = {True: "so the verdict holds", False: "so the verdict is doubtful", None: "too noisy to say"}
    evidence = (
        f"{slowdown.stage} made {100 * slowdown.share:.0f} % slower: a sample took {measured:+.0f} % (+- {half:.0f}) longer, "
        f"{expected:.0f} % expected: {words[agrees]}"
    )
    return CausalCheck(
        stage=slowdown.stage,
        delay_s=slowdown.share * (row.p50_s or 0.0),
        expected_percent=expected,
        measured_percent=measured,
        interval_percent=half,
        agrees=agrees,
        evidence=evidence,
    )
