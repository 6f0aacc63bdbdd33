"""Decides which files of a location are the checkpoint, and in which format.

The first bytes of all files are read at once and kept: they hold most headers whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from loaderkit._internal.text import short_repr
from loaderkit.checkpoint.discovery.kinds import (
    INDEX_NAME,
    METADATA,
    SUFFIXES,
    Kind,
    is_beside,
    is_pretrained,
    kind_of,
    step_in,
)
from loaderkit.checkpoint.discovery.locate import CheckpointLocation
from loaderkit.checkpoint.formats import deepspeed
from loaderkit.checkpoint.formats.state_file import STATE
from loaderkit.connectors.base import ByteRange, ObjectInfo
from loaderkit.errors import CheckpointError, FormatError

_MAX_CANDIDATES = 1000
_MIN_HEAD = 32
_HEAD = 64 * 2**10  # bytes of a file; most headers are no longer
_MAX_HEADS = 2**26  # bytes of all files
_GZIP = b"\x1f\x8b"
# Of several indexes the one that from_pretrained takes.
_USUAL_INDEXES = (
    "model.safetensors.index.json",
    "adapter_model.safetensors.index.json",
    "diffusion_pytorch_model.safetensors.index.json",
    "pytorch_model.bin.index.json",
    "diffusion_pytorch_model.bin.index.json",
)
# Files that name the newest folder: DeepSpeed's, which has the name itself, and Megatron's, which has a number.
_NUMBERED = "latest_checkpointed_iteration.txt"
_POINTERS = ("latest", _NUMBERED)
_MAX_POINTER = 1024
_PART = re.compile(r"(pytorch_model_fsdp|optimizer)_\d+/\.metadata")
_SAID = {
    "safetensors": "safetensors",
    "torch": "torch.save",
    "dcp": "torch.distributed.checkpoint",
    "state": "safetensors of loaderkit",
    "legacy": "a torch.save file older than torch 1.6",
}
Fetch = Callable[[Sequence[ByteRange]], list[bytes]]


class NoCheckpointError(CheckpointError):
    """There are files, and none of them is a checkpoint's."""


@dataclass(frozen=True)
class CheckpointFiles:
    """The files of a checkpoint; `kind` "dcp" and "state" have one that names the others. `heads`: the first bytes by key.

    `beside` are files and folders with weights that are no part of it.
    """

    kind: str
    files: list[str]
    index: str | None = None
    beside: list[str] = field(default_factory=list)
    heads: dict[str, bytes] = field(default_factory=dict)


class FoundCheckpoint(NamedTuple):
    """The files of a checkpoint, all files beside them by name, and where they are. That may be below the location that
    was asked for, if a file there says so."""

    files: CheckpointFiles
    infos: dict[str, ObjectInfo]
    location: CheckpointLocation


def choose(location: CheckpointLocation, fetch: Fetch) -> FoundCheckpoint:
    """The checkpoint at a location.

    A description decides: `.metadata`, the state file, an index of shards. Without one, safetensors before torch.save if the
    latter is what frameworks write beside a model, or the same model. A folder without weights of its own may have a file that
    names one below it, as DeepSpeed's `latest` does. Raises NoCheckpointError without any, CheckpointError if
    it was not committed, or if it cannot be told which files are meant.
    """
    if location.single is not None:
        return FoundCheckpoint(
            _single(location, location.single, fetch), {location.single.key: location.single}, location
        )
    infos, below = _divided(location)
    folders = _folders_in(below)
    description = location.named or _description(location, infos)
    if description in (METADATA, STATE):
        own = () if description == METADATA else (".safetensors",)
        beside = [name for name in infos if name.endswith(SUFFIXES) and not name.endswith(own)]
        kind = "dcp" if description == METADATA else "state"
        return FoundCheckpoint(CheckpointFiles(kind, [description], beside=[*beside, *folders]), infos, location)
    if description:
        return FoundCheckpoint(_indexed(location, infos, folders, description, fetch), infos, location)
    files = _deepspeed(location, infos, folders, fetch) or _parts(infos, below, folders)
    if files is None and folders and (pointed := _pointed(location, infos, fetch)):
        return choose(pointed, fetch)
    files = files or _loose(location, infos, folders, fetch)
    parts = tuple(name.removesuffix(METADATA) for name in files.files if "/" in name)
    return FoundCheckpoint(
        files, infos | {name: info for name, info in below.items() if name.startswith(parts)}, location
    )


