"""The rules on a stage and what comes before it: its items, the store it reads from, the batches ahead. Each is a
function of the facts, beside its words, that gives a verdict, or None where it does not apply.
"""

from __future__ import annotations

from loaderkit._internal.units import say_seconds
from loaderkit.diagnosis import changes
from loaderkit.diagnosis.causes import undecided
from loaderkit.diagnosis.evidence import compared, say_memory
from loaderkit.diagnosis.interval import WAITING
from loaderkit.diagnosis.make_verdict import BUSY, confidence_of_comparison, of_stage
from loaderkit.diagnosis.sharing_rules import MOVE_LESS, is_held_by_one
from loaderkit.diagnosis.stage_facts import (
    ALL_ALONE,
    COMPUTING,
    MOST_FOR_GIL_S,
    PLAINLY,
    Facts,
    are_slow_together,
)
from loaderkit.diagnosis.verdict import Remedy, Verdict
from loaderkit.engine.metrics.snapshot import ALWAYS

_CROWDED = 0.25  # share of the busy time ready to run while no CPU was free
_TAIL = 4.0  # times the usual service time; a longer item is a straggler
_TAIL_SHARE = 0.25  # share of the busy time spent on stragglers
_CONTENDED = 0.25  # share of the times at which the GIL was taken, above which items may be slow for it
_LONG_S = 1.0  # a single item that took less may have met a machine that stood still for a moment
_FEW = 0.25  # share of the items; where more are slow, that is usual
_BY_CHANCE = 1.4  # of the throughput of all; beside a lock or a full link one alone reached 0.78 to 1.19 in 72 runs
_AT_ITS_END = 0.1  # share of the time of workers, at the end of the only batch in work
_FILLS = (0.7, 1.3)  # times the wall time; between them, one worker was busy all the time


def shared(facts: Facts) -> Verdict | None:
    """The loop waits for what another rank reads, or for passing it on."""
    interval, stage, tuning = facts.interval, facts.awaited.stage, facts.interval.stats.tuning
    if stage.kind != "share":
        return None
    each = f"{say_seconds(stage.busy_s / stage.num_items)} a sample to pass on" if stage.num_items else "none passed on"
    reads_here = len(interval.pools) > 1
    if reads_here:
        evidence = f"batches were made, and not yet with the ranks {', '.join(map(str, tuning.peers))}: {each}"
        change = (
            "smaller batches between ranks, such as uint8 pictures that are normalized behind `transfer`; a faster network; or "
            "ranks: {share: read}, if the store can give every rank its own"
        )
    else:
        evidence = f"rank {tuning.reader} reads for this rank, and its batches came late: {each}"
        change = f"what the report of rank {tuning.reader} says"
    return of_stage(interval, facts.awaited, "waiting", evidence, Remedy(change), sure=0.9)


def no_cpu_free(facts: Facts) -> Verdict | None:
    """Its workers wait for a CPU, and none is free."""
    if facts.interval.is_short_of_cpus and facts.awaited.would_compute:
        return computing(facts, always=True)
    return None


def read_ahead(facts: Facts) -> Verdict | None:
    """Its workers wait for bytes that are read ahead, so the limit is the requests for these bytes, and not the workers.

    The sample that waits for a block looks like a straggler, and one worker alone gets what was fetched meanwhile.
    """
    interval, awaited = facts.interval, facts.awaited
    stage, ahead_s = awaited.stage, interval.stats.store.get("ahead_wait_s", 0.0)
    if stage.kind != "read" or not 0 < stage.busy_s < 2 * ahead_s:
        return None
    evidence = (
        f"{min(100.0, 100 * ahead_s / stage.busy_s):.0f} % of that waiting for bytes being read ahead; the store delivers "
        f"{stage.num_bytes / interval.wall_s / 1e6:.3g} MB/s in total"
    )
    change = (
        "more source.read_ahead.requests, if the store can answer more at a time; else a faster store, source.cache or a local "
        "copy, or smaller (compressed) samples; more workers would not help"
    )
    return of_stage(interval, awaited, "bandwidth", evidence, Remedy(change), sure=0.95)


