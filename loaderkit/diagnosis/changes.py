"""What to change: settings of the running loader, and the words for them. A change that would not help, or has no
memory, is left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from loaderkit._internal.system.cgroups import num_cpus_of_rank
from loaderkit._internal.units import format_bytes
from loaderkit.diagnosis.evidence import more_cpus, would_take_from_others
from loaderkit.diagnosis.interval import Interval, has_memory_for
from loaderkit.diagnosis.stage_facts import COMPUTING, StageFacts, more_of
from loaderkit.diagnosis.verdict import Remedy, Setting, say

FASTER = "a faster iterable, or its data in files, which workers read side by side"
FULL_LINK = "a faster store or a local copy, or smaller (compressed) samples; more workers would not help"
_SMALLER = "smaller batches: this machine has no memory for more of them"
_MOST_PROCESSES = 8  # each imports all that the functions need, and several ranks may share the machine
_CHEAPER: Mapping[str, str] = {
    "decode": "cheaper images: stored at the size they are used at, or decode: {scaled: true} where they are shrunk",
    "decode media": "cheaper videos and sounds: fewer `frames` or `seconds` of each, or files stored at the size, or rate, and "
    "the length they are used at",
    "batch": "less to copy: uint8 instead of float, one shape instead of padding, fewer fields",
    "call": "a cheaper function, or do its work once in advance",
    "filter": "a cheaper function, or leave such samples out of the source",
    "normalize": "`normalize` on the GPU, after `transfer`",
}

_OTHERWISE: Mapping[str, str] = {
    "gil": "do the work in NumPy or torch, which release the GIL",
    "depth": "find out why some items are slow",
    "memory": "smaller batches",
    "latency": "fewer, larger requests, or what answers sooner",
    "wakeup": "larger batches",
}


def otherwise(kind: str, stage_kind: str) -> str:
    """What to do, in words, if the settings for that kind of limit were tried and are not faster."""
    if kind == "stragglers":
        return slow_ones(stage_kind, computes=False)
    if kind in _OTHERWISE:
        return _OTHERWISE[kind]
    return _CHEAPER.get(stage_kind, "less work for each sample")


class Work(Protocol):
    """A stage, to what is said of it."""

    @property
    def kind(self) -> str: ...

    @property
    def content(self) -> str: ...


def work_of(stage: Work) -> str:
    """A stage's kind, with what it acts on where that makes another advice."""
    return f"{stage.kind} {stage.content}".strip()


def unlocked(stage: str) -> str:
    """What to do, in words, where the workers of a stage wait for one another."""
    return (
        f"give every worker its own connection, file or model instead of one that {stage} locks, or hold the lock for a "
        "shorter time; of a server, one that answers more at a time; more workers would not help"
    )


def in_a_process(interval: Interval, how: str = "") -> Setting:
    """The change to loading in another process, which has a GIL of its own."""
    return Setting(key="prefetch.executor", before=interval.stats.tuning.executor, value="process", why=how)


def num_processes(memory_bytes: int, batch_bytes: int) -> int:
    """The number of loading processes: one a CPU of this rank while the memory holds two batches for each; at least two."""
    fitting = memory_bytes // (2 * batch_bytes) if batch_bytes else _MOST_PROCESSES
    return max(2, min(num_cpus_of_rank(), fitting, _MOST_PROCESSES))


def several_processes(interval: Interval) -> tuple[Setting, ...]:
    """Several loading processes, each with a GIL of its own; empty if there are as many already, or if the memory does
    not hold two batches for each."""
    tuning, memory = interval.stats.tuning, interval.stats.memory
    batch_bytes, num = int(memory.get("batch_bytes", 0)), interval.num_processes
    processes = num_processes(memory["budget_bytes"], batch_bytes)
    is_enough = tuning.executor == "process" and ("processes" in (tuning.auto or ()) or num >= processes)
    if tuning.executor == "ray" or is_enough or 2 * processes * batch_bytes > memory["budget_bytes"]:
        return ()
    more = Setting(key="prefetch.processes", before=num, value=processes)
    return (more,) if tuning.is_remote else (in_a_process(interval), more)


