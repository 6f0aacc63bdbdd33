"""Which stage is the bottleneck, how sure that is, what says so, and what to change: read from the accounts alone.

    the loop hardly waited ──> training is the limit
    it waited for the start, for memory, to be woken up ──> that
    it waited for a stage ──> are its workers busy? ──no──> stragglers, memory, depth
                                     │yes
                                     └─> on a CPU, or ready for one? ──> computing, or one at a time: the GIL
                                         waiting? ──> stragglers; one at a time: a lock, the store's bandwidth; else its latency

What waits cannot be told apart by looking at it, so it is measured: `turns` lets one worker alone try for a few chunks. If
that gets as much done as all of them, they share something that only one can use at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple

from loaderkit.prefetch.stalls import MEMORY, START, WAKEUP
from loaderkit.prefetch.turns import Trial
from loaderkit.schema import say_bytes

if TYPE_CHECKING:
    from loaderkit.prefetch.stats import StageStats, Stats

_HARMLESS = 0.05  # of the time: such waits are not worth a change
_OCCASIONAL = 0.15  # as well, where the workers have time to spare
_SPARE = 0.6  # of their time: workers that are busy for less have time to spare
_BUSY = 0.75  # of their time: workers that are busy for more are the limit
_COMPUTING = 0.6  # of the busy time, on a CPU or ready for one
_WAITING = 0.25  # of the time: where workers wait less, nobody is held up
_SERIAL = 0.75  # one worker alone gets that much of what all get done: they cannot go on together
_PARALLEL = 0.6  # where it gets less, they can
_LITTLE_CPU = 0.3  # CPUs: whoever uses less does not hold the lock for long
_SHORT = 0.2  # of the busy time, ready to run while no CPU was free: then CPUs are what is short
_FULL = 0.8  # of the CPUs in use: so it is then
_TAIL = 4.0  # times the usual service time: a straggler
_TAIL_SHARE = 0.25  # of the busy time, spent on stragglers
_ONE_CPU = 1.2  # the CPUs that all who need Python's lock can have together, and a little for what runs without it
_NUM_SURE = 8  # batches from which on an interval says as much as it ever will


class Verdict(NamedTuple):
    """What limits the loop.

    `stage` is a stage's name, or `start`, `memory` or `wakeup`; None: training is the limit. `percent` of the interval's wall
    time were lost to it (for None: not lost to loading). `confidence` is from 0 to 1. `kind` says in one word how it
    limits: training, computing, gil, lock, latency, bandwidth, stragglers, waiting, memory, depth, start, wakeup, unknown.
    """

    stage: str | None
    percent: float
    confidence: float
    evidence: str
    change: str
    kind: str


def verdict(stats: Stats) -> Verdict:
    """The verdict on an interval, `loader.stats()` or `loader.stats(since=earlier)`; in about 0.1 ms, from any thread."""
    if stats.wall_s <= 0:
        evidence = "nobody has waited for a batch in this interval"
        return Verdict(None, 0.0, 0.0, evidence, "iterate over the loader", "unknown")
    case = _Case.of(stats)
    return _without_a_stage(case) or _of_a_stage(case)


def _without_a_stage(case: _Case) -> Verdict | None:
    stats = case.stats
    if case.start_s > case.waited_s and case.start_s > _HARMLESS * stats.wall_s:
        return _start(case)
    if case.share < _HARMLESS or (case.share < _OCCASIONAL and case.has_time_to_spare):
        return _training(case)
    if case.stall_s.get(MEMORY, 0.0) > case.waited_s / 2:
        return _memory(case)
    return None


def _of_a_stage(case: _Case) -> Verdict:
    stats = case.stats
    busiest = case.limit(max(stats.stages, key=lambda row: row.cpu_s))
    if busiest.is_gil:  # whoever is waited for waits for the lock: what matters is who has it
        return busiest.gil()
    if case.stall_s.get(WAKEUP, 0.0) > case.waited_s / 2:
        return _wakeup(case)
    awaited = case.limit(max(stats.stages, key=lambda row: case.stall_s.get(row.name, 0.0)))
    if case.is_short_of_cpus and awaited.would_compute:
        return busiest.computing()  # chunks wait for a CPU wherever they are: what matters is who uses them
    return awaited.verdict()


# --------------------------------------------------------------------------------------------- what is looked at


@dataclass(frozen=True)
class _Pool:
    """The stages of one pool, and its workers' time."""

    rows: list[StageStats]
    trial: Trial

    def total(self, name: str) -> float:
        return float(sum(getattr(row, name) for row in self.rows))

    @property
    def use(self) -> float:
        """The share of the time of workers that are to work in which they do."""
        whole = self.total("busy_s") + self.total("starved_s") + self.total("blocked_s")
        return self.total("busy_s") / whole if whole > 0 else 0.0

    @property
    def takes_turns(self) -> bool:
        """Whether only one worked for much of the time, since that was measured to be faster."""
        alone = self.trial.alone_share
        return alone is not None and alone >= 1.0 and self.total("idle_s") > _WAITING * self.total("slot_s")


