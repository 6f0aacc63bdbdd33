"""`--fail-if "stall>5%"`: a condition on a report's figures, for a script that must not go on when data is late.

stall > 5%        what the loop waited, of the time      utilisation < 90%     compute / total, as MLPerf Storage counts
stall_after_start > 5%     from the first batch on
step_p99 > 200ms  of a step: computing and waiting       samples_per_s < 2000
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from loaderkit._internal.units import parse_seconds
from loaderkit.pipeline.config.diagnostics import nearest
from loaderkit.profile.report import Report

_BEFORE = "the first batch came before, or was the only one"
_FORM = re.compile(r"\s*([A-Za-z_]\w*)\s*(<=|>=|<|>)\s*(\S+(?:\s+\S+)*?)\s*")
_COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


@dataclass(frozen=True)
class Figure:
    """A figure that a condition may be about; None where the report has it not."""

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


@dataclass(frozen=True)
class Condition:
    """`figure` compared with `bound` (percent, seconds or a number)."""

    figure: str
    comparison: str
    bound: float

    def holds(self, report: Report) -> bool:
        """Whether it is so. A figure that the report has not is taken for one that fails."""
        value = FIGURES[self.figure].of(report)
        return value is None or _COMPARE[self.comparison](value, self.bound)

    def say(self, report: Report) -> str:
        """The figure, beside the bound."""
        value = FIGURES[self.figure].of(report)
        missing = _BEFORE if self.figure in ("first_batch", "stall_after_start") else "there was no whole step"
        found = f"not measured: {missing}" if value is None else _say(self.figure, value)
        return f"{self.figure} is {found} ({self.comparison} {_say(self.figure, self.bound)})"


def parse_condition(text: str) -> Condition:
    """The condition of a text such as "stall>5%". Raises ValueError, which says what is wrong and what there is."""
    match = _FORM.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{text!r} is no condition: expected a figure, one of < <= > >=, and a value, as in stall>5%; figures are "
            f"{', '.join(FIGURES)}"
        )
    name, comparison, value = match.groups()
    if name not in FIGURES:
        raise ValueError(f"{text!r}: there is no figure {name!r}; {nearest(name, FIGURES)}")
    try:
        return Condition(name, comparison, _READ[FIGURES[name].unit](value))
    except ValueError as error:
        raise ValueError(f"{text!r}: expected {error}") from None


def _percent(text: str) -> float:
    try:
        found = float(text.removesuffix("%"))
    except ValueError:
        raise ValueError(f"a share of the time such as 5%, not {text!r}") from None
    if not 0 <= found <= 100:
        raise ValueError(f"a share of the time from 0% to 100%, not {text!r}")
    return found


def _number(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        raise ValueError(f"a number, not {text!r}") from None
    if not 0 <= found < float("inf"):
        raise ValueError(f"a number from 0 on, not {text!r}")
    return found


_READ: Mapping[str, Callable[[str], float]] = {"percent": _percent, "number": _number, "seconds": parse_seconds}


def _say(figure: str, value: float) -> str:
    unit = FIGURES[figure].unit
    if unit == "percent":
        return f"{value:.1f}%"
    return f"{value:.6g}" if unit == "number" else f"{value:.4g}s"
