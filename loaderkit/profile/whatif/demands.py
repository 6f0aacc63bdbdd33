"""The measured demands of a sample: seconds of each stage's workers, of a CPU, of the GIL, and of what one worker uses
at a time.

The service demand of operational analysis (Denning and Buzen, "The operational analysis of queueing network models", ACM
Computing Surveys 10(3), 1978): demand D = busy time B / completions C, over an interval, without assumptions on distributions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from loaderkit.engine.autotune.chunk_sizer import CHUNK_TARGET_S, ChunkSizer
from loaderkit.engine.metrics.nodes.counts import Nodes, NodeStats
from loaderkit.engine.metrics.stalls import WAKEUP
from loaderkit.profile.report import Report
from loaderkit.profile.report_parts import StageRow
from loaderkit.profile.whatif.times import USUAL, Times, times_of

_VARIES = 0.2  # of the waiting, by slow samples: a full link would make all of them wait
_SHORT = 0.2  # of the busy time, ready to run while no CPU was free: then CPUs were all in use


@dataclass(frozen=True)
class Demand:
    """The demand of one stage, in s a sample: on a CPU, and waiting for something other than a CPU or the GIL."""

    name: str
    kind: str
    cpu_s: float
    wait_s: float
    times: Times = USUAL
    of_batch: bool = False  # it runs once a batch

    @property
    def service_s(self) -> float:
        """With a CPU whenever it wants one."""
        return self.cpu_s + self.wait_s

    @property
    def usual_s(self) -> float:
        """Without what slow samples add."""
        return self.cpu_s * (1 - self.times.slow_cpu) + self.wait_s * (1 - self.times.slow_wait)


@dataclass(frozen=True)
class PoolModel:
    """The stages that the same workers run one after the other."""

    workers: int
    stages: tuple[Demand, ...]
    solo: float = 0.0  # the share of the time in which only one of its workers was let in

    @property
    def service_s(self) -> float:
        return sum(stage.service_s for stage in self.stages)


@dataclass(frozen=True)
class PipelineModel:
    """A pipeline and its loop as a queueing model. Demands in s a sample."""

    pools: tuple[PoolModel, ...]
    compute_s: float  # of the loop
    loop_cpu_s: float  # of that, on CPUs that the workers want, too
    cpus: float  # that there are
    others_cpus: float = 0.0  # how many of them other programs would use all the time
    gil_s: float = 0.0  # under the GIL; 0: hardly any
    processes: int = 1  # that load, each with its own GIL
    serial_stage: str | None = None  # a stage that only one worker at a time, or a few, can run
    serial_s: float = 0.0
    batch: float = 1.0  # samples of one
    chunk: float = 0.0  # samples of one that workers and batches ahead let be so long; 0: not known
    batches_ahead: float = float("inf")
    batches_in_memory: float = float("inf")
    steps: tuple[float, ...] = (1.0,)  # of the loop, one after the other, relative to their mean
    release_s: float = 0.0  # of the loop, dropping what it is done with
    wake_s: float = 0.0  # from what a thread waits for until it runs
    is_inline: bool = False
    network_s: float = (
        0.0  # of the way from other nodes to the trainer; 0: none came from there, or messages take its time
    )
    handover_s: float = 0.0  # of the loop's thread, taking batches that were made elsewhere

    @property
    def samples_ahead(self) -> float:
        """The samples that are in work at most: as many as are wanted ahead, or as memory holds."""
        return self.batch * min(self.batches_ahead, self.batches_in_memory)

    @property
    def stages(self) -> tuple[Demand, ...]:
        return tuple(stage for pool in self.pools for stage in pool.stages)


def model_of(report: Report) -> PipelineModel | None:
    """The model of a pipeline as it was seen to run; None where too little was seen."""
    samples = report.num_samples
    if not samples or not report.steps.num_steps or any(not row.num_items for row in report.stages):
        return None
    verdict, tuning, batch = report.verdict, report.tuning, samples / report.num_batches
    rows = report.stages
    in_turn = next((row.name for row in rows if row.in_turn), None)
    # What a few workers at a time can have is as full as what one can: more workers would only wait longer for it.
    is_limited = verdict.kind == "waiting" and any(row.is_limited for row in rows if row.name == verdict.stage)
    serial = verdict.stage if is_limited or verdict.kind in ("lock", "bandwidth") else in_turn
    serial_s = 1.0 / max(report.throughput["samples_per_s"], 1e-9) if serial else 0.0
    late_s, processes = _late_s(report), int(tuning.get("processes", 1))
    demands: dict[int, list[Demand]] = {}
    for row in rows:
        of_batch = "batch" in [one.kind for own in demands.values() for one in own]
        cpu_s, wait_s = row.cpu_s / row.num_items, row.io_s / row.num_items
        if verdict.kind == "gil":  # a worker that is late has the GIL, and keeps all others from it
            cpu_s += late_s(row) / row.num_items
        else:
            wait_s += late_s(row) / row.num_items
        times = times_of(row, wait_s, report.wall_s, report.world_size)
        if row.name == serial and verdict.kind == "bandwidth" and times.slow_wait > _VARIES:
            serial = None
        elif row.name == serial and row.in_turn:  # in each process, which takes all items and keeps its share
            serial_s = (cpu_s + wait_s) / processes
        elif row.name == serial:  # the time of the worker that runs it: the others' waiting for it is no demand
            wait_s, times = max(0.0, serial_s - cpu_s), USUAL
        demands.setdefault(row.pool, []).append(Demand(row.name, row.kind, cpu_s, wait_s, times, of_batch))
    firsts = {row.pool: row for row in reversed(rows)}
    pools = tuple(
        PoolModel(firsts[number].workers, tuple(own), _solo(firsts[number], report))
        for number, own in sorted(demands.items())
    )
    return PipelineModel(
        pools=pools,
        compute_s=report.steps.compute_s / report.steps.num_steps / batch,
        loop_cpu_s=_loop_cpu_s(report) / samples,
        cpus=_cpus(report),
        others_cpus=_others_cpus(report),
        gil_s=sum(one.cpu_s for own in demands.values() for one in own) if verdict.kind == "gil" else 0.0,
        processes=processes,
        serial_stage=serial,
        serial_s=serial_s if serial else 0.0,
        batch=batch,
        chunk=_chunk(report, pools, batch, processes),
        batches_ahead=float(tuning.get("batches") or 1),
        batches_in_memory=_batches_in_memory(report),
        steps=_steps(report),
        release_s=report.steps.release_s / report.steps.num_steps / batch,
        wake_s=report.stall.by_stage.get(WAKEUP, 0.0) / report.num_batches,
        is_inline=tuning.get("executor") == "inline",
        network_s=_network_s(report),
        handover_s=_handover_s(report),
    )


def _network_s(report: Report) -> float:
    """The time in which the network from other nodes was in use, divided by all samples. It is taken as if the network
    could carry no more in that time, which gives a lower bound of what it can carry."""
    others = [row for row in report.nodes if not row.is_trainers]
    known = [field.name for field in fields(NodeStats)]
    nodes = Nodes(tuple(NodeStats(**{name: getattr(row, name) for name in known}) for row in others))
    # Ways of several nodes may be used side by side, and the trainer's end is one.
    in_use_s = min(report.wall_s, sum(row.carrying_s for row in others))
    return in_use_s / report.num_samples if nodes.is_of_bytes else 0.0


def _handover_s(report: Report) -> float:
    """The loop's thread in `next()` with a batch that is there, where workers may be on other nodes."""
    if report.tuning.get("executor") != "ray":
        return 0.0
    steps = report.steps
    taking_s = steps.overhead_s - steps.release_s + report.stall.by_stage.get(WAKEUP, 0.0)
    return max(0.0, taking_s) / report.num_samples