def heads_of(infos: list[ObjectInfo], fetch: Fetch) -> dict[str, bytes]:
    """Key -> the first bytes of the object."""
    most = max(_MIN_HEAD, min(_HEAD, _MAX_HEADS // max(len(infos), 1)))
    read = fetch([ByteRange(info.key, 0, min(most, info.size), info.etag) for info in infos])
    return {info.key: head for info, head in zip(infos, read, strict=True)}


def _divided(location: CheckpointLocation) -> tuple[dict[str, ObjectInfo], dict[str, ObjectInfo]]:
    """(the files of a location, those in folders below it), both by name."""
    infos: dict[str, ObjectInfo] = {}
    below: dict[str, ObjectInfo] = {}
    for info in location.objects():
        name = info.key[len(location.prefix) :]
        (below if "/" in name else infos)[name] = info
    return infos, below


def _folders_in(below: Iterable[str]) -> list[str]:
    """The folders that hold files of checkpoints, each with a slash."""
    parted = [name.rpartition("/") for name in below]
    own = (*SUFFIXES, ".distcp")
    return [
        *dict.fromkeys(f"{folder}/" for folder, _, name in parted if name in (METADATA, STATE) or name.endswith(own))
    ]


def _parts(infos: Iterable[str], below: Iterable[str], folders: Sequence[str]) -> CheckpointFiles | None:
    """The descriptions in folders below, as accelerate and transformers save by FSDP: one of a model, one of its optimizer.
    None if there are weights here, or parts of several models, or a schedule but no optimizer, as the schedule is saved
    after the optimizer."""
    if any(name.endswith(SUFFIXES) and not is_beside(name) for name in infos):
        return None
    found = [match for match in map(_PART.fullmatch, below) if match]
    kinds = [match[1] for match in found]
    if "pytorch_model_fsdp" not in kinds or len({*kinds}) < len(kinds):
        return None
    if any(name.startswith("scheduler.") for name in infos) and not any(
        name.startswith("optimizer") for name in (*infos, *kinds)
    ):
        return None
    own = {match[0].removesuffix(METADATA) for match in found}
    return CheckpointFiles("dcp", [match[0] for match in found], beside=[one for one in folders if one not in own])


def _description(location: CheckpointLocation, infos: dict[str, ObjectInfo]) -> str | None:
    """The file that names the checkpoint's files. Raises CheckpointError for a checkpoint that was not committed."""
    if METADATA in infos and STATE in infos:
        raise _two_formats(location, ("dcp", METADATA), ("state", STATE))
    if METADATA in infos or STATE in infos:
        return METADATA if METADATA in infos else STATE
    if parts := [name for name in infos if name.endswith(".distcp")]:
        raise CheckpointError(
            f"{location.url} has {parts[0]} and no {METADATA}: the checkpoint was not committed, so it is not whole"
        )
    indexes = [name for name in infos if INDEX_NAME.fullmatch(name)]
    usual = [name for name in _USUAL_INDEXES if name in indexes]
    if len(indexes) > 1 and not usual:
        raise CheckpointError(
            f"{location.url} has two indexes, {indexes[0]} and {indexes[1]}: name the one that is meant, such as "
            f"{location.url.rstrip('/')}/{indexes[0]}"
        )
    return next(iter([*usual, *indexes]), None)


def _single(location: CheckpointLocation, info: ObjectInfo, fetch: Fetch) -> CheckpointFiles:
    heads = heads_of([info], fetch)
    kind = _kind_of(location, info, heads[info.key])
    if kind is None and heads[info.key].startswith(_GZIP):
        raise CheckpointError(
            f"{location.url} is compressed by gzip, so no part of it can be read by itself: unpack it"
        )
    if kind is None:
        raise _no_checkpoint(location, [info.key], [])
    return CheckpointFiles(kind, [info.key], heads=heads)


def _indexed(
    location: CheckpointLocation, infos: dict[str, ObjectInfo], folders: list[str], index: str, fetch: Fetch
) -> CheckpointFiles:
    match = INDEX_NAME.fullmatch(index)
    assert match is not None
    suffix = match[1]
    names = [name for name in infos if name.endswith(suffix)]
    if not names:
        raise CheckpointError(f"{location.connector.describe(infos[index].key)} is there, and none of its files is")
    heads = heads_of([infos[name] for name in names], fetch)
    kind = "safetensors" if suffix == ".safetensors" else "torch"
    files = [name for name in names if _kind_of(location, infos[name], heads[infos[name].key]) == kind]
    others = [name for name in infos if name.endswith(SUFFIXES) and not name.endswith(suffix)]
    return CheckpointFiles(kind, files, index, [*others, *folders], heads)


def _deepspeed(
    location: CheckpointLocation, infos: dict[str, ObjectInfo], folders: list[str], fetch: Fetch
) -> CheckpointFiles | None:
    """The files of a ZeRO run: the parts of the optimizer and the files beside them, each kind by rank."""
    try:
        parts = deepspeed.check_names(infos)
    except FormatError as error:
        raise CheckpointError(f"{location.url}, of DeepSpeed: {error}") from None
    if not parts:
        sharded = next((name for name in infos if (match := deepspeed.MODEL_FILE.fullmatch(name)) and match[1]), None)
        if sharded is None:
            return None
        raise CheckpointError(
            f"{location.url} is not whole: it has {sharded}, of ZeRO 3, and no zero_pp_rank_*_optim_states.pt, which hold the "
            "weights"
        )
    models = {int(match[1] or 0): match[0] for match in map(deepspeed.MODEL_FILE.fullmatch, infos) if match}
    if 0 not in models:
        raise CheckpointError(
            f"{location.url} is not whole: of DeepSpeed's files that with the names of the parameters is missing "
            "(mp_rank_00_model_states.pt, or zero_pp_rank_0_mp_rank_00_model_states.pt)"
        )
    files = [*(models[rank] for rank in sorted(models)), *parts]
    beside = [name for name in infos if name.endswith(SUFFIXES) and name not in files]
    heads = heads_of([infos[name] for name in files], fetch)
    return CheckpointFiles("deepspeed", files, None, [*beside, *folders], heads)


def _pointed(location: CheckpointLocation, infos: dict[str, ObjectInfo], fetch: Fetch) -> CheckpointLocation | None:
    """The folder below that a file here names as the newest, if there are no weights here. Raises CheckpointError."""
    name = next((name for name in _POINTERS if name in infos), None)
    if name is None or any(other.endswith(SUFFIXES) and not is_beside(other) for other in infos):
        return None
    info = infos[name]
    (data,) = fetch([ByteRange(info.key, 0, min(info.size, _MAX_POINTER), info.etag)])
    tag = data.decode(errors="replace").strip()
    folder = f"iter_{int(tag):07d}" if name == _NUMBERED and tag.isdecimal() and len(tag) < 20 else tag
    where = f"{location.url.rstrip('/')}/{folder}"
    if not folder or "/" in folder or "\\" in folder or folder in (".", ".."):
        raise CheckpointError(
            f"{location.connector.describe(info.key)} names {short_repr(tag)}, which is no folder's name"
        )
    pointed = location._replace(url=where, prefix=f"{location.prefix}{folder}/")
    if next(pointed.objects(), None) is None:
        raise CheckpointError(
            f"{location.connector.describe(info.key)} says that {folder!r} is the newest checkpoint, and it is not there"
        )
    return pointed


def _loose(
    location: CheckpointLocation, infos: dict[str, ObjectInfo], folders: list[str], fetch: Fetch
) -> CheckpointFiles:
    """The files of a checkpoint without a description."""
    names = _usual_files(infos)
    heads = heads_of([infos[name] for name in names], fetch)
    found = {name: _kind_of(location, infos[name], heads[infos[name].key]) for name in names}
    whole = [name for name, kind in found.items() if kind == "safetensors"]
    pickled = [name for name, kind in found.items() if kind in ("torch", "legacy")]
    own = [name for name in pickled if not is_beside(name)]
    if whole:
        stems = {name.removesuffix(".safetensors") for name in whole}
        if others := [name for name in own if not is_pretrained(name) and name.rpartition(".")[0] not in stems]:
            raise _two_formats(location, ("safetensors", whole[0]), (found[others[0]] or "", others[0]))
        own, beside = whole, pickled
    else:
        own, beside = own or pickled, [name for name in pickled if own and name not in own]
    if not own:
        raise _no_checkpoint(location, infos, folders)
    if folders and not any(map(is_pretrained, own)):
        raise CheckpointError(
            f"{location.url} holds {own[0]}, and below it there are {_listed(folders)}: name the one that is meant, such as "
            f"{location.url.rstrip('/')}/{folders[0]}"
        )
    legacy = [name for name in own if found[name] == "legacy"]
    kind = "safetensors" if whole else "legacy" if legacy else "torch"
    return CheckpointFiles(kind, legacy or own, None, [*beside, *folders], heads)


def _usual_files(infos: dict[str, ObjectInfo]) -> list[str]:
    usual = [name for name in infos if name.endswith(SUFFIXES)]
    return usual or [name for name in infos if not name.endswith((".json", ".txt", ".md", ".yaml"))][:_MAX_CANDIDATES]


def _kind_of(location: CheckpointLocation, info: ObjectInfo, head: bytes) -> Kind | None:
    """As `kind_of`. Raises CheckpointError for a file that is no checkpoint although its name says so."""
    kind = kind_of(head, info.size)
    if kind is not None and kind != "tar":
        return kind
    if info.key.endswith(".safetensors"):
        return "safetensors"  # whose reader says what is wrong
    if info.key.endswith((".pt", ".pth")):
        what = "is a tar archive: rename it to end in .tar" if kind else "is no whole torch.save file"
        raise CheckpointError(f"{location.connector.describe(info.key)} {what}: it begins with {head[:4]!r}")
    return None


def _two_formats(location: CheckpointLocation, one: tuple[str, str], other: tuple[str, str]) -> CheckpointError:
    (kind, name), (other_kind, other_name) = one, other
    return CheckpointError(
        f"{location.url} holds two formats, {_SAID[kind]} ({name}) and {_SAID[other_kind]} ({other_name}): name the file that "
        f"is meant, such as {location.url.rstrip('/')}/{name}"
    )


def _no_checkpoint(location: CheckpointLocation, names: Iterable[str], folders: Sequence[str]) -> CheckpointError:
    if folders:
        name = location.url.rstrip("/").rpartition("/")[2]
        made = NoCheckpointError if step_in(name) is None else CheckpointError
        return made(
            f"{location.url} holds no checkpoint itself; below it there are {_listed(folders)}: name the one that is meant, "
            f"such as {location.url.rstrip('/')}/{folders[0]}"
        )
    return NoCheckpointError(
        f"{location.url} holds no checkpoint: expected safetensors, torch.save or torch.distributed.checkpoint; there is "
        f"{_listed(names)}"
    )


def _listed(names: Iterable[str]) -> str:
    listed = [*names]
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "") or "nothing"
