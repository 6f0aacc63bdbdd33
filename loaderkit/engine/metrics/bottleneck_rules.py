"""The rules that explain a bottleneck: each a function of the facts that gives a verdict, or None where it does not apply.

The stage is given: it is the one that the loop waited for longest. A rule says what kind of wait that is and what to change.
`bottleneck.diagnose` tries them in order, so a rule may rely on those before it.
"""

from __future__ import annotations

from loaderkit._internal.units import say_seconds
from loaderkit.engine.metrics import bottleneck_words as words
from loaderkit.engine.metrics.bottleneck_words import Verdict
from loaderkit.engine.metrics.host import thread_variables
from loaderkit.engine.metrics.interval import (
    ALL_ALONE,
    COMPUTING,
    HARMLESS,
    LITTLE_CPU,
    PLAINLY,
    SPARE,
    WAITING,
    Facts,
    Interval,
    StageFacts,
    are_slow_together,
    is_of_user,
)
from loaderkit.engine.metrics.snapshot import ALWAYS
from loaderkit.engine.metrics.stalls import MEMORY, RELEASE, RESTART, START, WAKEUP

_BUSY = 0.75  # share of their time; workers that are busy for more are the limit
_CROWDED = 0.25  # share of the busy time ready to run while no CPU was free
_TAIL = 4.0  # times the usual service time; a longer item is a straggler
_TAIL_SHARE = 0.25  # share of the busy time spent on stragglers
_BY_CHANCE = 1.4  # of the throughput of all; beside a lock or a full link one alone reached 0.78 to 1.19 in 72 runs
_FILLS = (0.7, 1.3)  # times the wall time; between them, one worker was busy all the time
_MOST_OF_A_CPU = 0.75
_ONE_CPU = 1.2  # CPUs that threads which need the GIL can use together, and a little for what runs without it
_NATIVE = 0.2  # share of the CPU time, and of a CPU, of threads that Python did not start; pools of libraries use more


# ------------------------------------------------------------------------------------------------ without a stage


def training(interval: Interval) -> Verdict:
    """The loop hardly waited."""
    evidence = words.waited(interval)
    change = "nothing in loading: make the training step faster"
    if not interval.is_inline:
        use = max(pool.use for pool in interval.pools)
        evidence += f"; the workers were busy for {100 * use:.0f} % of their time"
        workers = sum(pool.rows[0].workers for pool in interval.pools)
        if use < SPARE and workers > len(interval.pools):
            change += "; fewer workers would do, if you need the CPUs"
    sure = interval.confidence(1.0 if interval.share < HARMLESS / 2 else 0.9)
    not_lost = round(100.0 - interval.percent(interval.waited_s), 1)
    return Verdict(None, not_lost, sure, evidence, change, "training")


def start(interval: Interval) -> Verdict:
    """Most of the waiting came before anything could have been read ahead."""
    change = (
        "call loader.start() before the model is built; for the steady state, take stats(since=...) from a later moment"
    )
    evidence = f"{words.waited(interval, START)}; {words.after_start(interval)}"
    return without_stage(interval, START, evidence, change)


def memory(interval: Interval) -> Verdict:
    """The loop waited for room in the memory budget."""
    evidence = f"{words.waited(interval, MEMORY)}; {words.say_memory(interval)}"
    return without_stage(interval, MEMORY, evidence, words.more_memory(interval), sure=0.95)


def wakeup(interval: Interval) -> Verdict:
    """Batches were ready, and the loop's thread was not running."""
    seconds, num_batches = interval.stats.stall_s[WAKEUP], interval.stats.num_batches
    each = f", {say_seconds(seconds / num_batches)} a batch" if num_batches else ""
    evidence = f"{words.waited(interval, WAKEUP)}{each}: batches were ready, and the loop's thread was not running"
    if interval.is_held_back:
        change = "a larger CPU quota; or less work for the CPUs: fewer workers, and library threads as few as the quota"
        return without_stage(interval, WAKEUP, f"{evidence}; {words.quota(interval)}", change, sure=0.9, kind="quota")
    change = "fewer workers; for batches of less than a millisecond, larger batches or executor: inline"
    process, is_short = "prefetch.executor: process, so that loading does not hold the GIL", interval.is_short_of_cpus
    if not interval.stats.tuning.is_remote:
        change = f"{change}; or {process}" if is_short else f"{process} when the loop needs it; or {change}"
    if is_short:  # beside programs that took most of them, another executor helped in none of five trials
        change = f"{words.more_cpus(interval)}; or {change}"
    return without_stage(interval, WAKEUP, evidence, change, sure=0.8)


