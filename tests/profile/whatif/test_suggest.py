"""What is suggested where times vary: on reports made up of pipelines that a simulation ran."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from num_examples import num_examples

from loaderkit.pipeline.config.model import PipelineConfig
from loaderkit.pipeline.config.parsing import parse
from loaderkit.profile.report import Report
from loaderkit.profile.report_parts import SlowTime
from loaderkit.profile.settings_patch import settings_yaml
from loaderkit.profile.whatif.demands import model_of
from loaderkit.profile.whatif.predict import rate_of
from loaderkit.profile.whatif.suggest import with_suggestion
from profiles.bottlenecks import settings_contradictions
from profiles.reports import FOLDER

DATABASE = Report.from_json((FOLDER / "database.json").read_text())
BATCH, EVERY, NUM_BATCHES = 8, 50, 500


def config_of(report: Report, **prefetch: Any) -> PipelineConfig:
    tuning = report.tuning
    sizes = {"concurrency": sum(pool["workers"] for pool in tuning["pools"]), "batches": tuning["batches"]}
    return parse({**report.config, "prefetch": {**sizes, **prefetch}})


def varied(
    *,
    workers: int,
    batches: int,
    slow_s: float = 0.2,
    compute_s: float = 1e-4,
    kind: str = "stragglers",
    batch_bytes: int = 256,
    budget_bytes: int = 2**31,
    cpu_share: float = 0.0,
    in_turn: bool = False,
    behind_s: float = 0.0,
) -> Report:
    """The report on rows of which most take 1 ms and one in fifty `slow_s`; the loop computes `compute_s` for each.

    `in_turn`: as of an iterable. `behind_s`: what the stage behind waits for each."""
    num = BATCH * NUM_BATCHES
    num_slow = num // EVERY
    busy_s = (num - num_slow) * 1e-3 + num_slow * slow_s
    slow = [
        SlowTime(epoch=0, position=EVERY * n, at_s=float(n), chunk=1, chunk_s=slow_s) for n in range(min(256, num_slow))
    ]
    changed = {
        "workers": workers,
        "num_items": num,
        "busy_s": busy_s,
        "cpu_s": cpu_share * busy_s,
        "io_s": (1 - cpu_share) * busy_s,
        "gil_s": 0.0,
        "delayed_s": 0.0,
        "idle_s": 0.0,
        "p50_s": 1e-3,
        "services": [[1e-3, num - num_slow], [slow_s, num_slow]],
        "slow": slow,
        "chunk": 1.0,
        "in_turn": in_turn,
    }
    read, batch = DATABASE.stages
    cheap = {
        "workers": workers,
        "num_items": num,
        "cpu_s": 1e-6 * num,
        "busy_s": 1e-6 * num + behind_s * num,
        "io_s": behind_s * num,
        "idle_s": 0.0,
    }
    steps = {"num_steps": NUM_BATCHES, "compute_s": num * compute_s, "stall_s": 1.0, "release_s": 0.0, "steps": []}
    report = DATABASE.model_copy(
        update={
            "num_batches": NUM_BATCHES,
            "num_samples": num,
            "first_batch": None,
            "verdict": DATABASE.verdict.model_copy(update={"kind": kind, "settings": [], "change": ""}),
            "steps": DATABASE.steps.model_copy(update=steps),
            "stages": [read.model_copy(update=changed), batch.model_copy(update={**cheap, "slow": [], "services": []})],
            "tuning": {
                "executor": "thread",
                "batches": batches,
                "concurrency": workers,
                "pools": [{"stages": ["read", "batch"], "workers": workers}],
            },
            "memory": {**DATABASE.memory, "batch_bytes": batch_bytes, "budget_bytes": budget_bytes},
        }
    )
    model = model_of(report)
    assert model is not None
    wall_s = num / rate_of(model)
    waited = report.steps.model_copy(update={"stall_s": wall_s - num * compute_s, "overhead_s": 0.0})
    return report.model_copy(update={"steps": waited, "wall_s": wall_s})


def suggested(report: Report, config: PipelineConfig | None = None) -> dict[str, Any]:
    return settings_and_words(report, config)[0]


def settings_and_words(report: Report, config: PipelineConfig | None = None) -> tuple[dict[str, Any], str]:
    found = with_suggestion(report, config or config_of(report))
    assert not settings_contradictions(found.verdict.model_dump(), found.tuning)
    assert found.patch == settings_yaml(found.verdict.settings)
    return {one.key: one.value for one in found.verdict.settings}, found.verdict.change


def test_workers_that_are_always_busy_need_others_beside_them() -> None:
    found = suggested(varied(workers=1, batches=64))
    assert set(found) == {"prefetch.concurrency"}
    assert found["prefetch.concurrency"] >= 3


def test_workers_that_have_no_batch_to_work_on_need_more_batches() -> None:
    found = suggested(varied(workers=8, batches=1))
    assert found["prefetch.batches"] >= 4


@pytest.mark.parametrize("kind", ["stragglers", "depth"])
def test_where_the_loop_is_hardly_waiting_nothing_is_set(kind: str) -> None:
    report = varied(workers=8, batches=16, compute_s=3e-3, slow_s=0.02, kind=kind)
    found, words = settings_and_words(report)
    assert found == {}
    assert "find out why" in words


@pytest.mark.parametrize("kind", ["stragglers", "depth", "waiting"])
@pytest.mark.parametrize(("workers", "batches"), [(1, 4), (4, 1), (4, 16)])
def test_what_is_done_one_at_a_time_gets_no_workers(kind: str, workers: int, batches: int) -> None:
    assert suggested(varied(workers=workers, batches=batches, kind=kind, in_turn=True)) == {}


def test_what_is_done_one_at_a_time_gets_batches_where_they_help() -> None:
    """Nearly as much time goes to training, and a slow item lasts longer than what is ahead."""
    found = suggested(varied(workers=2, batches=1, compute_s=6e-3, in_turn=True))
    assert found["prefetch.batches"] >= 2
    assert suggested(varied(workers=2, batches=64, compute_s=6e-3, in_turn=True)) == {}


def test_what_is_done_one_at_a_time_is_done_beside_what_comes_behind() -> None:
    report = varied(workers=1, batches=8, slow_s=1e-3, kind="waiting", in_turn=True, behind_s=1e-3)
    found, words = settings_and_words(report)
    assert "prefetch.concurrency" in found
    assert "a faster iterable" in words


def test_an_iterable_in_every_process_is_no_faster() -> None:
    report = varied(workers=4, batches=8, kind="waiting", in_turn=True)
    one, two = model_of(report), model_of(report.model_copy(update={"tuning": {**report.tuning, "processes": 2}}))
    assert one is not None
    assert two is not None
    assert two.serial_s == pytest.approx(one.serial_s / 2)
    assert rate_of(two) < 1.05 / two.serial_s
    assert rate_of(one) < 1.05 / one.serial_s


def test_where_cpus_are_the_limit_nothing_is_set() -> None:
    report = varied(workers=4, batches=128, cpu_share=0.9)
    assert suggested(report) == {}


def test_the_trainers_own_thread_gets_no_others_beside_it() -> None:
    report = varied(workers=1, batches=64)
    pools = [{"stages": ["batch"], "workers": 1}, {"stages": ["read"], "workers": 1, "process": "trainer"}]
    config = config_of(report)
    assert suggested(report.model_copy(update={"tuning": {**report.tuning, "pools": pools}}), config) == {}


def test_more_batches_come_with_the_memory_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    report = varied(workers=8, batches=2, batch_bytes=2**20, budget_bytes=2**21)
    config = config_of(report, memory="2MiB")
    found = suggested(report, config)
    assert found["prefetch.memory"] == f"{found['prefetch.batches']}MiB"
    monkeypatch.setattr("loaderkit.diagnosis.interval.free_memory", lambda: (0, 0))
    assert not {"prefetch.memory", "prefetch.batches"} & set(suggested(report, config))


def test_other_kinds_are_left_as_they_are() -> None:
    report = varied(workers=1, batches=64, kind="latency")
    assert with_suggestion(report, config_of(report)) is report


def test_what_build_refuses_is_not_suggested() -> None:
    """Eight processes share the batches ahead out."""
    report = varied(workers=8, batches=1)
    config = config_of(report)
    inline = replace(config, prefetch=config.prefetch.model_copy(update={"executor": "process", "processes": 4}))
    assert suggested(report, inline).get("prefetch.batches", 4) >= 4


@settings(max_examples=num_examples(8), deadline=None)
@given(
    st.integers(1, 6),
    st.sampled_from([1, 2, 4, 16]),
    st.floats(0.02, 0.4),
    st.sampled_from([1e-5, 1e-3, 1e-2]),
    st.sampled_from(["stragglers", "depth"]),
)
def test_words_and_settings_say_the_same_each_time(
    workers: int, batches: int, slow_s: float, compute_s: float, kind: str
) -> None:
    report = varied(workers=workers, batches=batches, slow_s=slow_s, compute_s=compute_s, kind=kind)
    found, words = settings_and_words(report)
    assert settings_and_words(report) == (found, words)
    assert found.get("prefetch.concurrency", workers) >= workers
    assert found.get("prefetch.batches", batches) >= batches
    assert ("by simulation, neither" in words) == (not found)
