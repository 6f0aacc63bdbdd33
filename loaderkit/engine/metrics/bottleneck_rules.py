"""The rules that name a bottleneck: each a function of the facts that gives a verdict, or None where it does not apply.

`bottleneck.diagnose` tries them in order, so a rule may rely on those before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from loaderkit._internal.units import say_bytes, say_seconds
from loaderkit.engine.metrics.interval import SPARE, WAITING, Interval
from loaderkit.engine.metrics.stage_facts import ALL_ALONE, COMPUTING, PLAINLY, Facts, StageFacts
from loaderkit.engine.metrics.stalls import MEMORY, START, WAKEUP

_HARMLESS = 0.05  # share of the time; shorter waits are not worth a change
_OCCASIONAL = 0.15  # share of the time; shorter waits are harmless if the workers have time to spare
_BUSY = 0.75  # share of their time; workers that are busy for more are the limit
_LITTLE_CPU = 0.3  # CPUs; a stage that uses less does not hold the GIL for long
_CROWDED = 0.25  # share of the busy time ready to run while no CPU was free
_TAIL = 4.0  # times the usual service time; a longer item is a straggler
_TAIL_SHARE = 0.25  # share of the busy time spent on stragglers
_FILLS = (0.7, 1.3)  # times the wall time; between them, one worker was busy all the time
_MOST_OF_A_CPU = 0.75
_ONE_CPU = 1.2  # CPUs that threads which need the GIL can use together, and a little for what runs without it


class Verdict(NamedTuple):
    """What limits the loop.

    `stage` is a stage's name, or `start`, `memory` or `wakeup`; None: training is the limit. `percent` of the interval's wall
    time were lost to it (for None: not lost to loading). `confidence` is from 0 to 1. `kind` says in one word how it
    limits: training, computing, gil, lock, latency, bandwidth, stragglers, waiting, memory, depth, start, wakeup, unknown.
    """

    stage: str | None
    percent: float
    confidence: float
    evidence: str
    change: str
    kind: str


# ------------------------------------------------------------------------------------------------ without a stage


def start(facts: Facts) -> Verdict | None:
    """Most of the waiting came before the first chunk could run."""
    interval, wall_s = facts.interval, facts.interval.stats.wall_s
    if interval.start_s <= max(interval.waited_s, _HARMLESS * wall_s):
        return None
    evidence = (
        f"the loop waited {say_seconds(interval.start_s)} of {say_seconds(wall_s)} before the first chunk could run, and "
        f"{say_seconds(interval.waited_s)} after that"
    )
    change = (
        "call loader.start() before the model is built; for the steady state, take stats(since=...) from a later moment"
    )
    return Verdict(START, interval.percent(interval.start_s), interval.confidence(), evidence, change, "start")


def training(facts: Facts) -> Verdict | None:
    """The loop hardly waited."""
    interval, share = facts.interval, facts.interval.share
    if share >= _HARMLESS and not (share < _OCCASIONAL and interval.has_time_to_spare):
        return None
    use = max(pool.use for pool in interval.pools)
    evidence = f"the loop waited {100 * share:.1f} % of {say_seconds(interval.wall_s)}"
    change = "nothing in loading: make the training step faster"
    if not interval.is_inline:
        evidence += f"; the workers were busy for {100 * use:.0f} % of their time"
        workers = sum(pool.rows[0].workers for pool in interval.pools)
        if use < SPARE and workers > len(interval.pools):
            change += "; fewer workers would do, if you need the CPUs"
    sure = interval.confidence(1.0 if share < _HARMLESS / 2 else 0.9 if share < _HARMLESS else 0.75)
    not_lost = round(100.0 - interval.percent(sum(interval.stats.stall_s.values())), 1)
    return Verdict(None, not_lost, sure, evidence, change, "training")


def memory(facts: Facts) -> Verdict | None:
    """The loop waited for room in the memory budget."""
    interval = facts.interval
    return _memory(interval) if interval.stall_s.get(MEMORY, 0.0) > interval.waited_s / 2 else None


def wakeup(facts: Facts) -> Verdict | None:
    """Batches were ready, and the loop's thread was not running."""
    interval = facts.interval
    seconds = interval.stall_s.get(WAKEUP, 0.0)
    if seconds <= interval.waited_s / 2:
        return None
    each = f", {say_seconds(seconds / interval.stats.num_batches)} a batch" if interval.stats.num_batches else ""
    lost = f"{say_seconds(seconds)} of {say_seconds(interval.wall_s)}{each}"
    evidence = f"batches were ready, and the loop's thread was not running: {lost}"
    change = (
        "prefetch.executor: process, so that loading does not hold the GIL when the loop needs it; or fewer workers; for "
        "batches of less than a millisecond, larger batches or executor: inline"
    )
    return Verdict(WAKEUP, interval.percent(seconds), interval.confidence(0.8), evidence, change, "wakeup")


