"""`--fail-if "stall>5%"`: a condition on a report's figures, for a script that has to stop when data is late."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from loaderkit._internal.config.diagnostics import nearest
from loaderkit._internal.units import parse_seconds
from loaderkit.profile.report import Report

_CONDITION = re.compile(r"\s*([A-Za-z_]\w*)\s*(<=|>=|<|>)\s*(\S+(?:\s+\S+)*?)\s*")
_COMPARE = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


class Figure(NamedTuple):
    """A figure of a report; `of` returns None where it was not measured."""

    unit: Literal["percent", "seconds", "number"]
    of: Callable[[Report], float | None]


FIGURES: Mapping[str, Figure] = {
    "stall": Figure("percent", lambda report: report.stall.percent),
    "stall_after_start": Figure("percent", lambda report: report.stall.after_start_percent),
    "utilisation": Figure("percent", lambda report: report.utilisation.percent if report.utilisation else None),
    "samples_per_s": Figure("number", lambda report: report.throughput["samples_per_s"]),
    "bytes_per_s": Figure("number", lambda report: report.throughput["bytes_per_s"]),
    "step_p50": Figure("seconds", lambda report: report.steps.p50_s),
    "step_p99": Figure("seconds", lambda report: report.steps.p99_s),
    "stall_p99": Figure("seconds", lambda report: report.steps.stall_p99_s),
    "first_batch": Figure("seconds", lambda report: report.first_batch.total_s if report.first_batch else None),
}


class Condition(NamedTuple):
    """`figure` compared with `bound` (percent, seconds or a number)."""

    figure: str
    comparison: str
    bound: float

    def holds(self, report: Report) -> bool:
        """True if the figure meets the condition, and if it was not measured."""
        value = FIGURES[self.figure].of(report)
        return value is None or bool(_COMPARE[self.comparison](value, self.bound))

    def say(self, report: Report) -> str:
        """The figure and its bound in words."""
        unit, of = FIGURES[self.figure]
        value = of(report)
        starts = self.figure in ("first_batch", "stall_after_start")
        missing = "the first batch came before, or was the only one" if starts else "there was no whole step"
        measured = f"not measured: {missing}" if value is None else _say(unit, value)
        return f"{self.figure} is {measured} ({self.comparison} {_say(unit, self.bound)})"


def parse_condition(text: str) -> Condition:
    """The condition of a text such as "stall>5%". Raises ValueError, which names what is wrong and what is possible."""
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{text!r} is no condition: expected a figure, one of < <= > >=, and a value, as in stall>5%; figures are "
            f"{', '.join(FIGURES)}"
        )
    name, comparison, value = match.groups()
    if name not in FIGURES:
        raise ValueError(f"{text!r}: there is no figure {name!r}; {nearest(name, FIGURES)}")
    try:
        return Condition(name, comparison, _parse_bound(value, FIGURES[name].unit))
    except ValueError as error:
        raise ValueError(f"{text!r}: expected {error}") from None


def _parse_bound(text: str, unit: str) -> float:
    if unit == "seconds":
        return parse_seconds(text)
    is_percent = unit == "percent"
    try:
        bound = float(text.removesuffix("%") if is_percent else text)
    except ValueError:
        raise ValueError(f"{'a share of the time such as 5%' if is_percent else 'a number'}, not {text!r}") from None
    if not (0 <= bound <= 100 if is_percent else 0 <= bound < math.inf):
        raise ValueError(
            f"{'a share of the time from 0% to 100%' if is_percent else 'a number from 0 on'}, not {text!r}"
        )
    return bound


def _say(unit: str, value: float) -> str:
    return f"{value:.1f}%" if unit == "percent" else f"{value:.6g}" if unit == "number" else f"{value:.4g}s"
