"""A loader's counters at one moment, and their rise between two moments.

Slot time: for every stage, workers x wall time = busy + starved + blocked + idle. Stages fused into one pool are listed
singly; `slot_s` is then their own busy time, with starved and idle at the pool's first stage and blocked at its last, so
that the rows of a pool sum to its workers' time. Stall time: what the consumer waited for, by stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Self, TypeVar

from loaderkit.engine.metrics.contention import ContentionResult, charged_to_holders, merged_trials
from loaderkit.engine.metrics.histogram import Histogram
from loaderkit.engine.metrics.host import HostStats, host_stats, merged_hosts
from loaderkit.engine.metrics.nodes.charge import charged_to_workers
from loaderkit.engine.metrics.nodes.counts import Nodes
from loaderkit.engine.metrics.slow_samples import SlowTable, slowest
from loaderkit.engine.metrics.stalls import NETWORK, RESTART, START, WAKEUP
from loaderkit.engine.metrics.tuning import Tuning
from loaderkit.engine.metrics.worker_clock import WorkerClock, WorkerStates
from loaderkit.engine.work import SourceCounts, Stage

AnySnapshot = TypeVar("AnySnapshot", bound="Snapshot")

_LEVELS = frozenset({"held_bytes"})
ALWAYS = 0.85  # share of the time in which one worker is in a stage, above which others would bring little


@dataclass
class StageStats:
    """One stage's counters. Times in seconds, summed over its workers."""

    name: str
    workers: int
    num_items: int = 0
    num_bytes: int = 0
    num_failed: int = 0
    busy_s: float = 0.0
    cpu_s: float = 0.0
    delayed_s: float = 0.0  # of busy: ready to run, and no CPU was free
    starved_s: float = 0.0
    blocked_s: float = 0.0
    idle_s: float = 0.0
    num_queued: int = 0  # chunks that wait for its workers, at this moment
    services: Histogram = field(default_factory=Histogram)
    kind: str = ""
    waits: bool = False  # it may wait for something other than a CPU or the GIL
    source: str = ""  # the mixed source that it is for alone
    in_turn: bool = False  # one worker at a time runs it, in each process
    content: str = ""  # what it acts on, where stages of its kind may act on different things
    alone: bool = (
        False  # in each process one thread at a time runs any of the rows that are `alone`: undeclared user code
    )

    @classmethod
    def of(cls, stage: Stage, workers: int) -> Self:
        """A row of zeros."""
        facts = {name: getattr(stage, name) for name in ("kind", "waits", "source", "in_turn", "content")}
        return cls(stage.name, workers, **facts, alone=stage.lock is not None)

    @property
    def slot_s(self) -> float:
        return self.busy_s + self.starved_s + self.blocked_s + self.idle_s

    def minus(self, earlier: StageStats) -> StageStats:
        services = self.services.minus(earlier.services)
        counted = {name: getattr(self, name) - getattr(earlier, name) for name in _COUNTERS}
        return replace(self, services=services, **counted)

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "workers": self.workers,
            "num_items": self.num_items,
            "num_bytes": self.num_bytes,
            "busy_s": self.busy_s,
            "cpu_s": self.cpu_s,
            "delayed_s": self.delayed_s,
            "starved_s": self.starved_s,
            "blocked_s": self.blocked_s,
            "idle_s": self.idle_s,
            "slot_s": self.slot_s,
            "p50_s": self.services.percentile(0.5),
            "p99_s": self.services.percentile(0.99),
            "num_failed": self.num_failed,
            "num_queued": self.num_queued,
        }


_COUNTERS = tuple(
    field.name
    for field in fields(StageStats)
    if field.name
    not in ("name", "workers", "services", "kind", "waits", "source", "in_turn", "content", "alone", "num_queued")
)


@dataclass(frozen=True)
class SourceState:
    """Where a mixed source is at one moment, all ranks together, and its bad samples of this rank."""

    name: str
    due: float  # what its weights come to over the positions delivered
    num_passes: float  # over its samples so far
    is_used_up: bool  # in this epoch
    num_bad: int  # each counted once an epoch
    share_of: Literal["samples", "tokens"]  # what weights are shares of