def slow_samples(facts: Facts) -> Verdict | None:
    """A few samples take much of the time by themselves, whatever they do meanwhile: compute, wait, hold the GIL."""
    interval, stage, trial = facts.interval, facts.awaited.stage, facts.awaited.pool.trial
    kinds = [row.kind for row in interval.stats.stages[: interval.stats.stages.index(stage) + 1]]
    if "batch" in kinds or interval.stats.turn_share(stage.name) >= ALWAYS:
        return None  # batches are new memory now and then; and in turn nothing else is done meanwhile, however long one takes
    # An item that waits for the GIL is slow for as long as others have it, and off the CPU in a stage that waits for
    # nothing else.
    if trial.holds_gil or not stage.waits:
        return _stragglers(facts, 0.0, stage.busy_s - stage.cpu_s)
    least_s = MOST_FOR_GIL_S if (trial.gil_taken or 0.0) > _CONTENDED else 0.0
    return _stragglers(facts, least_s, stage.delayed_s)


def stragglers(facts: Facts) -> Verdict | None:
    """A few items take much of the time, and wait."""
    return None if facts.awaited.needs_cpu > COMPUTING else _stragglers(facts, 0.0, facts.awaited.stage.delayed_s)


def _stragglers(facts: Facts, least_s: float, withheld_s: float) -> Verdict | None:
    """The same for items that take `least_s` or more. For `withheld_s` of their time items could not run because others
    had the GIL or the CPUs; items that were slow for that reason are no stragglers."""
    interval, awaited = facts.interval, facts.awaited
    stage, services = awaited.stage, awaited.stage.services
    usual_s = services.percentile(0.5)
    if usual_s is None:
        return None
    slow_s = max(_TAIL * usual_s, least_s)
    share, num_slow, num_all = services.share_above(slow_s), services.num_above(slow_s), sum(services.counts.values())
    by_itself = share - withheld_s / max(stage.busy_s, 1e-9)
    is_once = num_slow == 1 and not stage.services.num_above(_LONG_S)
    if is_once or num_slow > _FEW * num_all or share <= _TAIL_SHARE or by_itself <= _TAIL_SHARE / 2:
        return None
    if _may_be_a_lock(facts, usual_s):
        return None
    evidence = (
        f"the median item takes {say_seconds(usual_s)}; {num_slow} of {num_all} took more than {slow_s / usual_s:.0f} times as "
        f"long, and {100 * share:.0f} % of the stage's time"
    )
    change = changes.mended(interval, awaited, is_alone=is_held_by_one(facts))
    sure = 0.95 if (awaited.alone_share or 0.0) <= ALL_ALONE else 0.6  # it may be an unfair lock
    return of_stage(interval, awaited, "stragglers", evidence, change, sure=sure)


def _may_be_a_lock(facts: Facts, usual_s: float) -> bool:
    """True if slow items may be those that waited for usual ones.

    An unfair lock, or a server of a few at a time, keeps some workers waiting while others get it again and again: one
    worker alone then does its share or all of the work, and usual items fill the time. If it does plainly more, that is
    chance: the slow items came while all worked.
    """
    interval, awaited = facts.interval, facts.awaited
    alone = awaited.alone_share or 0.0
    num_served = max(1.0, 1.0 / alone) if alone > 0 else 1.0
    fills = _FILLS[0] < usual_s * awaited.stage.num_items / interval.wall_s / num_served < _FILLS[1]
    does_all_alone = (awaited.is_limited or alone > ALL_ALONE) and alone < _BY_CHANCE
    if not fills or not (awaited.pool.works_one_at_a_time or does_all_alone):
        return False
    return not are_slow_together(interval, awaited.stage, usual_s)


def memory_ahead(facts: Facts) -> Verdict | None:
    """Its workers are idle although the loop waits: there is no memory to read further ahead."""
    interval, awaited = facts.interval, facts.awaited
    if not _is_idle(facts) or not interval.is_short_of_memory:
        return None
    return of_stage(interval, awaited, "memory", say_memory(interval), changes.more_memory(interval), sure=0.95)


def depth(facts: Facts) -> Verdict | None:
    """Its workers are idle although the loop waits: as many batches are open as prefetch.batches allows."""
    first_pool = facts.interval.pools[0]
    idle_s = first_pool.total("blocked_s")
    if not _is_idle(facts) or idle_s <= WAITING * first_pool.total("slot_s"):
        return None
    return _depth(facts, idle_s, sure=0.8)


