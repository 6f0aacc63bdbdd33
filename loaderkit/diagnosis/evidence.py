"""The evidence in words: what the loop waited for, and what the machine could not give."""

from __future__ import annotations

from loaderkit._internal.units import say_bytes, say_seconds
from loaderkit.diagnosis.interval import HARMLESS, Interval
from loaderkit.diagnosis.stage_facts import StageFacts
from loaderkit.engine.metrics.stalls import START

_OTHERS = 0.2  # CPUs; other programs that use more are named
_DISK = 0.5  # share of the bytes read from the page cache; less is worth telling


def waited(interval: Interval, cause: str | None = None) -> str:
    """How long the loop waited in all, and for one cause: the head of every verdict's evidence."""
    stats = interval.stats
    text = f"the loop waited {interval.percent(interval.waited_s):.1f} % of {say_seconds(stats.wall_s)}"
    if cause is None or interval.stall_s[cause] >= interval.waited_s:
        return text
    return f"{text}, {interval.percent(interval.stall_s[cause]):.1f} % for {cause}"


def after_start(interval: Interval) -> str:
    """The waiting after the start, and what it was for."""
    stall_s = {cause: seconds for cause, seconds in interval.stall_s.items() if cause != START}
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
    """How much CPU a quota leaves, and for how long it held threads back."""
    host = interval.stats.host
    left = "" if host.quota_cpus is None else f" leaves this program {host.quota_cpus:.3g} CPUs"
    held = f" held its threads back for {say_seconds(host.throttled_s)}" if host.throttled_s else ""
    return f"a CPU quota{' and'.join(part for part in (left, held) if part)}"


def host_facts(interval: Interval, facts: StageFacts) -> list[str]:
    """What the machine cannot give: CPUs, memory, cached files."""
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
    """The throughput of one worker alone beside the throughput of several."""
    num_compared = round(facts.num_compared)
    others = f"{num_compared} of {facts.num_in_process} at a time"
    if num_compared == facts.num_in_process:
        others = f"all {facts.num_in_process}"
    evidence = f"one worker alone reached {100 * (facts.alone_share or 0.0):.0f} % of the throughput of {others}"
    if facts.slowdown is not None:
        evidence += f", and {facts.stage.name} takes {facts.slowdown:.1f} times as long side by side"
    if (tuned := facts.tuned) is not None:
        evidence += (
            f"; with {tuned.after} workers instead of {tuned.before} the tuner found {tuned.gain:+.0%} samples/s"
        )
    return evidence


def say_memory(interval: Interval) -> str:
    """How many batches the budget holds, and how many are to be read ahead."""
    budget_bytes, batch_bytes = interval.stats.memory["budget_bytes"], interval.stats.memory.get("batch_bytes", 0)
    return (
        f"prefetch.memory ({say_bytes(budget_bytes)}) holds {interval.num_in_memory} of the {interval.num_wanted} "
        f"batches to read ahead, {say_bytes(batch_bytes)} each"
    )


def more_cpus(interval: Interval) -> str:
    """Where more CPUs could come from."""
    if interval.stats.host.quota_cpus is not None or interval.throttled_share > HARMLESS:
        return "a larger CPU quota"
    others = interval.others_cpus or 0.0
    return f"the {others:.1f} CPUs that other programs take" if would_take_from_others(interval) else "more CPUs"


def would_take_from_others(interval: Interval) -> bool:
    """True if CPUs are short because other programs use them, and not because of a quota."""
    has_quota = interval.stats.host.quota_cpus is not None or interval.throttled_share > HARMLESS
    return not has_quota and (interval.others_cpus or 0.0) > _OTHERS
