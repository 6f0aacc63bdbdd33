"""Makes the report from stats and steps: the verdict, where the time went, the slowest samples, the first batch.

stats at begin, first batch, end ──differences──> verdict, stall, stages, slowest, first batch
steps ───────────────────────────────────────────> steps, utilisation
all of that, where times vary ────what if────────> the verdict's settings
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from statistics import median
from typing import Any

import torch

from loaderkit._internal.system.cgroups import num_cpus
from loaderkit._internal.system.numa import numa_conflict
from loaderkit._internal.units import say_seconds
from loaderkit._internal.version import __version__
from loaderkit.checkpoint.save_log import SAVES, SaveRecord
from loaderkit.diagnosis.interval import Interval
from loaderkit.diagnosis.stage_facts import measure
from loaderkit.diagnosis.stats import Stats
from loaderkit.engine.metrics.contention import ContentionResult
from loaderkit.engine.metrics.slow_samples import NOTHING_SLOW, rows_of
from loaderkit.engine.metrics.snapshot import StageStats
from loaderkit.engine.metrics.stalls import RELEASE, START
from loaderkit.errors import ConfigError
from loaderkit.pipeline.config.model import PipelineConfig
from loaderkit.pipeline.execution_plan import ExecutionPlan
from loaderkit.profile.experiments.trial import untried
from loaderkit.profile.report import Report
from loaderkit.profile.report_parts import (
    FirstBatch,
    Machine,
    NodeRow,
    PassMark,
    SavedObjectRow,
    SaveRow,
    SlowItem,
    SlowTime,
    SourceRow,
    StageRow,
    StallPart,
    Step,
    Steps,
    Utilisation,
    VerdictPart,
)
from loaderkit.profile.settings_patch import settings_yaml, verdict_part
from loaderkit.profile.slow_samples import say_stragglers, slowest_items
from loaderkit.profile.step_log import StepLog
from loaderkit.profile.whatif.suggest import with_suggestion
from loaderkit.sources.base import Source

LEFT_ALONE = "a loop that trains is left as it is; `loaderkit profile` tries settings"
_MOST_FILES = 20  # of a save
_SLOW = 3.0  # times the median
_NEARLY_ALL, _LEAST_STEPS = 0.95, 16

PASS_MARKS = {"MLPerf Storage: 3D U-Net, ResNet-50": 90.0, "MLPerf Storage: CosmoFlow": 70.0}
"""Percent of the time, from the Submission Guidelines v1.0 and v2.0."""


@dataclass(frozen=True)
class ReportSubject:
    """What a report is about: a pipeline, or a loop that loads without loaderkit."""

    name: str
    rank: int
    world_size: int
    config: dict[str, Any]  # plain values, with the settings that were tuned
    verdict: Callable[[Stats], VerdictPart]
    slowest: Callable[[Stats, float], list[SlowItem]]  # of stats, and since when
    finished: Callable[[Report], Report]  # the report with what can be said once all of it is there
    list_s: float
    index_s: float
    device: torch.device | None = None  # the GPU to which batches are copied; None if not known


def pipeline_subject(plan: ExecutionPlan, config_now: PipelineConfig) -> ReportSubject:
    """A pipeline. `config_now` has the settings that were tuned."""
    config, source = plan.config, plan.source
    return ReportSubject(
        name=config.name,
        rank=plan.schedule.rank,
        world_size=plan.schedule.world_size,
        config=described(config_now),
        verdict=lambda passed: _with_samples(verdict_part(passed, config), passed, source),
        slowest=lambda passed, begin_s: slowest_items(passed, source, begin_s),
        finished=lambda report: untried(with_suggestion(report, config), LEFT_ALONE),
        list_s=plan.list_s,
        index_s=plan.index_s,
        device=plan.compiled.device,
    )


def _with_samples(verdict: VerdictPart, passed: Stats, source: Source) -> VerdictPart:
    """The verdict, and, if it is on stragglers, which samples these are."""
    named = say_stragglers(passed, verdict.stage, source) if "stragglers" in (verdict.kind, verdict.or_kind) else ""
    return verdict.model_copy(update={"evidence": f"{verdict.evidence}; {named}"}) if named else verdict


@dataclass(frozen=True)
class ReportFacts:
    """The input of `make_report`."""

    subject: ReportSubject
    begin: Stats
    first: Stats | None  # right after the first batch
    end: Stats
    series: list[dict[str, Any]]
    log: StepLog
    import_s: float | None
    partial: str | None
    error: Exception | None = None  # that ended the block


def make_report(facts: ReportFacts) -> Report:
    """The report on a block. If an error or Ctrl-C restarted the stats in the block, it covers the time after that."""
    log, end = facts.log, facts.end
    loop_s = max(log.compute_s + log.next_s, 1e-9)
    passed = _since(end, facts.begin, loop_s)
    waited_s = sum(passed.waits_s.values())
    after_start_percent = None
    if facts.first is not None and not facts.begin.num_batches and end.num_batches > facts.first.num_batches:
        later = end.since(facts.first) if facts.first.run == end.run else end
        later_s = sum(later.waits_s.values())
        if end.tuning.executor != "inline":  # which reads nothing ahead: its first batch is made as any other is
            ran_s = waited_s - passed.waits_s.get(START, 0.0) - later_s + later.waits_s.get(START, 0.0)
            # Nothing can be read ahead of the first batch: all of its wait is the start. `first_batch` says what it was for.
            start_s = later.waits_s.get(START, 0.0) + max(0.0, waited_s - later_s)
            passed = replace(
                passed, waits_s={**later.waits_s, START: start_s}, started_s=passed.started_s + max(0.0, ran_s)
            )
        later_s += log.release_s
        after_start_percent = min(100.0, 100.0 * later_s / max(loop_s - (log.first_wait_s or 0.0), 1e-9))
    if log.release_s:
        passed = replace(passed, waits_s={**passed.waits_s, RELEASE: log.release_s})
    values = passed.to_dict()
    series = [{**point, "at_s": point["at_s"] - log.begin_s} for point in facts.series if point["at_s"] >= log.begin_s]
    subject = facts.subject
    verdict = subject.verdict(passed)
    if facts.error is not None and not passed.num_batches:
        verdict = _of_error(facts.error)
    elif verdict.stage not in (None, START) and (over_s := waiting_over_s(log)) is not None:
        evidence = f"{verdict.evidence}; nearly all of the waiting was over after {say_seconds(over_s)}"
        verdict = verdict.model_copy(update={"evidence": evidence})
    report = Report(
        name=subject.name,
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=machine(subject.device),
        rank=subject.rank,
        world_size=subject.world_size,
        partial=facts.partial,
        verdict=verdict,
        wall_s=loop_s,
        num_batches=passed.num_batches,
        num_samples=passed.num_samples,
        num_dropped=passed.num_dropped,
        bad_shards=[*passed.bad_shards],
        stall=StallPart(**values["stall"], after_start_percent=after_start_percent),
        throughput=values["throughput"],
        steps=steps_of(log, waited_s),
        stages=stage_rows(passed, series),
        sources=[SourceRow(**asdict(row)) for row in passed.source_rows()],
        nodes=[NodeRow(**row) for row in passed.nodes.to_dicts(passed.wall_s)],
        slowest=subject.slowest(passed, log.begin_s),
        first_batch=first_batch(facts),
        utilisation=utilisation(log),
        saves=save_rows(log.begin_s, log.end_s),
        patch=settings_yaml(verdict.settings),
        series=series,
        memory=values["memory"],
        host={
            **values["host"],
            "others_cpus": Interval.of(passed).others_cpus,
            "numa": numa_conflict(_gpu_address(subject.device)),
        },
        tuning=values["tuning"],
        store=values["store"],
        config=subject.config,
    )
    return subject.finished(report)


def _of_error(error: Exception) -> VerdictPart:
    """The verdict where nothing came before the error."""
    evidence = f"{type(error).__name__}: {error}"
    return VerdictPart(
        stage=None, kind="failed", percent=0.0, confidence=1.0, evidence=evidence, change="what the error says"
    )


def _since(end: Stats, earlier: Stats, wall_s: float) -> Stats:
    """The stats of the loop's own time: pauses outside of it, such as a validation, are no part of its wall time."""
    passed = end.since(earlier) if earlier.run == end.run else end
    return replace(passed, wall_s=max(wall_s, 1e-9), paused_s=max(0.0, passed.wall_s + passed.paused_s - wall_s))