def restart(interval: Interval) -> Verdict:
    """Worker processes died, and the loop waited for those in their place."""
    num = interval.stats.num_restarts
    times = f"{num} worker process{'es' if num != 1 else ''} died and {'were' if num != 1 else 'was'} started again"
    change = (
        "end the deaths: the log says how each process ended (out of memory: a smaller prefetch.memory, fewer workers); more "
        "prefetch.batches hide the time that a restart takes"
    )
    return without_stage(
        interval, RESTART, f"{words.waited(interval, RESTART)}; {times}", change, sure=0.95, kind="restart"
    )


def release(interval: Interval) -> Verdict:
    """The memory of batches was given back to the system, in the loop's thread."""
    evidence = f"{words.waited(interval, RELEASE)}: dropping the batches that the loop was done with"
    # `call` makes 400 MB anew: for each batch 350 ms a batch; for each sample 0.7, in a process 0.05, in huge pages 6 ms.
    process = words.process_instead(interval, ", or set prefetch.executor: process")
    change = (
        f"have `call` make its tensors in place or from samples, before `batch`{process}: such "
        "batches lie in memory that is used again. Else set THP_MEM_ALLOC_ENABLE=1 in the environment: torch then gives "
        "memory back faster"
    )
    return without_stage(interval, RELEASE, evidence, change, sure=0.95, kind="memory")


def without_stage(
    interval: Interval, cause: str, evidence: str, change: str, *, sure: float = 1.0, kind: str | None = None
) -> Verdict:
    """The verdict where the loop waited longest for something other than a stage."""
    percent = interval.percent(interval.stats.stall_s[cause])
    return Verdict(cause, percent, interval.confidence(sure, _clear(interval, cause)), evidence, change, kind or cause)


# ------------------------------------------------------------------------- a stage: what kind of wait that is


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
    return _of_stage(interval, facts.awaited, "waiting", evidence, change, sure=0.9)


def oversubscription(facts: Facts) -> Verdict | None:
    """A library that its function calls computes in threads of its own, in each worker as many as there are CPUs."""
    interval, stage = facts.interval, facts.awaited.stage
    if interval.is_inline or not is_of_user(stage):
        return None  # no worker, or no function of the user's
    native_s, num_cpus = interval.stats.host.native_s, interval.num_cpus or 1
    if not interval.stats.tuning.is_remote:
        # What the loop may have computed in such threads itself, while it did not wait.
        native_s -= max(0.0, interval.counted_s - interval.waited_s) * (num_cpus - 1)
    if native_s <= _NATIVE * max(interval.stats.host.cpu_s, stage.cpu_s, interval.counted_s):
        return None  # such threads use little of the CPU time, or hardly any is used at all
    if interval.num_idle_cpus is not None and interval.num_idle_cpus > num_cpus / 2:
        return None  # these threads delay no worker
    evidence = (
        f"threads that Python did not start (pools of BLAS, OpenMP or torch) used {native_s / interval.counted_s:.1f} CPUs, "
        f"the workers {interval.cpus_used:.1f}"
    )
    variables = " ".join(f"{variable}=1" for variable in thread_variables())
    change = (
        f"{variables} in the environment, so that each worker computes in its own thread; or "
        "threadpoolctl.threadpool_limits(1) around what the function computes"
    )
    return _of_stage(interval, facts.awaited, "oversubscription", evidence, change, sure=0.9)


