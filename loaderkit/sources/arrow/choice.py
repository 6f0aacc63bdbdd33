"""Chooses which columns become fields, and checks that all files of a source agree in them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from loaderkit.errors import ConfigError, SourceError
from loaderkit.sources.arrow.types import ColumnType, are_alike

logger = logging.getLogger("loaderkit")


def check_names(columns: Sequence[str] | None, fields: Mapping[str, str] | None) -> None:
    """Raise ValueError unless `columns` and `fields` of a source's arguments fit."""
    listed, renamed = columns or (), list((fields or {}).values())
    for name, given in (("columns", listed), ("fields", renamed)):
        if len({*given}) < len(given):
            raise ValueError(f"`{name}` names a column twice, and each is one field")
    if listed and (others := [column for column in renamed if column not in listed]):
        raise ValueError(f"`fields` names {others[0]!r}, which is none of `columns`: add it there")
    if taken := [name for name in fields or {} if name in listed and name not in renamed]:
        raise ValueError(f"two columns would be the field {taken[0]!r}: rename the other one as well")


def wanted_columns(columns: Sequence[str] | None, fields: Mapping[str, str] | None) -> list[str] | None:
    """The columns that the arguments ask for, or None for all."""
    if columns is not None:
        return list(columns)
    return None if fields is None else list(fields.values())


def choose(
    there: Mapping[str, ColumnType], wanted: Sequence[str] | None, key: str, where: str
) -> dict[str, ColumnType]:
    """The columns, of those that are `there`, that become fields; `key` is the argument that names them. Raises
    ConfigError."""
    usable = [name for name, kind in there.items() if kind.content]
    listed = ", ".join(usable)
    names = list(there) if wanted is None else wanted
    for name in names:
        if name not in there:
            raise ConfigError(f"source.{key}: {where} has no column {name!r}; those that can be fields are {listed}")
        if not there[name].content:
            raise ConfigError(
                f"source.{key}: the column {name!r} of {where} holds {there[name].reason}, which can be no field: "
                + (f"choose others, as by columns: [{listed}], or " * bool(usable))
                + "write it as numbers, text or bytes"
            )
    return {name: there[name] for name in names}


def filled_in(those: Mapping[str, ColumnType], these: Mapping[str, ColumnType]) -> dict[str, ColumnType]:
    """Types of files before, and those of another file for columns that had nothing but nulls so far."""
    return {name: these.get(name, kind) if kind.content == "null" else kind for name, kind in those.items()}


def without_nulls(
    types: Mapping[str, ColumnType], wanted: Sequence[str] | None, key: str, where: str
) -> tuple[dict[str, ColumnType], list[str]]:
    """The columns that have a value in some file, and the names of the others, which a warning says are left out. Raises
    ConfigError for one that is asked for, and where nothing else is there."""
    kept = {name: kind for name, kind in types.items() if kind.content != "null"}
    nulls = [name for name in types if name not in kept]
    if nulls and (wanted is not None or not kept):
        raise ConfigError(
            f"source.{key}: the column {nulls[0]!r} of {where} has nothing but nulls, of no type: leave it out"
            if wanted is not None
            else f"source: all columns of {where} have nothing but nulls"
        )
    if nulls:
        logger.warning(
            "%s: left out %s, as there is nothing but nulls in %s",
            where,
            ", ".join(map(repr, nulls)),
            "it" if len(nulls) == 1 else "them",
        )
    return kept, nulls


def check_same(these: Mapping[str, ColumnType], where: str, those: Mapping[str, ColumnType], first: str) -> None:
    """Raise SourceError unless the file `where` has the columns of the `first` one that has rows."""
    for name in {**those, **these}:
        here, there = these.get(name), those.get(name)
        if here is None or there is None or not are_alike(here, there):
            said = ["no such column" if one is None else str(one) for one in (here, there)]
            raise SourceError(
                f"the column {name!r} is {said[0]} in {where} and {said[1]} in {first}: files of one source have the same "
                "columns. Choose others by `columns`, the files by `include`, or mix two sources"
            )
