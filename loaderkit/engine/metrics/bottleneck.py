"""The verdict: the bottleneck, the confidence, the evidence and what to change, from the counters alone.

    the loop hardly waited ──> training is the limit
    else ──> the stage, or start, memory, wakeup, network, worker restart, release, that the loop waited for longest; a wakeup
    that a CPU quota delays is its fault; a network that is not full wants more batches on the way; for a stage:
        libraries compute in threads of their own ──> oversubscription
        user code runs one item at a time, and does all the time ──> lock
        the GIL is held, and no more than one CPU is used ──> gil
        the loop holds the GIL, and the workers hardly compute ──> gil
        one worker at a time runs it, and one is in it all the time ──> computing, waiting
        no CPU is free ──> computing
        its workers wait for bytes that are read ahead ──> bandwidth
        a few items take all the time ──> stragglers
        an item takes longer side by side than one alone, waiting ──> lock; in `read` and `transfer` bandwidth
        its workers are idle although the loop waits ──> memory, depth
        on a CPU ──> computing
        waiting ──> latency

So the verdict cannot contradict the table of waits: no rule names another stage, and all figures are of the same interval.
What a thread waits for cannot be seen, so it is measured: the contention probe lets one worker alone work for a few chunks,
and asks how long a thread that wakes up waits for the GIL.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from loaderkit.engine.metrics import bottleneck_rules as rules
from loaderkit.engine.metrics.bottleneck_words import Verdict
from loaderkit.engine.metrics.interval import HARMLESS, Facts, Interval, measure
from loaderkit.engine.metrics.nodes.rule import network
from loaderkit.engine.metrics.snapshot import Snapshot
from loaderkit.engine.metrics.stalls import MEMORY, NETWORK, RELEASE, RESTART, START, WAKEUP

__all__ = ["Verdict", "diagnose"]

_WITHOUT_A_STAGE: Mapping[str, Callable[[Interval], Verdict]] = {
    START: rules.start,
    MEMORY: rules.memory,
    WAKEUP: rules.wakeup,
    RELEASE: rules.release,
    RESTART: rules.restart,
    NETWORK: network,
}
_KINDS: Sequence[Callable[[Facts], Verdict | None]] = (
    rules.shared,
    rules.oversubscription,
    rules.user_code,
    rules.gil,
    rules.gil_of_loop,
    rules.in_turn,
    rules.no_cpu_free,
    rules.read_ahead,
    rules.stragglers,
    rules.lock_or_bandwidth,
    rules.memory_ahead,
    rules.depth,
    partial(rules.in_turn, least=0.0),
    rules.computing,
    rules.waiting,
)


def diagnose(snapshot: Snapshot) -> Verdict:
    """The verdict on an interval, `loader.stats()` or `loader.stats(since=earlier)`; in about 0.1 ms, from any thread."""
    if snapshot.wall_s <= 0:
        evidence = "no batch was requested in this interval"
        return Verdict(None, 0.0, 0.0, evidence, "iterate over the loader", "unknown")
    interval = Interval.of(snapshot)
    cause = interval.cause
    if cause is None or interval.share < HARMLESS:
        return rules.training(interval)
    if cause in _WITHOUT_A_STAGE:
        return _WITHOUT_A_STAGE[cause](interval)
    facts = measure(interval, cause)
    return next(verdict for rule in _KINDS if (verdict := rule(facts)) is not None)