def user_code(facts: Facts) -> Verdict | None:
    """Of user code that is not declared one item at a time runs in each process, and one does all the time."""
    interval, stage, share = facts.interval, facts.awaited.stage, facts.interval.stats.alone_share
    if not stage.alone or not stage.num_items or interval.is_inline or share < ALWAYS:
        return None  # where no item comes through, it is not for lack of room for others
    names = ", ".join(row.name for row in interval.stats.stages if row.alone)
    evidence = (
        f"of user code that is not declared `thread_safe` ({names}) one item at a time runs in each process: one did for "
        f"{100 * min(1.0, share):.0f} % of the time"
    )
    processes = words.process_instead(
        interval,
        "prefetch.executor: process, with a process for every CPU by prefetch.processes",
        words.several_processes(interval),
    )
    change = (
        f"{processes}; or `thread_safe: true` where several threads may be in it at once; more workers would not help"
    )
    return _of_stage(interval, facts.awaited, "lock", evidence, change, sure=0.95, agrees=True)


def gil(facts: Facts) -> Verdict | None:
    """Workers compute, together no more than one CPU can, and wait for one another meanwhile.

    The stage that is awaited may itself hold the GIL, or be held up by another stage that does.
    """
    interval, awaited, busiest = facts.interval, facts.awaited, facts.busiest
    if not _is_gil(interval, busiest) or not (awaited.stage is busiest.stage or awaited.is_held_up):
        return None
    trial = busiest.pool.trial
    share = busiest.stage.cpu_s / max(1e-9, interval.cpu_s)
    evidence = (
        f"the workers compute, but use {interval.cpus_used:.1f} CPUs in all, {100 * share:.0f} % of that for "
        f"{busiest.stage.name}; side by side they wait for one another {100 * busiest.contended_share:.0f} % of the time"
    )
    if trial.holds_gil:
        evidence += f"; the GIL was held {100 * (trial.gil_taken or 0.0):.0f} % of the times a worker asked for it"
    if busiest.alone_share is not None:
        evidence += f"; {words.compared(busiest)}"
    processes = words.process_instead(
        interval,
        "prefetch.executor: process gives loading a GIL of its own, prefetch.processes several",
        f"{words.several_processes(interval)}, each with a GIL of its own",
    )
    change = f"{processes}; or do the work in NumPy or torch, which release the GIL; more workers would not help"
    return _of_stage(interval, awaited, "gil", evidence, change, sure=0.95 if trial.holds_gil else 0.75)


def _is_gil(interval: Interval, busiest: StageFacts) -> bool:
    uses_several_cpus = interval.cpus_used > _ONE_CPU * interval.num_processes
    # Others leave less to who holds the GIL; workers that wait for a CPU do so without it, too.
    is_held = busiest.pool.trial.holds_gil and busiest.needs_cpu <= COMPUTING
    little = LITTLE_CPU * (min(1.0, interval.cpus_left) if is_held else 1.0)
    if busiest.stage.cpu_s < little * interval.wall_s or uses_several_cpus or interval.is_inline:
        return False
    if busiest.stage.in_turn:
        return False  # its workers wait for their turn
    may_be_as_fast_alone = busiest.is_as_fast_alone is not False
    if (holds_gil := busiest.pool.trial.holds_gil) is not None:
        # Where the GIL is held for a part of the time, several workers still get more done.
        is_full = interval.cpus_used > _MOST_OF_A_CPU * interval.num_processes
        return holds_gil and (is_full or may_be_as_fast_alone)
    return busiest.num_in_process > 1 and busiest.contended_share > WAITING and may_be_as_fast_alone


def gil_of_loop(facts: Facts) -> Verdict | None:
    """The loop computes in Python, and the workers, which have little to do, get the GIL late."""
    interval, awaited = facts.interval, facts.awaited
    if not awaited.loop_holds_gil:
        return None
    taken = 100 * (awaited.pool.trial.gil_taken or 0.0)
    evidence = (
        f"the loop's own thread computes for {100 * interval.loop_share:.0f} % of the time, and the GIL was held "
        f"{taken:.0f} % of the times a worker asked for it; the workers use {interval.cpus_used:.1f} CPUs"
    )
    change = (
        "prefetch.executor: process gives loading a GIL of its own; or do the loop's work in NumPy or torch, which release "
        "the GIL; more workers would not help"
    )
    return _of_stage(interval, awaited, "gil", evidence, change, sure=0.8)


