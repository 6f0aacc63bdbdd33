"""What the table says of the change that the verdict asks for, and of changes that it cannot know."""

from __future__ import annotations

import random
from typing import Any

import pytest

from loaderkit.diagnosis.verdict import Setting
from loaderkit.pipeline.config.model import PipelineConfig
from loaderkit.pipeline.config.parsing import parse
from loaderkit.profile.report import Report
from loaderkit.profile.report_parts import Rate, SettingsTrial, WhatIf
from loaderkit.profile.whatif.advised import predicted
from loaderkit.profile.whatif.table import well_known, what_if
from profiles.reports import FOLDER

DATABASE = Report.from_json((FOLDER / "database.json").read_text())


def sleeping(
    rng: random.Random, workers: int, kind: str = "latency", settings: dict[str, int] | None = None
) -> tuple[Report, PipelineConfig]:
    """A report on `workers` that wait a drawn time for each item, with a loop that does nothing else."""
    num, each_s = 800, rng.uniform(2e-3, 0.05)
    wall_s = num * each_s / workers
    read, batch = DATABASE.stages
    waits = {
        "workers": workers, "num_items": num, "busy_s": num * each_s, "cpu_s": 0.01 * num * each_s, "delayed_s": 0.0,
        "io_s": 0.99 * num * each_s, "gil_s": 0.0, "idle_s": 0.0, "p50_s": each_s, "services": [[each_s, num]], "slow": [],
        "chunk": 1.0, "num_bytes": 0,
    }  # fmt: skip
    cheap = {
        "workers": workers,
        "num_items": num,
        "busy_s": 1e-3,
        "cpu_s": 1e-3,
        "io_s": 0.0,
        "idle_s": 0.0,
        "slow": [],
        "services": [],
    }
    given = [Setting(key=key, before=None, value=value) for key, value in (settings or {}).items()]
    steps = {"num_steps": num // 8, "compute_s": 1e-6, "stall_s": wall_s, "overhead_s": 0.0, "release_s": 0.0}
    report = DATABASE.model_copy(
        update={
            "num_samples": num, "num_batches": num // 8, "wall_s": wall_s, "first_batch": None,
            "throughput": {"samples_per_s": num / wall_s, "bytes_per_s": 0.0},
            "verdict": DATABASE.verdict.model_copy(update={"stage": "read", "kind": kind, "settings": given}),
            "stages": [read.model_copy(update=waits), batch.model_copy(update=cheap)],
            "steps": DATABASE.steps.model_copy(update=steps),
            "tuning": {**DATABASE.tuning, "batches": 8, "pools": [{"stages": ["read", "batch"], "workers": workers}]},
        }
    )  # fmt: skip
    return report, parse({**DATABASE.config, "prefetch": {"concurrency": workers, "batches": 8}})


def test_the_verdicts_change_comes_first_and_more_cpus_do_not_help_what_sleeps(rng: random.Random) -> None:
    for _ in range(2):
        workers = rng.choice([1, 2, 3])
        value = workers * rng.choice([3, 4])
        report, config = sleeping(rng, workers, settings={"prefetch.concurrency": value})
        rows, _ = what_if(report, config)
        assert {one.key: one.value for one in rows[0].settings} == {"prefetch.concurrency": value}
        assert rows[0].is_advised
        assert rows[0].interval_percent is not None
        assert rows[0].speedup == pytest.approx(value / workers, rel=0.15)  # each at its own pace
        assert not [row for row in rows if "twice the CPUs" in row.name]
        assert sum(row.is_advised for row in rows) == 1


@pytest.mark.parametrize("kind", ["lock", "latency", "computing"])
def test_a_change_in_words_comes_first_too(kind: str, rng: random.Random) -> None:
    report, config = sleeping(rng, 2, kind)
    rows, _ = what_if(report, config)
    assert rows[0].is_advised
    assert rows[0].settings == []
    assert "read" in rows[0].name or "latency" in rows[0].name


def test_what_a_trial_found_stands_beside_its_prediction(rng: random.Random) -> None:
    report, config = sleeping(rng, 2)
    rate = Rate(samples_per_s=100.0, interval_percent=5.0, seconds=4.0, num_batches=40)
    setting = Setting(key="prefetch.concurrency", before=2, value=6)
    found = rng.uniform(0.7, 0.95)
    trial = SettingsTrial(settings=[setting], outcome="slower", before=rate, after=rate, speedup=found, interval=0.05)
    rows, _ = what_if(report.model_copy(update={"verdict": report.verdict.model_copy(update={"tried": trial})}), config)
    [row] = [row for row in rows if row.measured is not None]
    assert row.measured is not None
    assert row.measured.speedup == found
    assert row.measured.error_percent == pytest.approx(100 * (row.speedup / found - 1))
    assert not row.is_advised
    assert row.settings == [setting]


def test_rows_whose_error_is_over_half_are_left_out(rng: random.Random) -> None:
    def row(error: float | None, *, is_advised: bool = False) -> WhatIf:
        return WhatIf(
            name="", settings=[], samples_per_s=1.0, stall_percent=0.0, speedup=1.0, interval_percent=error, limit="gil",
            can_run=False, is_advised=is_advised,
        )  # fmt: skip

    errors = [rng.uniform(0, 100) for _ in range(100)] + [None]
    kept = well_known([row(error) for error in errors])
    assert [one.interval_percent for one in kept] == [error for error in errors if error is not None and error <= 50]
    assert len(well_known([row(99.0, is_advised=True), row(None, is_advised=True)])) == 2


@pytest.mark.parametrize(
    ("kind", "settings", "at_least", "at_most"),
    [
        ("latency", {"prefetch.concurrency": 8}, 3.0, 4.5),
        ("latency", {"stages.read.workers": 4}, 1.7, 2.2),
        ("lock", {"prefetch.concurrency": 8}, 0.9, 1.1),
        ("lock", {"prefetch.executor": "process", "prefetch.processes": 4, "prefetch.batches": 8}, 3.0, 4.5),
        ("latency", {"prefetch.batches": 16, "prefetch.memory": "1GiB"}, 0.9, 1.1),
        ("latency", {"prefetch.executor": "inline"}, 0.4, 0.6),
    ],
)
def test_what_settings_would_bring(
    kind: str, settings: dict[str, Any], at_least: float, at_most: float, rng: random.Random
) -> None:
    """By the arithmetic of workers that sleep: as many times as fast as there are more of them that do so at a time."""
    report, _ = sleeping(rng, 2, kind)
    row = predicted(report, [Setting(key=key, value=value) for key, value in settings.items()])
    assert row is not None
    assert at_least <= row.speedup <= at_most


def test_of_a_setting_that_the_model_lacks_nothing_is_said(rng: random.Random) -> None:
    report, _ = sleeping(rng, 2)
    assert predicted(report, [Setting(key="source.read_ahead.requests", value=8)]) is None
