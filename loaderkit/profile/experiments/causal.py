"""Is the verdict true? The stage that is blamed is made slower, and throughput must follow as far as it is the limit.

Virtual speed-up after Coz (Curtsinger and Berger, SOSP 2015): what a program gains from a faster piece of code is read from
what it loses when that piece is slower, in proportion. `stages/slowed.py` makes it slower, in the manner in which it is said
to limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from loaderkit.profile.experiments.interleave import Make, Variant, in_turns, ratio_of
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
    """What to stretch, and how much longer a sample has to take, in percent, were the verdict right. None where no stage
    is blamed: memory, depth, start, wakeup. `inline_s`: the wall time, where the loop's thread does all the work itself."""
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
    """What part of the time that limits is the stage's: of its workers' time, of all CPU time, or all of it."""
    if manner == "turns":
        return 1.0
    if manner == "wait":
        return row.busy_s / max(sum(one.busy_s for one in stages if one.pool == row.pool), 1e-9)
    return row.cpu_s / max(sum(one.cpu_s for one in stages), 1e-9)


def check_verdict(make: Make, step: Step, report: Report, *, seconds: float) -> CausalCheck | None:
    """Run it as it is and stretched, in turns, for about `seconds`; None where no stage is blamed."""
    stages = report.stages
    inline_s = report.wall_s if report.tuning.get("executor") == "inline" else None
    planned = plan_check(report.verdict, stages, inline_s)
    if planned is None:
        return None
    stretch, expected = planned
    with ExitStack() as stack:
        whole = Variant(stack.enter_context(make({}, None)), step)
        slower = Variant(stack.enter_context(make({}, stretch)), step)
        in_turns([whole, slower], rounds=_ROUNDS, window_s=seconds / (4 * _ROUNDS))
    ratio, half = ratio_of(whole, slower)  # of the rates: how many times as long a sample took
    row = next(row for row in stages if row.name == stretch.stage)
    return judge(stretch, expected, 100.0 * (ratio - 1), 100.0 * half, row)


def judge(stretch: Slowdown, expected: float, measured: float, half: float, row: StageRow) -> CausalCheck:
    """Whether what was measured fits what was expected: all in percent."""
    least = _FOLLOWS * expected if expected else 100.0 * _FOLLOWS * stretch.share
    agrees: bool | None = None
    if measured - half >= least:
        agrees = expected > 0
    elif measured + half < least:
        agrees = expected == 0
    elif half < least:  # the middle of the interval is the best guess, as long as it is not all noise
        agrees = (measured >= least) == (expected > 0)
    words = {True: "so the verdict holds", False: "so the verdict is doubtful", None: "too noisy to say"}
    evidence = (
        f"{stretch.stage} made {100 * stretch.share:.0f} % slower: a sample took {measured:+.0f} % (+- {half:.0f}) longer, "
        f"{expected:.0f} % expected: {words[agrees]}"
    )
    return CausalCheck(
        stage=stretch.stage,
        delay_s=stretch.share * (row.p50_s or 0.0),
        expected_percent=expected,
        measured_percent=measured,
        interval_percent=half,
        agrees=agrees,
        evidence=evidence,
    )