# ------------------------------------------------------------------------------- the stage with the most CPU time


def gil(facts: Facts) -> Verdict | None:
    """Its workers compute, use no more than one CPU together, and wait for one another.

    The stage that is awaited waits for the GIL as well: what matters is which stage holds it.
    """
    interval, busiest = facts.interval, facts.busiest
    if not _is_gil(interval, busiest):
        return None
    stage, trial = busiest.stage, busiest.pool.trial
    share = stage.cpu_s / max(1e-9, interval.cpus_used * interval.wall_s)
    evidence = (
        f"the loop waited {100 * interval.share:.0f} % of {say_seconds(interval.wall_s)}; the workers compute, but use "
        f"{interval.cpus_used:.1f} CPUs in all, {100 * share:.0f} % of that for {stage.name}; side by side they wait "
        f"for one another {100 * busiest.contended_share:.0f} % of the time"
    )
    if trial.holds_gil:
        evidence += f"; the GIL was held {100 * (trial.gil_taken or 0.0):.0f} % of the times a worker asked for it"
    if busiest.alone_share is not None:
        evidence += f"; {_compared(busiest)}"
    change = (
        "prefetch.executor: process gives loading a GIL of its own, prefetch.processes several; or do the work in NumPy "
        "or torch, which release the GIL; more workers would not help"
    )
    sure = interval.confidence(0.95 if trial.holds_gil else 0.75)
    return Verdict(stage.name, interval.percent(interval.waited_s), sure, evidence, change, "gil")


def _is_gil(interval: Interval, busiest: StageFacts) -> bool:
    uses_several_cpus = interval.cpus_used > _ONE_CPU * interval.num_processes
    if busiest.stage.cpu_s < _LITTLE_CPU * interval.wall_s or uses_several_cpus or interval.is_inline:
        return False
    may_be_as_fast_alone = busiest.is_as_fast_alone is not False
    if (holds_gil := busiest.pool.trial.holds_gil) is not None:
        # Where the GIL is held for a part of the time, several workers still get more done.
        is_full = interval.cpus_used > _MOST_OF_A_CPU * interval.num_processes
        return holds_gil and (is_full or may_be_as_fast_alone)
    return busiest.num_in_process > 1 and busiest.contended_share > WAITING and may_be_as_fast_alone


def no_cpu_free(facts: Facts) -> Verdict | None:
    """Chunks wait for a CPU wherever they are: what matters is which stage uses the CPUs."""
    if facts.interval.is_short_of_cpus and facts.awaited.would_compute:
        return _computing(facts.interval, facts.busiest)
    return None


# --------------------------------------------------------------------------- the stage that was waited for most


