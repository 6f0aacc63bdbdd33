"""`loaderkit.restore`: the tensors of a checkpoint, new or in place, and the plain values beside them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal, NamedTuple

import torch

from loaderkit.checkpoint.discovery.manifest import Verify
from loaderkit.checkpoint.restore import multi_rank
from loaderkit.checkpoint.restore.nested import nested_state, number_optimizers, with_versions
from loaderkit.checkpoint.restore.removed import restore_next
from loaderkit.checkpoint.restore.requests import given_tensors, is_dtensor, new_tensors
from loaderkit.checkpoint.restore.selection import (
    Dtype,
    Strictness,
    check_applied,
    choose,
    leaves_of_target,
    match_names,
    parse_dtype,
    parse_keys,
    parse_strict,
)
from loaderkit.checkpoint.restore.source import OpenCheckpoint, parse_device
from loaderkit.checkpoint.restore.task import Progress, Restored, RestoreTask, name_touched
from loaderkit.checkpoint.state import on_devices_of
from loaderkit.checkpoint.transfer.stages import hand_over, wait_for_queued
from loaderkit.connectors.base import Connector
from loaderkit.errors import STORE_FAILURES, CheckpointError, ConfigError, ConnectorError, FormatError

_CPU = torch.device("cpu")


def restore(
    url: str | os.PathLike[str],
    into: Any = None,
    *,
    device: str | torch.device | None = None,
    dtype: Dtype = None,
    keys: str | Iterable[str] | None = None,
    strict: bool | Mapping[str, str | Iterable[str]] = True,
    rename: Mapping[str, str] | None = None,
    nested: bool = False,
    rank: int | None = None,
    world_size: int | None = None,
    memory: int | str = "2GiB",
    verify: Verify = "auto",
    progress: Callable[[Progress], None] | None = None,
    concurrency: int | Literal["auto"] = "auto",
    timeout_s: float = multi_rank.TIMEOUT_S,
    export: bool = False,
    connectors: Mapping[str, Connector] | None = None,
) -> Any:
    """Restore the tensors of a checkpoint: as a dict, name -> tensor or plain value, or into the nested state dict `into`.

    `url` is a file, a directory, or either inside a tar: safetensors, torch.save, or torch.distributed.checkpoint. Names are
    dotted paths ("optimizer.state.0.step"). With `into`, no tensor is read or written before every name, shape and dtype
    fits; then its tensors are filled in place, its plain values replaced, and `into` is returned.

    `device`: where new tensors are made ("cpu", "cuda"; default cpu). `dtype`: cast floating-point tensors to it; "target": to
    the dtypes of `into`. `keys`: only the names that match one of these globs. `strict=False` lets the checkpoint have more
    names than `into`; `strict={"missing": "head.*", "unexpected": ["*.rotary.*"]}` gives globs: names of `into` that the
    checkpoint lacks, or has in another shape, keep their values; names that only the checkpoint has are left out. `rename` maps
    how names begin in the checkpoint to how they begin here ({"module.": ""}; a `*` is one part between dots, carried over);
    all else, `keys` too, means the names here. A DTensor in `into` gets the shards of this rank, and only their bytes are read.
    `nested=True` gives the state as it was saved, tables in tables, for `load_state_dict`. `memory`: bound
    on staging memory besides the tensors; stacks of 24 threads and torch's kernels add at most 24 MiB, and 2 MiB a thread
    where files are read past the page cache. `verify`: "auto" compares with the manifest if there is one, True requires
    one, False ignores it. `export`: `url` may be a copy in fewer bits that a CheckpointManager has made (`copies`), which is
    refused otherwise. `progress` is called in this thread as tensors become whole.

    With `rank` and `world_size`, which must be torch.distributed's, all ranks call `restore` for the same names, and
    each gets everything: each byte is read by one rank and sent to the others. `memory` is then shared by all ranks of
    a machine, `concurrency` is the number of reading threads on each rank, and `timeout_s` how long a rank waits for
    another before it raises an error that names it.

    Raises CheckpointError (partial, damaged, or not fitting; its `touched` names the tensors that were written to), PeerError
    (another rank failed), FormatError, ConnectorError, ConfigError.
    """
    several = _several_ranks(rank, world_size)
    strictness = parse_strict(strict)
    if into is None and isinstance(strict, Mapping):
        raise ConfigError(
            f"strict is {strict!r}, which compares names with those of `into`: give `into`, or choose by `keys`"
        )

    def restored(url: str | os.PathLike[str]) -> Any:
        with ExitStack() as stack:
            group = stack.enter_context(multi_rank.rank_group(*several, timeout_s)) if several is not None else None
            source = stack.enter_context(
                OpenCheckpoint.open(url, connectors, memory, verify, export=export, rename=rename)
            )
            source.tell_beside()
            transfer = source.restored if group is None else partial(multi_rank.transfer, group, source)
            wanted = _Wanted(parse_device(device), parse_dtype(dtype), parse_keys(keys), concurrency, progress)
            if into is None:
                return _new(source, transfer, wanted, nested=nested)
            return _filled(source, transfer, wanted, into, strictness, is_alone=group is None)

    try:
        return restored(url)
    except STORE_FAILURES:
        raise
    except (CheckpointError, FormatError, ConnectorError) as error:
        return restore_next(restored, url, error, connectors or {}, is_alone=several is None)


class _Wanted(NamedTuple):
    """What is to be read, and how."""

    device: torch.device | None
    dtype: torch.dtype | str | None
    globs: Sequence[str] | None
    concurrency: int | Literal["auto"]
    progress: Callable[[Progress], None] | None


_Transfer = Callable[[RestoreTask], Restored]


def _new(source: OpenCheckpoint, transfer: _Transfer, wanted: _Wanted, *, nested: bool) -> Any:
    """New tensors and the plain values, by name or nested."""
    device, dtype, globs, concurrency, progress = wanted
    if dtype == "target":
        raise ConfigError("dtype 'target' needs `into`: without it there are no tensors whose types could be meant")
    tensors, values = choose(source.contents, globs)
    device = device or _CPU
    wait_for_queued([device])
    make_requests = partial(new_tensors, names=tensors, device=device, dtype=dtype)
    made, plain = transfer(RestoreTask(tensors, values, make_requests, [device], concurrency, progress))
    hand_over(made.values())
    flat: dict[str, Any] = {name: made[name] for name in tensors} | plain
    return nested_state(source, flat, globs) if nested else with_versions(source, flat)


def _filled(
    source: OpenCheckpoint, transfer: _Transfer, wanted: _Wanted, into: Any, strict: Strictness, *, is_alone: bool
) -> Any:
    """`into`, its tensors filled and its plain values replaced."""
    device, dtype, globs, concurrency, progress = wanted
    leaves = leaves_of_target(into, source.contents)
    structure = source.structure()
    if structure.containers:
        number_optimizers(source, structure, leaves)
    leaves, tensors, values = match_names(source.contents, leaves, globs, strict)
    check_applied(structure, into, leaves, source.contents.name)
    targets = {name: leaves[name].value for name in tensors}
    if not is_alone and (sharded := next((name for name, tensor in targets.items() if is_dtensor(tensor)), None)):
        raise ConfigError(
            f"into: {sharded!r} is a DTensor, of which each rank reads its own shards: leave out `rank` and `world_size`, or "
            "take dcp.load(state, storage_reader=loaderkit.checkpoint.StreamReader(url)), whose ranks share what they read"
        )
    devices = {tensor.device for tensor in targets.values()}
    wait_for_queued(devices)
    make_requests = partial(given_tensors, targets=targets, dtype=dtype, device=device)
    task = RestoreTask(tensors, values, make_requests, devices, concurrency, progress)
    try:
        _, plain = transfer(task)
    except BaseException as error:
        name_touched(error, task.touched)
        raise
    for name, value in plain.items():
        leaves[name].container[leaves[name].key] = on_devices_of(value, leaves[name].value)
    return into


def _several_ranks(rank: int | None, world_size: int | None) -> tuple[int, int] | None:
    """(rank, world_size) if there are several ranks. Raises ConfigError."""
    if rank is None and world_size is None:
        return None
    if rank is None or world_size is None or not 0 <= rank < world_size:
        raise ConfigError(f"rank {rank!r} of world_size {world_size!r}: give both, the rank from 0 to world_size - 1")
    return (rank, world_size) if world_size > 1 else None
