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

No worker can be asked, and none is slowed down to find out: so latency, bandwidth and locks are all `waiting`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil
from typing import Any

from loaderkit._internal.system.cgroups import free_memory
from loaderkit._internal.units import say_seconds, say_size
from loaderkit.engine.metrics import bottleneck_words as words
from loaderkit.engine.metrics.bottleneck_words import Verdict
from loaderkit.engine.metrics.interval import COMPUTING, HARMLESS, SPARE, WAITING, Interval
from loaderkit.engine.metrics.stalls import EPOCH, RELEASE, START, WAKEUP
from loaderkit.profile.report_parts import Setting
from loaderkit.profile.watched.counters import (
    COLLATE,
    DATASET,
    HANDOVER,
    ITERABLE,
    PIN_MEMORY,
    WatchedCounters,
    WatchedSnapshot,
)
from loaderkit.profile.watched.dataloader import LoaderArguments

_BUSY = 0.75  # share of their time; workers that are busy for more are the limit
_ONE_BY_ONE = 0.6  # share of the workers that work while the loop waits; with fewer most wait for one
_THREADS = 1.3  # CPUs that a worker uses; more is threads of libraries
_KERNEL = 0.4  # share of the CPU time in the kernel that is worth telling
_DISK = 0.25  # share of what was read that came from a disk, from which on that is told
_SHARED_FULL = 0.1  # share of the shared memory that is free, below which that is told
_MANY_TENSORS = 32
_NOTABLE = 0.1  # share of the time without a free CPU
_SMALL, _LARGE = 1e5, 1e6  # bytes of a batch: less takes no time to move; for more, new pages of memory take long
_OTHERS = 0.2  # CPUs; other programs that use more are named
_MOST_WORKERS = 16
_MOST_AHEAD = 64
_ARRAYS = 0.5  # share of a batch's bytes in NumPy's arrays

Change = tuple[str, list[Setting]]
Diagnosis = tuple[Verdict, list[Setting]]

_HINTS: Mapping[str, str] = {
    "datasets": 'give it to a DataLoader: DataLoader(dataset.with_format("torch"), batch_size=..., num_workers=2)',
    "nvidia": "more num_threads, or a larger prefetch_queue_depth, in the pipeline that DALI runs",
}
"""By the package of what is watched."""


def diagnose_watched(stats: WatchedSnapshot) -> Diagnosis:
    """The verdict, and its change as arguments of the DataLoader; in about 0.1 ms."""
    if stats.wall_s <= 0 or not (stats.num_batches or any(stats.waits_s.values())):
        evidence = "no batch was requested in this interval"
        return Verdict(None, 0.0, 0.0, evidence, "iterate over what `watch` has returned", "unknown"), []
    interval = Interval.of(stats)
    cause = interval.cause
    if cause is None or interval.share < HARMLESS:
        return _training(interval, stats), []
    return _RULES.get(cause, _iterable)(_Facts(interval, stats, cause))