@dataclass
class Snapshot:
    """A loader's counters at one moment, or their rise between two.

    `wall_s` counts from the first wait for a batch, or from the earlier moment.
    """

    run: int  # counters start again with every run, such as after an error
    now_s: float
    wall_s: float
    num_batches: int
    num_samples: int
    waits_s: dict[str, float]  # of the loop, by the state of the chunk that it waited for
    stages: list[StageStats]
    num_ready: int  # complete batches at this moment
    num_open: int  # batches in the memory budget at this moment, complete or not
    memory: dict[str, int]
    host: HostStats  # of the processes that run the workers; `idle_s` since the first wait for a batch
    tuning: Tuning
    num_dropped: int = 0  # samples of those batches that `filter` left out; not in num_samples
    lateness: Histogram = field(default_factory=Histogram)  # of a thread that wakes up and needs the GIL and a CPU
    trials: dict[str, ContentionResult] = field(default_factory=dict)
    """How one worker alone compares with all, by the first stage of a pool."""
    slowest: dict[str, SlowTable] = field(default_factory=dict)
    """The samples that took longest in the whole run, by stage; after `since`, those within the interval."""
    store: dict[str, float] = field(default_factory=dict)  # the connectors' counters; those not in _LEVELS only grow
    copies: dict[str, float] = field(default_factory=dict)  # to a GPU: see `transfer` in docs/reference.md
    by_source: SourceCounts = field(default_factory=SourceCounts)  # what those batches hold of each mixed source
    sources: tuple[SourceState, ...] = ()  # the mixed sources
    paused_s: float = 0.0  # not in wall_s, but in the counters of workers and CPUs: the loop did something else
    num_restarts: int = 0  # of worker processes that had died
    nodes: Nodes = field(default_factory=Nodes)  # that workers are on, where they may be on several
    bad_shards: tuple[str, ...] = ()  # that were left out of the source, each with what is wrong
    started_s: float = 0.0  # of the waits for `start`, those in which workers ran: of a report's first batch

    @property
    def stall_s(self) -> dict[str, float]:
        """Seconds that the loop waited, by what it waited for: `waits_s`, with waits for the GIL or a CPU charged to
        the stages that held these, and waits for complete batches charged to the stages of workers that are always
        busy."""
        if self.tuning.executor == "inline":  # one thread: no other holds the GIL or a CPU
            return dict(self.waits_s)
        rows = {row.name: row for row in self.stages}
        pools = [[rows[name] for name in pool.stages] for pool in self.tuning.pools] or [self.stages]
        waits_s = charged_to_workers(self.waits_s, pools, WAKEUP)
        charged = charged_to_holders(waits_s, self.stages, self.trials.values())
        # A worker that holds the GIL keeps finished batches from being sent, which looks like a way that is full.
        holds_gil = any(trial.holds_gil for trial in self.trials.values())
        if not charged.get(NETWORK) or (self.has_full_network and not holds_gil):
            return charged
        return charged_to_workers(charged, pools, NETWORK)

    @property
    def has_full_network(self) -> bool:
        """True if the way from other nodes carries as much as it can, all the time in which workers run."""
        stopped_s = self.waits_s.get(START, 0.0) - self.started_s + self.waits_s.get(RESTART, 0.0)
        return self.nodes.is_full(max(self.wall_s - stopped_s, 1e-9))

    def turn_share(self, stage: str | None) -> float:
        """The share of the time in which a worker was in a stage that one worker at a time runs; 0 for other stages."""
        busy_s = sum(row.busy_s for row in self.stages if row.in_turn and row.name == stage)
        ran_s = self.wall_s - self.waits_s.get(START, 0.0) + self.started_s
        return busy_s / max(ran_s * (self.tuning.processes or 1), 1e-9)

    @property
    def alone_share(self) -> float:
        """The share of the time in which a worker was in user code that one thread at a time of each process runs."""
        busy_s = sum(row.busy_s for row in self.stages if row.alone)
        ran_s = self.wall_s - self.waits_s.get(START, 0.0) + self.started_s
        return busy_s / max(ran_s * (self.tuning.processes or 1), 1e-9)

    @property
    def full_turn(self) -> str | None:
        """A stage that one worker at a time runs, and in which one is all the time, so that no stage could do more items."""
        return next((row.name for row in self.stages if self.turn_share(row.name) >= ALWAYS), None)

    @classmethod
    def empty(cls, rows: Sequence[StageStats], memory_bytes: int) -> Self:
        """The counters of a process that has not started. `rows` name the stages and their workers."""
        memory = dict.fromkeys(("slab_bytes", "batch_bytes", "open_bytes", "live_bytes", "allocated_bytes"), 0)
        return cls(
            run=0,
            now_s=0.0,
            wall_s=0.0,
            num_batches=0,
            num_samples=0,
            waits_s={},
            stages=list(rows),
            num_ready=0,
            num_open=0,
            memory={"budget_bytes": memory_bytes, **memory, "rss_peak_bytes": 0},
            host=replace(
                host_stats(),
                rss_bytes=0,
                rss_peak_bytes=0,
                cpu_s=0.0,
                read_bytes=0,
                disk_bytes=0,
                native_s=0.0,
            ),
            tuning=Tuning(),
        )

    def since(self, earlier: Snapshot) -> Self:
        """The rise of the counters between `earlier` and this moment."""
        if earlier.run != self.run:
            raise ValueError(
                "`since` is a moment before an error or Ctrl-C ended that run; the counters have started from 0 since"
            )
        return replace(
            self,
            wall_s=self.wall_s - earlier.wall_s,
            num_batches=self.num_batches - earlier.num_batches,
            num_samples=self.num_samples - earlier.num_samples,
            num_dropped=self.num_dropped - earlier.num_dropped,
            num_restarts=self.num_restarts - earlier.num_restarts,
            waits_s=_rise(earlier.waits_s, self.waits_s),
            stages=[stage.minus(before) for stage, before in zip(self.stages, earlier.stages, strict=True)],
            host=self.host.minus(earlier.host),
            lateness=self.lateness.minus(earlier.lateness),
            slowest={stage: table[table["at_s"] > earlier.now_s] for stage, table in self.slowest.items()},
            store={
                name: value if name in _LEVELS else value - earlier.store.get(name, 0)
                for name, value in self.store.items()
            },
            nodes=self.nodes.minus(earlier.nodes),
            copies={name: value - earlier.copies.get(name, 0) for name, value in self.copies.items()},
            by_source=self.by_source.minus(earlier.by_source),
            sources=tuple(
                replace(now, due=now.due - before.due, num_bad=now.num_bad - before.num_bad)
                for now, before in zip(self.sources, earlier.sources, strict=True)
            ),
        )

    def slimmed(self) -> Self:
        """A copy without the fields that a time series does not show."""
        nothing = Histogram()
        stages = [replace(row, services=nothing) for row in self.stages]
        return replace(
            self, stages=stages, slowest={}, tuning=Tuning(batches=self.tuning.batches, processes=self.tuning.processes)
        )

    def to_point(self, wall_s: float) -> dict[str, Any]:
        """A point of the time series: what happened on average in an interval of `wall_s`, which may lie before the first wait
        for a batch, and the state at its end."""
        return {
            "at_s": self.now_s,
            "seconds": wall_s,
            "samples_per_s": self.num_samples / wall_s,
            "bytes_per_s": sum(row.num_bytes for row in self.stages) / wall_s,
            "stall": {cause: seconds / wall_s for cause, seconds in self.stall_s.items() if seconds},
            "busy": {row.name: row.busy_s / wall_s for row in self.stages},
            "workers": {row.name: row.workers for row in self.stages},
            "queued": {row.name: row.num_queued for row in self.stages},
            "ready": self.num_ready,
            "open": self.num_open,
            "batches": self.tuning.batches,
            "processes": self.tuning.processes,
            "live_bytes": self.memory.get("live_bytes"),
            "rss_bytes": self.host.rss_bytes,
            "cpus": self.host.cpu_s / wall_s,
            "throttled": None if self.host.throttled_s is None else self.host.throttled_s / wall_s,
            "page_cache_hits": self.host.page_cache_hits,
            "late_s": self.lateness.percentile(0.5),
        }

    def to_dict(self) -> dict[str, Any]:
        """JSON values; the layout is described in docs/reference.md."""
        total_s = sum(self.stall_s.values())
        wall_s = max(self.wall_s, 1e-12)
        nodes = self.nodes.to_dicts(self.wall_s)
        return {
            "wall_s": self.wall_s,
            "num_batches": self.num_batches,
            "num_samples": self.num_samples,
            "num_dropped": self.num_dropped,
            "num_restarts": self.num_restarts,
            "bad_shards": list(self.bad_shards),
            "stall": {
                "total_s": total_s,
                "percent": min(100.0, 100.0 * total_s / wall_s) if self.wall_s > 0 else 0.0,
                "by_stage": dict(sorted(self.stall_s.items(), key=lambda item: -item[1])),
            },
            "stages": [stage.to_dict() for stage in self.stages],
            "throughput": {
                "samples_per_s": self.num_samples / wall_s if self.wall_s > 0 else 0.0,
                "bytes_per_s": sum(stage.num_bytes for stage in self.stages) / wall_s if self.wall_s > 0 else 0.0,
            },
            "queue": {"ready": self.num_ready, "open": self.num_open},
            "memory": {**self.memory, "rss_bytes": self.host.rss_bytes},
            "host": {
                "cpu_s": self.host.cpu_s,
                "throttled_s": self.host.throttled_s,
                "idle_s": self.host.idle_s,
                "others_s": None if self.host.others_s is None else max(0.0, self.host.others_s),
                "native_s": self.host.native_s,
                "swapped_bytes": self.host.swapped_bytes,
                "read_bytes": self.host.read_bytes,
                "disk_bytes": self.host.disk_bytes,
                "page_cache_hits": self.host.page_cache_hits,
                "late_p50_s": self.lateness.percentile(0.5),
                "late_p99_s": self.lateness.percentile(0.99),
            },
            "tuning": self.tuning.to_dict(),
            "store": {**self.store, **_shares(self.store)},
            "transfer": {**self.copies, **self._overlap()},
            **({"nodes": nodes} if nodes else {}),
        }

    def _overlap(self) -> dict[str, float]:
        """The speed of the copies to the GPU that were timed, and the share of their time in which the loop did not wait for
        them."""
        copy_s = self.copies.get("copy_s", 0.0)
        if not copy_s:
            return {}
        return {
            "bytes_per_s": self.copies["timed_bytes"] / copy_s,
            "overlap": max(0.0, 1 - self.copies["exposed_s"] / copy_s),
        }