def described(config: PipelineConfig) -> dict[str, Any]:
    """The config as plain values; if a file cannot hold it (a lambda in it, say), its name and the reason."""
    try:
        return config.to_dict()
    except ConfigError as error:
        return {"name": config.name, "note": str(error)}


def machine(device: torch.device | None = None) -> Machine:
    """Where this runs. `device`: a GPU; None means the one that this process uses, if it uses one."""
    gpu = _gpu_properties(device)
    return Machine(
        cpus=num_cpus(),
        platform=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        torch=torch.__version__,
        loaderkit=__version__,
        device="cpu" if gpu is None else gpu.name,
    )


def _gpu_properties(device: torch.device | None) -> Any:
    """Torch's properties of a GPU, or of the current one. None if this process uses none: asking would begin CUDA, which takes
    seconds and memory, and forks no more."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return torch.cuda.get_device_properties(torch.cuda.current_device() if device is None else device)


def _gpu_address(device: torch.device | None) -> str | None:
    """The GPU's address on the PCI bus, as the kernel writes it; None without a GPU, or if torch does not say."""
    gpu = _gpu_properties(device)
    if not hasattr(gpu, "pci_bus_id"):
        return None
    return f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"


# ------------------------------------------------------------------------------------------------------ the loop


def steps_of(log: StepLog, stall_s: float) -> Steps:
    """The loop's steps; `stall_s` of the time inside next() was waiting."""
    return Steps(
        num_steps=log.num_steps,
        wall_s=log.end_s - log.begin_s,
        compute_s=log.compute_s,
        stall_s=stall_s,
        overhead_s=log.next_s - stall_s,
        release_s=log.release_s,
        save_waiting_s=log.save_waiting_s,
        save_staging_s=log.save_staging_s,
        outside_s=log.outside_s,
        p50_s=log.steps.percentile(0.5),
        p99_s=log.steps.percentile(0.99),
        compute_p50_s=log.computes.percentile(0.5),
        compute_p99_s=log.computes.percentile(0.99),
        stall_p50_s=log.waits.percentile(0.5),
        stall_p99_s=log.waits.percentile(0.99),
        every=log.every,
        steps=[Step(at_s=at_s, compute_s=compute_s, stall_s=wait_s) for at_s, compute_s, wait_s in log.kept()],
    )


