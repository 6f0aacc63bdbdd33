"""The verdict on a watched loop: what limits it, how sure that is, and which argument of its DataLoader to change.

    the loop hardly waited ──> training is the limit
    else ──> what it waited for longest:
        start, epoch change ──> once, or with every epoch
        release ──> giving back the memory of batches
        handover, pin_memory ──> taking batches over, in the loop's own process
        dataset and collate without workers ──> computing or waiting, in the loop's own thread
        dataset with workers:
            their libraries compute in threads of their own, and CPUs are short ──> oversubscription
            they have nothing to do, and the loop waits ──> stragglers (most of them while one is waited for), depth
            on a CPU, or ready to run ──> computing
            else ──> waiting
        iterable ──> computing in the loop's own thread, or waiting, of which nothing more is known
    the same rules on what it waited for besides; what is nearly as long is named, too, with the change for each

None of the workers is slowed down to find out: so latency, bandwidth and locks are all `waiting`. Where lines are sampled, the
one that costs most is named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from loaderkit._internal.units import say_seconds, say_size
from loaderkit.diagnosis import causes
from loaderkit.diagnosis.evidence import after_start, more_cpus, quota, waited
from loaderkit.diagnosis.interval import HARMLESS, SPARE, WAITING, Interval
from loaderkit.diagnosis.make_verdict import BUSY
from loaderkit.diagnosis.stage_facts import COMPUTING
from loaderkit.diagnosis.verdict import Remedy, Verdict
from loaderkit.diagnosis.watched.counters import (
    COLLATE,
    DATASET,
    HANDOVER,
    ITERABLE,
    PIN_MEMORY,
    WatchedSnapshot,
)
from loaderkit.diagnosis.watched.facts import (
    SMALL_BYTES,
    BatchSize,
    WatchedFacts,
    bursts,
    is_in_kernel,
    no_cpu,
    seen_in_proc,
)
from loaderkit.engine.metrics.stalls import EPOCH, RELEASE, START, WAKEUP

_ONE_BY_ONE = 0.6  # share of the workers that work while the loop waits; with fewer most wait for one
_THREADS = 1.3  # CPUs that a worker uses; more is threads of libraries

_HINTS: Mapping[str, str] = {
    "datasets": 'give it to a DataLoader: DataLoader(dataset.with_format("torch"), batch_size=..., num_workers=2)',
    "nvidia": "more num_threads, or a larger prefetch_queue_depth, in the pipeline that DALI runs",
}
"""By the package of what is watched."""


def diagnose_watched(stats: WatchedSnapshot) -> Verdict:
    """The verdict, and its change as arguments of the DataLoader; in about 0.1 ms."""
    if stats.wall_s <= 0 or not (stats.num_batches or any(stats.waits_s.values())):
        evidence = "no batch was requested in this interval"
        return Verdict(None, 0.0, 0.0, evidence, "iterate over what `watch` has returned", "unknown")
    interval = Interval.of(stats)
    if interval.cause is None or interval.share < HARMLESS:
        return _training(interval, stats)
    return causes.verdict_of(causes.ranked(interval), lambda cause: _of_cause(WatchedFacts(interval, stats, cause)))


def _of_cause(facts: WatchedFacts) -> Verdict:
    return _RULES.get(facts.cause, _iterable)(facts)


# ---------------------------------------------------------------------------------------------------------- the rules


def _training(interval: Interval, stats: WatchedSnapshot) -> Verdict:
    evidence, change = waited(interval), "nothing in loading: make the training step faster"
    arguments = stats.arguments
    if arguments is not None and arguments.num_workers and stats.watched.slot_s > 0:
        use = stats.watched.worker_use
        evidence += f"; the workers had batches to make for {100 * use:.0f} % of their time"
        if use < SPARE / 2 and arguments.num_workers > 1:
            change += "; fewer num_workers would do, if you need the CPUs or the memory"
    sure = interval.confidence(1.0 if interval.share < HARMLESS / 2 else 0.9)
    return Verdict(None, round(100.0 - interval.percent(interval.waited_s), 1), sure, evidence, change, "training")


def _start(facts: WatchedFacts) -> Verdict:
    change = "a longer run tells more: this comes once"
    if facts.arguments.num_workers:
        change += "; workers begin while the model is built if iter() is called before that"
    return facts.verdict("start", [after_start(facts.interval)], Remedy(change))


def _epoch_change(facts: WatchedFacts) -> Verdict:
    watched, arguments = facts.watched, facts.arguments
    num, total_s = max(1, watched.num_epochs), facts.interval.stats.stall_s[EPOCH]
    evidence = [
        f"{say_seconds(total_s / num)} an epoch: {say_seconds(watched.stop_s / num)} to end it, "
        f"{say_seconds(watched.open_s / num)} to begin the next one, and the rest until that gave a batch"
    ]
    if not arguments.num_workers:
        return facts.verdict(
            "start", evidence, Remedy("longer epochs, or an iterable that is faster to begin"), sure=0.8
        )
    longer = (
        "longer epochs (a sampler that goes over the data several times), as a DataLoader reads nothing ahead of one"
    )
    if not arguments.persistent_workers:
        evidence.append(f"its {arguments.num_workers} workers are ended and started again each time")
        change = facts.set("persistent_workers", True, False).then(f"; or {longer}")
        return facts.verdict("start", evidence, change)
    return facts.verdict("start", [*evidence, "its workers stay"], Remedy(longer), sure=0.9)


_FEWER_BYTES = "fewer bytes: uint8 until they are on the GPU, fewer fields"


def _release(facts: WatchedFacts) -> Verdict:
    batch = BatchSize(facts.watched)
    seconds = facts.interval.stats.stall_s[RELEASE]
    evidence = [
        f"{facts.per_batch(seconds)} to drop a batch of {say_size(batch.size)}: its memory goes back to the system"
    ]
    change = f"{_FEWER_BYTES}; or smaller batches"
    if not facts.arguments.num_workers:
        change += "; or THP_MEM_ALLOC_ENABLE=1 in the environment: torch then gives memory back faster"
    return facts.verdict("memory", evidence, Remedy(change), sure=0.95)


def _handover(facts: WatchedFacts) -> Verdict:
    watched, batch = facts.watched, BatchSize(facts.watched)
    evidence = [
        f"the loop's own process takes {facts.per_batch(facts.interval.stats.stall_s[HANDOVER])} to take over a batch of "
        f"{say_size(batch.size)} in {batch.num_tensors:.0f} tensors from a worker, {100 * facts.on_cpu:.0f} % of that on a CPU",
        f"the workers had batches to make for {100 * watched.worker_use:.0f} % of their time",
    ]
    change = _FEWER_BYTES
    if (moving := batch.moving()) is not None:
        evidence.append(moving[0])
        change = moving[1]
    elif batch.size < SMALL_BYTES:
        change = "larger batches: to hand one over takes this long, however little it holds"
    return facts.verdict("computing" if facts.on_cpu > COMPUTING else "waiting", evidence, Remedy(change), sure=0.85)


def _pin_memory(facts: WatchedFacts) -> Verdict:
    row, wall_s = facts.row, max(facts.interval.wall_s, 1e-9)
    share = row.cpu_s / wall_s
    evidence = [
        "workers had finished what they were asked for, and the thread that pins memory had not: it was on a CPU for "
        f"{100 * share:.0f} % of the time"
    ]
    if share < 0.5:
        evidence.append("it waits for the GIL or for the driver")
        change = "less Python in the loop, which holds the GIL while batches are to be pinned; or pin_memory=False"
        return facts.verdict("waiting", evidence, Remedy(change), sure=0.6)
    change = f"{_FEWER_BYTES}; or pin_memory=False, if copies need not overlap"
    return facts.verdict("computing", evidence, Remedy(change), sure=0.8)


def _wakeup(facts: WatchedFacts) -> Verdict:
    seconds = facts.interval.stats.stall_s[WAKEUP]
    evidence = [f"{facts.per_batch(seconds)} a batch: batches were there, and the loop's thread got no CPU"]
    if facts.interval.is_held_back:
        change = "a larger CPU quota; or fewer num_workers"
        return facts.verdict("quota", [*evidence, quota(facts.interval)], Remedy(change), sure=0.9)
    more = more_cpus(facts.interval)
    return facts.verdict(
        "wakeup", evidence, Remedy(f"{more}; or fewer num_workers, if they are what uses them"), sure=0.8
    )


def _inline(facts: WatchedFacts) -> Verdict:
    """Without workers the loop's own thread makes the batches."""
    row, what = facts.row, "collate_fn takes" if facts.cause == COLLATE else "the data set takes"
    computing = facts.needs_cpu > COMPUTING
    evidence = [
        "num_workers=0: the loop's own thread makes each batch",
        f"{what} {facts.per_batch(row.busy_s)} for one, {100 * facts.on_cpu:.0f} % of that on a CPU",
        facts.delayed(),
        facts.say_line(),
    ]
    change = facts.more_workers(computing=computing)
    if change is None:
        return facts.verdict(
            "computing", evidence, Remedy(f"{facts.cheaper()}; workers would not help: there is {no_cpu(facts)}")
        )
    change = change.then(": other processes make batches while the loop computes")
    if facts.line() is not None:
        change = change.then(f"; or {facts.cheaper()}")
    return facts.verdict("computing" if computing else "waiting", evidence, change, sure=0.95)