def _rise(earlier: Mapping[str, float], later: Mapping[str, float]) -> dict[str, float]:
    """The rise of every cause's stall: no rise is below 0, and they sum to the rise of the total.

    An open wait is charged to the cause that holds it now. When it ends, another chunk may have come last, and its seconds
    move to another cause. The cause that shrank counts as 0, and the others are scaled to the total.
    """
    grown = {cause: later.get(cause, 0.0) - earlier.get(cause, 0.0) for cause in {**earlier, **later}}
    total = max(0.0, sum(grown.values()))
    risen = sum(seconds for seconds in grown.values() if seconds > 0)
    return {cause: max(0.0, seconds) * total / risen if risen else 0.0 for cause, seconds in grown.items()}


def _shares(store: dict[str, float]) -> dict[str, float]:
    """The cache's hit rate by bytes, if there is a cache and anything was read."""
    hits, misses = store.get("cache_hit_bytes", 0), store.get("cache_missed_bytes", 0)
    return {"cache_hit_rate": hits / (hits + misses)} if hits + misses else {}


def merged(snapshots: Sequence[AnySnapshot]) -> AnySnapshot:
    """The counters of engines that run the same stages in parallel, as the counters of one engine: sums where a sum
    makes sense, otherwise the first engine's value."""
    first = snapshots[0]
    if len(snapshots) == 1:
        return first
    waits_s: dict[str, float] = {}
    for snapshot in snapshots:
        for cause, seconds in snapshot.waits_s.items():
            waits_s[cause] = waits_s.get(cause, 0.0) + seconds
    return replace(
        first,
        num_batches=sum(snapshot.num_batches for snapshot in snapshots),
        num_samples=sum(snapshot.num_samples for snapshot in snapshots),
        num_dropped=sum(snapshot.num_dropped for snapshot in snapshots),
        waits_s=waits_s,
        stages=[_sum(rows) for rows in zip(*(snapshot.stages for snapshot in snapshots), strict=True)],
        num_ready=sum(snapshot.num_ready for snapshot in snapshots),
        num_open=sum(snapshot.num_open for snapshot in snapshots),
        memory={
            name: (max if name in ("slab_bytes", "batch_bytes") else sum)(
                snapshot.memory[name] for snapshot in snapshots
            )
            for name in first.memory
        },
        host=merged_hosts([snapshot.host for snapshot in snapshots]),
        slowest={
            stage: slowest([snapshot.slowest[stage] for snapshot in snapshots if stage in snapshot.slowest])
            for stage in {stage: None for snapshot in snapshots for stage in snapshot.slowest}
        },
        lateness=_all_of(snapshot.lateness for snapshot in snapshots),
        store={
            name: sum(snapshot.store.get(name, 0) for snapshot in snapshots)
            for snapshot in snapshots
            for name in snapshot.store
        },
        trials={
            stage: merged_trials([snapshot.trials[stage] for snapshot in snapshots if stage in snapshot.trials])
            for stage in {stage: None for snapshot in snapshots for stage in snapshot.trials}
        },
    )


