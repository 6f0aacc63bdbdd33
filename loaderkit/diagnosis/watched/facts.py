"""The figures of a watched loop that the rules read: what it waited for longest, what a batch holds, what the kernel
counts."""

from __future__ import annotations

from math import ceil
from typing import Any

from loaderkit._internal.system.cgroups import free_memory
from loaderkit._internal.units import say_seconds, say_size
from loaderkit.diagnosis.evidence import more_cpus, quota, waited
from loaderkit.diagnosis.interval import Interval
from loaderkit.diagnosis.make_verdict import conclude
from loaderkit.diagnosis.stage_facts import COMPUTING
from loaderkit.diagnosis.verdict import Remedy, Setting, Verdict
from loaderkit.diagnosis.watched.counters import COLLATE, LoaderArguments, WatchedCounters, WatchedSnapshot
from loaderkit.diagnosis.watched.lines import COLLATE_FN, CostlyLine, cheaper

SMALL_BYTES = 1e5  # of a batch: less takes no time to move
_LARGE_BYTES = 1e6  # for more, new pages of memory take long
_KERNEL = 0.4  # share of the CPU time in the kernel that is worth telling
_DISK = 0.25  # share of what was read that came from a disk, from which on that is told
_SHARED_FULL = 0.1  # share of the shared memory that is free, below which that is told
_MANY_TENSORS = 32
_ARRAYS = 0.5  # share of a batch's bytes in NumPy's arrays
_NOTABLE = 0.1  # share of the time without a free CPU
_OTHERS = 0.2  # CPUs; other programs that use more are named
_MOST_WORKERS = 16
_MOST_AHEAD = 64


class WatchedFacts:
    """An interval, and the row of one thing that the loop waited for."""

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
        """The share of the workers that were working while the loop waited."""
        watched = self.watched
        return watched.wait_busy_s / watched.wait_slot_s if watched.wait_slot_s else 1.0

    def per_batch(self, seconds: float) -> str:
        return say_seconds(seconds / max(1, self.stats.num_batches))

    def delayed(self) -> str:
        """How much of the time it was ready to run while no CPU was free, if that was much."""
        share = min(1.0, self.row.delayed_s / max(self.row.busy_s, 1e-9))
        return f"{100 * share:.0f} % ready to run while no CPU was free" if share > _NOTABLE else ""

    def verdict(self, kind: str, evidence: list[str], change: Remedy, *, sure: float = 1.0) -> Verdict:
        """The verdict of that kind."""
        parts = [waited(self.interval, self.cause), *evidence, *of_machine(self.interval, self.stats)]
        return conclude(self.interval, self.cause, kind, "; ".join(filter(None, parts)), change, sure=sure)

    def line(self) -> CostlyLine | None:
        """The line that makes loading slow, if one stands out. For a loop that makes its batches itself, the line in
        the part for which it waits."""
        times, is_inline = self.stats.lines, not self.arguments.num_workers
        if times is None:
            return None
        return times.costliest(lambda line: not is_inline or (line.part == COLLATE_FN) == (self.cause == COLLATE))

    def say_line(self) -> str:
        line = self.line()
        return "" if line is None or self.stats.lines is None else self.stats.lines.say(line)

    # ------------------------------------------------------------------------------------------------- what to change

    def cheaper(self) -> str:
        """Less work for each sample: at the line that costs most, where it is known."""
        line = self.line()
        is_waiting = self.needs_cpu <= COMPUTING
        return "less work for each sample" if line is None else cheaper(line, is_waiting=is_waiting)

    def more_workers(self, *, computing: bool) -> Remedy | None:
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
        change = self.set("num_workers", max(now + 1, min(most, enough)), now)
        if self.arguments.is_iterable:
            return change.then(
                " (of an IterableDataset, if it splits its samples by get_worker_info(): else each worker gives all)"
            )
        return change

    def deeper(self, ahead: int) -> Remedy:
        """A `prefetch_factor` for as many batches as the loop takes while it waits for a late one, if there is memory
        for them."""
        watched, interval = self.watched, self.interval
        late_s = watched.late_s / max(1, sum(watched.gaps.values()))
        step_s = (interval.stats.wall_s - interval.waited_s) / max(1, self.stats.num_batches)
        wanted = ahead + ceil(late_s / max(step_s * self.arguments.num_workers, 1e-6))
        wanted = max(2 * ahead, min(_MOST_AHEAD, wanted))
        more_bytes = (wanted - ahead) * self.arguments.num_workers * BatchSize(watched).size
        free_bytes, _ = free_memory()
        if free_bytes is not None and more_bytes > free_bytes / 4:
            return Remedy("smaller batches, and a larger prefetch_factor: this machine has no memory for more of these")
        return self.set("prefetch_factor", wanted, ahead).then(", so that more batches are ready when one is late")

    @staticmethod
    def set(name: str, value: Any, before: Any) -> Remedy:
        """An argument of the DataLoader."""
        return Remedy(f"{name}={value}", (Setting(key=name, before=before, value=value),))


class BatchSize:
    """What is in a batch, in the mean."""

    def __init__(self, watched: WatchedCounters) -> None:
        num = max(1, watched.num_measured)
        self.size, self.num_tensors = watched.measured_bytes / num, watched.measured_tensors / num
        self.array_share = watched.measured_array_bytes / max(1, watched.measured_bytes)

    def moving(self) -> tuple[str, str] | None:
        """Why it is costly to pass the batch from one process to another, and what to change; None if only its bytes cost."""
        if self.array_share > _ARRAYS and self.size > SMALL_BYTES:
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


def bursts(facts: WatchedFacts) -> str:
    every = facts.watched.every_nth
    if every is None:
        return ""
    ordinal = {2: "2nd", 3: "3rd"}.get(every, f"{every}th")
    why = ": the workers begin together and are done together" if every == facts.arguments.num_workers else ""
    return f"every {ordinal} batch comes late{why}"


def seen_in_proc(facts: WatchedFacts) -> list[str]:
    """What else the kernel counts of the workers."""
    stats, watched, row, found = facts.stats, facts.watched, facts.row, []
    if is_in_kernel(facts):
        found.append(
            f"{100 * min(1.0, watched.kernel_s / row.cpu_s):.0f} % of the CPU time in the kernel, as for new pages of memory: "
            f"a batch is {say_size(BatchSize(watched).size)}"
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


def is_in_kernel(facts: WatchedFacts) -> bool:
    """True if workers spend much of their CPU time on memory, as they do for large batches."""
    watched = facts.watched
    return watched.kernel_s > _KERNEL * max(facts.row.cpu_s, 1e-9) and BatchSize(watched).size > _LARGE_BYTES


def of_machine(interval: Interval, stats: WatchedSnapshot) -> list[str]:
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
        found.append(quota(interval))
    if stats.host.swapped_bytes:
        found.append(f"{say_size(stats.host.swapped_bytes)} of this program are swapped out")
    return found


def no_cpu(facts: WatchedFacts) -> str:
    more = more_cpus(facts.interval)
    return f"no CPU free ({more} would)" if more != "more CPUs" else "no CPU free"