def _workers(facts: WatchedFacts) -> Verdict:
    watched, row, arguments, interval = facts.watched, facts.row, facts.arguments, facts.interval
    use, num = watched.worker_use, arguments.num_workers
    evidence = [
        f"{'its worker was' if num == 1 else f'its {num} workers were'} busy for {100 * use:.0f} % of "
        f"{'its' if num == 1 else 'their'} time, with {facts.per_batch(watched.busy_s)} for a batch",
        f"{100 * facts.on_cpu:.0f} % of that on a CPU",
    ]
    evidence += [facts.delayed(), facts.say_line(), bursts(facts), *seen_in_proc(facts)]
    if row.cpu_s > _THREADS * max(watched.busy_s, 1e-9) and interval.is_short_of_cpus:
        variables = "OMP_NUM_THREADS=1 in the environment (of OpenCV: cv2.setNumThreads(0) in worker_init_fn)"
        evidence.append(f"each uses {row.cpu_s / watched.busy_s:.1f} CPUs: libraries compute in threads of their own")
        return facts.verdict(
            "oversubscription", evidence, Remedy(f"{variables}, so that each worker computes in its own thread")
        )
    if watched.slot_s > 0 and (use < BUSY or (num > 1 and facts.use_in_waits < _ONE_BY_ONE)):
        return _idle(facts, evidence)
    if facts.needs_cpu > COMPUTING:
        cheaper = facts.cheaper()
        if (moving := BatchSize(watched).moving()) is not None:
            evidence.append(f"to pass a batch on is a part of that: {moving[0]}")
            cheaper = f"{moving[1]}; or {cheaper}"
        elif is_in_kernel(facts):
            cheaper = f"{_FEWER_BYTES}; or {cheaper}"
        change = facts.more_workers(computing=True)
        if change is None:
            return facts.verdict(
                "computing", evidence, Remedy(f"{cheaper}; more workers would not help: there is {no_cpu(facts)}")
            )
        return facts.verdict("computing", evidence, change.then(f"; or {cheaper}"), sure=0.95)
    evidence.insert(2, f"{100 * (1 - facts.needs_cpu):.0f} % waiting for something other than a CPU")
    change = facts.more_workers(computing=False)
    assert change is not None
    less = "fewer, larger reads, or a faster store" if facts.line() is None else facts.cheaper()
    change = change.then(f", which need no CPU while they wait; or {less}")
    return facts.verdict("waiting", evidence, change, sure=0.9 if facts.needs_cpu < WAITING else 0.6)


