"""The rules for a loop that waited longest for something other than a stage. Each rule is a function of the interval,
and its words are beside it.

On the network: a full link always has a batch on it, and a batch takes as long as its bytes do, many times as long as a
small message. On a link that is not full, batches come one at a time, or take no longer than messages: more batches
ahead would fill it.
"""

from __future__ import annotations

from loaderkit._internal.units import say_seconds, say_size
from loaderkit.diagnosis import changes
from loaderkit.diagnosis.evidence import after_start, more_cpus, quota, say_memory, waited
from loaderkit.diagnosis.interval import HARMLESS, NUM_SURE, SPARE, Interval
from loaderkit.diagnosis.make_verdict import without_stage
from loaderkit.diagnosis.verdict import Remedy, Setting, Verdict
from loaderkit.engine.metrics.nodes.counts import NodeStats
from loaderkit.engine.metrics.stalls import MEMORY, NETWORK, RELEASE, RESTART, START, WAKEUP

_SLOW = 3.0  # times the time of a batch from other nodes


def training(interval: Interval) -> Verdict:
    """The loop hardly waited."""
    evidence = waited(interval)
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
    num = interval.stats.num_batches
    if interval.cause == START and num < NUM_SURE:
        few = f": too few batches, {num}, to tell what comes once from what comes with every batch"
        longer = Remedy("a longer run: loaderkit profile --steps 30, or as many batches of your loop")
        return without_stage(interval, START, few, longer, sure=0.5, kind="unknown")
    change = (
        "call loader.start() before the model is built; for the steady state, take stats(since=...) from a later moment"
    )
    return without_stage(interval, START, f"; {after_start(interval)}", Remedy(change))


def memory(interval: Interval) -> Verdict:
    """The loop waited for room in the memory budget."""
    evidence = f"; {say_memory(interval)}"
    return without_stage(interval, MEMORY, evidence, changes.more_memory(interval), sure=0.95)


def wakeup(interval: Interval) -> Verdict:
    """Batches were ready, and the loop's thread was not running."""
    seconds, num_batches = interval.stall_s[WAKEUP], interval.stats.num_batches
    each = f", {say_seconds(seconds / num_batches)} a batch" if num_batches else ""
    evidence = f"{each}: batches were ready, and the loop's thread was not running"
    if interval.is_held_back:
        change = "a larger CPU quota; or less work for the CPUs: fewer workers, and library threads as few as the quota"
        return without_stage(interval, WAKEUP, f"{evidence}; {quota(interval)}", Remedy(change), sure=0.9, kind="quota")
    if interval.is_inline:  # the loop makes its batches itself
        cpus = f"{more_cpus(interval)}; or " if interval.is_short_of_cpus else ""
        return without_stage(interval, WAKEUP, evidence, Remedy(f"{cpus}larger batches"), sure=0.8)
    change = "fewer workers; for batches of less than a millisecond, larger batches or executor: inline"
    process = changes.in_a_process(interval, "so that loading does not hold the GIL")
    is_remote, settings = interval.stats.tuning.is_remote, tuple[Setting, ...]()
    if interval.is_short_of_cpus:
        # Beside programs that took most of them, another executor helped in none of five trials.
        change = f"{more_cpus(interval)}; or {change}{'' if is_remote else f'; or {process}, {process.why}'}"
    elif not is_remote:
        change = f"{process}, {process.why} when the loop needs it; or {change}"
        settings = (process,)
    return without_stage(interval, WAKEUP, evidence, Remedy(change, settings), sure=0.8)


def restart(interval: Interval) -> Verdict:
    """Worker processes died, and the loop waited for their replacements."""
    num = interval.stats.num_restarts
    times = f"{num} worker process{'es' if num != 1 else ''} died and {'were' if num != 1 else 'was'} started again"
    change = (
        "end the deaths: the log says how each process ended (out of memory: a smaller prefetch.memory, fewer workers); more "
        "prefetch.batches hide the time that a restart takes"
    )
    return without_stage(interval, RESTART, f"; {times}", Remedy(change), sure=0.95, kind="restart")


def release(interval: Interval) -> Verdict:
    """The memory of batches was given back to the system, in the loop's thread."""
    evidence = ": dropping the batches that the loop was done with"
    # `call` makes 400 MB anew: for each batch 350 ms a batch; for each sample 0.7, in a process 0.05, in huge pages 6 ms.
    process = "" if interval.stats.tuning.is_remote else f", or set {changes.in_a_process(interval)}"
    change = (
        f"have `call` make its tensors in place or from samples, before `batch`{process}: such "
        "batches lie in memory that is used again. Else set THP_MEM_ALLOC_ENABLE=1 in the environment: torch then gives "
        "memory back faster"
    )
    return without_stage(interval, RELEASE, evidence, Remedy(change), sure=0.95, kind="memory")


def network(interval: Interval) -> Verdict:
    """Batches were complete on other nodes, and not here yet."""
    nodes = interval.stats.nodes
    evidence = (
        f": batches that were complete on other nodes; one takes {say_seconds(nodes.way_s)} from there to the trainer"
    )
    if nodes.num_carried:
        share = 100 * min(1.0, nodes.carrying_s / interval.wall_s)
        evidence += (
            f", {say_size(nodes.carried_bytes / nodes.num_carried)} each, and for {share:.0f} % of the time at least one "
            f"was on the way: {nodes.bytes_per_s / 1e6:.3g} MB/s meanwhile"
        )
    if nodes.latency_s:
        evidence += f"; a small message and its answer take {say_seconds(nodes.latency_s)}"
    slow = _slow_node(nodes.others)
    if slow is not None:
        evidence += f"; from {slow.name} a batch takes {say_seconds(slow.way_s / slow.num_batches)}"
    if interval.stats.has_full_network:
        fewer = (
            "fewer bytes: uint8 until `normalize` after `transfer`, smaller images, fewer fields; or more of the workers on "
            "the trainer's node; or a faster network; more nodes would not help"
        )
        return without_stage(interval, NETWORK, evidence, Remedy(fewer), sure=0.9)
    change = changes.deeper(interval).then(", so that more batches are on the way at a time")
    return without_stage(interval, NETWORK, evidence, change, sure=0.8, kind="depth")


def _slow_node(others: tuple[NodeStats, ...]) -> NodeStats | None:
    """The node from which a batch takes several times as long as from all others, if there is one."""
    each = {row.name: row.way_s / row.num_batches for row in others if row.num_batches}
    if len(each) < 2:
        return None
    slowest = max(each, key=each.__getitem__)
    rest = [seconds for name, seconds in each.items() if name != slowest]
    return next(row for row in others if row.name == slowest) if each[slowest] > _SLOW * max(rest) else None