class _Facts:
    """An interval, and the row of what the loop waited for longest."""

    def __init__(self, interval: Interval, stats: WatchedSnapshot, cause: str) -> None:
        self.interval, self.stats, self.cause = interval, stats, cause
        self.watched: WatchedCounters = stats.watched
        self.arguments = stats.arguments or LoaderArguments(0)
        self.row = next((row for row in stats.stages if row.name == cause), stats.stages[0])

    @property
    def needs_cpu(self) -> float:
        """The share of the time in it on a CPU, or ready to run while none was free."""
        return min(1.0, (self.row.cpu_s + self.row.delayed_s) / max(self.row.busy_s, 1e-9))

    @property
    def on_cpu(self) -> float:
        return min(1.0, self.row.cpu_s / max(self.row.busy_s, 1e-9))

    @property
    def use_in_waits(self) -> float:
        """The share of the workers that worked while the loop waited."""
        watched = self.watched
        return watched.wait_busy_s / watched.wait_slot_s if watched.wait_slot_s else 1.0

    def per_batch(self, seconds: float) -> str:
        return say_seconds(seconds / max(1, self.stats.num_batches))

    def delayed(self) -> str:
        """How much of the time it was ready to run while no CPU was free, if that was much."""
        share = min(1.0, self.row.delayed_s / max(self.row.busy_s, 1e-9))
        return f"{100 * share:.0f} % ready to run while no CPU was free" if share > _NOTABLE else ""

    def verdict(
        self, kind: str, evidence: list[str], change: Change, *, sure: float = 1.0, cause: str | None = None
    ) -> Diagnosis:
        """The verdict of that kind. It is less sure where several causes share the waiting."""
        interval, cause = self.interval, cause or self.cause
        clear = 0.6 + 0.4 * interval.stats.stall_s[cause] / max(interval.waited_s, 1e-9)
        parts = [words.waited(interval, cause), *evidence, *_of_machine(interval, self.stats)]
        percent = interval.percent(interval.stats.stall_s[cause])
        text, settings = change
        return (
            Verdict(cause, percent, interval.confidence(clear, sure), "; ".join(filter(None, parts)), text, kind),
            settings,
        )

    # ------------------------------------------------------------------------------------------------- what to change

    def more_workers(self, *, computing: bool) -> Change | None:
        """`num_workers` that would be enough if throughput grew with them; None where there is no CPU for more."""
        interval, now = self.interval, self.arguments.num_workers
        share = min(0.95, interval.share_after_start)
        enough = ceil(max(now, 1) / (1 - share)) if now else ceil(share / (1 - share))
        most = min(4 * max(now, 2), max(_MOST_WORKERS, now + 4))
        if computing:
            if (now and interval.is_short_of_cpus) or (interval.num_cpus or 1) < 2:
                return None
            each = self.row.cpu_s / max(self.watched.busy_s, 1e-9) if now else 1.0
            free = interval.num_idle_cpus if now else interval.num_cpus
            most = min(most, now + max(1, round((free or 0.0) / max(each, 0.1))))
        return self.set("num_workers", max(now + 1, min(most, enough)), now)

    def deeper(self, ahead: int) -> Change:
        """`prefetch_factor` for as many batches as the loop takes while a late one is waited for, where memory has room."""
        watched, interval = self.watched, self.interval
        late_s = watched.late_s / max(1, sum(watched.gaps.values()))
        step_s = (interval.stats.wall_s - interval.waited_s) / max(1, self.stats.num_batches)
        wanted = ahead + ceil(late_s / max(step_s * self.arguments.num_workers, 1e-6))
        wanted = max(2 * ahead, min(_MOST_AHEAD, wanted))
        more_bytes = (wanted - ahead) * self.arguments.num_workers * _Batch(watched).size
        free_bytes, _ = free_memory()
        if free_bytes is not None and more_bytes > free_bytes / 4:
            return "smaller batches, and a larger prefetch_factor: this machine has no memory for more of these", []
        text, settings = self.set("prefetch_factor", wanted, ahead)
        return f"{text}, so that more batches are ready when one is late", settings

    @staticmethod
    def set(name: str, value: Any, before: Any) -> Change:
        """An argument of the DataLoader."""
        return f"{name}={value}", [Setting(key=name, before=before, value=value)]


# ---------------------------------------------------------------------------------------------------------- the rules


def _training(interval: Interval, stats: WatchedSnapshot) -> Verdict:
    evidence, change = words.waited(interval), "nothing in loading: make the training step faster"
    arguments = stats.arguments
    if arguments is not None and arguments.num_workers and stats.watched.slot_s > 0:
        use = stats.watched.worker_use
        evidence += f"; the workers had batches to make for {100 * use:.0f} % of their time"
        if use < SPARE / 2 and arguments.num_workers > 1:
            change += "; fewer num_workers would do, if you need the CPUs or the memory"
    sure = interval.confidence(1.0 if interval.share < HARMLESS / 2 else 0.9)
    return Verdict(None, round(100.0 - interval.percent(interval.waited_s), 1), sure, evidence, change, "training")


def _start(facts: _Facts) -> Diagnosis:
    change = "a longer run tells more: this comes once"
    if facts.arguments.num_workers:
        change += "; workers begin while the model is built if iter() is called before that"
    return facts.verdict("start", [words.after_start(facts.interval)], (change, []))