@dataclass(frozen=True)
class _Case:
    """An interval, but for the start of the first batch."""

    stats: Stats
    start_s: float
    stall_s: Mapping[str, float]
    waited_s: float
    wall_s: float
    pools: list[_Pool]

    @classmethod
    def of(cls, stats: Stats) -> _Case:
        stall_s = {cause: seconds for cause, seconds in stats.stall_s.items() if cause != START}
        start_s = stats.stall_s.get(START, 0.0)
        wall_s = max(stats.wall_s - start_s, 1e-9)
        return cls(stats, start_s, stall_s, sum(stall_s.values()), wall_s, _pools_of(stats))

    @property
    def share(self) -> float:
        """Of the time, in which the loop waited."""
        return min(1.0, self.waited_s / self.wall_s)

    @property
    def is_inline(self) -> bool:
        return bool(self.stats.tuning.get("executor") == "inline")

    @property
    def has_time_to_spare(self) -> bool:
        """Whether every pool could do more, if there were room for it."""
        return not self.is_inline and not self.is_short_of_memory and max(pool.use for pool in self.pools) < _SPARE

    @property
    def is_short_of_memory(self) -> bool:
        """Whether the budget holds fewer batches than are to be read ahead."""
        return self.num_in_memory < self.num_wanted

    @property
    def num_in_memory(self) -> int:
        memory = self.stats.memory
        return memory["budget_bytes"] // batch if (batch := memory.get("batch_bytes", 0)) else self.num_wanted

    @property
    def num_wanted(self) -> int:
        return int(self.stats.tuning.get("batches", 1))

    @property
    def num_cpus(self) -> int | None:
        return self.stats.tuning.get("cpus")

    @property
    def cpus_used(self) -> float:
        """By the workers, on average."""
        return sum(row.cpu_s for row in self.stats.stages) / self.wall_s

    @property
    def is_short_of_cpus(self) -> bool:
        rows = self.stats.stages
        delayed = sum(row.delayed_s for row in rows) > _SHORT * sum(row.busy_s for row in rows)
        return delayed or (self.num_cpus is not None and self.cpus_used > _FULL * self.num_cpus)

    def limit(self, row: StageStats) -> _Limit:
        return _Limit(self, row, next(pool for pool in self.pools if any(row is one for one in pool.rows)))

    def percent(self, seconds: float) -> float:
        return round(min(100.0, 100.0 * seconds / self.stats.wall_s), 1)

    def confidence(self, *factors: float) -> float:
        """All that speaks against being sure, multiplied; how short the interval is, too."""
        found = 0.95 if self.stats.num_batches >= _NUM_SURE else 0.6 + 0.35 * self.stats.num_batches / _NUM_SURE
        for factor in factors:
            found *= factor
        return round(max(0.05, found), 2)

    def suggested_workers(self, workers: int) -> int:
        """How many would be enough, if twice as many did twice as much; no more than four times as many at a time."""
        return max(
            workers + 1, min(4 * workers, ceil(workers / max(1e-9, 1 - self.share)) if self.share < 1 else 2 * workers)
        )


def _pools_of(stats: Stats) -> list[_Pool]:
    rows = {row.name: row for row in stats.stages}
    described: list[Mapping[str, Any]] = stats.tuning.get("pools") or [{"stages": list(rows)}]
    return [
        _Pool([rows[name] for name in pool["stages"]], stats.trials.get(pool["stages"][0], Trial()))
        for pool in described
    ]


# ------------------------------------------------------------------------------------------------ without a stage


