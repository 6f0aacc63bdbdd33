"""The stage that limits: how it does, told from its workers' time and from what `turns` tried, and what to change."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from loaderkit._internal.units import say_bytes, say_seconds
from loaderkit.engine.metrics.interval import WAITING, Interval, PoolUse, Verdict
from loaderkit.engine.metrics.snapshot import StageStats
from loaderkit.engine.metrics.stalls import MEMORY

_BUSY = 0.75  # of their time: workers that are busy for more are the limit
_COMPUTING = 0.6  # of the busy time, on a CPU or ready for one
_LITTLE_CPU = 0.3  # CPUs: whoever uses less does not hold the lock for long
_CROWDED = 0.25  # of the busy time, ready to run while no CPU was free
_TAIL = 4.0  # times the usual service time: a straggler
_TAIL_SHARE = 0.25  # of the busy time, spent on stragglers
_ALL_ALONE = 0.9  # of what all workers get done: one alone does it all
_PLAINLY = 1.2  # times as long as alone, or as its share: that is more than chance
_SEVERAL = 1.5  # workers, on average
_FILLS = (0.7, 1.3)  # times the wall time: as much as one worker's
_MOST_OF_A_CPU = 0.75
_ONE_CPU = 1.2  # the CPUs that all who need Python's lock can have together, and a little for what runs without it


@dataclass(frozen=True)
class BottleneckRules:
    """The stage that most was waited for, and its pool."""

    interval: Interval
    row: StageStats
    pool: PoolUse

    def verdict(self) -> Verdict:
        interval, first = self.interval, self.interval.pools[0]
        if self.has_stragglers and not self.is_unfair:
            return self._stragglers()
        # Workers that stand still although the loop waits hold nothing up; where no batch came at all, one of them hangs.
        if self.pool.use < _BUSY and not interval.is_inline and interval.stats.num_batches:
            if interval.is_short_of_memory:
                return memory_verdict(interval, self.pool.use)
            if first.total("blocked_s") > WAITING * first.total("slot_s"):
                return self._depth()
        if self.is_serial and not interval.is_self_served:
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
        return self.needs_cpu > _COMPUTING if waiting_share is None else waiting_share < WAITING

    @property
    def waiting(self) -> float:
        """Of the time in which its workers could have had a CPU, how much they waited for something else."""
        could_s = self.row.busy_s - (0.0 if self.is_delayed_by_others else self.row.delayed_s)
        return max(0.0, 1 - self.row.cpu_s / could_s) if could_s > 0 else 0.0

    @property
    def is_serial(self) -> bool:
        """Whether its workers hold one another up: side by side an item takes plainly longer, and one worker alone gets more
        than its share done, or as much as all, as where one has an unfair lock again and again while the others wait."""
        if self.pool.takes_turns:
            return self.needs_cpu <= _COMPUTING  # else one alone is faster for another reason than a lock: caches, say
        if self.alone is None or self.waiting <= WAITING:
            return False
        does_all = self.alone > _ALL_ALONE and self.num_inside > _SEVERAL
        is_held_up = self.num_in_stage > 1 and self.slowdown is not None and self.slowdown > self._middle
        return does_all or (is_held_up and self.alone * self.num_inside > _PLAINLY)

    @property
    def is_gil(self) -> bool:
        """Whether its workers compute, together no more than one CPU can, and wait for one another meanwhile."""
        row, interval = self.row, self.interval
        if (
            row.cpu_s < _LITTLE_CPU * interval.wall_s
            or interval.cpus_used > _ONE_CPU * interval.num_processes
            or interval.is_inline
        ):
            return False
        if (holds_gil := self.pool.trial.holds_gil) is not None:
            # Where the lock is held for a part of the time, several workers still get more done.
            is_full = interval.cpus_used > _MOST_OF_A_CPU * interval.num_processes
            return holds_gil and (is_full or self.is_as_fast_alone is not False)
        return self.num_side_by_side > 1 and self.together_waiting > WAITING and self.is_as_fast_alone is not False

    @property
    def together_waiting(self) -> float:
        """How much its workers waited when they were last side by side: if they take turns since, they wait no more."""
        waiting_share = self.pool.trial.waiting_share
        if waiting_share is None:
            return self.waiting
        # The trial takes every delay for the want of a CPU.
        return max(waiting_share, self.waiting) if self.is_delayed_by_others else waiting_share

    @property
    def is_delayed_by_others(self) -> bool:
        """Whether its workers were ready to run although CPUs were idle, and not only between two bursts of work."""
        return self.interval.has_idle_cpus and self.pool.total("blocked_s") < WAITING * self.pool.total("slot_s")

    @property
    def num_side_by_side(self) -> int:
        """Its workers in one process: those that take turns with one another."""
        return max(1, self.row.workers // self.interval.num_processes)

    @property
    def alone(self) -> float | None:
        """What one worker alone gets done, in shares of what all do; None: not tried."""
        return self.pool.trial.alone_share

    @property
    def is_as_fast_alone(self) -> bool | None:
        """Whether one worker alone gets nearer to what all do than to its share of that, by ratio; None: not tried."""
        return None if self.alone is None else bool(self.alone >= self.num_tried**-0.5)

    @property
    def num_tried(self) -> float:
        """How many of its workers there were on average when one alone was compared with them."""
        return max(1.0, min(self.pool.trial.num_inside or self.num_side_by_side, self.num_side_by_side))

    @property
    def slowdown(self) -> float | None:
        """How many times as long an item takes in this stage while workers are side by side as with one alone; None: not
        tried."""
        return self.pool.trial.slowdowns.get(self.row.name)

    @property
    def num_inside(self) -> float:
        """How many workers there were on average when one alone was compared with them; there may be others by now."""
        return max(1.0, self.pool.trial.num_inside or self.num_side_by_side)

    @property
    def num_in_stage(self) -> float:
        """How many of those workers were in this stage at a time, on average: if it lets in one, so many times as long does
        an item take."""
        busy_s = self.pool.total("busy_s")
        return self.num_inside * self.row.busy_s / busy_s if busy_s > 0 else self.num_inside

    @property
    def _middle(self) -> float:
        """The slowdown between each at its own pace, 1, and one at a time, `num_in_stage`: nearer to 1 by ratio, since that is
        seen within a tenth, while one alone is slowed by what comes between two items as well."""
        return max(math.cbrt(self.num_in_stage), _PLAINLY)

    @property
    def has_stragglers(self) -> bool:
        usual_s = self.row.services.percentile(0.5)
        if usual_s is None or self.needs_cpu > _COMPUTING:
            return False
        slow_s = self.row.services.percentile(0.99) or 0.0
        slow_share = self.row.services.share_above(_TAIL * usual_s)
        # What was slow for want of a CPU is no straggler.
        by_itself = slow_share - self.row.delayed_s / max(self.row.busy_s, 1e-9)
        return slow_s > _TAIL * usual_s and slow_share > _TAIL_SHARE and by_itself > _TAIL_SHARE / 2

    @property
    def is_unfair(self) -> bool:
        """Whether stragglers are those that a lock keeps waiting while others get it again and again: one worker alone gets
        as much done, and the usual items, one behind another, fill the time."""
        usual_s = (self.row.services.percentile(0.5) or 0.0) * self.row.num_items
        fills = _FILLS[0] < usual_s / self.interval.wall_s < _FILLS[1]
        return fills and (self.pool.takes_turns or (self.alone is not None and self.alone > _ALL_ALONE))

    # ------------------------------------------------------------------------------------------------- in words

    def _say(self, kind: str, evidence: str, change: str, sure: float = 1.0, seconds: float | None = None) -> Verdict:
        """`seconds` were lost to it; default: what the loop waited for the stage."""
        interval, row = self.interval, self.row
        seconds = interval.stall_s.get(row.name, 0.0) if seconds is None else seconds
        busy = f"its workers were busy for {100 * self.pool.use:.0f} % of their time"
        waited = f"{interval.percent(seconds):.0f} % of {say_seconds(interval.stats.wall_s)}"
        head = f"the loop waited for {row.name} {waited}; {busy}; "
        # The share of the waiting that is charged to this stage, and whether its workers look as a limit does.
        clear = 0.6 + 0.4 * seconds / max(interval.waited_s, 1e-9)
        agrees = 1.0 if self.pool.use >= _BUSY or interval.is_inline or kind in ("depth", "stragglers") else 0.7
        return Verdict(
            row.name, interval.percent(seconds), interval.confidence(clear, agrees, sure), head + evidence, change, kind
        )

    def _stragglers(self) -> Verdict:
        services = self.row.services
        usual_s, slow_s = services.percentile(0.5) or 0.0, services.percentile(0.99) or 0.0
        share = services.share_above(_TAIL * usual_s)
        evidence = (
            f"an item usually takes {say_seconds(usual_s)}, one in a hundred {say_seconds(slow_s)}: stragglers take "
            f"{100 * share:.0f} % of its time"
        )
        change = (
            f"prefetch.batches: {2 * self.interval.num_wanted}, so that others are ready meanwhile, and more workers; or find "
            "out what is special about those items"
        )
        return self._say("stragglers", evidence, change, 0.95)

    def _depth(self) -> Verdict:
        first = self.interval.pools[0]
        blocked = first.total("blocked_s") / first.total("slot_s")
        evidence = (
            f"no pool was at its limit: workers stood still for {100 * blocked:.0f} % of the time because "
            f"{self.interval.num_wanted} batches were open"
        )
        return self._say(
            "depth", evidence, f"prefetch.batches: {2 * self.interval.num_wanted}, to even out what varies", 0.8
        )

    def computing(self) -> Verdict:
        interval, row = self.interval, self.row
        delayed = row.delayed_s / max(row.busy_s, 1e-9)
        evidence = f"{100 * self.cpu_share:.0f} % of that on a CPU"
        if delayed > 0.1:
            evidence += f", {100 * delayed:.0f} % ready to run while {self._cpus_meanwhile}"
        evidence += f"; the workers use {interval.cpus_used:.1f} CPUs"
        if interval.num_cpus is not None:
            evidence += f" of {interval.num_cpus}"
        cheaper = _CHEAPER.get(row.kind, f"a cheaper {row.name}")
        if interval.is_inline:
            change = f"{self._by_workers('so that it is done beside training')}; or {cheaper}"
        elif interval.is_short_of_cpus:
            change = f"{cheaper}; or more CPUs: more workers would not help, since no CPU is free"
        elif self.pool.takes_turns:
            change = f"{cheaper}; more workers would not help: one alone was faster"
        else:
            change = f"{self._more_workers()}; or {cheaper}"
        if not interval.is_short_of_cpus:
            return self._say("computing", evidence, change)
        share = row.cpu_s / max(1e-9, interval.cpus_used * interval.wall_s)
        seconds = max(interval.stall_s.get(row.name, 0.0), share * interval.waited_s)
        # Where other programs have the CPUs, workers that wait for one another look much the same.
        sure = 1.0 if delayed < _CROWDED else 0.8
        return self._say("computing", f"{evidence}, {100 * share:.0f} % of that for {row.name}", change, sure, seconds)

    def gil(self) -> Verdict:
        interval, row = self.interval, self.row
        share = row.cpu_s / max(1e-9, interval.cpus_used * interval.wall_s)
        evidence = (
            f"the loop waited {100 * interval.share:.0f} % of {say_seconds(interval.wall_s)}; the workers compute, but use "
            f"{interval.cpus_used:.1f} CPUs in all, {100 * share:.0f} % of that for {row.name}; side by side they wait "
            f"for one another {100 * self.together_waiting:.0f} % of the time"
        )
        if self.pool.trial.holds_gil:
            evidence += (
                f"; Python's lock was taken {100 * (self.pool.trial.gil_taken or 0.0):.0f} % of the times one asked"
            )
        if self.alone is not None:
            evidence += f"; {self._tried()}"
        change = (
            "prefetch.executor: process keeps it off the loop's Python lock, prefetch.processes gives it several; or do the "
            "work in NumPy or torch, which let go of the lock; more workers would not help"
        )
        sure = interval.confidence(0.95 if self.pool.trial.holds_gil else 0.75)
        return Verdict(row.name, interval.percent(interval.waited_s), sure, evidence, change, "gil")

    def _lock(self) -> Verdict:
        evidence = f"{self._tried()}, on a CPU for {100 * self.cpu_share:.0f} %: they wait for one another"
        change = (
            f"give every worker its own of what {self.row.name} locks (a connection, a file, a model), or hold the lock for "
            "less; more workers would not help"
        )
        return self._say("lock", evidence, change, self._sure_of_trial)

    def _bandwidth(self) -> Verdict:
        row = self.row
        speed = row.num_bytes / self.interval.wall_s
        gives = f"; it gives {speed / 1e6:.3g} MB/s in all" if row.num_bytes else ""
        if row.kind == "transfer":
            change = "move less: uint8 until `normalize` behind `transfer`, fewer fields; or a faster link"
        else:
            change = "a faster store or a local copy, or smaller (compressed) samples; more workers would not help"
        return self._say("bandwidth", f"{self._tried()}, waiting: the way is full{gives}", change, self._sure_of_trial)

    def _waiting(self) -> Verdict:
        interval, row = self.interval, self.row
        usual_s = row.services.percentile(0.5)
        evidence = f"{100 * (1 - self.needs_cpu):.0f} % of that waiting for something other than a CPU"
        if usual_s is not None:
            evidence += f", {say_seconds(usual_s)} an item"
        change = self._by_workers("with several workers") if interval.is_inline else self._more_workers()
        kind, sure = "waiting", 0.9
        if self.alone is not None:
            is_plain = self.slowdown is not None and self.slowdown < _PLAINLY
            evidence += f"; {self._tried()}{': they do not hold one another up' if is_plain else ''}"
            kind, sure = "latency", self._sure_of_trial
        if row.kind == "read":
            change += "; or fewer, larger requests: tar shards, order.shuffle: block"
        elif row.kind == "transfer":
            change = "move less: uint8 until `normalize` behind `transfer`, fewer fields; or a faster link"
            kind = "waiting"
        elif not interval.is_inline:
            change += "; if the loop computes in Python, prefetch.executor: process"
        return self._say(kind, evidence, change, sure)

    @property
    def _cpus_meanwhile(self) -> str:
        return f"{self.interval.num_idle_cpus:.1f} CPUs were idle" if self.interval.has_idle_cpus else "no CPU was free"

    @property
    def _sure_of_trial(self) -> float:
        """Less than 1, the nearer what came of it is to the middle between together and one at a time."""
        if self.slowdown is None or (self.slowdown > self._middle) != self.is_serial:
            return 0.8
        return min(1.0, 0.7 + 1.5 * abs(1 - self.slowdown / self._middle))

    def _tried(self) -> str:
        all_of_them, tried = self.num_side_by_side, round(self.num_tried)
        others = f"all {all_of_them}" if tried == all_of_them else f"{tried} of {all_of_them} at a time"
        evidence = f"one worker alone got {100 * (self.alone or 0.0):.0f} % of what {others} did"
        if self.slowdown is not None:
            evidence += f", and {self.row.name} takes {self.slowdown:.1f} times as long side by side"
        return evidence

    def _by_workers(self, how: str) -> str:
        """What to change where the loop's thread makes the batches."""
        if self.interval.is_self_served:
            return "larger batches: the loop makes these itself, since to be handed one by a worker took longer"
        return f"prefetch.executor: thread, {how}"

    def _more_workers(self) -> str:
        if self.pool.is_in_trainer:
            return "nothing in the number of workers: one thread in the trainer's process runs it"
        wanted = self.interval.suggested_workers(self.row.workers)
        return f'more workers: loader.resize("{self.row.name}", workers={wanted})'


_CHEAPER: Mapping[str, str] = {
    "decode": "cheaper images: stored at the size they are used at, or decode: {scaled: true} where they are shrunk",
    "batch": "less to copy: uint8 instead of float, one shape instead of padding, fewer fields",
    "call": "a cheaper function, or its work done once beforehand",
    "normalize": "`normalize` on the GPU, behind `transfer`",
}


def memory_verdict(interval: Interval, use: float | None = None) -> Verdict:
    memory = interval.stats.memory
    batch = memory.get("batch_bytes", 0)
    evidence = (
        f"prefetch.memory ({say_bytes(memory['budget_bytes'])}) holds {interval.num_in_memory} of the {interval.num_wanted} "
        f"batches that are to be read ahead, of {say_bytes(batch)} each; the loop waited "
        f"{100 * interval.share:.0f} % of the time"
    )
    if use is not None:
        evidence += f", while the workers stood still for {100 * (1 - use):.0f} %"
    change = f"prefetch.memory: {say_bytes(interval.num_wanted * batch)} or more; or smaller batches"
    return Verdict(MEMORY, interval.percent(interval.waited_s), interval.confidence(0.95), evidence, change, "memory")