def _epoch_change(facts: _Facts) -> Diagnosis:
    watched, arguments = facts.watched, facts.arguments
    num, total_s = max(1, watched.num_epochs), facts.interval.stats.stall_s[EPOCH]
    evidence = [
        f"{say_seconds(total_s / num)} an epoch: {say_seconds(watched.stop_s / num)} to end it, "
        f"{say_seconds(watched.open_s / num)} to begin the next one, and the rest until that gave a batch"
    ]
    if not arguments.num_workers:
        return facts.verdict("start", evidence, ("longer epochs, or an iterable that is faster to begin", []), sure=0.8)
    longer = (
        "longer epochs (a sampler that goes over the data several times), as a DataLoader reads nothing ahead of one"
    )
    if not arguments.persistent_workers:
        evidence.append(f"its {arguments.num_workers} workers are ended and started again each time")
        text, settings = facts.set("persistent_workers", True, False)
        return facts.verdict("start", evidence, (f"{text}; or {longer}", settings))
    return facts.verdict("start", [*evidence, "its workers stay"], (longer, []), sure=0.9)


class _Batch:
    """What is in a batch, in the mean."""

    def __init__(self, watched: WatchedCounters) -> None:
        num = max(1, watched.num_measured)
        self.size, self.num_tensors = watched.measured_bytes / num, watched.measured_tensors / num
        self.array_share = watched.measured_array_bytes / max(1, watched.measured_bytes)

    def moving(self) -> tuple[str, str] | None:
        """What makes it costly to pass from one process to another, and what to change; None: nothing but its bytes."""
        if self.array_share > _ARRAYS and self.size > _SMALL:
            return (
                f"{100 * self.array_share:.0f} % of its bytes are NumPy arrays, which are pickled and sent through a pipe",
                "tensors instead of arrays, by torch.from_numpy in the data set or collate_fn: they come in shared memory",
            )
        if self.num_tensors > _MANY_TENSORS:
            return (
                f"it is {self.num_tensors:.0f} tensors, each of which comes as a file of its own",
                "fewer tensors in a batch: let collate_fn stack or concatenate them",
            )
        return None


_FEWER_BYTES = "fewer bytes: uint8 until they are on the GPU, fewer fields"


def _release(facts: _Facts) -> Diagnosis:
    batch = _Batch(facts.watched)
    seconds = facts.interval.stats.stall_s[RELEASE]
    evidence = [
        f"{facts.per_batch(seconds)} to drop a batch of {say_size(batch.size)}: its memory goes back to the system"
    ]
    change = f"{_FEWER_BYTES}; or smaller batches"
    if not facts.arguments.num_workers:
        change += "; or THP_MEM_ALLOC_ENABLE=1 in the environment: torch then gives memory back faster"
    return facts.verdict("memory", evidence, (change, []), sure=0.95)


def _handover(facts: _Facts) -> Diagnosis:
    watched, batch = facts.watched, _Batch(facts.watched)
    evidence = [
        f"the loop's own process takes {facts.per_batch(facts.interval.stats.stall_s[HANDOVER])} to take over a batch of "
        f"{say_size(batch.size)} in {batch.num_tensors:.0f} tensors from a worker, {100 * facts.on_cpu:.0f} % of that on a CPU",
        f"the workers had batches to make for {100 * watched.worker_use:.0f} % of their time",
    ]
    change = _FEWER_BYTES
    if (moving := batch.moving()) is not None:
        evidence.append(moving[0])
        change = moving[1]
    elif batch.size < _SMALL:
        change = "larger batches: to hand one over takes this long, however little it holds"
    return facts.verdict("computing" if facts.on_cpu > COMPUTING else "waiting", evidence, (change, []), sure=0.85)


def _pin_memory(facts: _Facts) -> Diagnosis:
    row, wall_s = facts.row, max(facts.interval.wall_s, 1e-9)
    share = row.cpu_s / wall_s
    evidence = [
        "workers had finished what they were asked for, and the thread that pins memory had not: it was on a CPU for "
        f"{100 * share:.0f} % of the time"
    ]
    if share < 0.5:
        evidence.append("it waits for the GIL or for the driver")
        change = "less Python in the loop, which holds the GIL while batches are to be pinned; or pin_memory=False"
        return facts.verdict("gil" if share < WAITING else "waiting", evidence, (change, []), sure=0.6)
    change = f"{_FEWER_BYTES}; or pin_memory=False, if copies need not overlap"
    return facts.verdict("computing", evidence, (change, []), sure=0.8)


