"""The verdict's change as settings, and those as YAML.

Only settings that leave every batch as it is: more workers or batches ahead, more memory, another executor. A faster store,
cheaper images or a cheaper function are the user's decision; the verdict names them in words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from loaderkit._internal.config.diagnostics import Problems
from loaderkit._internal.config.yaml_text import to_yaml
from loaderkit._internal.system.cgroups import num_cpus_of_rank
from loaderkit._internal.units import format_bytes
from loaderkit.engine.metrics import Stats, Verdict
from loaderkit.engine.metrics.interval import Interval, StageFacts, measure, more_of
from loaderkit.engine.metrics.stalls import RELEASE
from loaderkit.pipeline.config.model import PipelineConfig, PrefetchArgs
from loaderkit.pipeline.config.validation import check_structure
from loaderkit.pipeline.executors.process_setup import check_depth
from loaderkit.pipeline.executors.sendable import check_sendable
from loaderkit.profile.report_parts import Setting, VerdictPart

_MOST_PROCESSES = 8  # each imports all that the functions need, and several ranks may share the machine


def verdict_part(stats: Stats, config: PipelineConfig) -> VerdictPart:
    """The verdict on an interval, with its change as values, which its words name."""
    if not stats.num_batches and not any(stats.stall_s.values()):
        stats = replace(stats, wall_s=0.0)  # no batch was requested
    verdict = stats.verdict()
    settings = settings_for(verdict, stats, config) if stats.wall_s > 0 and stats.num_batches else []
    change, unsaid = verdict.change, [one for one in settings if not _is_said(one, verdict.change)]
    if unsaid:
        change = f"{change}; as settings {say_settings(settings)}"
    return VerdictPart(**verdict._replace(change=change)._asdict(), settings=settings)


def say_settings(settings: Sequence[Setting]) -> str:
    """Settings in words, as a file has them."""
    return ", ".join(f"{one.key}: {one.value}" for one in settings)


def _is_said(setting: Setting, change: str) -> bool:
    is_of_workers = setting.key == "prefetch.concurrency" or setting.key.endswith(".workers")
    return f"{setting.key}: {setting.value}" in change or (is_of_workers and "loader.resize(" in change)


def settings_for(verdict: Verdict, stats: Stats, config: PipelineConfig) -> list[Setting]:
    """The settings of the verdict's change; empty where it is not a matter of settings."""
    make = _CHANGES.get(verdict.kind)
    made = [] if make is None else make(Interval.of(stats), verdict, config)
    settings = [
        one for one in made if one.before != one.value
    ]  # where a loader was resized, the file may have it already
    return settings if settings and is_accepted(config, {one.key: one.value for one in settings}) else []


_THREADS = ("auto", "thread")


def is_accepted(config: PipelineConfig, settings: Mapping[str, Any]) -> bool:
    """True if `build` would take the pipeline with these values by dotted key. Nothing else is suggested."""
    given = {key.removeprefix("prefetch."): value for key, value in settings.items() if key.startswith("prefetch.")}
    problems = Problems(None)
    try:
        changed = replace(config, prefetch=PrefetchArgs.model_validate({**dict(config.prefetch), **given}))
        check_structure(changed.source, changed.stages, changed.order, changed.prefetch, problems)
        problems.raise_problems()
        if changed.prefetch.is_remote:
            check_depth(changed.prefetch)
            if not config.prefetch.is_remote:
                check_sendable(changed)
    except ValueError:  # of the model, or a ConfigError
        return False
    return True


def _more_batches(interval: Interval, verdict: Verdict, config: PipelineConfig) -> list[Setting]:
    batches = _set(config, "prefetch.batches", 2 * interval.num_wanted)
    if not (wanted := interval.memory_to_double):
        return [batches]
    budget = _memory_of(wanted, interval, config)
    return [batches, *budget] if budget else []


def _more_batches_and_workers(interval: Interval, verdict: Verdict, config: PipelineConfig) -> list[Setting]:
    if interval.is_inline:
        return _more_at_once(interval, verdict, config)
    found, facts = _more_batches(interval, verdict, config), _facts_of(interval, verdict)
    if facts is None or more_of(interval, facts) != "workers":
        return found
    return [*found, *_workers_of(facts, 2 * facts.stage.workers, interval, config)]


def _more_memory(interval: Interval, verdict: Verdict, config: PipelineConfig) -> list[Setting]:
    if verdict.stage == RELEASE:  # of it there is enough, and it takes long to give back
        return []
    return _memory_of(interval.memory_wanted, interval, config)


def _memory_of(wanted: int, interval: Interval, config: PipelineConfig) -> list[Setting]:
    """`prefetch.memory` of `wanted` bytes; empty if the machine has no memory for it."""
    budget = _set(config, "prefetch.memory", format_bytes(wanted))
    return [budget] if interval.has_memory_for(wanted) else []