def in_turn(facts: Facts, *, least: float = ALWAYS) -> Verdict | None:
    """One worker at a time runs it, and for the share `least` of the time one does."""
    interval, awaited = facts.interval, facts.awaited
    stage, share = awaited.stage, interval.stats.turn_share(awaited.stage.name)
    if not stage.in_turn or share < least:
        return None
    each_s = stage.busy_s / max(stage.num_items * interval.num_processes, 1)
    evidence = (
        f"one item takes {say_seconds(each_s)}, {100 * min(1.0, awaited.cpu_share):.0f} % of that on a CPU, and one thread "
        f"at a time iterates: one did for {100 * min(1.0, share):.0f} % of the time"
    )
    kind = "computing" if awaited.needs_cpu > COMPUTING else "waiting"
    change = words.faster_iterable(interval, awaited, computing=kind == "computing")
    return _of_stage(interval, awaited, kind, evidence, change, agrees=share >= _BUSY)


def no_cpu_free(facts: Facts) -> Verdict | None:
    """Its workers wait for a CPU, and none is free."""
    if facts.interval.is_short_of_cpus and facts.awaited.would_compute:
        return computing(facts, always=True)
    return None


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
    # An unfair lock, or a server of a few at a time, keeps some workers waiting while others get it again and again: one alone
    # gets its share or all done, and usual items fill the time. It gets plainly more done by chance: slow ones fell to all.
    alone = awaited.alone_share or 0.0
    num_served = max(1.0, 1.0 / alone) if alone > 0 else 1.0
    fills = _FILLS[0] < usual_s * stage.num_items / interval.wall_s / num_served < _FILLS[1]
    does_all_alone = (awaited.is_limited or alone > ALL_ALONE) and alone < _BY_CHANCE
    may_be_a_lock = fills and not are_slow_together(interval, stage, usual_s)
    if may_be_a_lock and (awaited.pool.works_one_at_a_time or does_all_alone):
        return None
    evidence = (
        f"the median item takes {say_seconds(usual_s)}, one in a hundred {say_seconds(slow_s)} or more: stragglers take "
        f"{100 * share:.0f} % of the stage's time"
    )
    ahead = words.wider(interval, awaited)
    if interval.is_inline:
        ahead = words.workers_instead(interval, "with several workers")
    change = f"{ahead}, so that other batches are ready meanwhile; or find out why those items are slow"
    sure = 0.95 if alone <= ALL_ALONE else 0.6  # it may be an unfair lock
    return _of_stage(interval, awaited, "stragglers", evidence, change, sure=sure)


def memory_ahead(facts: Facts) -> Verdict | None:
    """Its workers are idle although the loop waits: there is no memory to read further ahead."""
    interval, awaited = facts.interval, facts.awaited
    if not _is_idle(facts) or not interval.is_short_of_memory:
        return None
    return _of_stage(interval, awaited, "memory", words.say_memory(interval), words.more_memory(interval), sure=0.95)