def _wakeup(facts: _Facts) -> Diagnosis:
    seconds = facts.interval.stats.stall_s[WAKEUP]
    evidence = [f"{facts.per_batch(seconds)} a batch: batches were there, and the loop's thread got no CPU"]
    if facts.interval.is_held_back:
        change = "a larger CPU quota; or fewer num_workers"
        return facts.verdict("quota", [*evidence, words.quota(facts.interval)], (change, []), sure=0.9)
    more = words.more_cpus(facts.interval)
    return facts.verdict(
        "wakeup", evidence, (f"{more}; or fewer num_workers, if they are what uses them", []), sure=0.8
    )


def _inline(facts: _Facts) -> Diagnosis:
    """Without workers the loop's own thread makes the batches."""
    row, what = facts.row, "collate_fn takes" if facts.cause == COLLATE else "the data set takes"
    computing = facts.needs_cpu > COMPUTING
    evidence = [
        "num_workers=0: the loop's own thread makes each batch",
        f"{what} {facts.per_batch(row.busy_s)} for one, {100 * facts.on_cpu:.0f} % of that on a CPU",
        facts.delayed(),
    ]
    change = facts.more_workers(computing=computing)
    if change is None:
        return facts.verdict("computing", evidence, (f"less work for each sample: there is {_no_cpu(facts)}", []))
    text, settings = change
    text += ": other processes make batches while the loop computes"
    return facts.verdict("computing" if computing else "waiting", evidence, (text, settings), sure=0.95)


def _workers(facts: _Facts) -> Diagnosis:
    watched, row, arguments, interval = facts.watched, facts.row, facts.arguments, facts.interval
    use, num = watched.worker_use, arguments.num_workers
    evidence = [
        f"{'its worker was' if num == 1 else f'its {num} workers were'} busy for {100 * use:.0f} % of "
        f"{'its' if num == 1 else 'their'} time, with {facts.per_batch(watched.busy_s)} for a batch",
        f"{100 * facts.on_cpu:.0f} % of that on a CPU",
    ]
    evidence += [facts.delayed(), _bursts(facts), *_seen_in_proc(facts)]
    if row.cpu_s > _THREADS * max(watched.busy_s, 1e-9) and interval.is_short_of_cpus:
        variables = "OMP_NUM_THREADS=1 in the environment (of OpenCV: cv2.setNumThreads(0) in worker_init_fn)"
        evidence.append(f"each uses {row.cpu_s / watched.busy_s:.1f} CPUs: libraries compute in threads of their own")
        return facts.verdict(
            "oversubscription", evidence, (f"{variables}, so that each worker computes in its own thread", [])
        )
    if watched.slot_s > 0 and (use < _BUSY or (num > 1 and facts.use_in_waits < _ONE_BY_ONE)):
        return _idle(facts, evidence)
    if facts.needs_cpu > COMPUTING:
        cheaper = "less work for each sample (smaller images, a faster decoder, work done once in advance)"
        if (moving := _Batch(watched).moving()) is not None:
            evidence.append(f"to pass a batch on is a part of that: {moving[0]}")
            cheaper = f"{moving[1]}; or {cheaper}"
        elif _is_in_kernel(facts):
            cheaper = f"{_FEWER_BYTES}; or {cheaper}"
        change = facts.more_workers(computing=True)
        if change is None:
            return facts.verdict(
                "computing", evidence, (f"{cheaper}; more workers would not help: there is {_no_cpu(facts)}", [])
            )
        return facts.verdict("computing", evidence, (f"{change[0]}; or {cheaper}", change[1]), sure=0.95)
    evidence.insert(2, f"{100 * (1 - facts.needs_cpu):.0f} % waiting for something other than a CPU")
    change = facts.more_workers(computing=False)
    assert change is not None
    text, settings = change
    text += ", which need no CPU while they wait; or fewer, larger reads, or a faster store"
    return facts.verdict("waiting", evidence, (text, settings), sure=0.9 if facts.needs_cpu < WAITING else 0.6)


def _idle(facts: _Facts, evidence: list[str]) -> Diagnosis:
    """Workers have nothing to do, as all batches that they may make ahead are made, and yet the loop waits at times."""
    arguments = facts.arguments
    ahead = arguments.prefetch_factor or 2
    text, settings = facts.deeper(ahead)
    if facts.use_in_waits < _ONE_BY_ONE and arguments.num_workers > 1:
        evidence.append(
            f"while the loop waited, {100 * facts.use_in_waits:.0f} % of the workers worked: batches come in order, and one "
            "holds up the others"
        )
        if arguments.in_order:
            text += (
                "; or in_order=False, if the order of batches does not matter; or find out why some samples are slow"
            )
        return facts.verdict("stragglers", evidence, (text, settings), sure=0.85)
    evidence.append(f"the others of their time {arguments.num_workers * ahead} batches ahead were made")
    return facts.verdict("depth", evidence, (text, settings), sure=0.7)


