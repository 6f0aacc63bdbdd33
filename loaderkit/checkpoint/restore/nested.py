"""Makes the nested state of what was restored: the containers as the checkpoint has them, and optimizers by the numbers
of parameters."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from loaderkit.checkpoint.names import Index, Path, texts
from loaderkit.checkpoint.restore.optimizers import numbered_names, with_numbers
from loaderkit.checkpoint.restore.selection import matches
from loaderkit.checkpoint.restore.source import OpenCheckpoint
from loaderkit.checkpoint.structure import Structure, is_inner, nest, of_kind
from loaderkit.errors import printable

logger = logging.getLogger("loaderkit")


def nested_state(source: OpenCheckpoint, flat: Mapping[str, Any], globs: Sequence[str] | None) -> Any:
    """The state of these names as it was saved, without what only the manager needs. Raises CheckpointError."""
    contents, structure = source.contents, source.structure()
    numbered = numbered_names(source, structure)
    structure, paths = numbered.structure, {**contents.paths, **numbered.paths}
    values = {numbered.names.get(name, name): numbered.params.get(name, value) for name, value in flat.items()}
    values = {name: value for name, value in values.items() if not is_inner(name)}
    if contents.format == "dcp" and not structure.is_complete and not structure.numbered:
        _warn_of_numbers(contents.name, [paths.get(name, ()) for name in values])
    empty = [path for path in structure.containers if globs is None or matches(".".join(texts(path)), globs)]
    return nest(values, paths, structure, empty=empty)


def with_versions(source: OpenCheckpoint, flat: dict[str, Any]) -> dict[str, Any]:
    """The flat names with what a module's state that is a whole torch.save file says of its modules' versions."""
    root = source.structure().containers.get(()) if source.contents.tells_containers else None
    return flat if root is None or root.versions is None else of_kind(flat, root)


def _warn_of_numbers(name: str, paths: Iterable[Path]) -> None:
    """Say which table may have had numbers as its keys: torch.distributed.checkpoint makes all of them text."""
    keys: dict[Path, set[Any]] = {}
    for path in paths:
        for size in range(len(path)):
            keys.setdefault(path[:size], set()).add(path[size])
    for path, inside in keys.items():
        is_optimizer = bool(path) and path[-1] == "state" and "param_groups" in keys[path[:-1]]
        if not is_optimizer and all(not isinstance(key, Index) and str(key).isdecimal() for key in inside):
            logger.warning(
                "%s: the keys of %r are digits, and may have been whole numbers when torch.distributed.checkpoint saved them: "
                "it makes text of all keys, and so they come back",
                printable(name),
                ".".join(texts(path)),
            )
            return


def number_optimizers(source: OpenCheckpoint, structure: Structure, leaves: Iterable[str]) -> None:
    """Replace the names of parameters in the contents by their numbers, if `into` has numbers."""
    numbered = numbered_names(source, structure)
    if numbered.names and not numbered.names.keys() & {*leaves}:
        source.contents = with_numbers(source.contents, numbered)
