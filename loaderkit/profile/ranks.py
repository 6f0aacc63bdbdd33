"""`loaderkit profile --merge rank*.json`: compares the reports of all ranks of a job and finds the straggler.

In the collective of a step all ranks wait for the one whose batch came last, and that time counts as computing on the other
ranks. So the straggler is the rank that waits for *data* longer than the others, and it lengthens every step by the difference.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from pydantic import Field

from loaderkit._internal.units import say_seconds
from loaderkit.diagnosis.verdict import Part
from loaderkit.profile.report import SCHEMA_VERSION, Report
from loaderkit.profile.report_parts import Step, VerdictPart
from loaderkit.profile.statistics import LEAST_STEPS, NUM_WINDOWS, paired, windows

_LEAST_SHARE = 0.02  # of a step: less is not worth reporting


class RankRow(Part):
    """The figures of one rank."""

    rank: int
    samples_per_s: float
    stall_percent: float
    stall_s: float = Field(description="of a step, on average")
    compute_s: float = Field(description="of a step, on average: waiting for other ranks is part of it")
    last_percent: float = Field(description="of the steps, those in which it waited for data the longest")
    extra_s: float = Field(description="of a step: waiting for data, more than the other ranks' median")
    low_s: float | None = Field(description="of the 95 % interval of that; null: too few steps")
    high_s: float | None
    is_straggler: bool = Field(description="the interval leaves out zero, and it is at least 2 % of a step")
    verdict: VerdictPart
    partial: str | None


class Merged(Part):
    """The figures of all ranks of a job."""

    schema_version: int = SCHEMA_VERSION
    name: str
    world_size: int
    missing: list[int] = Field(description="ranks that no report is of")
    samples_per_s: float = Field(description="of all ranks here")
    num_steps: int = Field(description="that were compared, from the first one on")
    summary: str
    ranks: list[RankRow]


def merge(reports: Sequence[Report]) -> Merged:
    """Raises ValueError for reports that do not belong together."""
    _check(reports)
    reports = sorted(reports, key=lambda report: report.rank)
    every = max(report.steps.every for report in reports)
    steps = [report.steps.steps[:: every // report.steps.every] for report in reports]
    num_steps = min(map(len, steps))
    rows = _rows(reports, [some[:num_steps] for some in steps])
    present = {report.rank for report in reports}
    missing = [rank for rank in range(reports[0].world_size) if rank not in present]
    return Merged(
        name=reports[0].name,
        world_size=reports[0].world_size,
        missing=missing,
        samples_per_s=sum(report.throughput["samples_per_s"] for report in reports),
        num_steps=num_steps * every,
        summary=_summary(rows, missing),
        ranks=rows,
    )


def _check(reports: Sequence[Report]) -> None:
    if len(reports) < 2:
        raise ValueError("it takes reports of at least two ranks: give all of them, as in --merge rank*.json")
    for name, values in (
        ("the pipeline", [report.name for report in reports]),
        ("the number of ranks", [report.world_size for report in reports]),
    ):
        if len(set(values)) > 1:
            raise ValueError(f"these are no reports of one job: {name} is {', '.join(map(str, dict.fromkeys(values)))}")
    ranks = [report.rank for report in reports]
    if twice := [rank for rank in dict.fromkeys(ranks) if ranks.count(rank) > 1]:
        raise ValueError(f"there are {ranks.count(twice[0])} reports of rank {twice[0]}: give one of each rank")


def _rows(reports: Sequence[Report], steps: Sequence[Sequence[Step]]) -> list[RankRow]:
    stalls = [[step.stall_s for step in some] for some in steps]
    last = [max(range(len(reports)), key=lambda n: stalls[n][k]) for k in range(len(stalls[0]))]
    rows = []
    for number, (report, some) in enumerate(zip(reports, steps, strict=True)):
        others = [stalls[n] for n in range(len(reports)) if n != number]
        extra = [own - statistics.median(rest) for own, *rest in zip(stalls[number], *others, strict=True)]
        step_s = _mean([step.compute_s + step.stall_s for step in some])
        low_s = high_s = None
        if len(extra) >= LEAST_STEPS:
            intervals = [paired([_mean(window) for window in windows(extra, count)]) for count in NUM_WINDOWS]
            _, low_s, high_s = max(intervals, key=lambda interval: interval.high - interval.low)
        rows.append(
            RankRow(
                rank=report.rank,
                samples_per_s=report.throughput["samples_per_s"],
                stall_percent=report.stall.percent,
                stall_s=_mean(stalls[number]),
                compute_s=_mean([step.compute_s for step in some]),
                last_percent=100.0 * last.count(number) / max(1, len(last)),
                extra_s=_mean(extra),
                low_s=low_s,
                high_s=high_s,
                is_straggler=low_s is not None and low_s > 0 and _mean(extra) >= _LEAST_SHARE * step_s,
                verdict=report.verdict,
                partial=report.partial,
            )
        )
    return rows


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0


def _summary(rows: Sequence[RankRow], missing: Sequence[int]) -> str:
    stragglers = sorted((row for row in rows if row.is_straggler), key=lambda row: -row.extra_s)
    if stragglers:
        text = "; ".join(
            f"rank {row.rank} waits {say_seconds(row.extra_s)} a step longer for data than the others do "
            f"({_limit(row.verdict)}), and was the last in "
            f"{row.last_percent:.0f} % of the steps"
            for row in stragglers
        )
    elif any(row.low_s is None for row in rows):
        text = f"too few steps to name a straggler: at least {LEAST_STEPS} of each rank"
    else:
        text = "no rank keeps the others waiting: what they wait for data differs by no more than noise"
    return f"{text}; no report of rank {', '.join(map(str, missing))}" if missing else text


def _limit(verdict: VerdictPart) -> str:
    if verdict.stage is None:
        return "training is its limit"
    return f"{verdict.stage} is its limit{'' if verdict.kind == verdict.stage else f', {verdict.kind}'}"