def _training(case: _Case) -> Verdict:
    stats = case.stats
    use = max(pool.use for pool in case.pools)
    evidence = f"the loop waited {100 * case.share:.1f} % of {_seconds(case.wall_s)}"
    change = "nothing in loading: make the training step faster"
    if not case.is_inline:
        evidence += f"; the workers were busy for {100 * use:.0f} % of their time"
        workers = sum(pool.rows[0].workers for pool in case.pools)
        if use < _SPARE and workers > len(case.pools):
            change += "; fewer workers would do, if you need the CPUs"
    sure = case.confidence(1.0 if case.share < _HARMLESS / 2 else 0.9 if case.share < _HARMLESS else 0.75)
    return Verdict(
        None, round(100.0 - case.percent(sum(stats.stall_s.values())), 1), sure, evidence, change, "training"
    )


def _start(case: _Case) -> Verdict:
    stats = case.stats
    evidence = (
        f"of {_seconds(stats.wall_s)}, {_seconds(case.start_s)} went by before the first chunk could run, and "
        f"{_seconds(case.waited_s)} were waited after that"
    )
    change = (
        "call loader.start() while the model is made; look at stats(since=...) of a later moment for the steady state"
    )
    return Verdict(START, case.percent(case.start_s), case.confidence(), evidence, change, "start")


def _memory(case: _Case, use: float | None = None) -> Verdict:
    memory = case.stats.memory
    batch = memory.get("batch_bytes", 0)
    evidence = (
        f"prefetch.memory ({say_bytes(memory['budget_bytes'])}) holds {case.num_in_memory} of the {case.num_wanted} "
        f"batches that are to be read ahead, of {say_bytes(batch)} each; the loop waited {100 * case.share:.0f} % of the time"
    )
    if use is not None:
        evidence += f", while the workers stood still for {100 * (1 - use):.0f} %"
    change = f"prefetch.memory: {say_bytes(case.num_wanted * batch)} or more; or smaller batches"
    return Verdict(MEMORY, case.percent(case.waited_s), case.confidence(0.95), evidence, change, "memory")


def _wakeup(case: _Case) -> Verdict:
    seconds = case.stall_s[WAKEUP]
    each = f", {_seconds(seconds / case.stats.num_batches)} a batch" if case.stats.num_batches else ""
    lost = f"{_seconds(seconds)} of {_seconds(case.wall_s)}{each}"
    evidence = f"batches were ready, and the loop's thread was not running: {lost}"
    change = (
        "prefetch.executor: process, so that loading does not hold Python's lock when the loop needs it; or fewer workers; "
        "where a batch takes less than a millisecond, larger batches or executor: inline"
    )
    return Verdict(WAKEUP, case.percent(seconds), case.confidence(0.8), evidence, change, "wakeup")


# --------------------------------------------------------------------------------------------------- with a stage


