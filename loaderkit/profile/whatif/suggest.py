"""Suggests what to set where a stage's times vary: the smallest change that, by simulation, brings nearly all of the
possible gain.

Whether batches ahead, workers or both help depends on how long the slow items are, how close together they come, and how many
samples the engine makes at a time. No rule of thumb covers all of that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import log2

from loaderkit._internal.units import format_bytes
from loaderkit.diagnosis.changes import FASTER, slow_ones, work_of
from loaderkit.diagnosis.interval import has_memory_for
from loaderkit.diagnosis.stage_facts import COMPUTING
from loaderkit.diagnosis.verdict import Setting, say
from loaderkit.pipeline.config.model import PipelineConfig
from loaderkit.profile.report import Report
from loaderkit.profile.settings_patch import file_setting, is_accepted, settings_yaml, workers_settings
from loaderkit.profile.whatif.bounds import bounds
from loaderkit.profile.whatif.changes import Change
from loaderkit.profile.whatif.demands import PipelineModel, model_of
from loaderkit.profile.whatif.predict import predict, rate_of, steady_rate
from loaderkit.profile.whatif.simulate import most_ahead

_KINDS = frozenset({"stragglers", "depth"})
_DEPTHS, _WORKERS = (1, 2, 4, 8), (1, 2, 4)  # times as many as there are
_MOST_WORKERS = 128
_NEARLY = 0.9  # of the most
_GAIN = 1.1  # times as fast: a change that brings less is not worth it
_MIB = 2**20


def with_suggestion(report: Report, config: PipelineConfig) -> Report:
    """The report with the settings that help most where times vary, or none if none does, and a verdict whose words say the
    same. Other reports, and those that have seen too little, are returned as they are."""
    verdict = report.verdict
    is_in_turn = verdict.kind in ("computing", "waiting") and any(
        row.in_turn and row.name == verdict.stage for row in report.stages
    )
    is_of_a_stage = any(row.name == verdict.stage for row in report.stages)  # and not of the network
    is_sure = verdict.or_kind is None or verdict.or_kind in _KINDS
    # Of processes it is not known how the times would vary in them.
    needs_processes = any(one.key == "prefetch.executor" for one in verdict.settings)
    is_asked = is_of_a_stage and is_sure and not needs_processes and (verdict.kind in _KINDS or is_in_turn)
    model = model_of(report) if is_asked else None
    if model is None or model.is_inline:
        return report
    settings, speedup = _best(model, [*_candidates(model, report, config)], steady_rate(report))
    change, otherwise = verdict.change, FASTER
    if not is_in_turn:
        row = next(row for row in report.stages if row.name == verdict.stage)
        otherwise = slow_ones(work_of(row), computes=row.cpu_s + row.delayed_s > COMPUTING * row.busy_s)
        change = f"{otherwise}: by simulation, neither more batches ahead nor more workers would help"
    if settings:
        change = f"{say(settings)}: {speedup:.2g} times as fast by simulation; or {otherwise}"
    causes = [one.model_copy(update={"settings": settings, "change": change}) for one in verdict.causes[:1]]
    changed = verdict.model_copy(
        update={"settings": settings, "change": change, "causes": [*causes, *verdict.causes[1:]]}
    )
    return report.model_copy(update={"verdict": changed, "patch": settings_yaml(settings)})


def _best(model: PipelineModel, candidates: list[Change], measured: float) -> tuple[list[Setting], float]:
    """The settings of the first candidate that is nearly as good as the last and largest, and how many times as fast it is. No
    settings where even that brings too little. A run of the simulation takes 30 ms."""
    scale = measured / rate_of(model)
    best = predict(candidates[-1].model, scale).samples_per_s if candidates else 0.0
    if best < _GAIN * measured:
        return [], 1.0
    enough = max(_NEARLY * best, _GAIN * measured)
    for candidate in candidates[:-1]:
        if min(bounds(candidate.model).values()) * scale >= enough:
            rate = predict(candidate.model, scale).samples_per_s
            if rate >= enough:
                return [*candidate.settings], rate / measured
    return [*candidates[-1].settings], best / measured


def _candidates(model: PipelineModel, report: Report, config: PipelineConfig) -> Iterator[Change]:
    """More batches ahead, as far as there is memory, and more workers; the smallest change first."""
    pairs = [(depth, workers) for depth in _DEPTHS for workers in _WORKERS]
    for depth, workers in sorted(pairs, key=lambda pair: (log2(pair[0]) + log2(pair[1]), pair)):
        changed, settings = model, list[Setting]()
        if workers > 1:
            changed, settings = _with_workers(model, workers, report, config)
        deeper = _with_depth(changed, depth, report, config)
        if deeper is None or (workers > 1 and not settings):
            continue
        changed, settings = deeper[0], [*deeper[1], *settings]
        if settings and is_accepted(config, {one.key: one.value for one in settings}):
            yield Change("", changed, tuple(settings))


def _with_workers(
    model: PipelineModel, factor: int, report: Report, config: PipelineConfig
) -> tuple[PipelineModel, list[Setting]]:
    """More workers for the stage that the loop waits for; no settings where that is not possible."""
    numbers = sorted({row.pool for row in report.stages})
    row = next(row for row in report.stages if row.name == report.verdict.stage)
    place, is_in_trainer = numbers.index(row.pool), "process" in _pool_of(report, row.name)
    pool = model.pools[place]
    workers = factor * pool.workers
    if is_in_trainer or row.kind == "transfer" or workers > _MOST_WORKERS:
        return model, []
    pools = (*model.pools[:place], replace(pool, workers=workers), *model.pools[place + 1 :])
    return replace(model, pools=pools), workers_settings(config, row.name, pool.workers, workers, report.tuning)


def _pool_of(report: Report, stage: str) -> dict[str, object]:
    return next((pool for pool in report.tuning.get("pools", ()) if stage in pool["stages"]), {})


def _with_depth(
    model: PipelineModel, factor: int, report: Report, config: PipelineConfig
) -> tuple[PipelineModel, list[Setting]] | None:
    """More batches ahead, and the memory for them; None where the machine has no memory for them, or a run no time."""
    batches = factor * int(report.tuning.get("batches") or 1)
    if factor > 1 and batches > most_ahead(model.batch):
        return None
    settings = [] if factor == 1 else [file_setting(config, "prefetch.batches", batches)]
    needed = batches * int(report.memory.get("batch_bytes") or 0)
    changed = replace(model, batches_ahead=float(batches))
    if needed <= report.memory["budget_bytes"]:
        return changed, settings
    if factor == 1:
        return model, []
    budget = -(-needed // _MIB) * _MIB
    if not has_memory_for(report.memory, budget):
        return None
    memory = file_setting(config, "prefetch.memory", format_bytes(budget))
    return replace(changed, batches_in_memory=float(batches)), [*settings, memory]
