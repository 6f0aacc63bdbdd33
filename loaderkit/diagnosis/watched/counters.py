"""What is known of a watched loop besides a loader's counters, and what it may wait for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Self

from loaderkit.diagnosis.watched.lines import LineTimes
from loaderkit.engine.metrics.snapshot import Snapshot, StageStats

DATASET = "dataset"  # a DataLoader's: with workers `collate_fn`, too
COLLATE = "collate"
HANDOVER = "handover"
PIN_MEMORY = "pin_memory"
ITERABLE = "iterable"


@dataclass(frozen=True)
class LoaderArguments:
    """The arguments of a DataLoader that matter for its speed; None for one that is not known."""

    num_workers: int
    batch_size: int | None = None
    prefetch_factor: int | None = None
    pin_memory: bool = False
    persistent_workers: bool = False
    in_order: bool = True
    dataset: str = ""  # its class
    is_iterable: bool = False  # an IterableDataset, which splits its samples by worker, or does not

    @property
    def num_ahead(self) -> int:
        """How many batches workers are asked for ahead of the loop."""
        return self.num_workers * (self.prefetch_factor or 1)


@dataclass(frozen=True)
class WatchedCounters:
    """Counters of a watched loop. Times in seconds; times of workers are summed over them."""

    num_epochs: int = 0  # begun
    open_s: float = 0.0  # in iter(), of all epochs but the first
    first_s: float = 0.0  # in next() for the first batch, of those
    stop_s: float = 0.0  # in next() at the end of epochs, where no batch came
    own_cpu_s: float = 0.0  # inside next(), the loop's own thread on a CPU
    own_delayed_s: float = (
        0.0  # inside next(), it was ready to run and no CPU was free; of loops whose thread makes the batches
    )
    slot_s: float = 0.0  # workers x the time that they were there
    busy_s: float = 0.0  # of slot_s, with batches to make
    tail_s: float = 0.0  # of slot_s, without, as the epoch had no more
    wait_slot_s: float = 0.0  # of slot_s, while the loop waited
    wait_busy_s: float = 0.0  # of busy_s, while the loop waited
    kernel_s: float = 0.0  # the workers in the kernel
    disk_wait_s: float = 0.0
    num_disk_faults: int = 0
    pin_cpu_s: float = 0.0  # the thread that pins memory
    late_s: float = 0.0  # waits that were plainly longer than usual
    num_measured: int = 0  # batches whose bytes were counted
    measured_bytes: int = 0
    measured_tensors: int = 0
    measured_array_bytes: int = 0
    gaps: Mapping[int, int] = field(
        default_factory=dict
    )  # how often a late batch was the n-th after the late one before

    def minus(self, earlier: WatchedCounters) -> Self:
        """The rise since `earlier`."""
        rise = {name: getattr(self, name) - getattr(earlier, name) for name in _NUMBERS}
        gaps = {gap: count - earlier.gaps.get(gap, 0) for gap, count in self.gaps.items()}
        return replace(self, **rise, gaps=gaps)

    @property
    def worker_use(self) -> float:
        """The share of their time in which the workers had batches to make, ends of epochs left out."""
        return self.busy_s / max(self.slot_s - self.tail_s, 1e-9)

    @property
    def every_nth(self) -> int | None:
        """If nearly all the waiting is for every n-th batch: n, at least 2."""
        gap = max(self.gaps, key=lambda gap: self.gaps[gap], default=None)
        if gap is None or gap < 2:
            return None
        return gap if self.gaps[gap] >= 0.6 * sum(self.gaps.values()) and self.gaps[gap] >= 3 else None


_NUMBERS = tuple(field.name for field in fields(WatchedCounters) if field.name != "gaps")


@dataclass
class WatchedSnapshot(Snapshot):
    """The counters of a watched loop at one moment, or their rise between two. Its stages are the parts of the work
    that can be told apart from outside."""

    arguments: LoaderArguments | None = None  # of the DataLoader; None if it is none, or has not begun
    watched: WatchedCounters = field(default_factory=WatchedCounters)
    programs: tuple[tuple[str, float], ...] = ()  # other programs, and the CPU seconds that they used
    shared_free_share: float | None = None  # of /dev/shm, at this moment
    kind: str = ""  # the class of what is watched, with its package
    lines: LineTimes | None = None  # which lines load; None if they are not sampled

    def since(self, earlier: Snapshot) -> Self:
        """The rise of the counters between `earlier` and this moment."""
        if not isinstance(earlier, WatchedSnapshot):
            raise TypeError("`since` is stats of another kind of loader")
        before = {row.name: row for row in earlier.stages}
        # Before the first batch it is not known what there is to see.
        rows = [before.get(row.name, StageStats(row.name, row.workers)) for row in self.stages]
        earlier = replace(earlier, stages=rows)
        if earlier.arguments is None and self.arguments is not None and self.arguments.num_workers:
            # The counters of the processes that load: there were none.
            earlier = replace(earlier, host=replace(earlier.host, cpu_s=0.0, read_bytes=0, disk_bytes=0))
        passed = super().since(earlier)
        return replace(
            passed,
            watched=self.watched.minus(earlier.watched),
            paused_s=self.paused_s - earlier.paused_s,
            started_s=self.started_s - earlier.started_s,
        )