def one_batch(facts: Facts) -> Verdict | None:
    """No batch is ahead of the one in work, so workers are idle at its end, whatever they do before.

    Of a batch that one worker makes in a chunk the others get nothing, so one alone is as fast, and works alone from then on.
    If items take longer side by side, that may be for another reason: with one batch the two cannot be told apart.
    """
    interval, awaited, first_pool = facts.interval, facts.awaited, facts.interval.pools[0]
    if interval.num_wanted > 1 or interval.is_inline or not interval.stats.num_batches or interval.is_short_of_memory:
        return None
    idle_s = first_pool.total("blocked_s")
    at_its_end_s = _AT_ITS_END * first_pool.total("slot_s")
    if first_pool.rows[0].workers < 2:
        return None
    if idle_s > at_its_end_s:
        return _depth(facts, idle_s, sure=0.9)
    can_have_work = awaited.would_compute and not awaited.may_hold_gil and not interval.is_short_of_cpus
    if awaited.pool is not first_pool or not first_pool.works_one_at_a_time or not can_have_work:
        return None
    found = _depth(facts, idle_s + first_pool.total("idle_s"), sure=0.9)
    other = computing(facts, always=True)
    if not awaited.is_held_up or other is None:
        return found
    return undecided(found, other)._replace(settings=found.settings, is_exact=found.is_exact)


def _depth(facts: Facts, idle_s: float, *, sure: float) -> Verdict:
    interval = facts.interval
    share = idle_s / max(interval.pools[0].total("slot_s"), 1e-9)
    evidence = (
        f"no pool was at its limit: workers were idle for {100 * share:.0f} % of the time because "
        f"{interval.num_wanted} {'batch was' if interval.num_wanted == 1 else 'batches were'} already open"
    )
    change = changes.deeper(interval).then(", to absorb variation")
    return of_stage(interval, facts.awaited, "depth", evidence, change, sure=sure)


def _is_idle(facts: Facts) -> bool:
    """True if its workers have time to spare. Where no batch came at all, one of them hangs instead."""
    interval = facts.interval
    return facts.awaited.pool.use < BUSY and not interval.is_inline and interval.stats.num_batches > 0


def computing(facts: Facts, *, always: bool = False) -> Verdict | None:
    """Its workers need a CPU for most of their time."""
    interval, awaited = facts.interval, facts.awaited
    if not always and awaited.needs_cpu <= COMPUTING:
        return None
    stage = awaited.stage
    delayed = stage.delayed_s / max(stage.busy_s, 1e-9)
    evidence = f"{100 * awaited.cpu_share:.0f} % of that on a CPU"
    if delayed > 0.1:
        meanwhile = f"{interval.num_idle_cpus:.1f} CPUs were idle" if interval.has_idle_cpus else "no CPU was free"
        evidence += f", {100 * delayed:.0f} % ready to run while {meanwhile}"
    evidence += f"; the workers use {interval.cpus_used:.1f} CPUs"
    if interval.cpus is not None:
        evidence += (
            f" of {interval.cpus:.3g}, {100 * stage.cpu_s / max(1e-9, interval.cpu_s):.0f} % of that for {stage.name}"
        )
    # Where other programs have the CPUs, workers that wait for one another look much the same.
    sure = 0.8 if interval.is_short_of_cpus and delayed >= _CROWDED else 1.0
    return of_stage(interval, awaited, "computing", evidence, changes.less_work(interval, awaited), sure=sure)


def waiting(facts: Facts) -> Verdict:
    """Its workers wait for something other than a CPU or one another, or it is not known for what: no other rule applies."""
    interval, awaited = facts.interval, facts.awaited
    stage, usual_s = awaited.stage, awaited.stage.services.percentile(0.5)
    evidence = f"{100 * (1 - awaited.needs_cpu):.0f} % of that waiting for something other than a CPU"
    if usual_s is not None:
        evidence += f", {say_seconds(usual_s)} an item"
    change = changes.more_workers(interval, awaited)
    if interval.is_inline:
        change = changes.workers_instead(interval, "with several workers", helps=interval.stats.full_turn is None)
    kind, sure = "waiting", 0.9 if awaited.needs_cpu < WAITING else 0.5
    if awaited.alone_share is not None:
        is_independent = awaited.slowdown is not None and awaited.slowdown < PLAINLY
        found = ": all together hardly get more done" if awaited.is_limited else ""
        evidence += f"; {compared(awaited)}{': workers do not block one another' if is_independent else found}"
        kind, sure = ("waiting", 0.5) if awaited.is_limited else ("latency", confidence_of_comparison(awaited))
    if stage.kind == "read":
        change = change.then("; or fewer, larger requests: tar shards, order.shuffle: block")
    elif stage.kind == "transfer":
        kind, change = "waiting", Remedy(MOVE_LESS, change.settings, is_exact=not change.settings)
    elif not interval.is_inline and not interval.stats.tuning.is_remote:
        change = change.then(f"; if the loop computes in Python, {changes.in_a_process(interval)}")
    return of_stage(interval, awaited, kind, evidence, change, sure=sure)
