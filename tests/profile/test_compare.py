"""Two runs against each other, and ranks: what is found in steps whose difference and noise are known."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from num_examples import num_examples
from scipy.stats import ttest_1samp, ttest_ind

import loaderkit
from loaderkit import Pipeline
from loaderkit.profile.compare import compare_reports, say
from loaderkit.profile.ranks import merge
from loaderkit.profile.report import Report
from loaderkit.profile.report_parts import Step
from loaderkit.profile.statistics import compare, paired, steady, welch, windows

MakeReport = Callable[..., Report]


@pytest.fixture(scope="module")
def slow_report(photos: Path) -> Report:
    """Of a real loop; its steps are replaced by made ones."""
    pipeline = Pipeline.files(photos, include="**/*.jpg", label="parent").read().decode().center_crop(16).batch(4)
    with loaderkit.build(pipeline) as loader, loader.profile() as profile:
        list(loader)
    found: Report = profile.result
    return found


def correlated(rng: random.Random, num_steps: int, mean_s: float, spread: float, memory: float = 0.6) -> list[Step]:
    """Steps whose waits remember the step before: an autoregressive process."""
    noise, found = 0.0, []
    for number in range(num_steps):
        noise = memory * noise + rng.gauss(0, spread * (1 - memory**2) ** 0.5)
        found.append(Step(at_s=number * mean_s, compute_s=0.01, stall_s=max(0.0, mean_s * (1 + noise) - 0.01)))
    return found


@pytest.fixture
def make_report(slow_report: Report) -> MakeReport:
    def make(steps: list[Step], **changes: object) -> Report:
        found = slow_report.model_copy(update={"num_batches": 50, "num_samples": 50 * 32, **changes})
        return found.model_copy(update={"steps": found.steps.model_copy(update={"steps": steps, "every": 1})})

    return make


def of_step(steps: object) -> float:
    return statistics.fmean(step.compute_s + step.stall_s for step in steps)  # type: ignore[attr-defined]


def test_intervals_are_those_of_scipy() -> None:
    one, other = [1.0, 1.2, 0.9, 1.1], [1.5, 2.5, 2.0]
    interval = ttest_ind(other, one, equal_var=False).confidence_interval(0.95)
    assert welch(one, other)[1:] == pytest.approx(interval)
    assert paired(one)[1:] == pytest.approx(ttest_1samp(one, 0.0).confidence_interval(0.95))


def test_runs_alike_are_rarely_told_apart_and_unlike_ones_nearly_always() -> None:
    """Coverage of the 95 % interval, on steps that depend on one another."""
    rng = random.Random(7)
    num_false = num_found = 0
    for _ in range(100):
        one, other = (correlated(rng, 120, 0.05, 0.15) for _ in range(2))
        slower = correlated(rng, 120, 0.06, 0.15)  # by a fifth
        num_false += not compare(steady(one), steady(other), of_step).is_noise
        num_found += compare(steady(one), steady(slower), of_step).low > 0
    assert num_false / 100 <= 0.08  # 0.15 with 20 windows alone
    assert num_found / 100 >= 0.9


def test_the_warm_up_does_not_count() -> None:
    rng = random.Random(3)
    quiet = correlated(rng, 200, 0.05, 0.05)
    begin = [Step(at_s=0.0, compute_s=0.01, stall_s=0.5) for _ in range(20)]
    kept = steady([*begin, *quiet])
    assert len(kept) >= 150
    assert max(step.stall_s for step in kept) < 0.2
    assert len(steady(quiet)) >= 100  # at most half is cut


@given(st.lists(st.floats(0, 1e3), min_size=2, max_size=60), st.integers(1, 30))
def test_windows_are_alike_and_leave_out_less_than_one(items: list[float], num_windows: int) -> None:
    found = windows(items, num_windows)
    assert len({len(window) for window in found}) == 1
    assert 1 <= len(found) <= num_windows
    flat = [item for window in found for item in window]
    assert flat == items[len(items) - len(flat) :]
    assert len(items) - len(flat) < len(found)


@given(
    st.lists(st.floats(1, 100), min_size=2, max_size=30), st.lists(st.floats(1, 100), min_size=2, max_size=30)
)  # fmt: skip
@settings(max_examples=num_examples(200))
def test_a_difference_turns_around_with_its_sides(one: list[float], other: list[float]) -> None:
    there, back = welch(one, other), welch(other, one)
    assert there.mean == pytest.approx(-back.mean)
    assert there.low == pytest.approx(-back.high)
    assert there.low <= there.mean <= there.high
    assert there.is_noise == back.is_noise


def test_pairs_see_what_is_common_to_both() -> None:
    assert paired([1.0, 1.1, 0.9, 1.0, 1.05]).low > 0.8


def test_a_faster_run_is_said_to_be_faster(make_report: MakeReport) -> None:
    rng = random.Random(1)
    before = make_report(correlated(rng, 100, 0.100, 0.1))
    config = {**before.config, "prefetch": {"concurrency": 4}, "stages": ["read", {"decode": {"workers": 3}}, "batch"]}
    after = make_report(correlated(rng, 100, 0.050, 0.1), config=config)
    found = compare_reports([before], after)
    rows = {row.name: row for row in found.rows}
    assert rows["samples/s"].outcome == "better"
    assert rows["samples/s"].change == pytest.approx(100, abs=25)
    assert rows["waiting for data"].outcome == "better"
    assert rows["computing, of a step"].outcome == "noise"
    assert rows["a step, p99"].outcome == "unknown"
    assert "faster than before" in found.summary
    assert any(
        line.startswith("prefetch.concurrency: ") and line.endswith("before, 4 now") for line in found.differences
    )
    assert "stages.decode.workers: default before, 3 now" in found.differences
    back = compare_reports([after], before)
    assert back.rows[0].outcome == "worse"
    assert say(back.rows[0]).change.startswith("-")


def test_several_runs_before_tell_what_differs_from_run_to_run(make_report: MakeReport) -> None:
    """Runs on a machine that others use: within each of them steps are alike, and between them they are not."""
    rng = random.Random(4)
    num_false = {1: 0, 4: 0}
    for _ in range(60):
        runs = [make_report(correlated(rng, 60, 0.05 * rng.lognormvariate(0, 0.08), 0.03)) for _ in range(5)]
        for num_before in num_false:
            found = compare_reports(runs[4 - num_before : 4], runs[4])
            assert found.num_runs == num_before
            num_false[num_before] += found.rows[0].outcome != "noise"
    assert num_false[1] >= 20  # one run before cannot know
    assert num_false[4] <= 6


def test_a_larger_batch_is_not_slower_because_its_steps_are_longer(make_report: MakeReport) -> None:
    rng = random.Random(2)
    before = make_report(correlated(rng, 100, 0.05, 0.05))
    after = make_report(correlated(rng, 100, 0.08, 0.05), num_samples=50 * 64)
    rows = {row.name: row for row in compare_reports([before], after).rows}
    assert rows["samples/s"].outcome == "better"
    assert rows["a step"].outcome == "changed"


def test_too_few_steps_are_said_to_be_too_few(make_report: MakeReport) -> None:
    report = make_report([Step(at_s=0.0, compute_s=0.01, stall_s=0.01)] * 5)
    found = compare_reports([report], report)
    assert "too few steps" in found.summary
    assert {row.outcome for row in found.rows} == {"unknown"}
    empty = make_report([])
    assert "too few steps" in compare_reports([empty], report).summary


def test_the_rank_whose_data_come_late_is_the_straggler(make_report: MakeReport) -> None:
    rng = random.Random(5)
    reports = []
    for rank in range(4):
        stall_s = 0.030 if rank == 2 else 0.010
        steps = [
            Step(at_s=0.1 * n, compute_s=0.1 - stall_s, stall_s=stall_s * rng.uniform(0.7, 1.3)) for n in range(100)
        ]
        reports.append(make_report(steps, rank=rank, world_size=5))
    found = merge(reports[::-1])
    assert [row.rank for row in found.ranks] == [0, 1, 2, 3]
    assert [row.rank for row in found.ranks if row.is_straggler] == [2]
    slow = found.ranks[2]
    assert slow.extra_s == pytest.approx(0.02, rel=0.1)
    assert slow.last_percent == 100
    assert slow.low_s is not None
    assert slow.low_s > 0.015
    assert found.missing == [4]
    assert "rank 2 waits 19" in found.summary
    assert "no report of rank 4" in found.summary


def test_ranks_alike_have_no_straggler(make_report: MakeReport) -> None:
    rng = random.Random(6)
    reports = [make_report(correlated(rng, 100, 0.05, 0.2), rank=rank, world_size=2) for rank in range(2)]
    assert "no rank keeps the others waiting" in merge(reports).summary


def test_thinned_steps_are_compared_step_by_step(make_report: MakeReport) -> None:
    steps = [Step(at_s=0.1 * n, compute_s=0.05, stall_s=0.001 * n) for n in range(80)]
    whole, thinned = make_report(steps, rank=0, world_size=2), make_report(steps[::4], rank=1, world_size=2)
    thinned = thinned.model_copy(update={"steps": thinned.steps.model_copy(update={"every": 4})})
    found = merge([whole, thinned])
    assert found.num_steps == 80
    assert all(row.extra_s == pytest.approx(0) for row in found.ranks)


def test_reports_that_do_not_belong_together_are_refused(make_report: MakeReport) -> None:
    steps = [Step(at_s=0.0, compute_s=0.01, stall_s=0.01)] * 20
    one = make_report(steps, rank=0, world_size=2)
    with pytest.raises(ValueError, match="at least two ranks"):
        merge([one])
    with pytest.raises(ValueError, match="2 reports of rank 0"):
        merge([one, one])
    with pytest.raises(ValueError, match="number of ranks is 2, 4"):
        merge([one, make_report(steps, rank=1, world_size=4)])
    with pytest.raises(ValueError, match="the pipeline is"):
        merge([one, make_report(steps, rank=1, world_size=2, name="another")])
