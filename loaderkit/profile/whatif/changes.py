"""The changes that a what-if table shows: what each changes in the model, and the setting for it, if there is one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import median

from loaderkit._internal.config.diagnostics import Problems
from loaderkit._internal.system.cgroups import num_cpus
from loaderkit._internal.units import format_bytes
from loaderkit.diagnosis.changes import num_processes
from loaderkit.diagnosis.verdict import Setting
from loaderkit.engine.metrics.stalls import NETWORK
from loaderkit.pipeline.config.model import PipelineConfig
from loaderkit.pipeline.config.validation import check_neighbours
from loaderkit.profile.report import Report
from loaderkit.profile.settings_patch import (
    file_setting,
    is_accepted,
    workers_settings,
)
from loaderkit.profile.whatif.bounds import bounds
from loaderkit.profile.whatif.demands import Demand, PipelineModel, PoolModel
from loaderkit.profile.whatif.predict import rate_of
from loaderkit.stages.base import StageConfig

_MOST_WORKERS = 128
_MORE_NODES = (1, 2, 4, 8, 16)
_PLAINLY = 1.05  # times as fast
_BY_PIXEL = frozenset({
    "center_crop", "random_crop", "random_horizontal_flip", "random_vertical_flip", "random_rotation", "color_jitter",
    "random_grayscale", "gaussian_blur", "random_erasing", "batch", "normalize", "transfer",
})  # fmt: skip
_RESIZING = frozenset({"resize", "random_resized_crop", "center_crop", "random_crop"})


@dataclass(frozen=True)
class Change:
    """A change to the model. Without `settings` it cannot be tried here."""

    name: str
    model: PipelineModel
    settings: tuple[Setting, ...] = ()
    note: str = ""
    answers: tuple[str, ...] = ()  # kinds of verdicts that ask for it in words


def changes(model: PipelineModel, report: Report, config: PipelineConfig) -> list[Change]:
    """Every change that the model knows for this pipeline, and that `build` takes."""
    found = [
        *_workers(model, report, config),
        *_depth(model, report, config),
        *_executors(model, config, int(report.memory.get("batch_bytes", 0))),
        *_machine(model),
        *_nodes(model, report),
        *_iterable(model, report),
        *_cheaper(model, report),
        *_store(model, report),
        *_images(model, report, config),
    ]
    return [
        change
        for change in found
        if not change.settings or is_accepted(config, {one.key: one.value for one in change.settings})
    ]


def _workers(model: PipelineModel, report: Report, config: PipelineConfig) -> Iterator[Change]:
    if model.is_inline:
        return
    for number, pool in enumerate(model.pools):
        stage = max(pool.stages, key=lambda one: one.service_s).name
        for workers in (2 * pool.workers, pool.workers // 2):
            if not model.processes <= workers <= _MOST_WORKERS:
                continue
            settings = workers_settings(config, stage, pool.workers, workers, report.tuning)
            name = f"{workers} {'worker' if workers == 1 else 'workers'} instead of {pool.workers}"
            if len(model.pools) > 1:
                name = f"{stage}: {name}"
            yield Change(name, _with_pool(model, number, replace(pool, workers=workers)), tuple(settings))


def _depth(model: PipelineModel, report: Report, config: PipelineConfig) -> Iterator[Change]:
    batches = report.tuning.get("batches")
    if model.is_inline or not isinstance(batches, int):
        return
    is_waited_for = report.verdict.stage == NETWORK and report.verdict.kind == "depth"
    note = "how long batches are on their way between nodes is not in the model: try it" if is_waited_for else ""
    for wanted in (2 * batches, batches // 2):
        if wanted >= max(1, model.processes):
            changed = replace(model, batches_ahead=float(wanted))
            yield Change(
                f"{wanted} {'batch' if wanted == 1 else 'batches'} ahead instead of {batches}",
                changed,
                (file_setting(config, "prefetch.batches", wanted),),
                note,
            )
    if model.batches_in_memory < batches:
        memory = format_bytes(-(-batches * int(report.memory["batch_bytes"]) // 2**20) * 2**20)
        changed = replace(model, batches_in_memory=float(batches))
        yield Change("memory for all batches ahead", changed, (file_setting(config, "prefetch.memory", memory),))


def _executors(model: PipelineModel, config: PipelineConfig, batch_bytes: int) -> Iterator[Change]:
    executor = config.prefetch.executor
    if not config.prefetch.is_remote and not model.is_inline:
        yield Change("executor: process", model, (file_setting(config, "prefetch.executor", "process"),))
        processes = num_processes(config.prefetch.memory, batch_bytes)
        if model.gil_s > 0 and config.prefetch.first_batches >= processes:
            settings = (
                file_setting(config, "prefetch.executor", "process"),
                file_setting(config, "prefetch.processes", processes),
            )
            yield Change(f"{processes} processes", replace(model, processes=processes), settings)
    if executor != "inline":
        yield Change(
            "executor: inline", replace(model, is_inline=True), (file_setting(config, "prefetch.executor", "inline"),)
        )
    if executor == "inline":
        pool, wanted = PoolModel(num_cpus(), model.stages), config.executor_with_workers
        changed = replace(model, is_inline=False, pools=(pool,))
        yield Change(f"executor: {wanted}", changed, (file_setting(config, "prefetch.executor", wanted),))


def _machine(model: PipelineModel) -> Iterator[Change]:
    """More CPUs, if more workers would lack them: a call that sleeps needs only the workers."""
    pools = tuple(replace(pool, workers=2 * pool.workers) for pool in model.pools)
    more_workers = replace(model, pools=pools)
    more_cpus = replace(more_workers, cpus=2 * model.cpus)
    if rate_of(more_cpus) > _PLAINLY * rate_of(more_workers):
        yield Change("twice the CPUs, and workers for them", more_cpus)


def _nodes(model: PipelineModel, report: Report) -> Iterator[Change]:
    """More nodes with as many workers as the present nodes have, until the loop, the taking of batches or the network
    is the limit."""
    if report.tuning.get("executor") != "ray":
        return
    rows = [row for row in report.nodes if row.num_workers]
    others = [row for row in rows if not row.is_trainers]
    each = round(median([row.num_workers for row in others or rows] or [model.processes]))
    cpus = median([row.cpus or math.inf for row in others or rows] or [float(report.machine.cpus)])
    away = sum(row.num_workers for row in others)
    for number in _MORE_NODES:
        processes = model.processes + number * each
        factor = processes / model.processes
        pools = tuple(replace(pool, workers=round(pool.workers * factor)) for pool in model.pools)
        # In turns: every worker makes as many batches as any other.
        share = (away + number * each) / processes / (away / model.processes) if away else 0.0  # 0: not known
        changed = replace(
            model,
            pools=pools,
            processes=processes,
            cpus=model.cpus + number * cpus,
            batches_ahead=model.batches_ahead * factor,
            batches_in_memory=model.batches_in_memory * factor,
            network_s=model.network_s * share,
        )
        note = f"prefetch: {{processes: {processes}, batches: {round(changed.batches_ahead)}}}, and memory for them"
        if not changed.network_s:
            note += "; what the network carries is not known from this run"
        name = f"{number} more {'node' if number == 1 else 'nodes'} of {each} {'worker' if each == 1 else 'workers'}"
        yield Change(name, changed, note=note)
        upper = bounds(changed)
        if min(upper, key=upper.__getitem__) in ("training", "taking batches", "network"):
            return


def _iterable(model: PipelineModel, report: Report) -> Iterator[Change]:
    names = [row.name for row in report.stages if row.in_turn]
    if model.serial_stage not in names:
        return

    def faster(stage: Demand) -> Demand:
        return replace(stage, cpu_s=stage.cpu_s / 2, wait_s=stage.wait_s / 2) if stage.name in names else stage

    changed = replace(_with_stages(model, faster), serial_s=model.serial_s / 2)
    yield Change("an iterable twice as fast", changed, answers=("computing", "waiting"))


def _cheaper(model: PipelineModel, report: Report) -> Iterator[Change]:
    """The stage that the verdict names, if its cost is its own and not a store's."""
    blamed = next((row for row in report.stages if row.name == report.verdict.stage), None)
    if blamed is None or blamed.in_turn or blamed.num_bytes or blamed.kind in ("transfer", "share", "decode"):
        return
    is_serial = model.serial_stage == blamed.name

    def faster(stage: Demand) -> Demand:
        return replace(stage, cpu_s=stage.cpu_s / 2, wait_s=stage.wait_s / 2) if stage.name == blamed.name else stage

    changed = _with_stages(replace(model, serial_s=model.serial_s / 2) if is_serial else model, faster)
    name = f"{blamed.name} holding its lock for half as long" if is_serial else f"{blamed.name} twice as fast"
    yield Change(name, changed, answers=("computing", "gil", "lock", "latency", "waiting"))


