"""Makes a `PipelineConfig` from YAML or a dict.

    YAML text ─> nodes with lines ─> ${VAR} ─> overrides ─> models ─> structure ─> PipelineConfig

All problems on the way are collected and raised together as one `ConfigError`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loaderkit._internal.config.diagnostics import KeyPath, Problems, nearest
from loaderkit._internal.config.yaml_text import expand_variables, read_yaml
from loaderkit.errors import ConfigError
from loaderkit.pipeline.config.mixture import MixtureArgs
from loaderkit.pipeline.config.model import (
    ErrorsArgs,
    MetricsArgs,
    OrderArgs,
    PipelineConfig,
    PrefetchArgs,
    RanksArgs,
    escape,
)
from loaderkit.pipeline.config.registry import SOURCES
from loaderkit.pipeline.config.source_parsing import absolute_url, parse_section, parse_source
from loaderkit.pipeline.config.stage_parsing import parse_stages, stage_arguments, stage_names
from loaderkit.pipeline.config.validation import check_structure, order_of_stream

_SECTIONS = (
    "version", "name", "source", "sources", "mix", "order", "stages", "prefetch", "errors", "ranks", "metrics", "output"
)  # fmt: skip


def load_yaml(path: Path, *, overrides: Mapping[str, Any] | None = None) -> PipelineConfig:
    """The pipeline a YAML file describes. Paths in it are relative to the file. Raises ConfigError."""
    problems = Problems(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # not UTF-8, or a null byte in the path
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"{path}: the pipeline cannot be read: {reason}") from error
    return _parse(read_yaml(text, problems), problems, path.parent, overrides or {}, expand=True)


def parse(
    data: Mapping[str, Any], *, overrides: Mapping[str, Any] | None = None, expand: bool = True
) -> PipelineConfig:
    """The pipeline a dict describes; paths in it are relative to the working directory. `expand`: put in ${VAR}."""
    problems = Problems(None)
    return _parse(copied(data), problems, Path.cwd(), overrides or {}, expand=expand)


def _check_keys(data: dict[Any, Any], problems: Problems) -> None:
    for key in data:
        if not isinstance(key, str):
            if problems.file is None:  # in a file, the error was added with its line
                problems.error((), f"the key {key!r} is not text")
        elif key not in _SECTIONS:
            problems.error((key,), f"unknown key {key!r}; {nearest(str(key), _SECTIONS)}")


def copied(value: Any, path: KeyPath = ()) -> Any:
    """A copy of a description's containers, so that later changes by the caller do not reach it; objects are shared."""
    if _is_object(path):
        return value
    if isinstance(value, Mapping):
        return {key: copied(item, (*path, key)) for key, item in value.items()}
    return [copied(item, (*path, place)) for place, item in enumerate(value)] if type(value) is list else value


def _is_object(path: KeyPath) -> bool:
    """True for the place of a source's data set, which is the user's: also a list or a mapping, whose texts are data."""
    return path == ("source", "object") or (len(path) == 3 and (path[0], path[2]) == ("sources", "object"))


def _parse(data: Any, problems: Problems, base: Path, overrides: Mapping[str, Any], *, expand: bool) -> PipelineConfig:
    if not isinstance(data, dict):
        problems.raise_problems()
        given = "nothing" if data is None else type(data).__name__
        problems.error((), f"a pipeline is a mapping with at least `source` and `stages`, this is {given}")
        problems.raise_problems()
    _apply_overrides(data, _escaped(overrides) if expand else overrides, problems)
    if expand:
        data = expand_variables(data, (), problems, is_left=_is_object)
    _check_keys(data, problems)
    if data.get("version", 1) != 1 or isinstance(data.get("version"), bool):
        problems.error(("version",), f"this loaderkit reads version 1, not {data['version']!r}")
    if not isinstance(data.get("name", ""), str):
        problems.error(("name",), f"expected text, not {data['name']!r}")
    source = parse_source(data, problems, base)
    stages = parse_stages(data.get("stages"), ("stages",), problems, base)
    order = parse_section(OrderArgs, data, "order", problems)
    prefetch = parse_section(PrefetchArgs, data, "prefetch", problems)
    errors = parse_section(ErrorsArgs, data, "errors", problems)
    ranks = parse_section(RanksArgs, data, "ranks", problems)
    metrics = parse_section(MetricsArgs, data, "metrics", problems)
    output = _parse_output(data, problems)
    if source is not None and len(stages) == len(data["stages"] if isinstance(data.get("stages"), list) else ()):
        check_structure(source, stages, order, prefetch, problems)
    is_stream = source is not None and not isinstance(source, MixtureArgs) and SOURCES[source.kind].is_stream
    if order is not None and is_stream:
        order = order_of_stream(order, errors, problems)
    problems.raise_problems()
    assert source is not None
    assert order is not None
    assert prefetch is not None
    assert errors is not None
    assert ranks is not None
    assert metrics is not None
    if errors.quarantine is not None:
        errors = errors.model_copy(update={"quarantine": str(base.absolute() / Path(errors.quarantine).expanduser())})
    name = data.get("name", problems.file.stem if problems.file is not None else "pipeline")
    return PipelineConfig(source, stages, 1, name, order, prefetch, errors, output, ranks, metrics)


