"""The verdict: the bottleneck, the confidence, the evidence and what to change, from the counters alone.

    the loop hardly waited ──> training is the limit
    else ──> the stage, or start, memory, wakeup, network, worker restart, release, that the loop waited for longest; a wakeup
    that a CPU quota delays is its fault; a network that is not full wants more batches on the way; for a stage:
        libraries compute in threads of their own ──> oversubscription
        its workers wait for bytes that are read ahead ──> bandwidth
        a few items take much of the time by themselves, whatever they do meanwhile ──> stragglers
        one batch is read ahead, and workers are idle at its end or have no part in it ──> depth
        user code runs one item at a time, and does all the time ──> lock
        the GIL is held, and no more than one CPU is used ──> gil
        the loop holds the GIL, and the workers hardly compute ──> gil
        one worker at a time runs it, and one is in it all the time ──> computing, waiting
        no CPU is free ──> computing
        a few items take much of the time ──> stragglers
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

from loaderkit.diagnosis import causes, loop_rules, sharing_rules, stage_rules
from loaderkit.diagnosis.interval import HARMLESS, Interval
from loaderkit.diagnosis.margins import rival
from loaderkit.diagnosis.stage_facts import Facts, measure
from loaderkit.diagnosis.verdict import Setting, Verdict
from loaderkit.engine.metrics.snapshot import Snapshot
from loaderkit.engine.metrics.stalls import MEMORY, NETWORK, RELEASE, RESTART, START, WAKEUP

_BORDER = 1.4  # times HARMLESS, or as much below it: another run may be on the other side

_WITHOUT_A_STAGE: Mapping[str, Callable[[Interval], Verdict]] = {
    START: loop_rules.start,
    MEMORY: loop_rules.memory,
    WAKEUP: loop_rules.wakeup,
    RELEASE: loop_rules.release,
    RESTART: loop_rules.restart,
    NETWORK: loop_rules.network,
}
"""By what the loop waited for."""
_OF_A_STAGE: Sequence[Callable[[Facts], Verdict | None]] = (
    stage_rules.shared,
    sharing_rules.oversubscription,
    stage_rules.read_ahead,
    stage_rules.slow_samples,
    stage_rules.one_batch,
    sharing_rules.user_code,
    sharing_rules.gil,
    sharing_rules.gil_of_loop,
    sharing_rules.in_turn,
    stage_rules.no_cpu_free,
    stage_rules.stragglers,
    sharing_rules.lock_or_bandwidth,
    stage_rules.memory_ahead,
    stage_rules.depth,
    partial(sharing_rules.in_turn, least=0.0),
    stage_rules.computing,
    stage_rules.waiting,
)
"""The first rule that applies gives the verdict, so a rule may rely on the rules before it having failed."""


def diagnose(snapshot: Snapshot) -> Verdict:
    """The verdict on an interval, `loader.stats()` or `loader.stats(since=earlier)`; in 1 to 7 ms, from any thread."""
    if snapshot.wall_s <= 0:
        evidence = "no batch was requested in this interval"
        return Verdict(None, 0.0, 0.0, evidence, "iterate over the loader", "unknown")
    interval = Interval.of(snapshot)
    if interval.cause is None:
        return loop_rules.training(interval)
    waits = causes.ranked(interval)
    found = causes.verdict_of(
        waits, partial(_of_wait, interval, waits[0]), partial(_conflicts, interval), is_inline=interval.is_inline
    )
    is_near = HARMLESS / _BORDER < interval.share < HARMLESS * _BORDER
    if interval.share >= HARMLESS:
        return found._replace(or_kind="training") if is_near and found.or_kind is None else found
    return loop_rules.training(interval)._replace(causes=found.causes, or_kind=found.kind if is_near else None)


def _of_wait(interval: Interval, longest: str, cause: str) -> Verdict:
    """The verdict on one of the waits. For the longest it is asked, too, which kind fits about as well."""
    if cause in _WITHOUT_A_STAGE:
        return _WITHOUT_A_STAGE[cause](interval)
    verdict = _of_stage(interval, cause)
    if cause != longest or interval.share < HARMLESS or verdict.or_kind is not None:
        return verdict
    other = rival(interval.stats, verdict, lambda stats: _of_stage(interval.with_stats(stats), cause))
    return verdict if other is None else causes.undecided(verdict, other)


def _of_stage(interval: Interval, cause: str) -> Verdict:
    facts = measure(interval, cause)
    return next(verdict for rule in _OF_A_STAGE if (verdict := rule(facts)) is not None)


def _conflicts(interval: Interval, first: Verdict, other: Verdict, setting: Setting) -> bool:
    """True if a setting for another wait says how much runs side by side where the first verdict decides that: in its
    own pool, or for all pools."""
    if not causes.is_parallelism(setting) or first.stage == START:
        return False
    is_apart = any(
        other.stage in names and first.stage not in names
        for names in ({row.name for row in pool.rows} for pool in interval.pools)
    )
    of_all = any(one.key in causes.OF_ALL_POOLS for one in (*first.settings, setting))
    return not is_apart or of_all or first.stage in _WITHOUT_A_STAGE