def _iterable(facts: _Facts) -> Diagnosis:
    """Nothing is known but the loop's own thread."""
    evidence = [
        f"next() of {facts.stats.kind} takes {facts.per_batch(facts.row.busy_s)}, and for {100 * facts.on_cpu:.0f} % of that "
        "the loop's own thread is on a CPU",
        facts.delayed(),
        _bursts(facts),
    ]
    hint = next((hint for package, hint in _HINTS.items() if facts.stats.kind.startswith(f"{package}.")), None)
    if facts.needs_cpu > COMPUTING:
        change = (
            hint
            or "make batches in other processes while the loop computes: a DataLoader with num_workers=2 around it, say"
        )
        return facts.verdict("computing", evidence, (change, []), sure=0.8)
    evidence.append("what it waits for cannot be seen from here")
    return facts.verdict(
        "waiting", evidence, (hint or "find out what it waits for; read ahead of the loop", []), sure=0.4
    )


_RULES: Mapping[str, Callable[[_Facts], Diagnosis]] = {
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


# --------------------------------------------------------------------------------------------------------- evidence


def _bursts(facts: _Facts) -> str:
    every = facts.watched.every_nth
    if every is None:
        return ""
    ordinal = {2: "2nd", 3: "3rd"}.get(every, f"{every}th")
    why = ": the workers begin together and are done together" if every == facts.arguments.num_workers else ""
    return f"every {ordinal} batch comes late{why}"


def _seen_in_proc(facts: _Facts) -> list[str]:
    """What else the kernel counts of the workers."""
    stats, watched, row, found = facts.stats, facts.watched, facts.row, []
    if _is_in_kernel(facts):
        found.append(
            f"{100 * min(1.0, watched.kernel_s / row.cpu_s):.0f} % of the CPU time in the kernel, as for new pages of memory: "
            f"a batch is {say_size(_Batch(watched).size)}"
        )
    if (disk := stats.host.disk_bytes) and stats.host.read_bytes and disk > _DISK * stats.host.read_bytes:
        found.append(f"{disk / max(stats.wall_s, 1e-9) / 1e6:.3g} MB/s came from a disk")
    if watched.disk_wait_s > 0.05 * row.busy_s:
        found.append(f"{100 * watched.disk_wait_s / row.busy_s:.0f} % waiting for a disk")
    if stats.shared_free_share is not None and stats.shared_free_share < _SHARED_FULL:
        found.append(
            f"the shared memory that tensors pass through (/dev/shm) is {100 * (1 - stats.shared_free_share):.0f} % full"
        )
    return found


def _is_in_kernel(facts: _Facts) -> bool:
    """True if workers spend much of their CPU time on memory, as they do for large batches."""
    watched = facts.watched
    return watched.kernel_s > _KERNEL * max(facts.row.cpu_s, 1e-9) and _Batch(watched).size > _LARGE


def _of_machine(interval: Interval, stats: WatchedSnapshot) -> list[str]:
    """What the machine withholds: CPUs, memory."""
    found, others, num_cpus = [], interval.others_cpus, interval.num_cpus
    if others is not None and num_cpus is not None and others > _OTHERS and not interval.has_idle_cpus:
        named = ", ".join(
            f"{name} {used_s / interval.counted_s:.1f}"
            for name, used_s in stats.programs
            if used_s > 0.1 * interval.counted_s
        )
        found.append(f"other programs used {others:.1f} of {num_cpus} CPUs{f': {named}' if named else ''}")
    if interval.is_short_of_cpus and stats.host.quota_cpus is not None:
        found.append(words.quota(interval))
    if stats.host.swapped_bytes:
        found.append(f"{say_size(stats.host.swapped_bytes)} of this program are swapped out")
    return found


def _no_cpu(facts: _Facts) -> str:
    more = words.more_cpus(facts.interval)
    return f"no CPU free ({more} would)" if more != "more CPUs" else "no CPU free"