def own_gil(interval: Interval, facts: StageFacts, change: str, otherwise: str) -> Remedy:
    """One process if the loop holds the GIL, else several, with `change` as the words; `otherwise` if other processes
    load already."""
    text = otherwise if interval.stats.tuning.is_remote else change
    if facts.loop_holds_gil:
        return Remedy(text, (in_a_process(interval),))
    return Remedy(text, several_processes(interval), is_exact=False)


def say_more_processes(interval: Interval) -> str:
    """More processes than there are, in words."""
    more = f"{interval.num_processes + 1} or more"
    is_auto = "processes" in (interval.stats.tuning.auto or ())
    return (
        f"prefetch.max_processes: {more}, which processes: auto comes to" if is_auto else f"prefetch.processes: {more}"
    )


def workers_instead(interval: Interval, how: str, *, helps: bool = True) -> Remedy:
    """For a loop whose own thread makes the batches: another executor, or the workers that a rule left out."""
    tuning = interval.stats.tuning
    if interval.is_inline_by_rule:
        setting = Setting(key="prefetch.concurrency", value=interval.num_cpus, why=how)
        text = f"larger batches, or {setting}, {how}"
    else:
        setting = Setting(key="prefetch.executor", before=tuning.executor, value=tuning.executor_with_workers, why=how)
        text = f"{setting}, {how}"
    return Remedy(text, (setting,) if helps else ())


def _of_workers(facts: StageFacts, workers: int) -> tuple[str, Setting]:
    """This number of workers for a stage, in words and as a setting."""
    stage = facts.stage
    setting = Setting(key=f"stages.{stage.name}.workers", before=stage.workers, value=workers)
    return f'more workers: loader.resize("{stage.name}", workers={workers})', setting


def more_workers(interval: Interval, facts: StageFacts, *, computing: bool = False) -> Remedy:
    """The change for a stage that more workers make faster."""
    if more_of(interval, facts, computing=computing) is None:
        return Remedy(_no_workers(interval, facts))
    wanted = interval.suggested_workers(facts.stage.workers, computing=computing)
    text, workers = _of_workers(facts, wanted)
    if not (num := interval.batches_for(wanted)):
        return Remedy(text, (workers,))
    batches = Setting(key="prefetch.batches", before=interval.num_wanted, value=num, why="so that all have work")
    return Remedy(f"{text} and {batches}, {batches.why}", (batches, workers))


def _no_workers(interval: Interval, facts: StageFacts) -> str:
    if interval.stats.full_turn is not None:
        return f"{FASTER}: more workers would not help while one thread iterates in {interval.stats.full_turn} all the time"
    if facts.pool.is_in_trainer or facts.stage.kind == "transfer":
        return "not more workers: one thread in the trainer's process runs it"
    return f"what {facts.stage.name} waits for should answer more at a time: more workers would hardly help"


def less_work(interval: Interval, facts: StageFacts) -> Remedy:
    """The change for a stage that computes."""
    cheaper = _CHEAPER.get(work_of(facts.stage), f"a cheaper {facts.stage.name}")
    match more_of(interval, facts, computing=True):
        case "executor":
            more = workers_instead(interval, "so that it runs in parallel with training")
        case "workers":
            more = more_workers(interval, facts, computing=True)
        case "processes":
            more = _more_processes(interval, facts)
        case None:
            return Remedy(f"{cheaper}; {_why_not_more(interval, facts)}")
    return more.then(f"; or {cheaper}")


def _more_processes(interval: Interval, facts: StageFacts) -> Remedy:
    """More workers, each with a GIL of its own, since it is not known whether more threads would be enough."""
    change = own_gil(
        interval,
        facts,
        "prefetch.executor: process with a process for every CPU, by prefetch.processes",
        f"{say_more_processes(interval)}, while CPUs are free",
    )
    return change.then(f", each with a GIL of its own (more threads help only if {facts.stage.name} releases the GIL)")