def _escaped(value: Any, path: KeyPath = ()) -> Any:
    """Overrides as a file would have them, whose texts are taken as they are; data sets are left."""
    if _is_object(path) and not isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return {key: _escaped(item, (*path, *str(key).split("."))) for key, item in value.items()}
    if type(value) is list:
        return [_escaped(item, (*path, place)) for place, item in enumerate(value)]
    return escape(value)


def _apply_overrides(data: dict[str, Any], overrides: Any, problems: Problems) -> None:
    if not isinstance(overrides, Mapping):
        problems.error((), f"overrides are a mapping such as {{'stages.batch.size': 32}}, not {overrides!r}")
        return
    for dotted, value in overrides.items():
        if not isinstance(dotted, str):
            problems.error((), f"override {dotted!r}: a dotted key is text, such as 'stages.batch.size'")
            continue
        section = dotted.split(".")[0]
        if section not in _SECTIONS:
            problems.error((), f"override {dotted!r}: unknown key {section!r}; {nearest(section, _SECTIONS)}")
            continue
        found = _target_of(data, dotted, problems)
        if found is None:
            continue
        target, parts = found
        if section in ("source", "sources") and parts[-1:] == ["url"] and isinstance(value, (str, list)):
            # Relative to the caller's folder.
            value = absolute_url(value, Path.cwd()) if isinstance(value, str) else _absolute(value)  # noqa: PLW2901
        elif (dotted == "errors.quarantine" or dotted.endswith(".cache.dir")) and isinstance(value, str):
            value = str(Path.cwd() / Path(value).expanduser())  # noqa: PLW2901
        for part in parts[:-1]:
            if not isinstance(target.get(part), dict):
                target[part] = {}
            target = target[part]
        target[parts[-1]] = value


def _absolute(urls: list[Any]) -> list[Any]:
    return [absolute_url(url, Path.cwd()) if isinstance(url, str) else url for url in urls]


def _target_of(data: dict[str, Any], dotted: str, problems: Problems) -> tuple[dict[str, Any], list[str]] | None:
    """The mapping that an override changes, and the keys from there; None, with an error added, if there is none."""
    section, *rest = dotted.split(".")
    if section not in ("stages", "sources") or not rest:
        return data, [section, *rest]
    if section == "stages":
        target = stage_arguments(data.get("stages"), rest[0])
        names = [name for name, _ in stage_names(data.get("stages"))]
        what, example = "stage", ("arguments", "workers")
    else:
        listed = data.get("sources")
        entries = [entry for entry in (listed if isinstance(listed, list) else ()) if isinstance(entry, dict)]
        names = [str(entry.get("name")) for entry in entries]
        target = entries[names.index(rest[0])] if rest[0] in names else None
        what, example = "source", ("keys", "weight")
    if target is None:
        problems.error((), f"override {dotted!r}: no {what} is called {rest[0]!r}; {nearest(rest[0], names)}")
        return None
    if not rest[1:]:
        problems.error((), f"override {dotted!r}: name one of the {what}'s {example[0]}, as in {dotted}.{example[1]}")
        return None
    return target, rest[1:]


def _parse_output(data: dict[str, Any], problems: Problems) -> tuple[str, ...] | None:
    raw = data.get("output")
    if raw is None:
        return None
    if isinstance(raw, (list, tuple)) and raw and all(isinstance(name, str) for name in raw):
        return tuple(raw)
    problems.error(("output",), f"expected a list of fields, or null, not {raw!r}")
    return None
