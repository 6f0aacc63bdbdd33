"""The verdict's change as settings, and those as YAML.

Only settings that leave every batch as it is: more workers or batches ahead, more memory, another executor. A faster store,
cheaper images or a cheaper function are the user's decision; the verdict names them in words.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from loaderkit._internal.cgroups import num_cpus
from loaderkit._internal.diagnostics import Problems
from loaderkit._internal.units import format_bytes
from loaderkit._internal.yaml_text import to_yaml
from loaderkit.engine.metrics import Stats, Verdict
from loaderkit.engine.metrics.interval import Interval
from loaderkit.pipeline.config.model import PipelineConfig, PrefetchArgs
from loaderkit.pipeline.config.validation import check_structure
from loaderkit.pipeline.process_setup import check_depth, check_sendable
from loaderkit.profile.report_parts import Setting, VerdictPart

_MOST_PROCESSES = 8  # each imports all that the functions need, and several ranks may share the machine
_PAGE = 2**20


def verdict_part(stats: Stats, config: PipelineConfig) -> VerdictPart:
    """The verdict on an interval, with its change as values."""
    if not stats.num_batches and not any(stats.stall_s.values()):
        stats = replace(stats, wall_s=0.0)  # no batch was requested
    verdict = stats.verdict()
    settings = settings_for(verdict, stats, config) if stats.wall_s > 0 and stats.num_batches else []
    return VerdictPart(**verdict._asdict(), settings=settings)


def settings_for(verdict: Verdict, stats: Stats, config: PipelineConfig) -> list[Setting]:
    """The settings of the verdict's change; empty where it is not a matter of settings."""
    make = _CHANGES.get(verdict.kind)
    settings = [] if make is None else make(Interval.of(stats), verdict, config)
    return settings if settings and is_accepted(config, {one.key: one.value for one in settings}) else []


def is_accepted(config: PipelineConfig, settings: Mapping[str, Any]) -> bool:
    """True if `build` would take the pipeline with these values by dotted key. Nothing else is suggested."""
    given = {key.removeprefix("prefetch."): value for key, value in settings.items() if key.startswith("prefetch.")}
    problems = Problems(None)
    try:
        changed = replace(config, prefetch=PrefetchArgs.model_validate({**dict(config.prefetch), **given}))
        check_structure(changed.source, changed.stages, changed.order, changed.prefetch, problems)
        problems.raise_problems()
        if changed.prefetch.executor == "process":
            check_depth(changed.prefetch)
            if config.prefetch.executor != "process":
                check_sendable(changed)
    except ValueError:  # of the model, or a ConfigError
        return False
    return True


def _more_batches(interval: Interval, verdict: Verdict, config: PipelineConfig) -> list[Setting]:
    if interval.is_inline:
        return _more_at_once(interval, verdict, config)
    batches = _set(config, "prefetch.batches", 2 * interval.num_wanted)
    if not (wanted := interval.memory_to_double):
        return [batches]
    budget = _memory_of(wanted, interval, config)
    return [batches, *budget] if budget else []


def _more_memory(interval: Interval, verdict: Verdict, config: PipelineConfig) -> list[Setting]:
    return _memory_of(interval.num_wanted * int(interval.stats.memory.get("batch_bytes", 0)), interval, config)