def _store(model: PipelineModel, report: Report) -> Iterator[Change]:
    reads = [stage for stage in model.stages if stage.kind == "read" and stage.wait_s > 0]
    if not reads or any(row.in_turn for row in report.stages):
        return
    is_serial = model.serial_stage in [stage.name for stage in reads]
    fast = replace(model, serial_s=model.serial_s / 2) if is_serial else model
    halved = _with_stages(fast, lambda stage: replace(stage, wait_s=stage.wait_s / 2) if stage in reads else stage)
    yield Change("twice the bandwidth of the store", halved if is_serial else model, answers=("bandwidth",))
    yield Change("half the latency of the store", model if is_serial else halved, answers=("latency", "waiting"))
    if report.config.get("source", {}).get("kind") == "dataset":
        return
    cached = replace(model, serial_s=0.0, serial_stage=None) if is_serial else model
    cached = _with_stages(cached, lambda stage: replace(stage, wait_s=0.0) if stage in reads else stage)
    yield Change("all samples in a local cache", cached, note="source.cache: {dir: ...}, from the second epoch on")


def _images(model: PipelineModel, report: Report, config: PipelineConfig) -> Iterator[Change]:
    kinds = [stage.kind for stage in config.stages]
    if "decode" not in kinds or not _RESIZING & set(kinds):
        return
    if getattr(config.stages[kinds.index("decode")].args, "has_media", False):
        return
    first = next(kind for kind in kinds if kind in _RESIZING)

    def smaller(stage: Demand, pixels: float) -> Demand:
        if stage.kind in ("decode", first):
            return replace(stage, cpu_s=stage.cpu_s * pixels)
        return (
            replace(stage, cpu_s=stage.cpu_s * pixels, wait_s=stage.wait_s * pixels) if stage.kind == "read" else stage
        )

    half = _with_stages(model, lambda stage: smaller(stage, 0.25))
    is_blamed = any(row.name == report.verdict.stage and row.kind in ("decode", first) for row in report.stages)
    note, answers = "made once beforehand, offline", ("computing", "stragglers") if is_blamed else ()
    yield Change("images stored at half the width and height", half, note=note, answers=answers)
    # Where decoding is scaled it would change as well, and by how much is not in the model.
    is_scaled = getattr(config.stages[kinds.index("decode")].args, "scaled", False)
    if first in ("resize", "random_resized_crop") and not is_scaled:
        yield _used_smaller(model, config, kinds.index(first))
    if not _may_go_to_the_gpu(config, config.stages[kinds.index("decode")]):
        return
    gone = {stage.name for stage in config.stages[kinds.index("decode") :] if stage.kind not in ("batch", "transfer")}
    on_gpu = _with_stages(model, lambda stage: replace(stage, cpu_s=0.0, wait_s=0.0) if stage.name in gone else stage)
    note = "decode: {device: gpu}; how fast the GPU decodes, and what it takes from training, is not in the model"
    yield Change("decoding on the GPU", on_gpu, note=note)


