"""The rules for workers that share what only a few can use at a time: CPUs, the GIL, a lock, a turn, a link. Each is a
function of the facts, beside its words, that gives a verdict, or None where it does not apply.
"""

from __future__ import annotations

from loaderkit._internal.units import say_seconds
from loaderkit.diagnosis import changes
from loaderkit.diagnosis.evidence import compared
from loaderkit.diagnosis.interval import WAITING, Interval
from loaderkit.diagnosis.make_verdict import BUSY, confidence_of_comparison, of_stage
from loaderkit.diagnosis.stage_facts import COMPUTING, LITTLE_CPU, Facts, StageFacts, is_of_user
from loaderkit.diagnosis.verdict import Remedy, Verdict
from loaderkit.engine.metrics.host import thread_variables
from loaderkit.engine.metrics.snapshot import ALWAYS

MOVE_LESS = "transfer fewer bytes: uint8 until `normalize` after `transfer`, fewer fields; or a faster link"
_MOST_OF_A_CPU = 0.75
_ONE_CPU = 1.2  # CPUs that threads which need the GIL can use together, and a little for what runs without it
_NATIVE = 0.2  # share of the CPU time, and of a CPU, of threads that Python did not start; pools of libraries use more


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
    return of_stage(interval, facts.awaited, "oversubscription", evidence, Remedy(change), sure=0.9)


def user_code(facts: Facts) -> Verdict | None:
    """User code that is not declared thread-safe runs one item at a time in each process, and one runs all the time."""
    interval, share = facts.interval, facts.interval.stats.alone_share
    if not _is_alone(facts):
        return None
    names = ", ".join(row.name for row in interval.stats.stages if row.alone)
    evidence = (
        f"of user code that is not declared `thread_safe` ({names}) one item at a time runs in each process: one did for "
        f"{100 * min(1.0, share):.0f} % of the time"
    )
    change = changes.own_gil(
        interval,
        facts.awaited,
        "prefetch.executor: process, with a process for every CPU by prefetch.processes",
        changes.say_more_processes(interval),
    ).then("; or `thread_safe: true` where several threads may be in it at once; more workers would not help")
    return of_stage(interval, facts.awaited, "lock", evidence, change, sure=0.95, agrees=True)


def is_held_by_one(facts: Facts) -> bool:
    """True if only one worker at a time can run, as it needs the GIL, or as user code may not run in several threads."""
    return _is_alone(facts) or (_is_gil(facts.interval, facts.busiest) and facts.awaited.stage is facts.busiest.stage)


def _is_alone(facts: Facts) -> bool:
    """True if workers run alone, and not because there is no room for the items of others."""
    interval, stage = facts.interval, facts.awaited.stage
    return stage.alone and bool(stage.num_items) and not interval.is_inline and interval.stats.alone_share >= ALWAYS


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
        evidence += f"; {compared(busiest)}"
    change = changes.own_gil(
        interval,
        awaited,
        "prefetch.executor: process gives loading a GIL of its own, prefetch.processes several",
        f"{changes.say_more_processes(interval)}, each with a GIL of its own",
    ).then("; or do the work in NumPy or torch, which release the GIL; more workers would not help")
    return of_stage(interval, awaited, "gil", evidence, change, sure=0.95 if trial.holds_gil else 0.75)


def _is_gil(interval: Interval, busiest: StageFacts) -> bool:
    uses_several_cpus = interval.cpus_used > _ONE_CPU * interval.num_processes
    # Other programs leave less CPU to the thread that holds the GIL; workers that wait for a CPU would do so without
    # the GIL, too.
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
    """The loop computes in Python, and the workers, which have little to do, have to wait for the GIL."""
    interval, awaited = facts.interval, facts.awaited
    if not awaited.loop_holds_gil:
        return None
    taken = 100 * (awaited.pool.trial.gil_taken or 0.0)
    evidence = (
        f"the loop's own thread computes for {100 * interval.loop_share:.0f} % of the time, and the GIL was held "
        f"{taken:.0f} % of the times a worker asked for it; the workers use {interval.cpus_used:.1f} CPUs"
    )
    process = changes.in_a_process(interval, "gives loading a GIL of its own")
    change = Remedy(f"{process} {process.why}", (process,)).then(
        "; or do the loop's work in NumPy or torch, which release the GIL; more workers would not help"
    )
    return of_stage(interval, awaited, "gil", evidence, change, sure=0.8)


def in_turn(facts: Facts, *, least: float = ALWAYS) -> Verdict | None:
    """One worker at a time runs it, and one does so for at least the share `least` of the time."""
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
    change = changes.faster_iterable(interval, awaited, computing=kind == "computing")
    return of_stage(interval, awaited, kind, evidence, change, agrees=share >= BUSY)


def lock_or_bandwidth(facts: Facts) -> Verdict | None:
    """Its workers wait for one another: for a lock, or, where bytes move, for a link that is full."""
    interval, awaited = facts.interval, facts.awaited
    stage = awaited.stage
    if not awaited.is_serial:
        return None
    if stage.kind == "transfer" or (stage.kind == "read" and stage.num_bytes > 0):
        gives = f"; it delivers {stage.num_bytes / interval.wall_s / 1e6:.3g} MB/s in total" if stage.num_bytes else ""
        evidence = f"{compared(awaited)}, waiting for data: the link is full{gives}"
        change = MOVE_LESS if stage.kind == "transfer" else changes.FULL_LINK
        sure = confidence_of_comparison(awaited)
        return of_stage(interval, awaited, "bandwidth", evidence, Remedy(change), sure=sure)
    on_cpu = f"on a CPU for {100 * awaited.cpu_share:.0f} % of the time"
    evidence = f"{compared(awaited)}, {on_cpu}: workers wait for one another"
    change = changes.unlocked(stage.name)
    settings = changes.own_gil(interval, awaited, "", "").settings if stage.alone else ()
    found = Remedy(change, settings, is_exact=not settings)
    return of_stage(interval, awaited, "lock", evidence, found, sure=confidence_of_comparison(awaited))
