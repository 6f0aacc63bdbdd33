"""Turns the verdict's settings into keys of the pipeline's file, and into YAML.

It includes only settings that leave every batch as it is: more workers or batches ahead, more memory, another executor.
A faster store, cheaper images or a cheaper function are the user's decision; the verdict names them in words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from loaderkit._internal.config.diagnostics import Problems
from loaderkit._internal.config.yaml_text import to_yaml
from loaderkit.diagnosis.stats import Stats
from loaderkit.diagnosis.verdict import Cause, Setting, Verdict, say
from loaderkit.pipeline.config.model import PipelineConfig, PrefetchArgs
from loaderkit.pipeline.config.validation import check_structure
from loaderkit.pipeline.executors.process_setup import check_depth
from loaderkit.pipeline.executors.sendable import check_sendable
from loaderkit.profile.report_parts import SettingsTrial, VerdictPart


def verdict_part(stats: Stats, config: PipelineConfig) -> VerdictPart:
    """The verdict on an interval, with its settings as keys of the pipeline's file."""
    if not stats.num_batches and not any(stats.stall_s.values()):
        stats = replace(stats, wall_s=0.0)  # no batch was requested
    verdict = stats.verdict()
    settings = settings_for(verdict, stats, config)
    change = verdict.change
    if settings and not verdict.is_exact:
        change = f"{change}; as settings {say(settings)}"
    causes = [one.model_copy(update={"settings": settings_for(one, stats, config)}) for one in verdict.causes]
    return VerdictPart(**{**verdict.to_dict(), "change": change, "causes": causes}, settings=settings)


def settings_for(verdict: Verdict | Cause, stats: Stats, config: PipelineConfig) -> list[Setting]:
    """The verdict's settings as keys of the pipeline's file; empty if `build` would refuse them."""
    if stats.wall_s <= 0 or not stats.num_batches:
        return []
    tuning = stats.tuning.to_dict()
    in_file = {one.key: one for given in verdict.settings for one in _in_file(given, config, tuning)}
    # Where a loader was resized, the file may have it already.
    settings = [one for one in in_file.values() if one.before != one.value]
    return settings if settings and is_accepted(config, {one.key: one.value for one in settings}) else []


def _in_file(given: Setting, config: PipelineConfig, tuning: dict[str, Any]) -> list[Setting]:
    """A setting of the running loader in the form of the file."""
    section, _, rest = given.key.partition(".")
    if section == "stages":
        name, _, _ = rest.rpartition(".")
        return workers_settings(config, name, given.before, given.value, tuning)
    if given.key == "prefetch.processes":
        return _processes(config, given.value)
    return [given.model_copy(update={"before": value_of(config, given.key)})]


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


def workers_settings(
    config: PipelineConfig, stage: str, before: int, workers: int, tuning: dict[str, Any]
) -> list[Setting]:
    """`workers` for the pool of a stage: the stage's own `workers` if that is a number, else `prefetch.concurrency`."""
    pools = [pool for pool in tuning.get("pools", ()) if "process" not in pool]  # but for the trainer's own
    names = next((pool["stages"] for pool in pools if stage in pool["stages"]), [stage])
    bases = [name.partition(".")[0] for name in names]  # of a mixture there is `read.web`
    own = [one for one in config.stages if one.name in bases and one.args.workers != "auto"]
    if own:
        return [file_setting(config, f"stages.{one.name}.workers", workers) for one in own]
    concurrency = sum(int(pool["workers"]) for pool in pools) or before
    return [file_setting(config, "prefetch.concurrency", concurrency + workers - before)]


def _processes(config: PipelineConfig, processes: int) -> list[Setting]:
    """The settings for `processes` loading processes, with at least two batches ahead for each."""
    settings = [file_setting(config, "prefetch.executor", "process")]  # a loader may have chosen that itself
    settings.append(file_setting(config, "prefetch.processes", processes))
    if config.prefetch.first_batches < 2 * processes:
        settings.append(file_setting(config, "prefetch.batches", 2 * processes))
    return settings


def file_setting(config: PipelineConfig, key: str, value: Any) -> Setting:
    """A setting of the file, with the value that it has there."""
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


def patch_of(settings: Sequence[Setting], trial: SettingsTrial) -> str | None:
    """The YAML of settings below a comment that says what a trial of them found; None if there are none."""
    text = settings_yaml(settings)
    return None if text is None else f"# {' '.join(str(trial).split())}\n{text}"


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
