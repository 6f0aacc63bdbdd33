"""A verdict, and its words: what the loop waited for, what the machine withholds, and what to change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from loaderkit._internal.units import format_bytes, say_bytes, say_seconds
from loaderkit.engine.metrics.interval import HARMLESS, Interval, StageFacts, more_of
from loaderkit.engine.metrics.stalls import EPOCH, MEMORY, NETWORK, RELEASE, RESTART, START, WAKEUP

_OTHERS = 0.2  # CPUs; other programs that use more are named
_DISK = 0.5  # share of the bytes read from the page cache; less is worth telling

MOVE_LESS = "transfer fewer bytes: uint8 until `normalize` after `transfer`, fewer fields; or a faster link"

_SMALLER = "smaller batches: this machine has no memory for more of them"

FASTER = "a faster iterable, or its data in files, which workers read side by side"

_CHEAPER: Mapping[str, str] = {
    "decode": "cheaper images: stored at the size they are used at, or decode: {scaled: true} where they are shrunk",
    "batch": "less to copy: uint8 instead of float, one shape instead of padding, fewer fields",
    "call": "a cheaper function, or do its work once in advance",
    "filter": "a cheaper function, or leave such samples out of the source",
    "normalize": "`normalize` on the GPU, after `transfer`",
}


_WITHOUT_A_STAGE: Mapping[str, str] = {
    START: "Starting up is the limit: the first batch",
    EPOCH: "Changing epochs is the limit: nothing is ready when one begins",
    MEMORY: "Memory is the limit: no room for more batches ahead",
    WAKEUP: "Waking up the loop is the limit: its batch was there",
    NETWORK: "The network is the limit: batches wait for the way to the trainer",
    RESTART: "Restarting worker processes is the limit: they die",
    RELEASE: "Releasing batches is the limit: their memory goes back to the system",
}


class Verdict(NamedTuple):
    """What limits the loop.

    `stage` is what the loop waited for longest: a stage's name, or `start`, `memory`, `wakeup`, `network`, `worker restart` or
    `release`; None: training is the limit. `percent` of the interval's wall time were lost to it (for None: not lost to
    loading). `confidence` is from 0 to 1. `kind` says in one word how it limits: training, computing, gil, oversubscription,
    lock, latency, bandwidth, stragglers, waiting, memory, depth, start, wakeup, network, restart, quota, unknown. `source`
    begins with the name of the one of several sources that alone holds the loop up, if one does, and says how that is seen.
    """

    stage: str | None
    percent: float
    confidence: float
    evidence: str
    change: str
    kind: str
    source: str | None = None


def headline(stage: str | None, kind: str) -> str:
    """A verdict in one line."""
    if stage is None:
        return "Nothing to say yet" if kind == "unknown" else "Training is the limit"
    if kind == "quota":
        return "The CPU quota is the limit: the loop's thread was held back"
    if stage == NETWORK and kind != "network":
        return "Batches ahead are the limit: too few are on the way to the trainer at a time"
    return _WITHOUT_A_STAGE.get(stage, f"{stage} is the limit: {kind}")


def waited(interval: Interval, cause: str | None = None) -> str:
    """How long the loop waited in all, and for one cause: the head of every verdict's evidence."""
    stats = interval.stats
    text = f"the loop waited {interval.percent(interval.waited_s):.1f} % of {say_seconds(stats.wall_s)}"
    if cause is None or stats.stall_s[cause] >= interval.waited_s:
        return text
    return f"{text}, {interval.percent(stats.stall_s[cause]):.1f} % for {cause}"


def after_start(interval: Interval) -> str:
    """The waiting that is not the start's, and what that was for."""
    stall_s = {cause: seconds for cause, seconds in interval.stats.stall_s.items() if cause != START}
    longest = max(stall_s, key=stall_s.__getitem__, default=None)
    if longest is None or not stall_s[longest]:
        return "after the start it did not wait"
    later_s = sum(stall_s.values())
    text = f"after the start {interval.percent(later_s):.1f} %"
    if later_s > stall_s[longest]:
        text += f", most of it for {longest} ({interval.percent(stall_s[longest]):.1f} %)"
    else:
        text += f" for {longest}"
    return f"{text}: too little to matter" if interval.share_after_start < HARMLESS else text


