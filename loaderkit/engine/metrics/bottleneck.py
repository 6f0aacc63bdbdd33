"""The verdict: the bottleneck, the confidence, the evidence and what to change, from the counters alone.

    the loop hardly waited ──> training is the limit
    it waited for the start, for memory, for its own thread to run ──> start, memory, wakeup
    it waited for a stage:
        the GIL is held, and no more than one CPU is used ──> gil, in the stage that computes most
        no CPU is free ──> computing, in the stage that computes most
        its workers wait for bytes that are being read ahead ──> bandwidth
        a few items take all the time ──> stragglers
        its workers are idle although the loop waits ──> memory, depth
        an item takes longer side by side than one alone, waiting ──> lock; in `read` and `transfer` bandwidth
        on a CPU ──> computing
        waiting ──> latency

What a thread waits for cannot be seen from outside, so the contention probe measures it: it lets one worker alone work for a
few chunks, and measures how long a thread that wakes up waits for the GIL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from loaderkit.engine.metrics import bottleneck_rules as rules
from loaderkit.engine.metrics.bottleneck_rules import Verdict
from loaderkit.engine.metrics.interval import Interval
from loaderkit.engine.metrics.snapshot import Snapshot
from loaderkit.engine.metrics.stage_facts import Facts, measure

__all__ = ["Verdict", "diagnose"]

_RULES: Sequence[Callable[[Facts], Verdict | None]] = (
    rules.start,
    rules.training,
    rules.memory,
    rules.gil,
    rules.wakeup,
    rules.no_cpu_free,
    rules.read_ahead,
    rules.stragglers,
    rules.memory_ahead,
    rules.depth,
    rules.lock_or_bandwidth,
    rules.computing,
    rules.waiting,
)


def diagnose(snapshot: Snapshot) -> Verdict:
    """The verdict on an interval, `loader.stats()` or `loader.stats(since=earlier)`; in about 0.1 ms, from any thread."""
    if snapshot.wall_s <= 0:
        evidence = "no batch was requested in this interval"
        return Verdict(None, 0.0, 0.0, evidence, "iterate over the loader", "unknown")
    facts = measure(Interval.of(snapshot))
    return next(verdict for rule in _RULES if (verdict := rule(facts)) is not None)
