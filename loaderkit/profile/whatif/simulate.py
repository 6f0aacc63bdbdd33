"""Simulates a pipeline with the times that were measured, not with their means: where times vary, batches ahead pay.

The engine's own scheduler deals out chunks, keeps order and budget, and sets the length of chunks; only time is simulated.
CPUs and the GIL are shared evenly by those that want them (processor sharing), waits overlap, and what one worker uses at a
time is used in turn. The seed is fixed: variants of a pipeline meet the same slow samples, and a report is reproducible.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from typing import NamedTuple, cast

import numpy as np

from loaderkit.engine.contracts import Plan
from loaderkit.engine.metrics.worker_clock import WorkerClock, WorkerStates
from loaderkit.engine.scheduler import Scheduler
from loaderkit.engine.work import Chunk, WorkItem
from loaderkit.profile.whatif.demands import PipelineModel, chunk_length
from loaderkit.profile.whatif.times import Draws

_NUM_SAMPLES, _MOST_SAMPLES, _NUM_BATCHES, _NUM_SLOW = 2000, 6000, 64, 30
_NUM_ROUNDS = 4  # of processes taking turns
_NOTICED = 0.02  # of the time: slow samples that add less need not be met so often
_WARM = 8  # the first eighth of the batches does not count


def most_ahead(batch: float) -> int:
    """The most batches ahead to simulate: more of them make no difference in a run."""
    return max(_NUM_BATCHES, int(_NUM_SAMPLES / max(batch, 1.0)))


class _SimulatedPlan:
    """The batches of one loading process, every `stride`th of all; see `engine.contracts.Plan`."""

    is_prepared = True

    def __init__(self, batch_size: int, chunk: int, room: int, numbers: range) -> None:
        self.batch_size = batch_size
        self._chunk = chunk
        self.room = (room, False)
        self.numbers = deque(numbers)  # of batches that are not open yet

    def open(self, chunk_size: int) -> WorkItem:
        number, size, num = self.numbers.popleft(), self.batch_size, -(-self.batch_size // (self._chunk or chunk_size))
        item = WorkItem(0, number * size, (number + 1) * size, size)
        item.chunks = [Chunk(item, size * n // num, size * (n + 1) // num) for n in range(num)]
        item.num_pending = num
        return item

    def release(self, work_item: WorkItem) -> None:
        """Nothing to do: there is no memory."""


class _Phase(NamedTuple):
    """Seconds on a CPU (`lane` 0), under a GIL (`lane` 1 + process), or waiting (`lane` None)."""

    lane: int | None
    seconds: float
    pauses: deque[tuple[float, float]] | None = None  # (begin, end) of the times at which none continues
    is_serial: bool = False


_NOTHING = _Phase(None, 0.0)  # yet an event of its own


class _Task:
    """A worker with a chunk or batch in pool `pool` of a process; or the loop, which has none."""

    __slots__ = ("phases", "pool", "process", "unit")

    def __init__(self, process: int, pool: int, unit: Chunk | WorkItem | None, phases: list[_Phase]) -> None:
        self.process, self.pool, self.unit = process, pool, unit
        self.phases = phases[::-1]


class _Processors:
    """CPUs shared evenly by the threads that can run, ours and other programs'. Of the threads under one GIL only one
    can run."""

    def __init__(self, cpus: float, others: float, num_gils: int) -> None:
        self._cpus, self._others = cpus, others
        self._lanes: list[list[tuple[float, int, _Task]]] = [[] for _ in range(1 + num_gils)]
        self._served_s = [0.0] * (1 + num_gils)  # what a thread that was there all the time would have got
        self._rates = [1.0] * (1 + num_gils)
        self._count = 0

    def add(self, lane: int, seconds: float, task: _Task) -> None:
        self._count += 1
        heapq.heappush(self._lanes[lane], (self._served_s[lane] + seconds, self._count, task))
        self._share_out()

    def next_s(self) -> tuple[float, int]:
        """In how many seconds the next thread is done, and in which lane."""
        lanes = [(lane, waiting[0][0]) for lane, waiting in enumerate(self._lanes) if waiting]
        left = ((max(0.0, at_s - self._served_s[lane]) / self._rates[lane], lane) for lane, at_s in lanes)
        return min(left, default=(math.inf, 0))

    def pop(self, lane: int) -> _Task:
        task = heapq.heappop(self._lanes[lane])[2]
        self._share_out()
        return task

    def advance(self, seconds: float) -> None:
        for lane, rate in enumerate(self._rates):
            self._served_s[lane] += rate * seconds

    def _share_out(self) -> None:
        lanes = self._lanes
        running = len(lanes[0]) + sum(map(bool, lanes[1:])) + self._others
        each = self._cpus / running if running > self._cpus else 1.0
        self._rates = [each, *(each / (len(lane) or 1) for lane in lanes[1:])]


class Simulation:
    """One run of a model. Of `num_batches` only the first `num_counted` count, so that later batches are already begun
    when these end."""

    def __init__(self, model: PipelineModel, seed: int = 0) -> None:
        self._model = model
        self._batch = max(1, round(model.batch))
        least_s = _NOTICED * sum(stage.service_s for stage in model.stages)
        rare = max((one.times.every for one in model.stages if one.service_s - one.usual_s > least_s), default=0.0)
        wanted = min(_MOST_SAMPLES, max(_NUM_SAMPLES, _NUM_SLOW * rare))
        num = max(1, model.processes)
        num_counted = max(_NUM_BATCHES, int(wanted / self._batch), _NUM_ROUNDS * num)
        # Whole rounds: processes that work at one pace deliver in bursts, one round of turns at a time.
        while (num_counted - 1 - num_counted // _WARM) % num:
            num_counted += 1
        # Behind the batches that count there are as many as are read ahead: else these would come from a stock that is
        # never refilled.
        ahead = min(model.batches_ahead, model.batches_in_memory, num_counted)
        self.num_batches = num_counted + num * max(1, int(ahead) // num)
        self.num_counted = num_counted
        num_samples = self.num_batches * self._batch
        rngs = np.random.default_rng(seed).spawn(len(model.stages) + 1)
        draws = iter(
            Draws(stage.times, (stage.cpu_s, stage.wait_s), num_counted * self._batch, num_samples, rng)
            for stage, rng in zip(model.stages, rngs[1:], strict=True)
        )
        self._pools = [[(stage, next(draws)) for stage in pool.stages] for pool in model.pools]
        self._computes = [(model.compute_s * factor + model.release_s) * self._batch for factor in model.steps]
        self._landing = max(
            (number for number, pool in enumerate(model.pools) if any(not stage.of_batch for stage in pool.stages)),
            default=0,
        )
        self._now = 0.0
        self._timers: list[tuple[float, int, _Task]] = []
        self._num_timers = 0
        self._serial_free_s = 0.0
        cpu_s = sum(stage.cpu_s for stage in model.stages)
        self._gil_share = min(1.0, model.gil_s / cpu_s) if cpu_s > 0 else 0.0
        self._cpus = _Processors(model.cpus, model.others_cpus, num if self._gil_share else 0)
        room = max(1, int(min(model.batches_ahead, model.batches_in_memory, num_samples)) // num)
        self._workers = [max(1, pool.workers // num) for pool in model.pools]
        states = WorkerStates(1)
        self._clock = WorkerClock(states, self._time, first_state=0)
        self._plans = [
            _SimulatedPlan(self._batch, self._chunk(room), room, range(process, self.num_batches, num))
            for process in range(num)
        ]
        self._schedulers = [
            Scheduler(cast("Plan", plan), states, self._time, num_workers=sum(self._workers), is_whole=False)
            for plan in self._plans
        ]
        self._free = [list(self._workers) for _ in range(num)]
        self._buffers: list[list[deque[Chunk | WorkItem]]] = [[deque() for _ in model.pools] for _ in range(num)]
        # Workers that are done with a unit, and have no room for it in the next pool's buffer.
        self._held: list[list[deque[_Task]]] = [[deque() for _ in model.pools] for _ in range(num)]
        self._is_waiting = True
        self.taken_s: list[float] = []

    def _chunk(self, room: int) -> int:
        """The length of chunks: as they were, adapted to other numbers of workers and batches ahead; 0 lets the
        scheduler decide from the beginning."""
        chunk = self._model.chunk
        return chunk_length(chunk, self._batch, sum(self._workers), room) if chunk else 0

    def _time(self) -> float:
        return self._now

    def run(self) -> float:
        """samples/s."""
        for process in range(len(self._schedulers)):
            self._deal_out(process)
        self._take()
        while len(self.taken_s) < self.num_counted:
            self._step()
        first = self.num_counted // _WARM
        return (self.num_counted - 1 - first) * self._batch / max(self.taken_s[-1] - self.taken_s[first], 1e-12)

    def _step(self) -> None:
        """Advance to the next moment at which a task is done."""
        timer_s = self._timers[0][0] if self._timers else math.inf
        after_s, lane = self._cpus.next_s()
        if self._now + after_s < timer_s:
            self._cpus.advance(after_s)
            self._now += after_s
            task = self._cpus.pop(lane)
        else:
            self._cpus.advance(timer_s - self._now)
            self._now = timer_s
            task = heapq.heappop(self._timers)[2]
        self._go_on(task)

    def _go_on(self, task: _Task) -> None:
        while task.phases:
            phase = task.phases.pop()
            if phase.lane is not None:
                self._cpus.add(phase.lane, phase.seconds, task)
                return
            until_s = self._now + phase.seconds
            if phase.is_serial:
                until_s = self._serial_free_s = max(self._serial_free_s, self._now) + phase.seconds
            while phase.pauses and phase.pauses[0][1] <= self._now:
                phase.pauses.popleft()
            for begin_s, end_s in phase.pauses or ():
                if begin_s >= until_s:
                    break
                until_s += end_s - max(begin_s, self._now)
            self._num_timers += 1
            heapq.heappush(self._timers, (until_s, self._num_timers, task))
            return
        if task.unit is None:
            self._take()
        else:
            self._done(task, task.unit)

    def _phases(self, process: int, pool: int, unit: Chunk | WorkItem) -> list[_Phase]:
        """What a pool's stages do to a chunk, or to a whole batch."""
        is_batch = isinstance(unit, WorkItem)
        begin = unit.begin if isinstance(unit, WorkItem) else unit.work_item.begin
        low, high = (0, len(unit)) if isinstance(unit, WorkItem) else (unit.lo, unit.hi)
        found, cpu_all_s, wait_all_s = [], 0.0, 0.0
        for stage, draws in self._pools[pool]:
            if stage.of_batch is not is_batch:
                continue
            cpu_s, wait_s = draws.of(begin + low, begin + high)
            if stage.name == self._model.serial_stage:
                scale = self._model.serial_s / max(stage.service_s, 1e-12)
                found.append(_Phase(None, (cpu_s + wait_s) * scale, draws.pauses, is_serial=True))
                continue
            if draws.pauses:
                found.append(_Phase(None, wait_s, draws.pauses))
            else:
                wait_all_s += wait_s
            cpu_all_s += cpu_s
        parts = ((None, wait_all_s), (1 + process, cpu_all_s * self._gil_share), (0, cpu_all_s * (1 - self._gil_share)))
        return [*found, *(_Phase(lane, seconds) for lane, seconds in parts if seconds > 0)] or [_NOTHING]

    def _start(self, process: int, pool: int, unit: Chunk | WorkItem, *, rested: bool) -> None:
        self._free[process][pool] -= 1
        wake = [_Phase(None, self._model.wake_s)] if rested and self._model.wake_s else []
        self._go_on(_Task(process, pool, unit, [*wake, *self._phases(process, pool, unit)]))

    def _done(self, task: _Task, unit: Chunk | WorkItem) -> None:
        """A worker is through with a unit: it lands, and passes to the next pool or to the loop."""
        process, pool = task.process, task.pool
        onward: Chunk | WorkItem | None = unit
        if isinstance(unit, Chunk) and pool == self._landing:
            onward = landed = self._schedulers[process].work.land(unit)
            if landed is not None and any(stage.of_batch for stage, _ in self._pools[pool]):
                self._go_on(_Task(process, pool, landed, self._phases(process, pool, landed)))
                return
        if onward is not None and pool + 1 < len(self._pools):
            task.unit = onward
            self._held[process][pool + 1].append(task)
            self._deal_out(process, pool)
            return
        self._free[process][pool] += 1
        if isinstance(onward, WorkItem):
            self._schedulers[process].ready.deliver(onward)
            is_its_turn = process == len(self.taken_s) % len(self._schedulers)
            if self._is_waiting and is_its_turn and self._schedulers[process].ready.head is onward:
                self._is_waiting = False
                self._go_on(_Task(process, 0, None, [_Phase(None, self._model.wake_s)]))
        self._deal_out(process, pool)

    def _deal_out(self, process: int, at_hand: int = -1) -> None:
        """Give work to free workers, until there is no work or no free worker. A worker of pool `at_hand` need not be
        woken up."""
        free, buffers, scheduler = self._free[process], self._buffers[process], self._schedulers[process]
        for pool in range(len(free) - 1, 0, -1):
            buffer, held = buffers[pool], self._held[process][pool]
            while (held and len(buffer) < 2 * self._workers[pool]) or (buffer and free[pool]):
                if buffer and free[pool]:
                    self._start(process, pool, buffer.popleft(), rested=pool != at_hand)
                    at_hand = -1 if pool == at_hand else at_hand
                else:
                    task = held.popleft()
                    assert task.unit is not None
                    buffer.append(task.unit)
                    free[pool - 1] += 1
        plan = self._plans[process]
        while free[0] and (len(scheduler.work) or (plan.numbers and scheduler.budget.num_open < plan.room[0])):
            chunk = scheduler.work.take(self._clock)
            assert chunk is not None
            self._start(process, 0, chunk, rested=at_hand != 0)
            at_hand = -1

    def _take(self) -> None:
        """The loop asks for the next batch."""
        number = len(self.taken_s)
        if number == self.num_batches:
            return
        process = number % len(self._schedulers)
        self._is_waiting = self._schedulers[process].ready.first() is None
        if self._is_waiting:
            return
        self.taken_s.append(self._now)
        compute_s = self._computes[number % len(self._computes)]
        cpu_s = min(compute_s, self._model.loop_cpu_s * self._batch)
        parts = ((0, cpu_s), (None, compute_s - cpu_s))
        phases = [_Phase(lane, seconds) for lane, seconds in parts if seconds > 0]
        self._go_on(_Task(process, 0, None, phases or [_NOTHING]))
        self._deal_out(process)