def quota(interval: Interval) -> str:
    """What a CPU quota leaves, and for how long it held threads back."""
    host = interval.stats.host
    left = "" if host.quota_cpus is None else f" leaves this program {host.quota_cpus:.3g} CPUs"
    held = f" held its threads back for {say_seconds(host.throttled_s)}" if host.throttled_s else ""
    return f"a CPU quota{' and'.join(part for part in (left, held) if part)}"


def host_facts(interval: Interval, facts: StageFacts) -> list[str]:
    """What the machine withholds: CPUs, memory, cached files."""
    found = []
    host, others, num_cpus = interval.stats.host, interval.others_cpus, interval.num_cpus
    if others is not None and num_cpus is not None and others > _OTHERS and not interval.has_idle_cpus:
        found.append(f"other programs used {others:.1f} of {num_cpus} CPUs: this one gets {num_cpus - others:.1f}")
    if interval.is_short_of_cpus and host.quota_cpus is not None:
        found.append(quota(interval))
    if host.swapped_bytes:
        found.append(f"{say_bytes(host.swapped_bytes)} of this program are swapped out")
    hits = host.page_cache_hits
    if facts.stage.kind == "read" and hits is not None and hits < _DISK:
        found.append(f"{100 * hits:.0f} % of what was read came from the page cache, the rest from a disk")
    return found


def compared(facts: StageFacts) -> str:
    """The throughput of one worker alone beside that of several."""
    num_compared = round(facts.num_compared)
    others = f"{num_compared} of {facts.num_in_process} at a time"
    if num_compared == facts.num_in_process:
        others = f"all {facts.num_in_process}"
    evidence = f"one worker alone reached {100 * (facts.alone_share or 0.0):.0f} % of the throughput of {others}"
    if facts.slowdown is not None:
        evidence += f", and {facts.stage.name} takes {facts.slowdown:.1f} times as long side by side"
    return evidence


def say_memory(interval: Interval) -> str:
    """How many batches the budget holds, and how many are to be read ahead."""
    budget_bytes, batch_bytes = interval.stats.memory["budget_bytes"], interval.stats.memory.get("batch_bytes", 0)
    return (
        f"prefetch.memory ({say_bytes(budget_bytes)}) holds {interval.num_in_memory} of the {interval.num_wanted} "
        f"batches to read ahead, {say_bytes(batch_bytes)} each"
    )


def less_work(interval: Interval, facts: StageFacts) -> str:
    """The change for a stage that computes."""
    cheaper = _CHEAPER.get(facts.stage.kind, f"a cheaper {facts.stage.name}")
    match more_of(interval, facts, computing=True):
        case "executor":
            more = workers_instead(interval, "so that it runs in parallel with training")
        case "workers":
            more = more_workers(interval, facts, computing=True)
        case "processes":
            more = more_processes(interval, facts)
        case None:
            return f"{cheaper}; {_why_not_more(interval, facts)}"
    return f"{more}; or {cheaper}"


def _why_not_more(interval: Interval, facts: StageFacts) -> str:
    """Why no more of what computes can be done at a time."""
    if interval.is_inline:
        return "or larger batches"
    if interval.is_short_of_cpus:
        gain = "would not help, since no CPU is free"
        if _has_greedy_others(interval):  # the kernel shares CPUs among threads
            gain = "would only take CPUs from those programs"
        return f"or {more_cpus(interval)}: more workers {gain}"
    if facts.pool.works_one_at_a_time:
        return "more workers would not help: one worker alone was faster"
    return _no_workers(interval, facts)


def faster_iterable(interval: Interval, facts: StageFacts, *, computing: bool) -> str:
    """The change for an iterable, which one thread at a time iterates over."""
    change = f"{FASTER}; more processes would not help, as each iterates over all of it"
    if interval.stats.full_turn is not None:
        change = f"{FASTER}; more workers would not help, nor more processes, as each iterates over all of it"
    if more_of(interval, facts, computing=computing) == "executor":
        return f"{workers_instead(interval, 'so that it runs in parallel with training')}; or {FASTER}"
    if computing:
        change += process_instead(interval, "; if the loop computes in Python, prefetch.executor: process")
    return change


