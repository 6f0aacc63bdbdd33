"""The charts' figures, against those of the loop that they are on."""

from __future__ import annotations

import random

import pytest

from loaderkit.profile.render.charts import charts
from loaderkit.profile.report import Report
from loaderkit.profile.report_parts import Step
from profiles.reports import FOLDER

DATABASE = Report.from_json((FOLDER / "database.json").read_text())


@pytest.mark.parametrize("batch_s", [0.01, 0.2, 0.7, 3.0])
def test_throughput_counts_over_batches_and_not_over_intervals_without_one(batch_s: float, rng: random.Random) -> None:
    """A point of the series is of a quarter of a second: in most of them no batch came."""
    steps, at_s = [], rng.uniform(0, 1)
    for _ in range(max(30, round(8 / batch_s))):
        seconds = batch_s * rng.uniform(0.7, 1.3)
        steps.append(Step(at_s=at_s, compute_s=0.1 * seconds, stall_s=0.9 * seconds))
        at_s += seconds
    arrived = [step.at_s + step.compute_s + step.stall_s for step in steps]
    series = [
        {**DATABASE.series[0], "at_s": 0.25 * (n + 1), "seconds": 0.25,
         "samples_per_s": 8 * sum(0.25 * n < one <= 0.25 * (n + 1) for one in arrived) / 0.25}
        for n in range(int(at_s / 0.25))
    ]  # fmt: skip
    report = DATABASE.model_copy(
        update={
            "steps": DATABASE.steps.model_copy(update={"steps": steps}), "series": series,
            "num_batches": len(steps), "num_samples": 8 * len(steps),
        }
    )  # fmt: skip
    rows = charts(report)["speed"]["data"]["values"]
    assert 3 <= len(rows) <= 260
    assert all(0.7 <= row["speed"] * batch_s / 8 <= 1.45 for row in rows)
    ends = [steps[0].at_s, *(row["at"] for row in rows)]
    counted = sum(row["speed"] * (end - begin) for row, begin, end in zip(rows, ends, ends[1:], strict=False))
    assert counted == pytest.approx(8 * sum(one <= ends[-1] + 1e-9 for one in arrived))
