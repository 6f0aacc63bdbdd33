"""Makes `ReadRequest`s for tensors, new or given. Shapes, dtypes and memory are checked before a byte of a tensor is read."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from loaderkit._internal.garbage import collector_off
from loaderkit.checkpoint.contents import Checkpoint, TensorEntry, TensorShard
from loaderkit.checkpoint.structure import OWN_KEY
from loaderkit.checkpoint.transfer.layout import ReadLimits, part_spans, tensor_spans
from loaderkit.checkpoint.transfer.plan import PreparedRead, ReadRequest
from loaderkit.errors import CheckpointError, printable

logger = logging.getLogger("loaderkit")
SAME_MEMORY = "is the same memory as {!r}, and they are two tensors in the checkpoint"
GIVE_MEMORY = "Give it memory of its own (copy.deepcopy, clone)"
_NUM_LISTED = 8
_MAX_COMPARED = 2**26  # bytes of two tensors whose addresses are compared one by one
_VIEW_ALIGNMENT = 64  # bytes; no dtype is larger


def _cast(stored: torch.dtype, dtype: torch.dtype | str | None) -> torch.dtype:
    return dtype if isinstance(dtype, torch.dtype) and stored.is_floating_point else stored


# ------------------------------------------------------------------------------------------------------ new tensors


@collector_off()
def new_tensors(
    checkpoint: Checkpoint, names: Sequence[str], device: torch.device, dtype: torch.dtype | str | None
) -> list[ReadRequest]:
    """Requests that make their tensors. Tensors that share a storage in the checkpoint are read once and share one again."""
    by_storage: dict[tuple[str, int, int], dict[str, TensorEntry]] = {}
    requests = []
    for name in names:
        entry = checkpoint.tensors[name]
        if entry.storage is not None and entry.num_bytes:
            by_storage.setdefault(entry.storage, {})[name] = entry
        else:
            requests.append(_new(name, entry, device, dtype))
    for (key, storage_start, _), views in by_storage.items():
        dtypes = {entry.dtype for entry in views.values()}
        if len(dtypes) > 1 and any(_cast(stored, dtype) != stored for stored in dtypes):
            # Once cast, no bytes are shared.
            requests += [_new(name, entry, device, dtype) for name, entry in views.items()]
        else:
            requests.append(_views(views, key, storage_start, device, dtype))
    return requests


def _start_of(entry: TensorEntry) -> tuple[str, int]:
    if len(entry.shards) == 1:
        return entry.shards[0].key, entry.shards[0].start
    return min(((shard.key, shard.start) for shard in entry.shards), default=("", 0))


def _new(name: str, entry: TensorEntry, device: torch.device, dtype: torch.dtype | str | None) -> ReadRequest:
    made_dtype = _cast(entry.dtype, dtype)

    def prepare(limits: ReadLimits) -> PreparedRead:
        tensor = torch.empty(entry.shape, dtype=made_dtype, device=device)
        return tensor_spans(name, entry, tensor, limits), lambda: [(name, tensor)]

    new_bytes = entry.num_bytes // entry.dtype.itemsize * made_dtype.itemsize
    return ReadRequest(name, _start_of(entry), entry.num_bytes, new_bytes, prepare)


def _views(
    views: dict[str, TensorEntry], key: str, storage_start: int, device: torch.device, dtype: torch.dtype | str | None
) -> ReadRequest:
    """Views of one storage: the bytes from the first to the last that any view needs are read as one flat tensor."""
    shards = {name: entry.shards[0] for name, entry in views.items()}
    dtypes = {entry.dtype for entry in views.values()}
    stored = next(iter(dtypes)) if len(dtypes) == 1 else torch.uint8
    made_dtype = _cast(stored, dtype)
    first = min(shard.start for shard in shards.values()) - storage_start
    lo = storage_start + first // _VIEW_ALIGNMENT * _VIEW_ALIGNMENT  # so that every view begins at a whole element
    hi = max(shard.start + shard.length for shard in shards.values())
    count = (hi - lo) // stored.itemsize
    flat = TensorEntry(stored, (count,), (TensorShard((0,), (count,), key, lo, hi - lo, (1,)),))
    label = next(iter(views))

    def prepare(limits: ReadLimits) -> PreparedRead:
        memory = torch.empty(count, dtype=made_dtype, device=device)

        def view(name: str, entry: TensorEntry) -> torch.Tensor:
            offset = (shards[name].start - lo) // entry.dtype.itemsize
            if len(dtypes) == 1:
                return memory.as_strided(entry.shape, shards[name].strides, offset)
            untyped = memory.untyped_storage()
            return torch.empty(0, dtype=entry.dtype, device=device).set_(
                untyped, offset, entry.shape, shards[name].strides
            )

        return tensor_spans(label, flat, memory, limits), lambda: [(n, view(n, entry)) for n, entry in views.items()]

    return ReadRequest(label, (key, lo), hi - lo, count * made_dtype.itemsize, prepare)


# ------------------------------------------------------------------------------------------------- given tensors


@collector_off()
def given_tensors(
    checkpoint: Checkpoint,
    targets: Mapping[str, torch.Tensor],
    dtype: torch.dtype | str | None,
    device: torch.device | None,
) -> list[ReadRequest]:
    """Requests that fill `targets`, all of which the checkpoint has. Raises CheckpointError naming each that does not fit."""
    problems = []
    for name, tensor in targets.items():
        problem = _unfillable(tensor) or _difference(tensor, checkpoint.tensors[name], dtype, device)
        if problem:
            problems.append(f"{name!r} {problem}")
    if problems:
        more = f"\n  and {len(problems) - _NUM_LISTED} more" if len(problems) > _NUM_LISTED else ""
        raise CheckpointError(
            f"{checkpoint.name} does not fit the tensors to be filled; nothing was written:\n  "
            + "\n  ".join(problems[:_NUM_LISTED])
            + more
        )
    return [_given(name, checkpoint.tensors[name], targets[name]) for name in _distinct(checkpoint, targets)]


def _given(name: str, entry: TensorEntry, tensor: torch.Tensor) -> ReadRequest:
    local = local_of(tensor)
    offsets = _offsets_of(tensor)

    def deliver() -> list[tuple[str, Any]]:
        if not local.is_inference():
            torch.autograd.graph.increment_version(local)
        return [(name, tensor)]

    def prepare(limits: ReadLimits) -> PreparedRead:
        if offsets is None:
            return tensor_spans(name, entry, tensor.detach(), limits), deliver
        return part_spans(name, entry, local, limits, offsets=offsets), deliver

    num_bytes = entry.num_bytes if offsets is None else local.numel() * entry.dtype.itemsize
    return ReadRequest(name, _start_of(entry), num_bytes, 0, prepare)


def is_dtensor(tensor: torch.Tensor) -> bool:
    """True for a tensor of which each rank has a part."""
    return type(tensor).__name__ == "DTensor"


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; other tensors themselves."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        local: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
        return local


def _offsets_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Where a DTensor's part on this rank begins, as torch.distributed.checkpoint asks it; None for other tensors."""
    if not is_dtensor(tensor):
        return None
    chunks = tensor.__create_chunk_list__()  # type: ignore[attr-defined]
    return tuple(chunks[0].offsets)