def _memory_of(wanted: int, interval: Interval, config: PipelineConfig) -> list[Setting]:
    """`prefetch.memory` of `wanted` bytes; empty if the machine has no memory for it."""
    budget = _set(config, "prefetch.memory", format_bytes(-(-wanted // _PAGE) * _PAGE))
    return [budget] if interval.has_memory_for(wanted) else []


def _in_a_process(interval: Interval, verdict: Verdict, config: PipelineConfig) -> list[Setting]:
    return [_set(config, "prefetch.executor", "process")] if config.prefetch.executor == "thread" else []


def _more_at_once(interval: Interval, verdict: Verdict, config: PipelineConfig) -> list[Setting]:
    if interval.is_inline_by_rule:  # what computes would take longer with workers
        return [] if verdict.kind == "computing" else [_set(config, "prefetch.concurrency", interval.num_cpus)]
    if interval.is_inline:
        return [_set(config, "prefetch.executor", config.executor_with_workers)]
    if verdict.stage is None or (verdict.kind == "computing" and interval.is_short_of_cpus):
        return []
    return _more_workers(interval, verdict.stage, config)


_CHANGES: Mapping[str, Callable[[Interval, Verdict, PipelineConfig], list[Setting]]] = {
    "latency": _more_at_once,
    "waiting": _more_at_once,
    "computing": _more_at_once,
    "stragglers": _more_batches,
    "depth": _more_batches,
    "memory": _more_memory,
    "gil": lambda interval, verdict, config: process_settings(config, int(interval.stats.memory.get("batch_bytes", 0))),
    "wakeup": _in_a_process,
}


def _more_workers(interval: Interval, stage: str, config: PipelineConfig) -> list[Setting]:
    pool = next((pool for pool in interval.pools if any(row.name == stage for row in pool.rows)), None)
    if pool is None or pool.is_in_trainer:
        return []
    workers = pool.rows[0].workers
    return workers_settings(
        config, stage, workers, interval.suggested_workers(workers), interval.stats.tuning.to_dict()
    )


def workers_settings(
    config: PipelineConfig, stage: str, before: int, workers: int, tuning: dict[str, Any]
) -> list[Setting]:
    """`workers` for the pool of a stage: the stage's own `workers` if that is a number, else `prefetch.concurrency`."""
    names = next((pool["stages"] for pool in tuning.get("pools", ()) if stage in pool["stages"]), [stage])
    own = [one for one in config.stages if one.name in names and one.args.workers != "auto"]
    if own:
        return [_set(config, f"stages.{one.name}.workers", workers) for one in own]
    concurrency = int(tuning.get("concurrency", before))
    return [_set(config, "prefetch.concurrency", concurrency + workers - before)]


def num_processes(config: PipelineConfig, batch_bytes: int) -> int:
    """The number of loading processes: one a CPU of this rank while `memory` holds two batches for each; at least two."""
    ranks_here = os.environ.get("LOCAL_WORLD_SIZE", "1")
    cpus = num_cpus() // max(1, int(ranks_here) if ranks_here.isdigit() else 1)
    fitting = config.prefetch.memory // (2 * batch_bytes) if batch_bytes else _MOST_PROCESSES
    return max(2, min(cpus, fitting, _MOST_PROCESSES))


def process_settings(config: PipelineConfig, batch_bytes: int) -> list[Setting]:
    """Settings for several loading processes, each with its own GIL; empty if they are set already, or if `memory` does not
    hold two batches for each."""
    prefetch, processes = config.prefetch, num_processes(config, batch_bytes)
    if 2 * processes * batch_bytes > prefetch.memory:
        return []
    if prefetch.executor == "process" and prefetch.processes >= processes:
        return []
    settings = [_set(config, "prefetch.executor", "process"), _set(config, "prefetch.processes", processes)]
    if prefetch.first_batches < 2 * processes:
        settings.append(_set(config, "prefetch.batches", 2 * processes))
    return [setting for setting in settings if setting.before != setting.value]


def _set(config: PipelineConfig, key: str, value: Any) -> Setting:
    return Setting(key=key, before=value_of(config, key), value=value)


def value_of(config: PipelineConfig, key: str) -> Any:
    """The plain value of a dotted key in a config."""
    section, _, rest = key.partition(".")
    if section == "stages":
        name, _, rest = rest.rpartition(".")
        args: Any = next(stage.args for stage in config.stages if stage.name == name)
    else:
        args = getattr(config, section)
    return args.model_dump(mode="json", include={rest}).get(rest)  # another field may hold an object that has no name


def settings_yaml(settings: Sequence[Setting]) -> str | None:
    """The values to set as YAML, in the form they have in a pipeline's file; None if there are none."""
    if not settings:
        return None
    description: dict[str, Any] = {}
    for setting in settings:
        section, _, rest = setting.key.partition(".")
        if section == "stages":
            name, _, key = rest.rpartition(".")
            description.setdefault("stages", []).append({name: {key: setting.value}})
        else:
            description.setdefault(section, {})[rest] = setting.value
    return to_yaml(description)