def _in_a_process(interval: Interval, verdict: Verdict, config: PipelineConfig) -> list[Setting]:
    return [_set(config, "prefetch.executor", "process")] if config.prefetch.executor in _THREADS else []


def _to_wake_up(interval: Interval, verdict: Verdict, config: PipelineConfig) -> list[Setting]:
    return [] if interval.is_short_of_cpus else _in_a_process(interval, verdict, config)


def _more_processes(interval: Interval, verdict: Verdict, config: PipelineConfig) -> list[Setting]:
    facts = _facts_of(interval, verdict)
    if facts is not None and facts.loop_holds_gil:  # one will do, which has a GIL of its own
        return _in_a_process(interval, verdict, config)
    return process_settings(config, int(interval.stats.memory.get("batch_bytes", 0)))


def _processes_for_user_code(interval: Interval, verdict: Verdict, config: PipelineConfig) -> list[Setting]:
    facts = _facts_of(interval, verdict)
    return _more_processes(interval, verdict, config) if facts is not None and facts.stage.alone else []


def _more_at_once(interval: Interval, verdict: Verdict, config: PipelineConfig) -> list[Setting]:
    facts, computing = _facts_of(interval, verdict), verdict.kind == "computing"
    match None if facts is None else more_of(interval, facts, computing=computing):
        case "executor" if interval.is_inline_by_rule:
            return [_set(config, "prefetch.concurrency", interval.num_cpus)]
        case "executor":
            return [_set(config, "prefetch.executor", config.executor_with_workers)]
        case "processes":
            return _more_processes(interval, verdict, config)
        case "workers" if facts is not None:
            workers = interval.suggested_workers(facts.stage.workers, computing=computing)
            batches = interval.batches_for(workers)
            ahead = [_set(config, "prefetch.batches", batches)] if batches else []
            return [*ahead, *_workers_of(facts, workers, interval, config)]
    return []


_CHANGES: Mapping[str, Callable[[Interval, Verdict, PipelineConfig], list[Setting]]] = {
    "latency": _more_at_once,
    "waiting": _more_at_once,
    "computing": _more_at_once,
    "stragglers": _more_batches_and_workers,
    "depth": _more_batches,
    "memory": _more_memory,
    "gil": _more_processes,
    "lock": _processes_for_user_code,
    "wakeup": _to_wake_up,
}


def _facts_of(interval: Interval, verdict: Verdict) -> StageFacts | None:
    """The facts of the stage that a verdict names; None where it names something else."""
    is_known = any(row.name == verdict.stage for row in interval.stats.stages)
    return measure(interval, verdict.stage).awaited if is_known and verdict.stage is not None else None


def _workers_of(facts: StageFacts, workers: int, interval: Interval, config: PipelineConfig) -> list[Setting]:
    return workers_settings(config, facts.stage.name, facts.stage.workers, workers, interval.stats.tuning.to_dict())


def workers_settings(
    config: PipelineConfig, stage: str, before: int, workers: int, tuning: dict[str, Any]
) -> list[Setting]:
    """`workers` for the pool of a stage: the stage's own `workers` if that is a number, else `prefetch.concurrency`."""
    pools = [pool for pool in tuning.get("pools", ()) if "process" not in pool]  # but for the trainer's own
    names = next((pool["stages"] for pool in pools if stage in pool["stages"]), [stage])
    bases = [name.partition(".")[0] for name in names]  # of a mixture there is `read.web`
    own = [one for one in config.stages if one.name in bases and one.args.workers != "auto"]
    if own:
        return [_set(config, f"stages.{one.name}.workers", workers) for one in own]
    concurrency = sum(int(pool["workers"]) for pool in pools) or before
    return [_set(config, "prefetch.concurrency", concurrency + workers - before)]


def num_processes(config: PipelineConfig, batch_bytes: int) -> int:
    """The number of loading processes: one a CPU of this rank while `memory` holds two batches for each; at least two."""
    cpus = num_cpus_of_rank()
    fitting = config.prefetch.memory // (2 * batch_bytes) if batch_bytes else _MOST_PROCESSES
    return max(2, min(cpus, fitting, _MOST_PROCESSES))


def process_settings(config: PipelineConfig, batch_bytes: int) -> list[Setting]:
    """Settings for several loading processes, each with its own GIL; empty if they are set already, or if `memory` does not
    hold two batches for each."""
    prefetch, processes = config.prefetch, num_processes(config, batch_bytes)
    if 2 * processes * batch_bytes > prefetch.memory:
        return []
    is_enough = prefetch.processes == "auto" or prefetch.processes >= processes
    if prefetch.executor == "ray" or (prefetch.executor == "process" and is_enough):
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