def workers_instead(interval: Interval, how: str) -> str:
    """The change where the loop's own thread makes the batches."""
    if interval.is_inline_by_rule:
        return f"larger batches, or prefetch.concurrency: {interval.num_cpus}, {how}"
    return f"prefetch.executor: {interval.stats.tuning.executor_with_workers}, {how}"


def _no_workers(interval: Interval, facts: StageFacts) -> str:
    if interval.stats.full_turn is not None:
        return f"{FASTER}: more workers would not help while one thread iterates in {interval.stats.full_turn} all the time"
    if facts.pool.is_in_trainer or facts.stage.kind == "transfer":
        return "not more workers: one thread in the trainer's process runs it"
    return f"what {facts.stage.name} waits for should answer more at a time: more workers would hardly help"


def more_workers(interval: Interval, facts: StageFacts, *, computing: bool = False) -> str:
    """The change for a stage that more workers make faster."""
    if more_of(interval, facts, computing=computing) is None:
        return _no_workers(interval, facts)
    wanted = interval.suggested_workers(facts.stage.workers, computing=computing)
    more = f'more workers: loader.resize("{facts.stage.name}", workers={wanted})'
    batches = interval.batches_for(wanted)
    return f"{more} and prefetch.batches: {batches}, so that all have work" if batches else more


def more_processes(interval: Interval, facts: StageFacts) -> str:
    """More workers, each with a GIL of its own, since it is not known that more threads would do."""
    change = process_instead(
        interval,
        "prefetch.executor: process with a process for every CPU, by prefetch.processes",
        f"{several_processes(interval)}, while CPUs are free",
    )
    return f"{change}, each with a GIL of its own (more threads help only if {facts.stage.name} releases the GIL)"


def more_cpus(interval: Interval) -> str:
    """Where more CPUs could come from."""
    if interval.stats.host.quota_cpus is not None or interval.throttled_share > HARMLESS:
        return "a larger CPU quota"
    others = interval.others_cpus or 0.0
    return f"the {others:.1f} CPUs that other programs take" if _has_greedy_others(interval) else "more CPUs"


def _has_greedy_others(interval: Interval) -> bool:
    """True if other programs have CPUs that are short here, and no quota is the reason."""
    has_quota = interval.stats.host.quota_cpus is not None or interval.throttled_share > HARMLESS
    return not has_quota and (interval.others_cpus or 0.0) > _OTHERS


def several_processes(interval: Interval) -> str:
    """More processes than there are."""
    more = f"{interval.num_processes + 1} or more"
    is_auto = "processes" in (interval.stats.tuning.auto or ())
    return (
        f"prefetch.max_processes: {more}, which processes: auto comes to" if is_auto else f"prefetch.processes: {more}"
    )


def process_instead(interval: Interval, change: str, otherwise: str = "") -> str:
    """`change`, which sets `prefetch.executor: process`; `otherwise` where it is set."""
    return otherwise if interval.stats.tuning.is_remote else change


def more_memory(interval: Interval) -> str:
    wanted = interval.memory_wanted
    if not interval.has_memory_for(wanted):
        return _SMALLER
    return f"prefetch.memory: {format_bytes(wanted)} or more; or smaller batches"


def deeper(interval: Interval) -> str:
    """More batches ahead, as far as memory holds them."""
    batches, wanted = f"prefetch.batches: {2 * interval.num_wanted}", interval.memory_to_double
    if not wanted:
        return batches
    return f"{batches} and prefetch.memory: {format_bytes(wanted)}" if interval.has_memory_for(wanted) else _SMALLER


def wider(interval: Interval, facts: StageFacts) -> str:
    """More batches ahead and more workers, where times vary."""
    if more_of(interval, facts) != "workers":
        return deeper(interval)
    workers = f'loader.resize("{facts.stage.name}", workers={2 * facts.stage.workers})'
    return f"{deeper(interval)}; and more workers: {workers}"