def waiting_over_s(log: StepLog) -> float | None:
    """Seconds from the log's beginning after which the loop hardly waited any more, as where a cache is full after an epoch.
    None if it waited in the second half of the time, too, or if it is not known."""
    steps = log.kept()
    left_s = (1.0 - _NEARLY_ALL) * sum(stall_s for *_, stall_s in steps)
    if len(steps) < _LEAST_STEPS:
        return None
    for at_s, compute_s, stall_s in reversed(steps):
        left_s -= stall_s
        if left_s < 0:
            over_s = at_s + compute_s + stall_s
            return over_s if over_s < (log.end_s - log.begin_s) / 2 else None
    return None


def utilisation(log: StepLog) -> Utilisation | None:
    """Compute time / total time, in percent; None without a whole step besides the first one of an epoch.

    MLPerf Storage, Submission Guidelines v2.0, section 4: AU = total_compute_time / total_benchmark_running_time * 100. DLIO,
    its program, computes it by epoch, leaves out the first step of each, loading and computing, and takes the mean, here
    weighted by steps for the sake of an epoch that is not whole. Validation between epochs is no part of the total time, nor
    are pauses for saving.
    """
    if not log.num_later_steps:
        return None
    trained_s = log.compute_s - log.save_waiting_s - log.save_staging_s
    whole_run = 100.0 * trained_s / max(trained_s + log.next_s, 1e-9)
    percent = 100.0 * log.utilised_steps / log.num_later_steps
    marks = [PassMark(name=name, at_least_percent=least, passes=percent >= least) for name, least in PASS_MARKS.items()]
    return Utilisation(percent=percent, whole_run_percent=whole_run, marks=marks)