def _unfillable(tensor: torch.Tensor) -> str | None:
    """Why no bytes can be written to a tensor, or None if they can."""
    if is_dtensor(tensor):
        if any(one.is_partial() for one in tensor.placements):  # type: ignore[attr-defined]
            return "is a DTensor of partial sums, of which no rank has the value"
        if len(tensor.__create_chunk_list__()) != 1:  # type: ignore[attr-defined]
            return "is a DTensor of several parts on a rank: restore it with dcp.load and loaderkit.checkpoint.StreamReader"
        tensor = local_of(tensor)
    if tensor.is_meta:
        return "is on the meta device and has no memory: call model.to_empty(device=...) first"
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return f"has the layout {tensor.layout}, or is quantised or conjugated: only plain tensors are filled"
    if overlaps_itself(tensor):
        return "is expanded, or overlaps itself: its elements share memory"
    return None


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """True if elements of a tensor lie in the same memory, as after `expand`."""
    if tensor.is_contiguous():
        return False
    sizes = sorted((s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1)
    spans = [*accumulate((stride * (size - 1) for stride, size in sizes), initial=1)]
    if tensor.numel() > spans[-1]:
        return True
    if all(stride >= span for (stride, _), span in zip(sizes, spans, strict=False)):
        return False  # each dimension steps over what those of smaller strides span
    places = np.zeros(1, np.int64)
    for stride, size in sizes:
        places = (places[:, None] + stride * np.arange(size)).ravel()
    return np.unique(places).size < places.size


def _difference(
    tensor: torch.Tensor, entry: TensorEntry, dtype: torch.dtype | str | None, device: torch.device | None
) -> str | None:
    """How a tensor differs from the checkpoint's, or None if it fits."""
    if tensor.shape != entry.shape:
        return f"has shape {list(tensor.shape)}, and {list(entry.shape)} in the checkpoint"
    if device is not None and not _same_device(tensor.device, device):
        return f"is on {tensor.device}, and device is {device}: leave `device` out, or move it first"
    if dtype == "target" and entry.dtype.is_floating_point == tensor.dtype.is_floating_point:
        return None
    if tensor.dtype == entry.dtype and dtype is None:
        return None
    expected = _cast(entry.dtype, dtype)
    if tensor.dtype != expected:
        hint = "" if dtype is not None else "; dtype='target' casts to the types given"
        return f"is {tensor.dtype}, and {expected} {'comes out' if dtype is not None else 'in the checkpoint'}{hint}"
    return None


def _same_device(one: torch.device, other: torch.device) -> bool:
    return one.type == other.type and (one.index is None or other.index is None or one.index == other.index)


def _distinct(checkpoint: Checkpoint, targets: Mapping[str, torch.Tensor]) -> list[str]:
    """The names to read: if several are the same memory (tied weights), the last, as with load_state_dict.

    Raises CheckpointError for two tensors that share a part of their memory, or all of it where they are known to be two.
    """
    last: dict[Any, str] = {}
    for name, tensor in targets.items():
        first = last.get(identity(tensor), name)
        if checkpoint.tensors[first].shards != checkpoint.tensors[name].shards:
            if stores_memory_once(checkpoint):
                raise CheckpointError(
                    f"{checkpoint.name}: {name!r} {SAME_MEMORY.format(first)}; nothing was written. {GIVE_MEMORY}"
                )
            warn_same_memory(checkpoint, first, name)
        last[identity(tensor)] = name
    chosen = set(last.values())
    overlapping = overlapping_pair({name: local_of(tensor) for name, tensor in targets.items() if name in chosen})
    if overlapping is not None:
        raise CheckpointError(f"{overlap_of(*overlapping)}; nothing was written. {GIVE_MEMORY}")
    return [name for name in targets if name in chosen]


def overlap_of(one: str, other: str) -> str:
    """What is wrong with two tensors."""
    return f"{one!r} and {other!r} share a part of their memory, so filling one would change the other"


def overlapping_pair(tensors: Mapping[str, torch.Tensor]) -> tuple[str, str] | None:
    """Two of the tensors that share a part of their memory; None if there are none."""
    extents = []
    for name, tensor in tensors.items():
        if tensor.numel():
            start = tensor.data_ptr()
            spanned = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            extents.append((str(tensor.device), start, start + spanned * tensor.itemsize, name))
    extents.sort()
    farthest: tuple[str, int, int, str] | None = None
    for extent in extents:
        device, start, end, name = extent
        if farthest is not None and device == farthest[0]:
            if start < farthest[2] and _share_bytes(tensors[name], tensors[farthest[3]]):
                return farthest[3], name
            if end <= farthest[2]:
                continue
        farthest = extent
    return None


def identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """A key that is equal for tensors that are the same view of the same memory, and for no others."""
    tensor = local_of(tensor)
    if not tensor.numel() or tensor.is_meta or tensor.layout != torch.strided:
        return (id(tensor),)
    return (str(tensor.device), tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


def stores_memory_once(checkpoint: Checkpoint) -> bool:
    """True if a CheckpointManager has saved the checkpoint, so that no two of its tensors were the same memory."""
    return any(f"{OWN_KEY}.step" in names for names in (checkpoint.values, checkpoint.pickled))


def warn_same_memory(checkpoint: Checkpoint, first: str, name: str) -> None:
    """Warn that only the last of two tensors of the checkpoint is restored. They may well be equal, as with tied weights."""
    logger.warning(
        "%s: %r %s, of which %r is taken. If they are not tied weights, %s%s",
        *(printable(checkpoint.name), name, SAME_MEMORY.format(first), name, GIVE_MEMORY[0].lower(), GIVE_MEMORY[1:]),
    )


def _share_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two tensors of overlapping extents have a byte in common: columns of one matrix have none."""
    low = min(one.data_ptr(), other.data_ptr())
    addresses: list[Any] = []
    for tensor in (one, other):
        if tensor.numel() * tensor.itemsize > _MAX_COMPARED:
            return False
        address = np.array([tensor.data_ptr() - low], np.int64)
        for size, stride in zip((*tensor.shape, tensor.itemsize), (*tensor.stride(), None), strict=True):
            step = 1 if stride is None else stride * tensor.itemsize
            address = (address[:, None] + np.arange(size, dtype=np.int64) * step).reshape(-1)
        addresses.append(address)
    return bool(np.intersect1d(*addresses).size)
