"""What the running tuner found with more workers tells a lock from latency, where one worker alone leaves it open."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from made_accounts import row
from made_accounts import stats as made_stats

from loaderkit.diagnosis.stats import Stats
from loaderkit.engine.autotune.tuned_setting import Decision
from loaderkit.engine.metrics.contention import ContentionResult


def seen(rng: random.Random, gain: float | None, *, before: int = 2, after: int = 8, kept: bool = False) -> Stats:
    """Two workers that wait all the time, one of which alone did what may be a lock's or latency's share."""
    trial = ContentionResult(rng.uniform(0.62, 0.8), 0.99, 0.05, 2.0, {"call": rng.uniform(1.1, 1.45)})
    found = made_stats({"call": 9.0}, [row("call", 19.0, 0.1, num_items=800)], trial=trial, idle_s=30.0)
    decision = Decision(3.0, "workers of call", before, after, "it waits", kept, "", ["call"], gain)
    return replace(found, tuning=replace(found.tuning, auto=("call",), decisions=(decision.to_dict(),)))


@pytest.mark.parametrize(("low", "high", "kind"), [(-0.3, 0.4, "lock"), (2.4, 3.0, "latency")])
def test_what_more_workers_brought_decides(low: float, high: float, kind: str, rng: random.Random) -> None:
    """Four times the workers bring three times more on top, at their own pace."""
    for _ in range(50):
        gain = rng.uniform(low, high)
        verdict = seen(rng, gain, kept=gain >= 0.03).verdict()
        assert (verdict.stage, verdict.kind) == ("call", kind)
        assert f"{gain:+.0%} samples/s" in verdict.evidence
        assert bool(verdict.settings) == (kind == "latency")


def test_what_the_tuner_does_not_know_or_cannot_tell_decides_nothing(rng: random.Random) -> None:
    for _ in range(20):
        stats = seen(rng, None)
        assert stats.verdict() == replace(stats, tuning=replace(stats.tuning, decisions=())).verdict()
        between = seen(rng, rng.uniform(0.9, 1.4))
        assert "the tuner found" not in between.verdict().evidence
        hardly = seen(rng, 0.0, before=10, after=11)
        assert "the tuner found" not in hardly.verdict().evidence