def _idle(facts: WatchedFacts, evidence: list[str]) -> Verdict:
    """Workers have nothing to do, as all batches that they may make ahead are made, and yet the loop waits at times."""
    arguments = facts.arguments
    ahead = arguments.prefetch_factor or 2
    change = facts.deeper(ahead)
    if facts.use_in_waits < _ONE_BY_ONE and arguments.num_workers > 1:
        evidence.append(
            f"while the loop waited, {100 * facts.use_in_waits:.0f} % of the workers worked: batches come in order, and one "
            "holds up the others"
        )
        if arguments.in_order:
            change = change.then(
                "; or in_order=False, if the order of batches does not matter; or find out why some samples are slow"
            )
        return facts.verdict("stragglers", evidence, change, sure=0.85)
    evidence.append(f"the others of their time {arguments.num_workers * ahead} batches ahead were made")
    return facts.verdict("depth", evidence, change, sure=0.7)


def _iterable(facts: WatchedFacts) -> Verdict:
    """Nothing is known but the loop's own thread."""
    evidence = [
        f"next() of {facts.stats.kind} takes {facts.per_batch(facts.row.busy_s)}, and for {100 * facts.on_cpu:.0f} % of that "
        "the loop's own thread is on a CPU",
        facts.delayed(),
        bursts(facts),
    ]
    hint = next((hint for package, hint in _HINTS.items() if facts.stats.kind.startswith(f"{package}.")), None)
    if facts.needs_cpu > COMPUTING:
        change = (
            hint
            or "make batches in other processes while the loop computes: a DataLoader with num_workers=2 around it, say"
        )
        return facts.verdict("computing", evidence, Remedy(change), sure=0.8)
    evidence.append("what it waits for cannot be seen from here")
    return facts.verdict(
        "waiting", evidence, Remedy(hint or "find out what it waits for; read ahead of the loop"), sure=0.4
    )


_RULES: Mapping[str, Callable[[WatchedFacts], Verdict]] = {
    START: _start,
    EPOCH: _epoch_change,
    HANDOVER: _handover,
    PIN_MEMORY: _pin_memory,
    RELEASE: _release,
    WAKEUP: _wakeup,
    COLLATE: _inline,
    DATASET: lambda facts: (_workers if facts.arguments.num_workers else _inline)(facts),
    ITERABLE: _iterable,
}