def _chunk(report: Report, pools: Sequence[PoolModel], batch: float, processes: int) -> float:
    """Samples of a chunk as they were, or by their time where workers and batches ahead allowed for no more."""
    tuning = report.tuning
    if tuning.get("graph"):
        return math.inf  # DALI makes whole batches
    chunk = max((row.chunk or 0.0 for row in report.stages if row.kind != "transfer"), default=0.0)
    by_time = CHUNK_TARGET_S / max(sum(stage.usual_s for pool in pools for stage in pool.stages), 1e-9)
    workers = sum(max(1, pool.workers // processes) for pool in pools)
    room = max(1, int(min(tuning.get("batches") or 1, _batches_in_memory(report))) // processes)
    most = chunk_length(by_time, max(1, round(batch)), workers, room)
    return max(chunk, by_time) if chunk >= most else chunk


def chunk_length(wanted: float, batch: int, workers: int, num_open: int) -> int:
    """Samples of a chunk, by the engine's rule, where samples take so long that `wanted` of them would make one."""
    if math.isinf(wanted):
        return batch
    chunk_sizer = ChunkSizer()
    chunk_sizer.landed(CHUNK_TARGET_S / (wanted + 0.5), 1)
    return chunk_sizer.chunk_size(batch, workers, num_open)


def _solo(row: StageRow, report: Report) -> float:
    """The share of the time in which one worker ran alone, as the contention probe lets it, from the idle time of the
    others. Not known where the tuner resizes."""
    if row.workers < 2 or report.tuning.get("auto"):
        return 0.0
    return min(1.0, row.idle_s / ((row.workers - 1) * report.wall_s))


def _running(report: Report) -> float:
    """Our threads that run, or could."""
    return sum(row.cpu_s + row.delayed_s for row in report.stages) / max(report.wall_s, 1e-9)


def _others_cpus(report: Report) -> float:
    """Threads of other programs that want a CPU: as many as used one, or more where ours, computing, got a smaller share."""
    if report.nodes:  # on several machines
        return 0.0
    used = float(report.host.get("others_cpus") or 0.0)
    computing = [row for row in report.stages if row.cpu_s > row.io_s + row.gil_s]
    cpu_s = sum(row.cpu_s for row in computing)
    if not used or sum(row.busy_s for row in computing) < _SHORT * sum(row.busy_s for row in report.stages):
        return used
    slowdown = 1 + sum(row.delayed_s for row in computing) / cpu_s
    return max(used, slowdown * _cpus(report) - _running(report))


def _late_s(report: Report) -> Callable[[StageRow], float]:
    """Seconds for which workers of a stage were late: ready to run while no CPU was free, beyond the effect of sharing
    CPUs."""
    share = max(0.0, (_running(report) + _others_cpus(report)) / _cpus(report) - 1.0)
    return lambda row: max(0.0, row.delayed_s - share * row.cpu_s)


def _loop_cpu_s(report: Report) -> float:
    """CPU time of this process that is not the workers'; known only where the workers are in this process."""
    if report.tuning.get("executor") in ("process", "ray"):
        return 0.0
    own_s = float(report.host.get("cpu_s") or 0.0) - sum(row.cpu_s for row in report.stages)
    return max(0.0, min(own_s, report.steps.compute_s * report.machine.cpus))


def _cpus(report: Report) -> float:
    """The CPUs there are. Where it is not known what others use of them, and workers waited for one, as many as were used."""
    rows: Sequence[StageRow] = report.stages
    if report.nodes:
        known = [row.cpus for row in report.nodes if row.num_workers]
        return sum(cpus or 0.0 for cpus in known) if None not in known else math.inf
    if report.host.get("others_cpus") is not None:
        return float(report.machine.cpus)
    delayed = sum(row.delayed_s for row in rows) > _SHORT * sum(row.busy_s for row in rows)
    used = (sum(row.cpu_s for row in rows) + _loop_cpu_s(report)) / max(report.wall_s, 1e-9)
    return min(float(report.machine.cpus), used) if delayed else float(report.machine.cpus)


def _batches_in_memory(report: Report) -> float:
    batch_bytes = report.memory.get("batch_bytes") or 0
    return float(max(1, report.memory["budget_bytes"] // batch_bytes)) if batch_bytes else float("inf")


def _steps(report: Report) -> tuple[float, ...]:
    seconds = [step.compute_s for step in report.steps.steps]
    mean_s = sum(seconds) / max(1, len(seconds))
    return tuple(one / mean_s for one in seconds) if mean_s > 0 else (1.0,)