def as_past(snapshot: AnySnapshot) -> AnySnapshot:
    """The counters of a process that has ended, to be merged into the counters of the process in its place: without its
    state."""
    memory = {name: value if name in ("slab_bytes", "batch_bytes") else 0 for name, value in snapshot.memory.items()}
    return replace(
        snapshot,
        waits_s={},
        stages=[_past_row(row) for row in snapshot.stages],
        num_ready=0,
        num_open=0,
        memory=memory,
        host=replace(snapshot.host, rss_bytes=0, rss_peak_bytes=0, swapped_bytes=0),
        trials={},
        store={name: 0 if name in _LEVELS else value for name, value in snapshot.store.items()},
    )


def rows_with_past(rows: Sequence[StageStats], past: Sequence[StageStats]) -> list[StageStats]:
    """The rows of stages with the counters of earlier ones, where there are any."""
    if not past:
        return list(rows)
    return [_sum((row, _past_row(before))) for row, before in zip(rows, past, strict=True)]


def _past_row(row: StageStats) -> StageStats:
    return replace(row, workers=0, num_queued=0)


def _sum(rows: Sequence[StageStats]) -> StageStats:
    """One row for one stage of several engines."""
    counted = {name: sum(getattr(row, name) for row in rows) for name in (*_COUNTERS, "workers", "num_queued")}
    return replace(rows[0], **counted, services=_all_of(row.services for row in rows))


def _all_of(histograms: Iterable[Histogram]) -> Histogram:
    total = Histogram()
    for histogram in histograms:
        total.merge(histogram.copy())  # `copy` sums the histograms that were merged into it
    return total


def add_worker_time(
    rows: Sequence[StageStats],
    ends: tuple[StageStats, StageStats],
    worker_clocks: list[WorkerClock],
    states: WorkerStates,
    now: float,
) -> None:
    """Add the time of a pool's workers to the rows of their stages; waiting goes to the rows of the pool's `ends`."""
    if not worker_clocks:
        return
    state_s, totals = WorkerClock.summed(worker_clocks, now)
    first, last = ends
    first.starved_s += state_s[states.starved]
    first.idle_s += state_s[states.idle]
    last.blocked_s += state_s[states.blocked]
    for row, busy_s, (num_items, num_bytes, num_failed, cpu_s, delayed_s, services) in zip(
        rows, state_s, totals, strict=False
    ):
        row.busy_s += busy_s
        row.cpu_s += cpu_s
        row.delayed_s += delayed_s
        row.num_items += num_items
        row.num_bytes += num_bytes
        row.num_failed += num_failed
        if services:
            row.services.merge(Histogram.of(services))
