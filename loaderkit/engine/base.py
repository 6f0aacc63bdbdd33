"""The engine: takes chunks through the stages, hands work items over in order, and measures what it does.

A chunk runs through all stages of a pool without a hand-off. Which thread runs it is decided in `threaded.py` and
`inline.py`.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from loaderkit.engine.autotune.contention_probe import ContentionProbe, SoloGate
from loaderkit.engine.contracts import Plan
from loaderkit.engine.lifetime import Lifetime
from loaderkit.engine.metrics import stalls
from loaderkit.engine.metrics.consumer_account import ConsumerAccount
from loaderkit.engine.metrics.host import host_stats
from loaderkit.engine.metrics.slow_samples import SlowItems
from loaderkit.engine.metrics.snapshot import Snapshot, StageStats, add_worker_time
from loaderkit.engine.metrics.trace import WHOLE, Trace, finished_lane, new_entries, num_entries
from loaderkit.engine.metrics.tuning import Tuning
from loaderkit.engine.metrics.worker_clock import Clock, WorkerClock, WorkerStates
from loaderkit.engine.pools import Buffer, PoolPlan
from loaderkit.engine.serial_turn import Turn
from loaderkit.engine.work import Chunk, Stage, WorkItem
from loaderkit.errors import ConfigError


class WorkerPool:
    """A running pool. The first takes its chunks from the scheduler, the others from a buffer."""

    def __init__(
        self,
        number: int,
        plan: PoolPlan,
        stages: Sequence[Stage],
        states: WorkerStates,
        clock: Clock,
        *,
        tries_one_worker: bool = True,
    ) -> None:
        """`stages`: the stages of all pools."""
        self.number = number
        self.plan = plan
        self.sample_stages = [(number, _run_of(stages[number]), stages[number].part) for number in plan.sample_stages]
        self.batch_stages = [(number, _run_of(stages[number])) for number in plan.batch_stages]
        before_last = plan.sample_stages[:-1]
        # The stage that `Plan.finish` completes, if another one follows it in this pool.
        self.finishing = next((number for number in before_last if stages[number].finishes), None)
        self.num_workers = plan.num_workers  # wanted at present; the others are idle
        self.buffer: Buffer[Chunk | WorkItem] | None = Buffer(2 * plan.num_workers, states) if number else None
        self.gate = SoloGate()
        names = [stage.name for stage in stages]
        self.probe = ContentionProbe(names, self.gate, clock) if tries_one_worker else None
        self.worker_clocks: list[WorkerClock] = []
        self.threads: list[threading.Thread] = []

    def one_works(self) -> bool:
        """True if only one worker takes chunks at present."""
        return self.num_workers == 1 or self.gate.is_solo


def _run_of(stage: Stage) -> Callable[..., Any] | None:
    """The function that runs a stage; None if one worker at a time runs it."""
    return None if stage.in_turn or stage.lock is not None else stage.run


class Engine(ABC):
    """Runs a plan. All public methods but `stats` and `close` belong to the consumer's thread."""

    def __init__(
        self,
        plan: Plan,
        stages: Sequence[Stage],
        pools: Sequence[PoolPlan],
        *,
        tries_one_worker: bool = True,
        clock: Clock = time.perf_counter,
        counters: Callable[[], dict[str, float]] | None = None,
    ) -> None:
        """`tries_one_worker`: the contention probe may let one worker work alone; False where no stage holds the GIL, and
        workers are off the CPU because they wait for a store. `counters` returns the connector's counters."""
        self.plan = plan
        self.stages = stages
        self.states = WorkerStates(len(stages))
        self.clock = clock
        self.counters = counters
        self.pools = [
            WorkerPool(number, pool, stages, self.states, clock, tries_one_worker=tries_one_worker)
            for number, pool in enumerate(pools)
        ]
        self.turns: list[Turn | None] = [Turn() if stage.in_turn else None for stage in stages]
        self._stage_names = [stage.name for stage in stages]
        worker_clocks = [pool.worker_clocks for pool in self.pools]
        self._facts = {short: stalls.WaitFacts(short, self._stage_names, worker_clocks) for short in (False, True)}
        self.account = ConsumerAccount(clock)
        self.slow_items = SlowItems(len(stages))
        self._num_entries = 0  # kept of each worker's trace; 0: no trace
        self.lifetime = Lifetime()
        self._has_ended = False

    # ------------------------------------------------------------------------------------- what a subclass implements

    @abstractmethod
    def start(self) -> None:
        """Start to read ahead, if this engine does. Idempotent."""

    @abstractmethod
    def _wait(self) -> WorkItem:
        """The next work item, once it is complete."""

    @abstractmethod
    def _land(self, chunk: Chunk) -> WorkItem | None:
        """Count a chunk as landed; returns its work item, if that was the last chunk and the item is not cancelled."""

    @abstractmethod
    def resize(self, stage: str, num_workers: int) -> None:
        """Set the number of workers of the pool that runs `stage`; from any thread. Raises ConfigError."""

    @abstractmethod
    def set_depth(self, num_batches: int | None, memory_bytes: int | None) -> None:
        """Set how many batches are read ahead, and in how many bytes; None leaves a value unchanged. From any thread."""

    def set_processes(self, num: int, refused: Callable[[str], None]) -> None:
        """This engine is in one process, the trainer's or a worker's. Raises ConfigError."""
        raise ConfigError("an engine of threads has no processes to be more or fewer")

    @abstractmethod
    def seek(self, epoch: int, position: int) -> None:
        """Drop everything read ahead and continue at another position, unless the plan is already there."""

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """Make the consumer raise `error` at its next wait; from any thread."""

    @abstractmethod
    def _stop(self, join_s: float) -> None:
        """Cancel open work and return when no worker is left, or after `join_s`."""

    @abstractmethod
    def head(self) -> WorkItem | None:
        """The awaited work item, for reports; from any thread."""

    @property
    @abstractmethod
    def is_short_of_memory(self) -> bool:
        """True if memory, not depth, keeps the next work item from being opened."""

    @property
    @abstractmethod
    def num_queued(self) -> int:
        """Chunks that no worker has taken yet; for any thread."""

    @property
    @abstractmethod
    def num_open(self) -> int:
        """Work items that hold memory, other than those that were handed over."""

    @property
    @abstractmethod
    def num_ready(self) -> int:
        """Work items that are complete and wait for the consumer."""

    # ------------------------------------------------------------------------------------------------ the consumer

    def next(self) -> WorkItem:
        """The next work item in order, complete; its error, if it has one, is still in it."""
        work_item = self.account.take(self._wait, self._causes)
        work_item.last_chunk = None
        work_item.chunks = []
        return work_item

    def _causes(self, work_item: WorkItem, begin_s: float, end_s: float) -> dict[str, float]:
        assert work_item.last_chunk is not None
        path = stalls.ChunkPath(work_item.opened_s, work_item.last_chunk.marks, work_item.done_s)
        return self.attribute(begin_s, end_s, path)

    def attribute(self, begin_s: float, end_s: float, path: stalls.ChunkPath) -> dict[str, float]:
        """Seconds of the wait [begin_s, end_s) by cause, along the path of the awaited chunk."""
        if path.done_s <= begin_s:  # it was ready before the wait; most waits are such
            return {stalls.WAKEUP: end_s - begin_s}
        return stalls.attribute(begin_s, end_s, path, self._facts[self.is_short_of_memory])

    def open_wait(self, begin: float | None, now: float) -> dict[str, float]:
        """Seconds by cause of the wait that the consumer has been in since `begin`; for any thread."""
        if begin is None or begin >= now or self.lifetime.is_fork:
            return {}
        head = self.head()
        if head is not None and head.is_done:
            return self.attribute(begin, now, stalls.ChunkPath(head.opened_s, [], head.done_s))
        if head is None:
            path = stalls.ChunkPath(now, [], now)
        else:
            # The least advanced of the chunks that keep the batch waiting.
            unfinished = [chunk for chunk in list(head.chunks) if not chunk.has_landed]
            last = min(unfinished, key=lambda chunk: len(chunk.marks), default=None)
            path = stalls.ChunkPath(head.opened_s, list(last.marks) if last is not None else [], now)
        return self.attribute(begin, now, path)

    def stats(self, tuning: Tuning, run: int, at_s: float | None = None) -> Snapshot:
        """The counters up to now, or to `at_s`, a moment ago; for any thread. About 0.2 ms with two workers, 1 ms with 64 and
        eight stages."""
        read = self.account.read(at_s)
        counters = read.counters(self.open_wait(read.waiting_since_s, read.now_s))
        rows = [StageStats.of(stage, 0) for stage in self.stages]
        for pool in self.pools:
            numbers = pool.plan.stages
            first, last = rows[numbers[0]], rows[numbers[-1]]
            for number in numbers:
                rows[number].workers = pool.num_workers
            first.num_queued = self.num_queued if pool.buffer is None else len(pool.buffer)
            # Inline, one worker clock serves all pools; threads only enter the stages of their own pool.
            add_worker_time(rows, (first, last), list(pool.worker_clocks), self.states, read.now_s)
        host = self.account.cpus.added_to(host_stats())
        return Snapshot(
            run=run,
            **counters,
            stages=rows,
            num_ready=self.num_ready,
            num_open=self.num_open,
            memory={
                "budget_bytes": self.plan.memory_bytes,
                **self.plan.memory_stats(self.num_open),
                "rss_peak_bytes": host.rss_peak_bytes,
            },
            host=host,
            tuning=tuning,
            trials={
                self.stages[pool.plan.stages[0]].name: pool.probe.trial for pool in self.pools if pool.probe is not None
            },
            slowest={stage.name: self.slow_items.kept(number) for number, stage in enumerate(self.stages)},
            store=dict(self.counters()) if self.counters is not None else {},
        )

    def record(self) -> None:
        """Start a trace of workers and loop that keeps the last `num_entries` of each worker."""
        self._num_entries = num_entries(sum(pool.num_workers for pool in self.pools))
        self.account.record(self._num_entries)
        for pool in self.pools:
            for worker_clock in pool.worker_clocks:
                self._record(worker_clock)

    def _new_worker_clock(self, first_state: int, since_s: float | None = None) -> WorkerClock:
        """The clock of a new worker, traced if a trace is being recorded."""
        worker_clock = WorkerClock(
            self.states, self.clock, first_state=first_state, since_s=since_s, slow_items=self.slow_items
        )
        self._record(worker_clock)
        return worker_clock

    def _record(self, worker_clock: WorkerClock) -> None:
        if self._num_entries:
            worker_clock.trace = new_entries(self._num_entries, self.clock(), worker_clock.open_state)

    def recorded(self) -> Trace:
        """The trace since `record`; ends it. For any thread."""
        self._num_entries = 0
        names = (*self._stage_names, "starved", "blocked", "idle")
        lanes = []
        for pool in self.pools:
            stages = "+".join(self._stage_names[number] for number in pool.plan.stages)
            for number, worker_clock in enumerate(pool.worker_clocks):
                entries, worker_clock.trace = worker_clock.trace, None
                if entries is not None:
                    name = f"{stages} {number}" if pool.threads else "in the loop's thread"
                    lanes.append(finished_lane(entries, self.lifetime.pid, name, names, self.clock()))
        return Trace(lanes, self.account.recorded())

    def close(self, join_s: float = 10.0) -> None:
        """Stop and join the workers and drop what was read ahead. Idempotent, from any thread and any state."""
        if self.lifetime.is_fork:
            self.lifetime.is_closed = True
            return
        if self._has_ended:
            return
        for stage in self.stages:
            if stage.interrupt is not None:
                stage.interrupt()
        self._stop(join_s)
        for stage in self.stages:
            if stage.close is not None:
                stage.close()
        self.plan.close()
        self._has_ended = True  # set last: a second call completes a close that Ctrl-C has interrupted

    def abandon(self) -> None:
        """Close because the loader was collected."""
        self.close()

    # --------------------------------------------------------------------------------------------- running stages

    def _run(self, pool: WorkerPool, worker_clock: WorkerClock, item: Chunk | WorkItem) -> Chunk | WorkItem | None:
        """Run a pool's stages on an item. Returns what to pass on: the chunk, its complete work item, or None."""
        if isinstance(item, WorkItem):
            self._run_batch_stages(pool, worker_clock, item)
            return item
        work_item = item.work_item
        if worker_clock.trace is not None:
            worker_clock.item = (work_item.epoch, work_item.end, item.lo, item.hi)
        num_items, num_failed = len(item), item.num_failed if item.failures else 0
        try:
            for number, run, part_of in pool.sample_stages:
                turn = self.turns[number]
                if work_item.cancelled:
                    if turn is not None:
                        turn.pass_on(item.number)
                    continue  # others may have turns, too
                item.marks.append((worker_clock.enter(number), number))
                num_bytes = run(item) if run is not None else self._run_alone(turn, number, worker_clock, item)
                if part_of is None:
                    worker_clock.served(number, num_items, num_bytes or 0, item)
                elif (part := part_of(item)) is not None:
                    worker_clock.served(number, len(part), num_bytes or 0, part)
                if item.failures and item.num_failed > num_failed:
                    worker_clock.failed(number, item.num_failed - num_failed)
                    num_failed = item.num_failed
        except Exception as error:
            work_item.error = work_item.error or error
        if not pool.plan.lands:
            return item
        landed = self._land(item)
        if landed is not None:
            self._run_batch_stages(pool, worker_clock, landed)
        return landed

    def _run_in_turn(self, turn: Turn, number: int, worker_clock: WorkerClock, chunk: Chunk) -> int | None:
        """Run a stage that one worker at a time runs; a worker that waits for its turn is starved, not busy."""
        waiting = turn.take(chunk.number)
        if waiting is not None:
            worker_clock.enter(self.states.starved)
            waiting.acquire()
            worker_clock.enter(number)
        try:
            num_bytes: int | None = None if turn.is_closed else self.stages[number].run(chunk)
            return num_bytes
        finally:
            turn.pass_on(chunk.number)

    def _run_alone(self, turn: Turn | None, number: int, worker_clock: WorkerClock, chunk: Chunk) -> int | None:
        """Run a stage that one worker at a time runs: in the order of the chunks, or in any."""
        if turn is not None:
            return self._run_in_turn(turn, number, worker_clock, chunk)
        return self._run_locked(number, worker_clock, chunk)

    def _run_locked(self, number: int, worker_clock: WorkerClock, *arguments: Any) -> int | None:
        """Run user code that one thread at a time may run; a worker that waits for another one is starved, not busy."""
        stage = self.stages[number]
        if (lock := stage.lock) is None:
            plain: int | None = stage.run(*arguments)
            return plain

        def look() -> None:
            if worker_clock.open_state != self.states.starved:
                worker_clock.enter(self.states.starved)
            self.lifetime.check_awaited()

        def run() -> int | None:
            if worker_clock.open_state != number:
                worker_clock.enter(number)
            num_bytes: int | None = stage.run(*arguments)
            return num_bytes

        return lock.run(run, look)

    def _run_batch_stages(self, pool: WorkerPool, worker_clock: WorkerClock, work_item: WorkItem) -> None:
        if worker_clock.trace is not None:
            worker_clock.item = (work_item.epoch, work_item.end, WHOLE, WHOLE)
        try:
            if work_item.result is None and work_item.error is None:
                if pool.finishing is not None:
                    self._enter(work_item, worker_clock, pool.finishing)
                work_item.result = self.plan.finish(work_item)
            for number, run in pool.batch_stages:
                if work_item.cancelled or work_item.error is not None or work_item.is_empty:
                    break
                self._enter(work_item, worker_clock, number)
                context = self.plan.context(work_item)
                if run is not None:
                    run(work_item.result, context)
                else:
                    self._run_locked(number, worker_clock, work_item.result, context)
                worker_clock.served(number, len(work_item), 0)
        except Exception as error:
            work_item.error = error

    @staticmethod
    def _enter(work_item: WorkItem, worker_clock: WorkerClock, stage: int) -> None:
        """Note that a worker begins a stage on a whole batch."""
        now = worker_clock.enter(stage)
        assert work_item.last_chunk is not None
        work_item.last_chunk.marks.append((now, stage))