def save_rows(begin_s: float, end_s: float) -> list[SaveRow]:
    """The saves of this process that were over in that time, by `time.perf_counter`."""
    return [_save_row(record, begin_s) for record in SAVES.between(begin_s, end_s)]


def _save_row(record: SaveRecord, begin_s: float) -> SaveRow:
    stats: dict[str, Any] = dict(record.stats)
    objects = [
        SavedObjectRow(rank=rank, object=name, **times)
        for rank, files in stats.get("ranks", {}).items()
        for name, times in files.items()
    ]
    objects.sort(key=lambda row: -(row.writing_s + row.syncing_s))
    return SaveRow(
        step=record.step,
        at_s=record.end_s - begin_s,
        num_bytes=sum(row.num_bytes for row in objects),
        waiting_s=stats.get("waiting_s", 0.0),
        staging_s=stats.get("staging_s", 0.0),
        flush_s=stats.get("flush_s", 0.0),
        commit_s=stats.get("commit_s"),
        error=record.error,
        objects=objects[:_MOST_FILES],
    )


def first_batch(facts: ReportFacts) -> FirstBatch | None:
    """Where the time until the first batch went, if it came within the block."""
    first, wait_s = facts.first, facts.log.first_wait_s
    if first is None or wait_s is None or facts.begin.num_batches:
        return None
    by_stage = {cause: seconds for cause, seconds in first.stall_s.items() if cause != START and seconds > 0}
    parts = FirstBatch(
        import_s=facts.import_s,
        list_s=facts.subject.list_s,
        index_s=facts.subject.index_s,
        workers_s=max(0.0, wait_s - sum(by_stage.values())),
        by_stage=by_stage,
        total_s=0.0,
    )
    total_s = (parts.import_s or 0.0) + parts.list_s + parts.index_s + parts.workers_s + sum(by_stage.values())
    return parts.model_copy(update={"total_s": total_s})


# ---------------------------------------------------------------------------------------------------- the stages


def stage_rows(passed: Stats, series: Sequence[Mapping[str, Any]]) -> list[StageRow]:
    """A row for every stage, in their order."""
    interval = Interval.of(passed)
    pools = {name: number for number, pool in enumerate(passed.tuning.pools) for name in pool.stages}
    first_of = {number: name for name, number in reversed(pools.items())}
    rows = []
    for row in passed.stages:
        facts = measure(interval, row.name).awaited
        pool = pools.get(row.name, 0)
        trial = passed.trials.get(first_of.get(pool, row.name), ContentionResult())
        waiting_s = max(0.0, row.busy_s - row.cpu_s - row.delayed_s)
        gil_s = waiting_s if trial.holds_gil and row.kind not in ("read", "transfer") else 0.0
        queued = [point["queued"][row.name] for point in series if row.name in point["queued"]]
        stall_s = passed.stall_s.get(row.name, 0.0)
        chunks = passed.slowest.get(row.name, NOTHING_SLOW)["chunk"].tolist()
        known = {name: value for name, value in row.to_dict().items() if name != "num_queued"}
        rows.append(
            StageRow(
                **known,
                kind=row.kind,
                in_turn=row.in_turn,
                content=row.content,
                is_limited=facts.is_limited,
                pool=pool,
                io_s=waiting_s - gil_s,
                gil_s=gil_s,
                items_per_s=row.num_items / passed.wall_s,
                bytes_per_s=row.num_bytes / passed.wall_s,
                stall_s=stall_s,
                stall_percent=100.0 * stall_s / passed.wall_s,
                queued_mean=sum(queued) / len(queued) if queued else None,
                queued_max=max(queued, default=None),
                services=sorted(map(list, row.services.durations())),
                chunk=median(chunks) if chunks else None,
                slow=_slow_times(passed, row),
            )
        )
    return rows


def _slow_times(passed: Stats, row: StageStats) -> list[SlowTime]:
    least_s = _SLOW * (row.services.percentile(0.5) or 0.0)
    found = sorted(rows_of(passed.slowest.get(row.name, NOTHING_SLOW)), key=lambda slow: slow.at_s)
    return [SlowTime(**slow._asdict()) for slow in found if slow.each_s >= least_s]