def depth(facts: Facts) -> Verdict | None:
    """Its workers are idle although the loop waits: as many batches are open as prefetch.batches allows."""
    interval, first_pool = facts.interval, facts.interval.pools[0]
    blocked_s, slot_s = first_pool.total("blocked_s"), first_pool.total("slot_s")
    if not _is_idle(facts) or blocked_s <= WAITING * slot_s:
        return None
    evidence = (
        f"no pool was at its limit: workers were idle for {100 * blocked_s / slot_s:.0f} % of the time because "
        f"{interval.num_wanted} {'batch was' if interval.num_wanted == 1 else 'batches were'} already open"
    )
    return _of_stage(
        interval, facts.awaited, "depth", evidence, f"{words.deeper(interval)}, to absorb variation", sure=0.8
    )


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
        evidence = f"{words.compared(awaited)}, waiting for data: the link is full{gives}"
        change = "a faster store or a local copy, or smaller (compressed) samples; more workers would not help"
        if stage.kind == "transfer":
            change = words.MOVE_LESS
        return _of_stage(interval, awaited, "bandwidth", evidence, change, sure=_confidence_of_comparison(awaited))
    on_cpu = f"on a CPU for {100 * awaited.cpu_share:.0f} % of the time"
    evidence = f"{words.compared(awaited)}, {on_cpu}: workers wait for one another"
    change = (
        f"give every worker its own connection, file or model instead of one that {stage.name} locks, or hold the lock "
        "for a shorter time; of a server, one that answers more at a time; more workers would not help"
    )
    return _of_stage(interval, awaited, "lock", evidence, change, sure=_confidence_of_comparison(awaited))


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
    return _of_stage(interval, awaited, "computing", evidence, words.less_work(interval, awaited), sure=sure)


def waiting(facts: Facts) -> Verdict:
    """Its workers wait for something other than a CPU or one another, or nothing tells what for: no other rule applies."""
    interval, awaited = facts.interval, facts.awaited
    stage, usual_s = awaited.stage, awaited.stage.services.percentile(0.5)
    evidence = f"{100 * (1 - awaited.needs_cpu):.0f} % of that waiting for something other than a CPU"
    if usual_s is not None:
        evidence += f", {say_seconds(usual_s)} an item"
    change = (
        words.workers_instead(interval, "with several workers")
        if interval.is_inline
        else words.more_workers(interval, awaited)
    )
    kind, sure = "waiting", 0.9 if awaited.needs_cpu < WAITING else 0.5
    if awaited.alone_share is not None:
        is_independent = awaited.slowdown is not None and awaited.slowdown < PLAINLY
        found = ": all together hardly get more done" if awaited.is_limited else ""
        evidence += f"; {words.compared(awaited)}{': workers do not block one another' if is_independent else found}"
        kind, sure = ("waiting", 0.5) if awaited.is_limited else ("latency", _confidence_of_comparison(awaited))
    if stage.kind == "read":
        change += "; or fewer, larger requests: tar shards, order.shuffle: block"
    elif stage.kind == "transfer":
        kind, change = "waiting", words.MOVE_LESS
    elif not interval.is_inline:
        change += words.process_instead(interval, "; if the loop computes in Python, prefetch.executor: process")
    return _of_stage(interval, awaited, kind, evidence, change, sure=sure)


# ----------------------------------------------------------------------------------------------- verdict of a stage


def _clear(interval: Interval, cause: str) -> float:
    """A factor for the confidence: 1 where all of the waiting is charged to one cause, less where it is shared."""
    return 0.6 + 0.4 * interval.stats.stall_s[cause] / max(interval.waited_s, 1e-9)


def _of_stage(
    interval: Interval,
    facts: StageFacts,
    kind: str,
    evidence: str,
    change: str,
    *,
    sure: float = 1.0,
    agrees: bool = False,
) -> Verdict:
    name, use = facts.stage.name, facts.pool.use
    parts = [words.waited(interval, name), f"the workers were busy for {100 * use:.0f} % of their time", evidence]
    parts += words.host_facts(interval, facts)
    # Workers are as busy as a limit's are, or idle for a reason.
    agrees = agrees or use >= _BUSY or interval.is_inline or kind in ("depth", "memory", "stragglers")
    confidence = interval.confidence(_clear(interval, name), 1.0 if agrees else 0.7, sure)
    return Verdict(name, interval.percent(interval.stats.stall_s[name]), confidence, "; ".join(parts), change, kind)


def _confidence_of_comparison(facts: StageFacts) -> float:
    """Less than 1, the nearer the slowdown is to the middle between side by side and one at a time."""
    if facts.slowdown is None or (facts.slowdown > facts.serial_slowdown) != facts.is_serial:
        return 0.8
    return min(1.0, 0.7 + 1.5 * abs(1 - facts.slowdown / facts.serial_slowdown))
