"""Where the files of one save go until they are committed, and the marker beside them that says which process writes them.

<parent>/.saving-<name>.<attempt>.json     the marker: written first, removed last
<parent>/.saving-<name>.<attempt>.new/     renaming it shows whether the store can, to
<parent>/.saving-<name>.<attempt>/         the files; where the store cannot rename, they go to <parent>/<name>/
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from loaderkit.checkpoint.discovery.locate import SAVING, SaveTarget
from loaderkit.checkpoint.save.owner import MAX_SILENCE_S, Owner, is_running, this_process
from loaderkit.connectors.base import Connector, ObjectInfo, Writes, links_of, modified_s_of
from loaderkit.errors import ObjectNotFoundError

_PROBE = "probe"
_SAVING = re.compile(
    re.escape(SAVING) + r"(?P<name>[^/]*)\.(?P<attempt>[0-9a-f]{16})(\.json(\.[0-9a-f]{16}\.tmp)?|(\.new)?/.*)",
    re.DOTALL,
)
_DATA_FILE = re.compile(r"__\d+_(\d+)\.distcp|[^/.]+(?:\.(\d+))?\.safetensors")


class Placement(NamedTuple):
    """Where the ranks of one save put their files: below the prefix `folder`, with the number `generation` in their names.

    `number` grows with every save of the process `owner`. `in_place`: `folder` is the checkpoint's own directory.
    """

    attempt: str
    number: int
    owner: Owner
    folder: str
    generation: int
    in_place: bool

    def file_name(self, rank: int) -> str:
        """The name of a rank's file."""
        return f"__{rank}_{self.generation}.distcp"


class UnfinishedSave(NamedTuple):
    """What there is of one save that has not ended, running or dead: the keys of its objects, and what its marker says, if it
    has one."""

    base: str  # begins the keys of all its objects
    name: str  # of the checkpoint
    keys: list[str]
    placement: Placement | None
    renewed_s: float
    is_beginning: bool  # its marker is being written, by a process that is not known to be dead

    @property
    def is_running(self) -> bool:
        """True if the process that saves is not known to be dead."""
        placement = self.placement
        return self.is_beginning or (
            placement is not None and is_running(placement.owner, placement.attempt, self.renewed_s)
        )

    @property
    def marker(self) -> str:
        """The key of its marker."""
        return f"{self.base}.json"

    @property
    def folders(self) -> tuple[str, str]:
        """The prefixes of its directories."""
        return f"{self.base}/", f"{self.base}.new/"


def place(target: SaveTarget, writes: Writes, others: Iterable[Placement], first_generation: int = 0) -> Placement:
    """A place for the files of a new save, and its marker. `others` save the same checkpoint now; the number in the files'
    names is at least `first_generation`. Raises ConnectorError."""
    attempt = secrets.token_hex(8)
    names = [info.key[len(target.prefix) :] for info in listed(target.connector, target.prefix)]
    used = {number for number in map(generation_of, names) if number is not None} | {
        other.generation for other in others
    }
    generation = max(first_generation, max(used, default=-1) + 1)
    placement = Placement(attempt, time.monotonic_ns(), this_process(), target.prefix, generation, in_place=True)
    is_new = bool(target.name) and not names
    if is_new:
        folder = saving_folder(target, placement)
        placement = placement._replace(folder=folder, generation=first_generation, in_place=False)
    put_marker(target, writes, placement)
    if is_new and not _can_rename(writes, placement.folder):
        placement = placement._replace(folder=target.prefix, in_place=True)
        put_marker(target, writes, placement)
    return placement


def _can_rename(writes: Writes, folder: str) -> bool:
    """Whether a directory can be renamed to `folder`, which is then there and empty."""
    probe = f"{folder[:-1]}.new/"
    writes.put(probe + _PROBE, b"")
    is_renamed = writes.rename(probe, folder)
    writes.delete((folder if is_renamed else probe) + _PROBE)
    if not is_renamed:
        writes.clear(probe)
    return is_renamed


