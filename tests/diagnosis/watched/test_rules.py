"""The rules on accounts that are drawn: what they say agrees with the accounts, whatever these are."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from loaderkit.diagnosis.watched.counters import (
    COLLATE,
    DATASET,
    HANDOVER,
    ITERABLE,
    PIN_MEMORY,
    LoaderArguments,
    WatchedCounters,
)
from loaderkit.diagnosis.watched.rules import diagnose_watched
from loaderkit.diagnosis.watched.stats import WatchedStats
from loaderkit.engine.metrics.host import host_stats
from loaderkit.engine.metrics.snapshot import StageStats
from loaderkit.engine.metrics.stalls import EPOCH, RELEASE, START, WAKEUP
from loaderkit.engine.metrics.tuning import PoolTuning, Tuning

ARGUMENTS = {"num_workers", "prefetch_factor", "persistent_workers", "pin_memory"}


def drawn(rng: random.Random) -> WatchedStats:
    """The accounts of a loop that might have been."""
    num_workers = rng.choice([None, 0, 1, 4, 32])
    arguments = None
    if num_workers is not None:
        arguments = LoaderArguments(
            num_workers, 8, rng.choice([1, 2, 8]) if num_workers else None, rng.random() < 0.5, rng.random() < 0.5
        )
    names = (
        [ITERABLE]
        if num_workers is None
        else [DATASET, COLLATE]
        if not num_workers
        else [DATASET, PIN_MEMORY, HANDOVER]
    )
    wall_s = rng.uniform(0.1, 100)
    share, parts = rng.choice([0.0, 0.02, 0.049, 0.051, 0.5, 0.99]), {}
    for cause in [*names, START, EPOCH, RELEASE, WAKEUP]:
        parts[cause] = rng.choice([0.0, rng.random()])
    whole = sum(parts.values()) or 1.0
    workers = num_workers or 1
    rows = []
    for name in names:
        here = workers if name == DATASET else 1
        busy_s = rng.random() * here * wall_s
        rows.append(
            StageStats(
                name, here, 100, 100, 0, busy_s, busy_s * rng.random(), 0.0, blocked_s=here * wall_s - busy_s, kind=name
            )
        )
        rows[-1].delayed_s = rng.random() * (busy_s - rows[-1].cpu_s)
    pools = tuple(PoolTuning((row.name,), row.workers) for row in rows)
    slot_s = wall_s * workers
    watched = WatchedCounters(
        num_epochs=rng.randrange(1, 9), stop_s=rng.random(), open_s=rng.random(), slot_s=slot_s, busy_s=slot_s * rng.random(),
        wait_slot_s=slot_s / 2, wait_busy_s=slot_s / 2 * rng.random(), late_s=rng.random(), kernel_s=rng.random(),
        disk_wait_s=rng.random(), num_measured=rng.randrange(0, 50), measured_bytes=rng.randrange(10**9),
        measured_tensors=rng.randrange(10**4), measured_array_bytes=rng.randrange(10**9), gaps={rng.randrange(1, 9): 30},
    )  # fmt: skip
    host = replace(
        host_stats(), idle_s=rng.choice([None, 0.0, wall_s]), others_s=rng.choice([0.0, wall_s]),
        quota_cpus=rng.choice([None, 1.5]), throttled_s=rng.choice([None, 0.0, wall_s]), swapped_bytes=rng.choice([0, 10**8]),
    )  # fmt: skip
    return WatchedStats(
        run=1, now_s=wall_s, wall_s=wall_s, num_batches=rng.randrange(1, 50), num_samples=100, num_ready=0, num_open=0,
        waits_s={cause: share * wall_s * part / whole for cause, part in parts.items()}, stages=rows, memory={}, host=host,
        tuning=Tuning(None if num_workers is None else "dataloader" if num_workers else "inline", cpus=4, pools=pools),
        arguments=arguments, watched=watched, programs=(("other (5)", wall_s),), kind="builtins.generator",
        shared_free_share=rng.choice([None, 0.01, 0.9]),
    )  # fmt: skip


@pytest.mark.parametrize("number", range(40))
def test_a_verdict_agrees_with_the_accounts(number: int, rng: random.Random) -> None:
    stats = drawn(rng)
    verdict = diagnose_watched(stats)
    waited = sum(stats.stall_s.values()) / stats.wall_s
    assert (verdict.stage is None) == (verdict.kind == "training") == (waited < 0.05)
    assert 0 < verdict.confidence <= 0.95
    assert verdict.evidence.startswith("the loop waited")
    assert "\n" not in verdict.evidence + verdict.change
    assert verdict.change
    if verdict.stage is None:
        assert verdict.settings == ()
        return
    assert stats.stall_s[verdict.stage] == max(stats.stall_s.values())
    assert verdict.percent == pytest.approx(100 * stats.stall_s[verdict.stage] / stats.wall_s, abs=0.1)
    for setting in verdict.settings:
        assert setting.key in ARGUMENTS
        assert f"{setting.key}={setting.value}" in verdict.change
        assert setting.value != setting.before
        assert stats.arguments is not None
        assert setting.before == getattr(stats.arguments, setting.key)
    if stats.arguments is None:
        assert verdict.settings == ()
        assert verdict.confidence <= 0.4 or verdict.kind != "waiting"


@pytest.mark.parametrize("number", range(20))
def test_a_cause_that_is_close_is_named_with_its_change(number: int, rng: random.Random) -> None:
    """Epochs change as often as batches are late: what is said of the one alone is not lost."""
    stats = drawn(rng)
    while stats.arguments is None or not stats.arguments.num_workers:
        stats = drawn(rng)
    stats.arguments = replace(stats.arguments, persistent_workers=False)
    for row in stats.stages:
        row.delayed_s = 0.0  # so that no wait is another stage's
    longer_s = stats.wall_s * rng.uniform(0.1, 0.45)
    ratio = rng.choice([rng.uniform(0.1, 0.65), rng.uniform(0.68, 0.99)])
    first, second = rng.choice([(DATASET, EPOCH), (EPOCH, DATASET), (HANDOVER, EPOCH), (START, EPOCH), (EPOCH, START)])
    alone = [diagnose_watched(replace(stats, waits_s={cause: longer_s})) for cause in (first, second)]
    verdict = diagnose_watched(replace(stats, waits_s={first: longer_s, second: longer_s * ratio}))
    assert verdict.stage == first
    is_both = ratio > 2 / 3
    assert (f"nearly as long for {second}" in verdict.evidence) == is_both
    assert (f"{first} and {second} together" in verdict.headline) == is_both
    assert [cause.stage for cause in verdict.causes] == [first, second]
    keys = {setting.key for one in alone[: 1 + is_both] for setting in one.settings}
    assert sorted(setting.key for setting in verdict.settings) == sorted(keys)
    assert all(f"{setting.key}={setting.value}" in verdict.change for setting in verdict.settings)


def test_without_a_batch_there_is_nothing_to_say() -> None:
    stats = replace(drawn(random.Random(1)), num_batches=0, waits_s={})
    verdict = diagnose_watched(stats)
    assert (verdict.kind, verdict.confidence, verdict.settings) == ("unknown", 0.0, ())
