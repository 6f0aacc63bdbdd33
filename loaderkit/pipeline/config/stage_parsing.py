"""Parses the stages of a config: from the raw list to `StageConfig`s, and their names."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from loaderkit._internal.config.diagnostics import KeyPath, Problems, nearest
from loaderkit._internal.config.model_errors import validate
from loaderkit._internal.config.paths import absolute_path
from loaderkit.errors import ConfigError
from loaderkit.pipeline.config.registry import STAGES
from loaderkit.stages.base import StageArgs, StageConfig


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


def stage_arguments(stages: Any, name: str) -> dict[str, Any] | None:
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


def parse_stages(raw: Any, where: KeyPath, problems: Problems, base: Path) -> tuple[StageConfig, ...]:
    """The stages at the key `where`: the common ones, or one source's own. Paths below `base` become absolute."""
    if not isinstance(raw, list) or not raw:
        if where == ("stages",):
            said = "is missing" if raw is None else "is empty" if raw == [] else f"is {raw!r}"
            problems.error(where, f"`stages` {said}: expected a list that begins with `read` and has a `batch`")
        else:
            problems.error(where, f"expected a list of the stages for samples of this source alone, not {raw!r}")
        return ()
    stages: list[StageConfig] = []
    seen: set[str] = set()
    names = {number: name for name, number in stage_names(raw)}
    default_names = {number: name for name, number in stage_names(raw, given=False)}
    for number, item in enumerate(raw):
        path: KeyPath = (*where, number)
        known = _kind_and_arguments(item, path, problems)
        if known is None:
            continue
        kind, arguments = known
        args = None if arguments is None else validate(STAGES[kind].args, arguments, (*path, kind), problems)
        if args is None:  # its errors are added; the checks of the stages' order still need it
            args = STAGES[kind].args.model_construct()
        else:
            args = args.model_copy(update=_paths_in(args, STAGES[kind].paths, base))
        name = names[number]
        if name in seen:
            problems.error(path, f"two stages are called {name!r}: give one of them another `name`")
        seen.add(name)
        if args.name == default_names[number]:
            args = args.model_copy(update={"name": None})
        stages.append(StageConfig(kind, name, args))
    return tuple(stages)


def _paths_in(args: StageArgs, names: Iterable[str], base: Path) -> dict[str, str]:
    """The arguments that name an existing file or folder, as absolute paths; others may be names of something else."""
    given = {name: getattr(args, name) for name in names}
    absolute = {
        name: absolute_path(base.absolute() / os.path.expanduser(value))
        for name, value in given.items()
        if isinstance(value, str)
    }
    return {name: path for name, path in absolute.items() if os.path.exists(path)}


def _kind_and_arguments(item: Any, path: KeyPath, problems: Problems) -> tuple[str, dict[str, Any] | None] | None:
    """The kind of a stage and its arguments (None if they are wrong); None if the kind is not known."""
    if isinstance(item, dict) and len(item) == 1:
        kind, arguments = next(iter(item.items()))
    else:
        kind, arguments = item, {}
    if not isinstance(kind, str):
        problems.error(path, f"a stage is a name, or one name with its arguments, not {item!r}")
        return None
    if kind not in STAGES:
        problems.error(path, f"unknown stage {kind!r}; {nearest(kind, STAGES)}")
        return None
    try:
        _ = STAGES[kind]
    except ConfigError as error:  # of the package that brings it
        problems.error(path, str(error))
        return None
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        own = [name for name in STAGES[kind].args.model_fields if name not in StageArgs.model_fields]
        problems.error((*path, kind), f"expected arguments by name ({', '.join(own)}), not {arguments!r}")
        arguments = None
    return kind, arguments