def generation_of(name: str) -> int | None:
    """The number of the save that wrote a file of this name; None for other files."""
    match = _DATA_FILE.fullmatch(name)
    return None if match is None else int(match[1] or match[2] or 0)


def saving_folder(target: SaveTarget, placement: Placement) -> str:
    """The prefix of the directory beside the checkpoint that belongs to a save."""
    return f"{target.parent}{SAVING}{target.name}.{placement.attempt}/"


def marker_key(target: SaveTarget, placement: Placement) -> str:
    """The key of the marker of a save."""
    return f"{target.parent}{SAVING}{target.name}.{placement.attempt}.json"


def put_marker(target: SaveTarget, writes: Writes, placement: Placement) -> None:
    """Write the marker of a save, which says that it runs now. Raises ConnectorError."""
    said = placement._asdict() | {"owner": placement.owner._asdict()}
    content = {"version": 1, "name": target.name, "renewed_s": time.time(), **said}
    writes.put(marker_key(target, placement), json.dumps(content).encode())


def unfinished_saves(target: SaveTarget) -> list[UnfinishedSave]:
    """The unfinished saves of all checkpoints in the same directory."""
    keys: dict[tuple[str, str], list[str]] = {}
    for info in listed(target.connector, target.parent + SAVING):
        match = _SAVING.fullmatch(info.key[len(target.parent) :])
        if match is not None:
            base = f"{target.parent}{SAVING}{match['name']}.{match['attempt']}"
            keys.setdefault((base, match["name"]), []).append(info.key)
    found = []
    for (base, name), own in keys.items():
        placement, renewed_s = _marked(target.connector, f"{base}.json")
        unnamed = [key for key in own if key.startswith(f"{base}.json.")] if placement is None else []
        is_beginning = any(_may_be_put(target.connector, key) for key in unnamed)
        found.append(UnfinishedSave(base, name, own, placement, renewed_s, is_beginning))
    return found


def _marked(connector: Connector, key: str) -> tuple[Placement | None, float]:
    """What a marker says, and when it was renewed."""
    try:
        said: Any = json.loads(read_object(connector, key))
        fields = {name: said[name] for name in Placement._fields}
        return Placement(**fields | {"owner": Owner(**said["owner"])}), float(said["renewed_s"])
    except (ObjectNotFoundError, ValueError, KeyError, TypeError):  # none, or of another version
        return None, 0.0


def _may_be_put(connector: Connector, key: str) -> bool:
    """True unless a marker that has not got its name yet was left by a process that died."""
    placement, renewed_s = _marked(connector, key)
    if placement is not None and placement.owner != this_process():
        return is_running(placement.owner, placement.attempt, renewed_s)
    try:
        written_s = modified_s_of(connector, key)
    except ObjectNotFoundError:
        return True
    return written_s is None or time.time() - written_s < MAX_SILENCE_S


def find_placement(target: SaveTarget, owner: Owner) -> Placement | None:
    """The newest save of this checkpoint by the process `owner`."""
    found = [save.placement for save in unfinished_saves(target) if save.name == target.name and save.placement]
    mine = [placement for placement in found if placement.owner == owner]
    return max(mine, key=lambda placement: placement.number, default=None)


def listed(connector: Connector, prefix: str) -> Iterator[ObjectInfo]:
    """The objects below a prefix; none in a store that does not exist yet."""
    try:
        yield from connector.list(prefix)
    except ObjectNotFoundError:
        return


def own_keys(connector: Connector, prefix: str, keys: Iterable[str]) -> list[str]:
    """What to delete of these objects below the directory `prefix`: objects behind symbolic links are replaced by the
    links."""
    links = links_of(connector, prefix)
    behind = tuple(f"{link}/" for link in links)
    return [*links, *(key for key in keys if not key.startswith(behind))]


def read_object(connector: Connector, key: str) -> bytes:
    """All bytes of a small object."""
    info = connector.stat(key)
    data = bytearray(info.size)
    connector.read_into(key, 0, memoryview(data), etag=info.etag)
    return bytes(data)
