"""The methods of `Pipeline` that are made from settings: one for each kind of source and of stage, `prefetch`,
`errors`, `ranks` and `metrics`.

Editors and type checkers read kind_methods.pyi instead, which docs/make_stubs.py writes.
"""

from __future__ import annotations

import inspect
import os
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from pydantic.fields import FieldInfo

from loaderkit._internal.config.diagnostics import nearest
from loaderkit._internal.config.settings import Model
from loaderkit.connectors.config import StoreArgs
from loaderkit.errors import ConfigError
from loaderkit.pipeline.config.model import ErrorsArgs, MetricsArgs, PrefetchArgs, RanksArgs
from loaderkit.pipeline.config.registry import SOURCES, STAGES
from loaderkit.stages.base import StageArgs


class _SourceNames(type):
    """Finds the sources that packages and programs add, on first use: only a metaclass is asked for a class's attribute."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise _no_kind(cls, name)
        if name in SOURCES:
            return source_method(name, SOURCES[name].args).__get__(None, cls)
        if name in STAGES:
            return stage_method(name, STAGES[name].args)
        raise AttributeError(f"Pipeline has no source {name!r}; {nearest(name, _public(cls))}")

    def __dir__(cls) -> list[str]:
        return sorted({*super().__dir__(), *SOURCES, *STAGES})


class KindMethods(metaclass=_SourceNames):
    """The base of `Pipeline`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise _no_kind(type(self), name)
        if name in STAGES:
            return stage_method(name, STAGES[name].args).__get__(self)
        raise AttributeError(f"a pipeline has no stage {name!r}; {nearest(name, _public(type(self)))}")

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *STAGES})


def _no_kind(owner: type, name: str) -> AttributeError:
    """The error for an unknown name. It lists no similar names: copy, pickle, inspect and test runners ask for such
    names, and a list of all takes 40 ms."""
    return AttributeError(f"type object {owner.__name__!r} has no attribute {name!r}")


def _public(cls: type) -> list[str]:
    return [known for known in dir(cls) if not known.startswith("_")]


def source_method(kind: str, args: type[Model]) -> Any:
    """The class method that begins a pipeline. Arguments that the source requires may be given by position."""
    needed = [key for key, field in args.model_fields.items() if field.is_required()]
    return classmethod(
        _method(kind, args, needed, lambda cls, given: cls({"source": {"kind": kind, **given}, "stages": []}))
    )


def stage_method(kind: str, args: type[Model]) -> Callable[..., Any]:
    """The method that adds a stage. Its own arguments may be given by position."""
    own = [key for key in args.model_fields if key not in StageArgs.model_fields]
    own.sort(key=lambda key: not args.model_fields[key].is_required())
    return _method(kind, args, own, lambda pipeline, given: pipeline._with_stage({kind: given} if given else kind))


def section_method(key: str, args: type[Model]) -> Callable[..., Any]:
    """The method that changes settings of a section."""
    return _method(key, args, [], lambda pipeline, given: pipeline._with_section(key, **given))


def _method(
    name: str, args: type[Model], positional: list[str], use: Callable[[Any, dict[str, Any]], Any]
) -> Callable[..., Any]:
    """A method that passes its arguments on: they are checked together with the rest of the description."""

    def method(owner: Any, /, *values: Any, **arguments: Any) -> Any:
        if len(values) > len(positional):
            raise ConfigError(
                f"{name} takes {len(positional)} arguments by position ({', '.join(positional)}), not {len(values)}"
            )
        given = dict(zip(positional, values, strict=False))
        if doubled := given.keys() & arguments.keys():
            raise ConfigError(f"{name}: {', '.join(sorted(doubled))} given twice")
        return use(owner, plain({**given, **arguments}))

    fields = {key: field for key, field in args.model_fields.items() if key != "kind"}
    others = [key for key in fields if key not in positional]
    names = [*positional, *sorted(others, key=lambda key: key in StoreArgs.model_fields)]
    described = [textwrap.fill(f"{key}: {fields[key].description}", 100, subsequent_indent="    ") for key in names]
    method.__name__, method.__qualname__ = name, f"Pipeline.{name}"
    method.__doc__ = "\n".join([inspect.cleandoc(args.__doc__ or ""), "", *described]).rstrip()
    owner = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [_parameter(key, fields[key], is_positional=key in positional) for key in names]
    method.__signature__ = inspect.Signature([owner, *parameters])  # type: ignore[attr-defined]
    return method


def _parameter(name: str, field: FieldInfo, *, is_positional: bool) -> inspect.Parameter:
    default = {} if isinstance(field.default, Model) else field.default
    return inspect.Parameter(
        name,
        inspect.Parameter.POSITIONAL_OR_KEYWORD if is_positional else inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if field.is_required() else default,
    )


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values as in YAML: lists for tuples and texts for paths, also in lists; but a data set as it is."""
    return {key: value if key == "object" else _plain(value) for key, value in values.items()}


def _plain(value: Any) -> Any:
    if type(value) in (tuple, list):
        return [str(item) if isinstance(item, os.PathLike) else item for item in value]
    return str(value) if isinstance(value, os.PathLike) else value


for _kind, _source in SOURCES.ours.items():
    setattr(KindMethods, _kind, source_method(_kind, _source.args))
for _kind, _stage in STAGES.ours.items():
    setattr(KindMethods, _kind, stage_method(_kind, _stage.args))
_SECTIONS = {"prefetch": PrefetchArgs, "errors": ErrorsArgs, "ranks": RanksArgs, "metrics": MetricsArgs}
for _key, _args in _SECTIONS.items():
    setattr(KindMethods, _key, section_method(_key, _args))