@dataclass(frozen=True)
class _Limit:
    """The stage that most was waited for, and its pool."""

    case: _Case
    row: StageStats
    pool: _Pool

    def verdict(self) -> Verdict:
        case, first = self.case, self.case.pools[0]
        if self.has_stragglers:
            return self._stragglers()
        if (
            self.pool.use < _BUSY and not case.is_inline and case.stats.num_batches
        ):  # none of its workers holds the others up
            if case.is_short_of_memory:
                return _memory(case, self.pool.use)
            if first.total("blocked_s") > _WAITING * first.total("slot_s"):
                return self._depth()
        if self.is_serial:
            return self._taking_turns()
        return self.computing() if self.needs_cpu > _COMPUTING else self._waiting()

    def _taking_turns(self) -> Verdict:
        is_way = self.row.kind == "transfer" or (self.row.kind == "read" and self.row.num_bytes > 0)
        return self._bandwidth() if is_way else self._lock()

    @property
    def cpu_share(self) -> float:
        """The share of its busy time on a CPU."""
        return self.row.cpu_s / self.row.busy_s if self.row.busy_s > 0 else 0.0

    @property
    def needs_cpu(self) -> float:
        """The share of its busy time on a CPU, or ready for one while none was free."""
        return min(1.0, (self.row.cpu_s + self.row.delayed_s) / self.row.busy_s) if self.row.busy_s > 0 else 0.0

    @property
    def would_compute(self) -> bool:
        """Whether it is for want of a CPU that its workers wait, as far as they do."""
        waiting_share = self.pool.trial.waiting_share
        return self.needs_cpu > _COMPUTING if waiting_share is None else waiting_share < _WAITING

    @property
    def waiting(self) -> float:
        """Of the time in which its workers could have had a CPU, how much they waited for something else."""
        could_s = self.row.busy_s - self.row.delayed_s
        return max(0.0, 1 - self.row.cpu_s / could_s) if could_s > 0 else 0.0

    @property
    def is_serial(self) -> bool:
        """Whether one worker gets on as fast as all of them, and they hold one another up."""
        if self.pool.takes_turns:
            return True
        return (self.alone or 0.0) >= _SERIAL and self.waiting > _WAITING

    @property
    def is_gil(self) -> bool:
        """Whether its workers compute, together no more than one CPU can, and wait for one another meanwhile."""
        row, case = self.row, self.case
        if self.alone is not None and self.alone < _PARALLEL:
            return False
        if row.cpu_s < _LITTLE_CPU * case.wall_s or case.cpus_used > _ONE_CPU or case.is_inline:
            return False
        if self.pool.trial.holds_gil is not None:
            return self.pool.trial.holds_gil
        # As they were side by side; if they take turns since, they wait no more.
        waiting = self.waiting if self.pool.trial.waiting_share is None else self.pool.trial.waiting_share
        return row.workers > 1 and waiting > _WAITING

    @property
    def alone(self) -> float | None:
        """What one worker alone gets done, in shares of what all do; None: not tried."""
        return self.pool.trial.alone_share

    @property
    def has_stragglers(self) -> bool:
        usual_s = self.row.services.percentile(0.5)
        if usual_s is None or self.needs_cpu > _COMPUTING:
            return False
        slow_s = self.row.services.percentile(0.99) or 0.0
        return slow_s > _TAIL * usual_s and self.row.services.share_above(_TAIL * usual_s) > _TAIL_SHARE

    # ------------------------------------------------------------------------------------------------- in words

    def _say(self, kind: str, evidence: str, change: str, sure: float = 1.0, seconds: float | None = None) -> Verdict:
        """`seconds` were lost to it; default: what the loop waited for the stage."""
        case, row = self.case, self.row
        seconds = case.stall_s.get(row.name, 0.0) if seconds is None else seconds
        busy = f"its workers were busy for {100 * self.pool.use:.0f} % of their time"
        head = (
            f"the loop waited for {row.name} {case.percent(seconds):.0f} % of {_seconds(case.stats.wall_s)}; {busy}; "
        )
        # The share of the waiting that is charged to this stage, and whether its workers look as a limit does.
        clear = 0.6 + 0.4 * seconds / max(case.waited_s, 1e-9)
        agrees = 1.0 if self.pool.use >= _BUSY or case.is_inline or kind in ("depth", "stragglers") else 0.7
        return Verdict(
            row.name, case.percent(seconds), case.confidence(clear, agrees, sure), head + evidence, change, kind
        )

    def _stragglers(self) -> Verdict:
        services = self.row.services
        usual_s, slow_s = services.percentile(0.5) or 0.0, services.percentile(0.99) or 0.0
        share = services.share_above(_TAIL * usual_s)
        evidence = (
            f"an item usually takes {_seconds(usual_s)}, one in a hundred {_seconds(slow_s)}: stragglers take "
            f"{100 * share:.0f} % of its time"
        )
        change = (
            f"prefetch.batches: {2 * self.case.num_wanted}, so that others are ready meanwhile, and more workers; or find out "
            "what is special about those items"
        )
        return self._say("stragglers", evidence, change, 0.95)

    def _depth(self) -> Verdict:
        first = self.case.pools[0]
        blocked = first.total("blocked_s") / first.total("slot_s")
        evidence = (
            f"no pool was at its limit: workers stood still for {100 * blocked:.0f} % of the time because "
            f"{self.case.num_wanted} batches were open"
        )
        return self._say(
            "depth", evidence, f"prefetch.batches: {2 * self.case.num_wanted}, to even out what varies", 0.8
        )

    def computing(self) -> Verdict:
        case, row = self.case, self.row
        delayed = row.delayed_s / max(row.busy_s, 1e-9)
        evidence = f"{100 * self.cpu_share:.0f} % of that on a CPU"
        if delayed > 0.1:
            evidence += f", {100 * delayed:.0f} % ready to run while no CPU was free"
        evidence += f"; the workers use {case.cpus_used:.1f} CPUs"
        if case.num_cpus is not None:
            evidence += f" of {case.num_cpus}"
        cheaper = _CHEAPER.get(row.kind, f"a cheaper {row.name}")
        if case.is_inline:
            change = f"prefetch.executor: thread, so that it is done beside training; or {cheaper}"
        elif case.is_short_of_cpus:
            change = f"{cheaper}; or more CPUs: more workers would not help, since no CPU is free"
        else:
            change = f"{self._more_workers()}; or {cheaper}"
        if not case.is_short_of_cpus:
            return self._say("computing", evidence, change)
        share = row.cpu_s / max(1e-9, case.cpus_used * case.wall_s)
        seconds = max(case.stall_s.get(row.name, 0.0), share * case.waited_s)
        return self._say("computing", f"{evidence}, {100 * share:.0f} % of that for {row.name}", change, 1.0, seconds)

    def gil(self) -> Verdict:
        case, row = self.case, self.row
        share = row.cpu_s / max(1e-9, case.cpus_used * case.wall_s)
        waiting = self.waiting if self.pool.trial.waiting_share is None else self.pool.trial.waiting_share
        evidence = (
            f"the loop waited {100 * case.share:.0f} % of {_seconds(case.wall_s)}; the workers compute, but use "
            f"{case.cpus_used:.1f} CPUs in all, {100 * share:.0f} % of that for {row.name}; side by side they wait "
            f"for one another {100 * waiting:.0f} % of the time"
        )
        if self.pool.trial.holds_gil:
            evidence += f", and {_seconds(self.pool.trial.gil_wait_s or 0.0)} for Python's lock at every turn"
        if self.alone is not None:
            evidence += f"; {self._tried()}"
        change = (
            "prefetch.executor: process keeps it off the loop's Python lock, prefetch.processes gives it several; or do the "
            "work in NumPy or torch, which let go of the lock; more workers would not help"
        )
        sure = case.confidence(0.95 if self.alone is not None else 0.85)
        return Verdict(row.name, case.percent(case.waited_s), sure, evidence, change, "gil")

    def _lock(self) -> Verdict:
        evidence = (
            f"{self._tried()}, and they compute for {100 * self.cpu_share:.0f} % of the time: they wait for one another"
        )
        change = (
            f"give every worker its own of what {self.row.name} locks (a connection, a file, a model), or hold the lock for "
            "less; more workers would not help"
        )
        return self._say("lock", evidence, change, 0.95)

    def _bandwidth(self) -> Verdict:
        row = self.row
        speed = row.num_bytes / self.case.wall_s
        gives = f"; it gives {speed / 1e6:.3g} MB/s in all" if row.num_bytes else ""
        if row.kind == "transfer":
            change = "move less: uint8 until `normalize` behind `transfer`, fewer fields; or a faster link"
        else:
            change = "a faster store or a local copy, or smaller (compressed) samples; more workers would not help"
        return self._say("bandwidth", f"{self._tried()}, waiting: the way is full{gives}", change, 0.95)

    def _waiting(self) -> Verdict:
        case, row = self.case, self.row
        usual_s = row.services.percentile(0.5)
        evidence = f"{100 * (1 - self.needs_cpu):.0f} % of that waiting for something other than a CPU"
        if usual_s is not None:
            evidence += f", {_seconds(usual_s)} an item"
        change = "prefetch.executor: thread, with several workers" if case.is_inline else self._more_workers()
        kind, sure = "waiting", 0.9
        if self.alone is not None:
            evidence += f"; {self._tried()}: they do not hold one another up"
            kind, sure = "latency", 1.0
        if row.kind == "read":
            change += "; or fewer, larger requests: tar shards, order.shuffle: block"
        elif row.kind == "transfer":
            change = "move less: uint8 until `normalize` behind `transfer`, fewer fields; or a faster link"
            kind = "waiting"
        elif not case.is_inline:
            change += "; if the loop computes in Python, prefetch.executor: process"
        return self._say(kind, evidence, change, sure)

    def _tried(self) -> str:
        return f"one worker alone got {100 * (self.alone or 0.0):.0f} % of what all {self.row.workers} did"

    def _more_workers(self) -> str:
        wanted = self.case.suggested_workers(self.row.workers)
        return f'more workers: loader.resize("{self.row.name}", workers={wanted})'


_CHEAPER: Mapping[str, str] = {
    "decode": "cheaper images: stored at the size they are used at, or decode: {scaled: true} where they are shrunk",
    "batch": "less to copy: uint8 instead of float, one shape instead of padding, fewer fields",
    "call": "a cheaper function, or its work done once beforehand",
    "normalize": "`normalize` on the GPU, behind `transfer`",
}


def _seconds(seconds: float) -> str:
    """A duration for people."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} us"
