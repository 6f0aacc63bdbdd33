"""Copies a checkpoint of any make in another format: `loaderkit checkpoints A --copy B --format dcp`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from loaderkit.checkpoint.discovery.description import DESCRIPTIONS, Format
from loaderkit.checkpoint.discovery.kinds import SUFFIXES
from loaderkit.checkpoint.discovery.listing import list_checkpoints, url_below
from loaderkit.checkpoint.discovery.locate import NothingThereError, locate
from loaderkit.checkpoint.manager.saving import KeptPlan, write_checkpoint
from loaderkit.checkpoint.restore.nested import nested_state
from loaderkit.checkpoint.restore.requests import new_tensors
from loaderkit.checkpoint.restore.source import OpenCheckpoint
from loaderkit.checkpoint.restore.task import Progress, RestoreTask
from loaderkit.checkpoint.save.copy import CopiedCheckpoint
from loaderkit.checkpoint.save.dcp_writer import StreamWriter
from loaderkit.checkpoint.save.safetensors.writer import check_plain_values
from loaderkit.checkpoint.state import resolve
from loaderkit.checkpoint.structure import OWN_KEY, saved_structure
from loaderkit.connectors.base import Connector
from loaderkit.errors import CheckpointError, printable

logger = logging.getLogger("loaderkit")
_CPU = torch.device("cpu")


def convert_checkpoint(
    url: str | os.PathLike[str],
    to: str | os.PathLike[str],
    format: Format,  # noqa: A002 (as in the YAML)
    *,
    rename: Mapping[str, str] | None = None,
    connectors: Mapping[str, Connector] | None = None,
    progress: Callable[[int], None] = lambda num_bytes: None,
) -> CopiedCheckpoint:
    """Write a whole checkpoint of any make into the directory `to`, under its own name, in the format "dcp" or "safetensors".

    Tensors and plain values stay what they are to the last bit; every byte read is compared with a manifest, if there is one,
    and the copy gets its own. Values that only code could make are left out, with a warning. In safetensors a model's state by
    itself is put under "model", so that Hugging Face's loaders read `model.safetensors`. All tensors are held in memory
    meanwhile. `rename` is that of `loaderkit.restore`; `progress` is called with the bytes as they are read.

    Raises CheckpointError for a checkpoint that is not whole, and if there is one of this name in `to`; ConfigError for values
    that the format cannot hold; FormatError, ConnectorError.
    """
    given = connectors or {}
    with OpenCheckpoint.open(url, given, "2GiB", "auto", rename=rename) as source:
        target = url_below(to, _name_of(source.contents.name))
        if _is_there(target, given):
            raise CheckpointError(f"{target} is there already: remove it, or convert elsewhere")
        state = _read(source, progress)
    if not isinstance(state, dict) or (format == "safetensors" and _is_bare(state)):
        state = {"model": state}
    flat, containers, _ = resolve(state)
    flat = flat.plus({OWN_KEY: saved_structure(containers)})
    if format == "safetensors":
        check_plain_values(flat.values)
    writer = StreamWriter(target, format=format, connectors=given)
    try:
        write_checkpoint(writer, target, flat, None, key="", kept=KeptPlan())
    finally:
        writer.close()
    (made,) = list_checkpoints(target, given)
    return CopiedCheckpoint(target, made.num_bytes, made.num_files, was_there=False)


def _name_of(url: str) -> str:
    name = url.rstrip("/").rpartition("/")[2]
    while (
        suffix := next((suffix for suffix in SUFFIXES if name.endswith(suffix) and name != suffix), None)
    ) is not None:
        name = name.removesuffix(suffix)
    return name


def _is_there(target: str, connectors: Mapping[str, Connector]) -> bool:
    try:
        location = locate(target, connectors)
    except NothingThereError:
        return False
    try:
        names = {info.key[len(location.prefix) :] for info in location.objects()}
        return any(known.key in names for known in DESCRIPTIONS)
    finally:
        location.close()


def _read(source: OpenCheckpoint, progress: Callable[[int], None]) -> Any:
    """The nested state, without values that only code could make."""
    contents = source.contents
    tensors, names = [*contents.tensors], [*contents.values, *contents.pickled]
    try:
        source.plain_values(names)
    except CheckpointError:
        names = [name for name in names if _can_make(source, name)]
    done = 0

    def tell(now: Progress) -> None:
        nonlocal done
        progress(now.num_bytes - done)
        done = now.num_bytes

    def requests(resolved: Any) -> Any:
        return new_tensors(resolved, tensors, _CPU, None)

    made, values = source.restored(RestoreTask(tensors, names, requests, [_CPU], progress=tell))
    return nested_state(source, {**made, **values}, None)


def _can_make(source: OpenCheckpoint, name: str) -> bool:
    try:
        source.plain_values([name])
    except CheckpointError as error:
        logger.warning("left out: %s", printable(str(error)))
        return False
    return True


def _is_bare(state: Mapping[Any, Any]) -> bool:
    """True for the state of a model by itself, by names of its tensors."""
    return bool(state) and all(isinstance(value, torch.Tensor) for value in state.values())
