"""From YAML or a dict to a `PipelineConfig`.

    YAML text ─> nodes with lines ─> ${VAR} ─> overrides ─> models ─> structure ─> PipelineConfig

All problems on the way are collected and raised together as one `ConfigError`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from loaderkit._internal.config.diagnostics import KeyPath, Problems, nearest
from loaderkit._internal.config.model_errors import validate
from loaderkit._internal.config.settings import Model
from loaderkit._internal.config.yaml_text import expand_variables, read_yaml
from loaderkit.connectors.config import SourceArgs
from loaderkit.errors import ConfigError
from loaderkit.pipeline.config.model import ErrorsArgs, OrderArgs, PipelineConfig, PrefetchArgs, escape
from loaderkit.pipeline.config.registry import SOURCES, STAGES
from loaderkit.pipeline.config.validation import check_structure, order_of_stream
from loaderkit.stages.base import StageArgs, StageConfig

_SECTIONS = ("version", "name", "source", "order", "stages", "prefetch", "errors", "output")

M = TypeVar("M", bound=Model)


def load_yaml(path: Path, *, overrides: Mapping[str, Any] | None = None) -> PipelineConfig:
    """The pipeline a YAML file describes. Paths in it are relative to the file. Raises ConfigError."""
    problems = Problems(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"{path}: the pipeline cannot be read: {reason}") from error
    return _parse(read_yaml(text, problems), problems, path.parent, overrides or {}, expand=True)


def parse(
    data: Mapping[str, Any], *, overrides: Mapping[str, Any] | None = None, expand: bool = True
) -> PipelineConfig:
    """The pipeline a dict describes; paths in it are relative to the working directory. `expand`: put in ${VAR}."""
    problems = Problems(None)
    return _parse(_copied(data), problems, Path.cwd(), overrides or {}, expand=expand)


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if type(value) is list else value


def _parse(data: Any, problems: Problems, base: Path, overrides: Mapping[str, Any], *, expand: bool) -> PipelineConfig:
    if not isinstance(data, dict):
        problems.raise_problems()
        given = "nothing" if data is None else type(data).__name__
        problems.error((), f"a pipeline is a mapping with at least `source` and `stages`, this is {given}")
        problems.raise_problems()
    _apply_overrides(data, escape(overrides) if expand else overrides, problems)
    if expand:
        data = expand_variables(data, (), problems)
    for key in data:
        if not isinstance(key, str):
            if problems.file is None:  # in a file, the error was added with its line
                problems.error((), f"the key {key!r} is not text")
        elif key not in _SECTIONS:
            problems.error((key,), f"unknown key {key!r}; {nearest(str(key), _SECTIONS)}")
    if data.get("version", 1) != 1 or isinstance(data.get("version"), bool):
        problems.error(("version",), f"this loaderkit reads version 1, not {data['version']!r}")
    if not isinstance(data.get("name", ""), str):
        problems.error(("name",), f"expected text, not {data['name']!r}")
    source = _parse_source(data, problems, base)
    stages = _parse_stages(data, problems)
    order = _parse_section(OrderArgs, data, "order", problems)
    prefetch = _parse_section(PrefetchArgs, data, "prefetch", problems)
    errors = _parse_section(ErrorsArgs, data, "errors", problems)
    output = _parse_output(data, problems)
    if source is not None and len(stages) == len(data["stages"] if isinstance(data.get("stages"), list) else ()):
        check_structure(source, stages, order, prefetch, problems)
    if source is not None and order is not None and SOURCES[data["source"]["kind"]].is_stream:
        order = order_of_stream(order, errors, problems)
    problems.raise_problems()
    assert source is not None
    assert order is not None
    assert prefetch is not None
    assert errors is not None
    if errors.quarantine is not None:
        errors = errors.model_copy(update={"quarantine": str(base.absolute() / Path(errors.quarantine).expanduser())})
    name = data.get("name", problems.file.stem if problems.file is not None else "pipeline")
    return PipelineConfig(source, stages, 1, name, order, prefetch, errors, output)


def _apply_overrides(data: dict[str, Any], overrides: Any, problems: Problems) -> None:
    if not isinstance(overrides, Mapping):
        problems.error((), f"overrides are a mapping such as {{'stages.batch.size': 32}}, not {overrides!r}")
        return
    for dotted, value in overrides.items():
        if not isinstance(dotted, str):
            problems.error((), f"override {dotted!r}: a dotted key is text, such as 'stages.batch.size'")
            continue
        section, *rest = dotted.split(".")
        if section not in _SECTIONS:
            problems.error((), f"override {dotted!r}: unknown key {section!r}; {nearest(section, _SECTIONS)}")
            continue
        if section == "source" and rest == ["url"] and isinstance(value, str):
            value = _absolute_url(value, Path.cwd())  # noqa: PLW2901 - relative to the caller's folder
        elif dotted in ("errors.quarantine", "source.cache.dir") and isinstance(value, str):
            value = str(Path.cwd() / Path(value).expanduser())  # noqa: PLW2901
        target: Any = data
        parts = [section, *rest]
        if section == "stages" and rest:
            stage = _stage_arguments(data.get("stages"), rest[0])
            if stage is None:
                names = [name for name, _ in stage_names(data.get("stages"))]
                problems.error((), f"override {dotted!r}: no stage is called {rest[0]!r}; {nearest(rest[0], names)}")
                continue
            target, parts = stage, rest[1:]
            if not parts:
                problems.error((), f"override {dotted!r}: name one of the stage's arguments, as in {dotted}.workers")
                continue
        for part in parts[:-1]:
            if not isinstance(target.get(part), dict):
                target[part] = {}
            target = target[part]
        target[parts[-1]] = value


def stage_names(stages: Any, *, given: bool = True) -> list[tuple[str, int]]:
    """(name, number) of every stage, as far as known before validation; without `given` the default names."""
    names: list[tuple[str, int]] = []
    counts: dict[str, int] = {}
    for number, item in enumerate(stages if isinstance(stages, list) else []):
        kind = item if isinstance(item, str) else next(iter(item), None) if isinstance(item, dict) else None
        args = item.get(kind) if isinstance(item, dict) else None
        name = args.get("name") if isinstance(args, dict) else None
        if isinstance(kind, str):
            counts[kind] = counts.get(kind, 0) + 1
            default = kind if counts[kind] == 1 else f"{kind}-{counts[kind]}"
            names.append((name if given and isinstance(name, str) else default, number))
    return names


def _stage_arguments(stages: Any, name: str) -> dict[str, Any] | None:
    """The mutable arguments of the stage called `name` in the raw list."""
    for stage_name, number in stage_names(stages):
        if stage_name == name:
            item = stages[number]
            if isinstance(item, str) or not isinstance(item[next(iter(item))], dict):
                kind = item if isinstance(item, str) else next(iter(item))
                stages[number] = item = {kind: {}}
            arguments: dict[str, Any] = item[next(iter(item))]
            return arguments
    return None


def _parse_source(data: dict[str, Any], problems: Problems, base: Path) -> SourceArgs | None:
    raw = data.get("source")
    if not isinstance(raw, dict):
        said = "is missing" if "source" not in data else f"is {raw!r}"
        problems.error(
            ("source",), f"`source` {said}: expected a mapping with `kind` ({', '.join(SOURCES)}) and where to read"
        )
        return None
    kind = raw.get("kind")
    if not isinstance(kind, str) or kind not in SOURCES:
        text = "`kind` is missing" if "kind" not in raw else f"unknown kind {kind!r}"
        problems.error(("source", "kind"), f"{text}; {nearest(str(kind), SOURCES)}")
        return None
    parsed = validate(SOURCES[kind].args, raw, ("source",), problems)
    url = getattr(parsed, "url", None)
    if parsed is not None and url is not None:
        try:
            parsed = parsed.model_copy(update={"url": _absolute_url(url, base)})
        except RuntimeError as error:  # an unknown user in ~user
            problems.error(("source", "url"), f"{url!r}: {error}")
    cache = getattr(parsed, "cache", None)
    if parsed is not None and cache is not None and cache.dir is not None:
        try:
            folder = os.path.normpath(base.absolute() / Path(cache.dir).expanduser())
            parsed = parsed.model_copy(update={"cache": cache.model_copy(update={"dir": folder})})
        except RuntimeError as error:  # an unknown user in ~user
            problems.error(("source", "cache", "dir"), f"{cache.dir!r}: {error}")
    return parsed


def _absolute_url(url: str, base: Path) -> str:
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", url):
        return url
    return os.path.normpath(base.absolute() / Path(url).expanduser())


def _parse_section(model: type[M], data: dict[str, Any], key: str, problems: Problems) -> M | None:
    raw = data.get(key)
    if raw is None:
        raw = {}
    if not isinstance(raw, dict):
        problems.error((key,), f"expected a mapping with {', '.join(model.model_fields)}, not {raw!r}")
        return None
    return validate(model, raw, (key,), problems)


def _parse_stages(data: dict[str, Any], problems: Problems) -> tuple[StageConfig, ...]:
    raw = data.get("stages")
    if not isinstance(raw, list) or not raw:
        said = "is missing" if "stages" not in data else "is empty" if raw == [] else f"is {raw!r}"
        problems.error(("stages",), f"`stages` {said}: expected a list that begins with `read` and has a `batch`")
        return ()
    stages: list[StageConfig] = []
    seen: set[str] = set()
    names = {number: name for name, number in stage_names(raw)}
    default_names = {number: name for name, number in stage_names(raw, given=False)}
    for number, item in enumerate(raw):
        path: KeyPath = ("stages", number)
        if isinstance(item, dict) and len(item) == 1:
            kind, arguments = next(iter(item.items()))
        else:
            kind, arguments = item, {}
        if not isinstance(kind, str):
            problems.error(path, f"a stage is a name, or one name with its arguments, not {item!r}")
            continue
        if kind not in STAGES:
            problems.error(path, f"unknown stage {kind!r}; {nearest(kind, STAGES)}")
            continue
        if arguments is None:
            arguments = {}
        if not isinstance(arguments, dict):
            own = [name for name in STAGES[kind].args.model_fields if name not in StageArgs.model_fields]
            problems.error((*path, kind), f"expected arguments by name ({', '.join(own)}), not {arguments!r}")
            arguments = None
        args = None if arguments is None else validate(STAGES[kind].args, arguments, (*path, kind), problems)
        if args is None:  # its errors are added; the checks of the stages' order still need it
            args = STAGES[kind].args.model_construct()
        name = names[number]
        if name in seen:
            problems.error(path, f"two stages are called {name!r}: give one of them another `name`")
        seen.add(name)
        if args.name == default_names[number]:
            args = args.model_copy(update={"name": None})
        stages.append(StageConfig(kind, name, args))
    return tuple(stages)


def _parse_output(data: dict[str, Any], problems: Problems) -> tuple[str, ...] | None:
    raw = data.get("output")
    if raw is None:
        return None
    if isinstance(raw, (list, tuple)) and raw and all(isinstance(name, str) for name in raw):
        return tuple(raw)
    problems.error(("output",), f"expected a list of fields, or null, not {raw!r}")
    return None