def _may_go_to_the_gpu(config: PipelineConfig, decoding: StageConfig) -> bool:
    """True if `decode: {device: gpu}` would be a change and a valid pipeline."""
    if getattr(decoding.args, "device", "gpu") == "gpu":
        return False
    there = replace(decoding, args=decoding.args.model_copy(update={"device": "gpu"}))
    problems = Problems(None)
    check_neighbours(tuple(there if stage is decoding else stage for stage in config.stages), problems)
    return not problems.problems


def _used_smaller(model: PipelineModel, config: PipelineConfig, place: int) -> Change:
    """The stage at `place`, which resizes, makes images of half the width and height.

    It takes about as long itself (in ours a fifth less): each pixel that is read is weighed, whatever comes of it.
    """
    behind = {stage.name for stage in config.stages[place + 1 :] if stage.kind in _BY_PIXEL}

    def smaller(stage: Demand) -> Demand:
        return replace(stage, cpu_s=stage.cpu_s / 4, wait_s=stage.wait_s / 4) if stage.name in behind else stage

    note = "other images for the network, and a faster step"
    return Change(f"{config.stages[place].name} to half the width and height", _with_stages(model, smaller), note=note)


def _with_pool(model: PipelineModel, number: int, pool: PoolModel) -> PipelineModel:
    return replace(model, pools=(*model.pools[:number], pool, *model.pools[number + 1 :]))


def _with_stages(model: PipelineModel, change: Callable[[Demand], Demand]) -> PipelineModel:
    pools = tuple(replace(pool, stages=tuple(change(stage) for stage in pool.stages)) for pool in model.pools)
    before = sum(stage.cpu_s for stage in model.stages)
    after = sum(stage.cpu_s for pool in pools for stage in pool.stages)
    return replace(model, pools=pools, gil_s=model.gil_s * after / before if before > 0 else model.gil_s)
