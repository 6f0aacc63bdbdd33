"""The measured demand of a sample: seconds of each stage's worker, of a CPU, of the GIL, of what one worker uses at a time.

The service demand of operational analysis (Denning and Buzen, "The operational analysis of queueing network models", ACM
Computing Surveys 10(3), 1978): demand D = busy time B / completions C, over an interval, without assumptions on distributions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from loaderkit.profile.report import Report
from loaderkit.profile.report_parts import StageRow

_SHORT = 0.2  # of the busy time, ready to run while no CPU was free: then CPUs were all in use


@dataclass(frozen=True)
class Demand:
    """Of one stage, in s a sample: on a CPU, and waiting for something other than a CPU or the GIL."""

    name: str
    kind: str
    cpu_s: float
    wait_s: float

    @property
    def service_s(self) -> float:
        """With a CPU whenever it wants one."""
        return self.cpu_s + self.wait_s


@dataclass(frozen=True)
class PoolModel:
    """The stages that the same workers run one after the other."""

    workers: int
    stages: tuple[Demand, ...]

    @property
    def service_s(self) -> float:
        return sum(stage.service_s for stage in self.stages)


class Stragglers(NamedTuple):
    """One sample in `every` takes `seconds` in a pool, and batches come in order: the others wait for it."""

    pool: int
    seconds: float
    every: float


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
    loop_has_gil: bool = True  # the loop's thread shares the GIL with the workers
    serial_stage: str | None = None  # a stage of which only one worker gets on at a time
    serial_s: float = 0.0
    batch: float = 1.0  # samples of one
    batches_ahead: float = float("inf")
    batches_in_memory: float = float("inf")
    stragglers: Stragglers | None = None
    is_inline: bool = False

    @property
    def samples_ahead(self) -> float:
        """In work at most: what is wanted ahead, or what memory holds."""
        return self.batch * min(self.batches_ahead, self.batches_in_memory)

    @property
    def stages(self) -> tuple[Demand, ...]:
        return tuple(stage for pool in self.pools for stage in pool.stages)


def model_of(report: Report) -> PipelineModel | None:
    """The model of a pipeline as it was seen to run; None where too little was seen."""
    samples = report.num_samples
    if not samples or not report.steps.num_steps or any(not row.num_items for row in report.stages):
        return None
    verdict, tuning = report.verdict, report.tuning
    rows = report.stages
    serial = verdict.stage if verdict.kind in ("lock", "bandwidth") else None
    serial_s = 1.0 / max(report.throughput["samples_per_s"], 1e-9) if serial else 0.0
    pools = tuple(
        PoolModel(own[0].workers, tuple(_demand(row, serial_s if row.name == serial else None) for row in own))
        for own in ([row for row in rows if row.pool == number] for number in sorted({row.pool for row in rows}))
    )
    cpu_s = sum(row.cpu_s / row.num_items for row in rows)
    batch = samples / report.num_batches
    processes = int(tuning.get("processes", 1))
    is_process = tuning.get("executor") == "process"
    return PipelineModel(
        pools=pools,
        compute_s=report.steps.compute_s / report.steps.num_steps / batch,
        loop_cpu_s=_loop_cpu_s(report) / samples,
        cpus=_cpus(report),
        others_cpus=float(report.host.get("others_cpus") or 0.0),
        gil_s=cpu_s if verdict.kind == "gil" else 0.0,
        processes=processes,
        loop_has_gil=not is_process,
        serial_stage=serial,
        serial_s=serial_s,
        batch=batch,
        batches_ahead=float(tuning.get("batches") or 1),
        batches_in_memory=_batches_in_memory(report),
        stragglers=_stragglers(report) if verdict.kind == "stragglers" else None,
        is_inline=tuning.get("executor") == "inline",
    )


def _demand(row: StageRow, serial_s: float | None) -> Demand:
    """Where only one worker gets on at a time, it is what that one takes: the others' waiting for it is no demand."""
    cpu_s = row.cpu_s / row.num_items
    wait_s = row.io_s / row.num_items if serial_s is None else max(0.0, serial_s - cpu_s)
    return Demand(row.name, row.kind, cpu_s, wait_s)


def _loop_cpu_s(report: Report) -> float:
    """CPU time of this process that is not the workers'; known only where the workers are in this process."""
    if report.tuning.get("executor") == "process":
        return 0.0
    own_s = float(report.host.get("cpu_s") or 0.0) - sum(row.cpu_s for row in report.stages)
    return max(0.0, min(own_s, report.steps.compute_s * report.machine.cpus))


def _cpus(report: Report) -> float:
    """The CPUs there are. Where it is not known what others use of them, and workers waited for one, as many as were used."""
    rows: Sequence[StageRow] = report.stages
    if report.host.get("others_cpus") is not None:
        return float(report.machine.cpus)
    delayed = sum(row.delayed_s for row in rows) > _SHORT * sum(row.busy_s for row in rows)
    used = (sum(row.cpu_s for row in rows) + _loop_cpu_s(report)) / max(report.wall_s, 1e-9)
    return min(float(report.machine.cpus), used) if delayed else float(report.machine.cpus)


def _batches_in_memory(report: Report) -> float:
    batch_bytes = report.memory.get("batch_bytes") or 0
    return float(max(1, report.memory["budget_bytes"] // batch_bytes)) if batch_bytes else float("inf")


def _stragglers(report: Report) -> Stragglers | None:
    """How long they take is what the slowest took, and how often they come is what they add to the mean."""
    row = next(row for row in report.stages if row.name == report.verdict.stage)
    slow = [item.seconds for item in report.slowest if item.stage == row.name and item.num_together == 1]
    if not slow or row.p50_s is None:
        return None
    seconds = median(slow)
    extra_s = row.busy_s / row.num_items - row.p50_s
    return Stragglers(row.pool, seconds, seconds / extra_s) if 0 < extra_s < seconds else None
