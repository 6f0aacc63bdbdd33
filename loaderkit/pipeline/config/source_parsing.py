"""Parses the sources of a config, `source`, or `sources` and `mix`; and a section as its model."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from loaderkit._internal.config.diagnostics import KeyPath, Problems, nearest
from loaderkit._internal.config.model_errors import validate
from loaderkit._internal.config.paths import absolute_path
from loaderkit._internal.config.settings import Model
from loaderkit.connectors.config import SourceArgs
from loaderkit.connectors.factory import CONNECTORS, scheme_of
from loaderkit.errors import ConfigError
from loaderkit.pipeline.config.mixture import MixArgs, MixedArgs, MixedSourceConfig, MixtureArgs, mixture_args
from loaderkit.pipeline.config.registry import SOURCES
from loaderkit.pipeline.config.stage_parsing import parse_stages
from loaderkit.sources.base import SourceKind

M = TypeVar("M", bound=Model)


def parse_source(data: dict[str, Any], problems: Problems, base: Path) -> SourceArgs | None:
    """The arguments of `source`, or of `sources` and `mix`; None if they are wrong."""
    if "sources" in data:
        return _parse_mixture(data, problems, base)
    if "mix" in data:
        problems.error(
            ("mix",), "`mix` says how `sources` take turns, and there is only `source`: remove it, or list `sources`"
        )
    return _parse_single(data, problems, base)


def _parse_single(data: dict[str, Any], problems: Problems, base: Path) -> SourceArgs | None:
    raw = data.get("source")
    if not isinstance(raw, dict):
        said = "is missing" if "source" not in data else f"is {raw!r}"
        problems.error(
            ("source",), f"`source` {said}: expected a mapping with `kind` ({', '.join(SOURCES)}) and where to read"
        )
        return None
    return parse_kind(raw, ("source",), problems, base)


def _parse_mixture(data: dict[str, Any], problems: Problems, base: Path) -> MixtureArgs | None:
    """The arguments of `sources` and `mix`."""
    if "source" in data:
        problems.error(("source",), "`source` and `sources` exclude each other: list it among `sources`")
    raw, mix = data["sources"], parse_section(MixArgs, data, "mix", problems)
    if not isinstance(raw, list) or not raw:
        problems.error(
            ("sources",), f"expected a list of sources, each with `name`, `kind` and where to read, not {raw!r}"
        )
        return None
    members = [_parse_mixed(entry, number, problems, base) for number, entry in enumerate(raw)]
    known = [member for member in members if member is not None]
    for number, member in enumerate(known):
        if member.name in [other.name for other in known[:number]]:
            problems.error(("sources", number, "name"), f"two sources are called {member.name!r}")
        if mix is not None and mix.stop == "never" and member.mixed.epochs is not None:
            problems.error(
                ("sources", number, "epochs"), "`mix.stop: never` lets every source begin again: remove `epochs`"
            )
    if mix is None or len(known) < len(members):
        return None
    names = [member.name for member in known]
    for number, change in enumerate(mix.changes):
        where = ("mix", "changes", number, "weights")
        for name in [name for name in change.weights if name not in names]:
            problems.error((*where, name), f"no source is called {name!r}; {nearest(name, names)}")
        if missing := [name for name in names if name not in change.weights]:
            problems.error(where, f"give the weight of every source, 0 for none: {', '.join(missing)} is missing")
            return None
    return mixture_args(tuple(known), mix)


def _parse_mixed(raw: Any, number: int, problems: Problems, base: Path) -> MixedSourceConfig | None:
    path: KeyPath = ("sources", number)
    if not isinstance(raw, dict):
        problems.error(path, f"expected a mapping with `name`, `kind` and where to read, not {raw!r}")
        return None
    own = [*MixedArgs.model_fields, "stages"]
    mixed = validate(
        MixedArgs, {key: value for key, value in raw.items() if key in MixedArgs.model_fields}, path, problems
    )
    rest = {key: value for key, value in raw.items() if key not in own}
    if (source_kind := _kind_of(raw, path, problems)) is not None:
        known = [*own, *source_kind.args.model_fields]
        for key in [key for key in rest if key not in known]:
            del rest[key]
            problems.error((*path, key), f"unknown key {key!r}; {nearest(str(key), known)}")
    args = parse_kind(rest, path, problems, base)
    stages = parse_stages(raw["stages"], (*path, "stages"), problems, base) if raw.get("stages") else ()
    if args is None or mixed is None or source_kind is None:
        return None
    kind = args.kind
    if source_kind.is_stream or not source_kind.has_samples:
        reason = "its items come in their own order only" if source_kind.is_stream else "it has tensors and no samples"
        problems.error((*path, "kind"), f"kind: {kind} cannot be mixed, as {reason}")
        return None
    named = tuple(replace(stage, name=f"{stage.name}.{mixed.name}") for stage in stages)
    return MixedSourceConfig(mixed, kind, args, named)


def parse_kind(raw: dict[str, Any], path: KeyPath, problems: Problems, base: Path) -> SourceArgs | None:
    """The arguments of one source, at the key `path`, with absolute paths."""
    kind = _kind_of(raw, path, problems)
    if kind is None:
        return None
    parsed = validate(kind.args, raw, path, problems)
    url = getattr(parsed, "url", None)
    if parsed is not None and url is not None:
        urls = (url,) if isinstance(url, str) else url
        for one in urls:
            _check_scheme(one, (*path, "url"), problems)
        try:
            absolute = tuple(absolute_url(one, base) for one in urls)
            parsed = parsed.model_copy(update={"url": absolute[0] if isinstance(url, str) else absolute})
        except RuntimeError as error:  # an unknown user in ~user
            problems.error((*path, "url"), f"{url!r}: {error}")
    cache = getattr(parsed, "cache", None)
    if parsed is not None and cache is not None and cache.dir is not None:
        try:
            folder = absolute_path(base.absolute() / Path(cache.dir).expanduser())
            parsed = parsed.model_copy(update={"cache": cache.model_copy(update={"dir": folder})})
        except RuntimeError as error:  # an unknown user in ~user
            problems.error((*path, "cache", "dir"), f"{cache.dir!r}: {error}")
    return parsed


def _kind_of(raw: dict[str, Any], path: KeyPath, problems: Problems) -> SourceKind | None:
    """The kind that a source names; None, with an error added, if it names none that can be used."""
    kind = raw.get("kind")
    if not isinstance(kind, str) or kind not in SOURCES:
        text = "`kind` is missing" if "kind" not in raw else f"unknown kind {kind!r}"
        problems.error((*path, "kind"), f"{text}; {nearest(str(kind), SOURCES)}")
        return None
    try:
        return SOURCES[kind]
    except ConfigError as error:  # of the package that brings it
        problems.error((*path, "kind"), str(error))
        return None


def _check_scheme(url: str, path: KeyPath, problems: Problems) -> None:
    """Add an error for a URL whose connector comes from a package that cannot be used. An unknown scheme is no error
    here: `build` may be given its connector."""
    scheme = scheme_of(url)
    if CONNECTORS.is_ours(scheme) or scheme not in CONNECTORS:
        return
    try:
        _ = CONNECTORS[scheme]
    except ConfigError as error:
        problems.error(path, str(error))


def absolute_url(url: str, base: Path) -> str:
    """The URL, or the path relative to `base` as an absolute one."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", url):
        return url
    return absolute_path(base.absolute() / os.path.expanduser(url))  # "~x" without such a user is a name


def parse_section(model: type[M], data: dict[str, Any], key: str, problems: Problems) -> M | None:
    """The section `key`, or its defaults; None if it is wrong."""
    raw = data.get(key)
    if raw is None:
        raw = {}
    if not isinstance(raw, dict):
        problems.error((key,), f"expected a mapping with {', '.join(model.model_fields)}, not {raw!r}")
        return None
    return validate(model, raw, (key,), problems)