def read_ahead(facts: Facts) -> Verdict | None:
    """Its workers wait for bytes that are read ahead, so the requests for those are the limit, not the workers.

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
    return _of_stage(interval, awaited, "bandwidth", evidence, change, sure=0.95)


def stragglers(facts: Facts) -> Verdict | None:
    """A few items take much of the time."""
    interval, awaited = facts.interval, facts.awaited
    stage, services = awaited.stage, awaited.stage.services
    usual_s, slow_s = services.percentile(0.5), services.percentile(0.99)
    if usual_s is None or slow_s is None or awaited.needs_cpu > COMPUTING:
        return None
    share = services.share_above(_TAIL * usual_s)
    # An item that was slow for lack of a CPU is no straggler.
    by_itself = share - stage.delayed_s / max(stage.busy_s, 1e-9)
    if slow_s <= _TAIL * usual_s or share <= _TAIL_SHARE or by_itself <= _TAIL_SHARE / 2:
        return None
    # An unfair lock keeps some workers waiting while others get it again and again: one alone gets as much done, and the
    # usual items, one behind another, fill the time.
    fills = _FILLS[0] < usual_s * stage.num_items / interval.wall_s < _FILLS[1]
    does_all_alone = awaited.alone_share is not None and awaited.alone_share > ALL_ALONE
    if fills and (awaited.pool.works_one_at_a_time or does_all_alone):
        return None
    evidence = (
        f"the median item takes {say_seconds(usual_s)}, one in a hundred {say_seconds(slow_s)} or more: stragglers take "
        f"{100 * share:.0f} % of the stage's time"
    )
    change = (
        f"prefetch.batches: {2 * interval.num_wanted}, so that other batches are ready meanwhile, and more workers; or "
        "find out why those items are slow"
    )
    return _of_stage(interval, awaited, "stragglers", evidence, change, sure=0.95)


def memory_ahead(facts: Facts) -> Verdict | None:
    """Its workers are idle although the loop waits: there is no memory to read further ahead."""
    if _is_idle(facts) and facts.interval.is_short_of_memory:
        return _memory(facts.interval, facts.awaited.pool.use)
    return None


def depth(facts: Facts) -> Verdict | None:
    """Its workers are idle although the loop waits: as many batches are open as prefetch.batches allows."""
    interval, first_pool = facts.interval, facts.interval.pools[0]
    blocked_s, slot_s = first_pool.total("blocked_s"), first_pool.total("slot_s")
    if not _is_idle(facts) or blocked_s <= WAITING * slot_s:
        return None
    evidence = (
        f"no pool was at its limit: workers were idle for {100 * blocked_s / slot_s:.0f} % of the time because "
        f"{interval.num_wanted} batches were already open"
    )
    change = f"prefetch.batches: {2 * interval.num_wanted}, to absorb variation"
    return _of_stage(interval, facts.awaited, "depth", evidence, change, sure=0.8)


def _is_idle(facts: Facts) -> bool:
    """True if its workers have time to spare. Where no batch came at all, one of them hangs instead."""
    interval = facts.interval
    return facts.awaited.pool.use < _BUSY and not interval.is_inline and interval.stats.num_batches > 0


def lock_or_bandwidth(facts: Facts) -> Verdict | None:
    """Its workers wait for one another: for a lock, or, where bytes move, for a link that is full."""
    interval, awaited = facts.interval, facts.awaited
    stage = awaited.stage
    if not awaited.is_serial:
        return None
    if stage.kind == "transfer" or (stage.kind == "read" and stage.num_bytes > 0):
        gives = f"; it delivers {stage.num_bytes / interval.wall_s / 1e6:.3g} MB/s in total" if stage.num_bytes else ""
        evidence = f"{_compared(awaited)}, waiting for data: the link is full{gives}"
        change = "a faster store or a local copy, or smaller (compressed) samples; more workers would not help"
        if stage.kind == "transfer":
            change = _MOVE_LESS
        return _of_stage(interval, awaited, "bandwidth", evidence, change, sure=_confidence_of_comparison(awaited))
    evidence = (
        f"{_compared(awaited)}, on a CPU for {100 * awaited.cpu_share:.0f} % of the time: workers wait for one another"
    )
    change = (
        f"give every worker its own connection, file or model instead of one that {stage.name} locks, or hold the lock "
        "for a shorter time; more workers would not help"
    )
    return _of_stage(interval, awaited, "lock", evidence, change, sure=_confidence_of_comparison(awaited))


def computing(facts: Facts) -> Verdict | None:
    """Its workers need a CPU for most of their time."""
    return _computing(facts.interval, facts.awaited) if facts.awaited.needs_cpu > COMPUTING else None


def waiting(facts: Facts) -> Verdict:
    """Its workers wait for something other than a CPU or one another: the case that is left when no other rule applies."""
    interval, awaited = facts.interval, facts.awaited
    stage = awaited.stage
    usual_s = stage.services.percentile(0.5)
    evidence = f"{100 * (1 - awaited.needs_cpu):.0f} % of that waiting for something other than a CPU"
    if usual_s is not None:
        evidence += f", {say_seconds(usual_s)} an item"
    change = (
        _workers_instead(interval, "with several workers") if interval.is_inline else _more_workers(interval, awaited)
    )
    kind, sure = "waiting", 0.9
    if awaited.alone_share is not None:
        is_independent = awaited.slowdown is not None and awaited.slowdown < PLAINLY
        evidence += f"; {_compared(awaited)}{': workers do not block one another' if is_independent else ''}"
        kind, sure = "latency", _confidence_of_comparison(awaited)
    if stage.kind == "read":
        change += "; or fewer, larger requests: tar shards, order.shuffle: block"
    elif stage.kind == "transfer":
        kind, change = "waiting", _MOVE_LESS
    elif not interval.is_inline:
        change += "; if the loop computes in Python, prefetch.executor: process"
    return _of_stage(interval, awaited, kind, evidence, change, sure=sure)


# ------------------------------------------------------------------------------------------------------- in words

_MOVE_LESS = "transfer fewer bytes: uint8 until `normalize` after `transfer`, fewer fields; or a faster link"

_CHEAPER: Mapping[str, str] = {
    "decode": "cheaper images: stored at the size they are used at, or decode: {scaled: true} where they are shrunk",
    "batch": "less to copy: uint8 instead of float, one shape instead of padding, fewer fields",
    "call": "a cheaper function, or do its work once in advance",
    "normalize": "`normalize` on the GPU, after `transfer`",
}


def _of_stage(
    interval: Interval,
    facts: StageFacts,
    kind: str,
    evidence: str,
    change: str,
    *,
    sure: float = 1.0,
    lost_s: float | None = None,
) -> Verdict:
    """`lost_s`: seconds lost to the stage; default: the loop's wait for it."""
    name, use = facts.stage.name, facts.pool.use
    seconds = interval.stall_s.get(name, 0.0) if lost_s is None else lost_s
    percent = interval.percent(seconds)
    evidence = (
        f"the loop waited for {name} {percent:.0f} % of {say_seconds(interval.stats.wall_s)}; "
        f"its workers were busy for {100 * use:.0f} % of their time; {evidence}"
    )
    # The share of the waiting that is charged to this stage, and whether its workers are as busy as a limit's are.
    clear = 0.6 + 0.4 * seconds / max(interval.waited_s, 1e-9)
    agrees = 1.0 if use >= _BUSY or interval.is_inline or kind in ("depth", "stragglers") else 0.7
    return Verdict(name, percent, interval.confidence(clear, agrees, sure), evidence, change, kind)


