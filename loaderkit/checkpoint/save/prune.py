"""Finds and removes what saves that died have left behind."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from loaderkit._internal.units import say_age
from loaderkit.checkpoint.discovery.kinds import DESCRIBING, METADATA
from loaderkit.checkpoint.discovery.listing import list_checkpoints, newest_s, url_below
from loaderkit.checkpoint.discovery.locate import SaveTarget, save_target
from loaderkit.checkpoint.discovery.manifest import NAME
from loaderkit.checkpoint.formats.state_file import CONFIG, STATE
from loaderkit.checkpoint.save.commit import clear
from loaderkit.checkpoint.save.placement import UnfinishedSave, listed, own_keys, unfinished_saves
from loaderkit.connectors.base import Connector, ObjectInfo, writes_of
from loaderkit.errors import CheckpointError

IDLE_S = 24 * 3600.0
_STEP = re.compile(r"step-\d+")
_DESCRIBING = "|".join(map(re.escape, DESCRIBING))
_OWN_FILES = re.compile(rf".*\.(?:distcp|safetensors)|.*(?:{_DESCRIBING})|(?:\..+)?\.[0-9a-f]{{16}}\.tmp")


@dataclass(frozen=True)
class Debris:
    """What is left of a save or a checkpoint, and how it is known that no process writes to it any more."""

    name: str
    num_bytes: int
    num_files: int
    reason: str
    save: UnfinishedSave | None = field(default=None, repr=False)  # None for a directory of a step


def find_debris(
    url: str | os.PathLike[str], *, idle_s: float = IDLE_S, connectors: Mapping[str, Connector] | None = None
) -> list[Debris]:
    """What can be removed below the directory `url`: what saves have left that are known to have died, and incomplete
    directories of steps without a manifest, if nothing was written to them for `idle_s` by the store's clock.

    A whole checkpoint, a checkpoint with a manifest, and a file that no save has written are never among them.
    """
    given = connectors or {}
    whole = {item.name for item in list_checkpoints(url, given) if item.is_whole}
    target = save_target(url_below(url, "step"), given)
    try:
        debris = [_of_save(target, save) for save in unfinished_saves(target) if not save.is_running]
        written = {save.name for save in unfinished_saves(target) if save.is_running}
        steps: dict[str, list[ObjectInfo]] = {}
        for info in listed(target.connector, f"{target.parent}step-"):
            name, slash, rest = info.key[len(target.parent) :].partition("/")
            if slash and rest:
                steps.setdefault(name, []).append(info)
        for name, infos in steps.items():
            cut = len(target.parent) + len(name) + 1
            files = {info.key[cut:] for info in infos}
            others = files - {CONFIG} if STATE in files else files
            is_own = _STEP.fullmatch(name) and all(map(_OWN_FILES.fullmatch, others))
            if not is_own or name in whole or name in written:
                continue
            newest = newest_s(target.connector, [info.key for info in infos])
            if newest is not None and time.time() - newest >= idle_s:
                reason = f"it is no checkpoint, and nothing in it was written for {say_age(time.time() - newest)}"
                debris.append(Debris(name, sum(info.size for info in infos), len(infos), reason))
        return debris
    finally:
        target.close()


def _of_save(target: SaveTarget, save: UnfinishedSave) -> Debris:
    owner = save.placement.owner if save.placement is not None else None
    reason = "a save left it" if owner is None else f"process {owner.pid} on {owner.host}, which saved it, has ended"
    sizes = [target.connector.stat(key).size for key in save.keys]
    return Debris(save.base[len(target.parent) :], sum(sizes), len(sizes), reason, save)


def remove_debris(
    url: str | os.PathLike[str], debris: Sequence[Debris], *, connectors: Mapping[str, Connector] | None = None
) -> None:
    """Remove what `find_debris` has found. Raises CheckpointError if something was written to it meanwhile."""
    target = save_target(url_below(url, "step"), connectors or {})
    try:
        writes = writes_of(target.connector)
        for item in debris:
            if item.save is not None:
                clear(target, writes, item.save)
                continue
            infos = list(listed(target.connector, f"{target.parent}{item.name}/"))
            if (sum(info.size for info in infos), len(infos)) != (item.num_bytes, item.num_files):
                raise CheckpointError(f"{target.connector.describe(target.parent + item.name)} is being written to")
            remove_directory(target.connector, f"{target.parent}{item.name}/", infos)
    finally:
        target.close()


def remove_directory(connector: Connector, prefix: str, infos: Sequence[ObjectInfo]) -> None:
    """Remove a checkpoint, or what is left of one: its manifest first, then the bytes, and its description, which says whose
    it is, last. If this is interrupted, what is left is no whole checkpoint. If it is a symbolic link, the link is
    removed."""
    writes = writes_of(connector)

    def turn(key: str) -> tuple[bool, bool, bool]:
        return key.endswith((METADATA, STATE)), key.endswith(DESCRIBING), not key.endswith(NAME)

    for key in sorted(own_keys(connector, prefix, [info.key for info in infos]), key=turn):
        writes.delete(key)
        if key.endswith(NAME):
            writes.sync(prefix)
    writes.clear(prefix)