def _why_not_more(interval: Interval, facts: StageFacts) -> str:
    """Why no more can be computed at a time."""
    if interval.is_inline:
        return "or larger batches"
    if interval.is_short_of_cpus:
        gain = "would not help, since no CPU is free"
        if would_take_from_others(interval):  # the kernel shares CPUs among threads
            gain = "would only take CPUs from those programs"
        return f"or {more_cpus(interval)}: more workers {gain}"
    if facts.pool.works_one_at_a_time:
        return "more workers would not help: one worker alone was faster"
    return _no_workers(interval, facts)


def faster_iterable(interval: Interval, facts: StageFacts, *, computing: bool) -> Remedy:
    """The change for an iterable, which one thread at a time iterates over."""
    if more_of(interval, facts, computing=computing) == "executor":
        return workers_instead(interval, "so that it runs in parallel with training").then(f"; or {FASTER}")
    change = f"{FASTER}; more processes would not help, as each iterates over all of it"
    if interval.stats.full_turn is not None:
        change = f"{FASTER}; more workers would not help, nor more processes, as each iterates over all of it"
    if computing and not interval.stats.tuning.is_remote:
        change += f"; if the loop computes in Python, {in_a_process(interval)}"
    return Remedy(change)


def more_memory(interval: Interval) -> Remedy:
    """A budget of memory for all batches that are to be read ahead."""
    memory = _of_memory(interval, interval.memory_wanted)
    return Remedy(_SMALLER) if memory is None else Remedy(f"{memory} or more; or smaller batches", (memory,))


def deeper(interval: Interval) -> Remedy:
    """More batches ahead, as far as memory holds them."""
    batches = Setting(key="prefetch.batches", before=interval.num_wanted, value=2 * interval.num_wanted)
    if not (wanted := interval.memory_to_double):
        return Remedy(str(batches), (batches,))
    memory = _of_memory(interval, wanted)
    return Remedy(_SMALLER) if memory is None else Remedy(say((batches, memory), " and "), (batches, memory))


def _of_memory(interval: Interval, wanted: int) -> Setting | None:
    """A budget of `wanted` bytes; None if the machine has no memory for it."""
    if not has_memory_for(interval.stats.memory, wanted):
        return None
    before = format_bytes(interval.stats.memory["budget_bytes"])
    return Setting(key="prefetch.memory", before=before, value=format_bytes(wanted))


def mended(interval: Interval, facts: StageFacts, *, is_alone: bool) -> Remedy:
    """The change if a few items take long: make others meanwhile, and make those few cheaper. `is_alone`: only one
    worker at a time can run in this process."""
    computes = facts.needs_cpu > COMPUTING
    otherwise = slow_ones(work_of(facts.stage), computes=computes)
    more = more_of(interval, facts, computing=computes)
    if interval.is_inline:
        return workers_instead(interval, "with several workers", helps=more is not None).then(f"; or {otherwise}")
    if is_alone:
        processes = own_gil(
            interval,
            facts,
            "prefetch.executor: process, with several by prefetch.processes, so that others go on meanwhile",
            say_more_processes(interval),
        )
        return processes.then(f"; or {otherwise}")
    change = deeper(interval)
    if more == "workers" and not computes:
        text, workers = _of_workers(facts, 2 * facts.stage.workers)
        change = Remedy(f"{change.text}; and {text}", (*change.settings, workers))
    return change.then(f", so that other batches are ready meanwhile; {'and' if computes else 'or'} {otherwise}")


def slow_ones(kind: str, *, computes: bool) -> str:
    """What to do about the slow items of a stage of that kind."""
    if not computes:
        return "find out why those items are slow"
    if kind == "decode":
        return "make large images smaller where they are stored, or, for JPEGs that are shrunk, decode: {scaled: true}"
    if kind == "decode media":
        return "cut long videos and sounds into shorter files, and store videos with more keyframes"
    return "make those items cheaper, or do their work once in advance"