def _computing(interval: Interval, facts: StageFacts) -> Verdict:
    stage = facts.stage
    delayed = stage.delayed_s / max(stage.busy_s, 1e-9)
    evidence = f"{100 * facts.cpu_share:.0f} % of that on a CPU"
    if delayed > 0.1:
        meanwhile = f"{interval.num_idle_cpus:.1f} CPUs were idle" if interval.has_idle_cpus else "no CPU was free"
        evidence += f", {100 * delayed:.0f} % ready to run while {meanwhile}"
    evidence += f"; the workers use {interval.cpus_used:.1f} CPUs"
    if interval.num_cpus is not None:
        evidence += f" of {interval.num_cpus}"
    cheaper = _CHEAPER.get(stage.kind, f"a cheaper {stage.name}")
    if interval.is_inline:
        change = f"{_workers_instead(interval, 'so that it runs in parallel with training')}; or {cheaper}"
    elif interval.is_short_of_cpus:
        change = f"{cheaper}; or more CPUs: more workers would not help, since no CPU is free"
    elif facts.pool.works_one_at_a_time:
        change = f"{cheaper}; more workers would not help: one worker alone was faster"
    else:
        change = f"{_more_workers(interval, facts)}; or {cheaper}"
    if not interval.is_short_of_cpus:
        return _of_stage(interval, facts, "computing", evidence, change)
    share = stage.cpu_s / max(1e-9, interval.cpus_used * interval.wall_s)
    lost_s = max(interval.stall_s.get(stage.name, 0.0), share * interval.waited_s)
    # Where other programs have the CPUs, workers that wait for one another look much the same.
    sure = 1.0 if delayed < _CROWDED else 0.8
    evidence += f", {100 * share:.0f} % of that for {stage.name}"
    return _of_stage(interval, facts, "computing", evidence, change, sure=sure, lost_s=lost_s)


def _memory(interval: Interval, use: float | None = None) -> Verdict:
    budget_bytes, batch_bytes = interval.stats.memory["budget_bytes"], interval.stats.memory.get("batch_bytes", 0)
    evidence = (
        f"prefetch.memory ({say_bytes(budget_bytes)}) holds {interval.num_in_memory} of the {interval.num_wanted} "
        f"batches to read ahead, {say_bytes(batch_bytes)} each; the loop waited "
        f"{100 * interval.share:.0f} % of the time"
    )
    if use is not None:
        evidence += f", while the workers were idle for {100 * (1 - use):.0f} %"
    change = f"prefetch.memory: {say_bytes(interval.num_wanted * batch_bytes)} or more; or smaller batches"
    return Verdict(MEMORY, interval.percent(interval.waited_s), interval.confidence(0.95), evidence, change, "memory")


def _confidence_of_comparison(facts: StageFacts) -> float:
    """Less than 1, the nearer the slowdown is to the middle between side by side and one at a time."""
    if facts.slowdown is None or (facts.slowdown > facts.serial_slowdown) != facts.is_serial:
        return 0.8
    return min(1.0, 0.7 + 1.5 * abs(1 - facts.slowdown / facts.serial_slowdown))


def _compared(facts: StageFacts) -> str:
    num_compared = round(facts.num_compared)
    others = f"{num_compared} of {facts.num_in_process} at a time"
    if num_compared == facts.num_in_process:
        others = f"all {facts.num_in_process}"
    evidence = f"one worker alone reached {100 * (facts.alone_share or 0.0):.0f} % of the throughput of {others}"
    if facts.slowdown is not None:
        evidence += f", and {facts.stage.name} takes {facts.slowdown:.1f} times as long side by side"
    return evidence


def _workers_instead(interval: Interval, how: str) -> str:
    """The change where the loop's own thread makes the batches."""
    if interval.is_inline_by_rule:
        return f"larger batches, or prefetch.concurrency: {interval.num_cpus}, {how}"
    return f"prefetch.executor: thread, {how}"


def _more_workers(interval: Interval, facts: StageFacts) -> str:
    if facts.pool.is_in_trainer:
        return "not more workers: one thread in the trainer's process runs it"
    wanted = interval.suggested_workers(facts.stage.workers)
    return f'more workers: loader.resize("{facts.stage.name}", workers={wanted})'
