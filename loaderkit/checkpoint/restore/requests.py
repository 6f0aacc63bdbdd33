"""What is wanted of a checkpoint: names chosen, checked against what is to be filled, and turned into `ReadRequest`s.

All of this happens before a byte of a tensor is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch

from loaderkit.checkpoint.contents import Checkpoint, TensorEntry, TensorShard
from loaderkit.checkpoint.names import Leaf
from loaderkit.checkpoint.transfer.layout import ReadLimits, lay
from loaderkit.checkpoint.transfer.plan import Laid, ReadRequest
from loaderkit.errors import CheckpointError, ConfigError
from loaderkit.native.garbage import collected_later

_NUM_LISTED = 8
_MOST_COMPARED = 2**26
Dtype = torch.dtype | str | None


def choose(found: Checkpoint, keys: str | Iterable[str] | None) -> tuple[list[str], list[str]]:
    """(names of tensors, names of other values) that match one of the globs `keys`. Raises CheckpointError if one matches
    nothing."""
    others = [*found.values, *found.pickled]
    if keys is None:
        return [*found.tensors], others
    patterns = [keys] if isinstance(keys, str) else [*keys]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in (*found.tensors, *others)):
            near = get_close_matches(pattern, [*found.tensors, *others], 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {_listed([*found.tensors, *others])}"
            raise CheckpointError(f"{found.name} has no name that matches {pattern!r}: {hint}")
    return [name for name in found.tensors if matches(name, patterns)], [n for n in others if matches(n, patterns)]


def matches(name: str, keys: str | Iterable[str] | None) -> bool:
    """Whether a name is chosen by `keys`: one glob or several, upper and lower case told apart; None: all."""
    if keys is None:
        return True
    return any(fnmatchcase(name, pattern) for pattern in ([keys] if isinstance(keys, str) else keys))


def parse_dtype(dtype: Dtype) -> torch.dtype | str | None:
    """A dtype by object or name; "target": that of each tensor to be filled. Raises ConfigError."""
    if dtype is None or isinstance(dtype, torch.dtype) or dtype == "target":
        found = dtype
    else:
        short = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": "float8_e4m3fn", "half": "float16"}
        name = short.get(str(dtype), str(dtype)).removeprefix("torch.")
        found = getattr(torch, name, None)
        if not isinstance(found, torch.dtype):
            raise ConfigError(f"dtype {dtype!r} is no type of torch's: give torch.bfloat16, 'float16', 'target'")
    if isinstance(found, torch.dtype) and not found.is_floating_point:
        raise ConfigError(f"dtype {dtype!r}: only floating-point tensors are cast, to a floating-point type")
    return found


def _cast(stored: torch.dtype, dtype: torch.dtype | str | None) -> torch.dtype:
    return dtype if isinstance(dtype, torch.dtype) and stored.is_floating_point else stored


# ------------------------------------------------------------------------------------------------------ new tensors


@collected_later
def new_tensors(
    found: Checkpoint, names: Sequence[str], device: torch.device, dtype: torch.dtype | str | None
) -> list[ReadRequest]:
    """Wants that make their tensors. Those that share a storage in the checkpoint are read once and share one again."""
    by_storage: dict[tuple[str, int, int], list[str]] = {}
    requests = []
    for name in names:
        stored = found.tensors[name]
        if stored.storage is not None and stored.num_bytes:
            by_storage.setdefault(stored.storage, []).append(name)
        else:
            requests.append(_new(name, stored, device, dtype))
    for sharing in by_storage.values():
        kinds = {found.tensors[name].dtype for name in sharing}
        if len(kinds) > 1 and any(_cast(kind, dtype) != kind for kind in kinds):
            requests += [_new(name, found.tensors[name], device, dtype) for name in sharing]  # cast: no bytes to share
        else:
            requests.append(_shared({name: found.tensors[name] for name in sharing}, device, dtype))
    return requests


def _first(stored: TensorEntry) -> tuple[str, int]:
    return min(((part.key, part.start) for part in stored.parts), default=("", 0))


def _new(name: str, stored: TensorEntry, device: torch.device, dtype: torch.dtype | str | None) -> ReadRequest:
    kind = _cast(stored.dtype, dtype)

    def make(limits: ReadLimits) -> Laid:
        tensor = torch.empty(stored.shape, dtype=kind, device=device)
        return lay(name, stored, tensor, limits), lambda: [(name, tensor)]

    made = stored.num_bytes // stored.dtype.itemsize * kind.itemsize
    return ReadRequest(name, _first(stored), stored.num_bytes, made, make)


def _shared(sharing: dict[str, TensorEntry], device: torch.device, dtype: torch.dtype | str | None) -> ReadRequest:
    """Views of one storage: the bytes from the first that any of them needs to the last are read, as one flat tensor."""
    parts = {name: stored.parts[0] for name, stored in sharing.items()}
    kinds = {stored.dtype for stored in sharing.values()}
    kind = next(iter(kinds)) if len(kinds) == 1 else torch.uint8
    target = _cast(kind, dtype)
    base = next(iter(sharing.values())).storage
    assert base is not None
    # From a multiple of 64 in the storage on, so that every view begins at a whole element.
    lo = base[1] + (min(part.start for part in parts.values()) - base[1]) // 64 * 64
    hi = max(part.start + part.length for part in parts.values())
    count = (hi - lo) // kind.itemsize
    flat = TensorEntry(kind, (count,), (TensorShard((0,), (count,), base[0], lo, hi - lo, (1,)),))
    label = next(iter(sharing))

    def make(limits: ReadLimits) -> Laid:
        memory = torch.empty(count, dtype=target, device=device)

        def give() -> list[tuple[str, Any]]:
            given = []
            for name, stored in sharing.items():
                seen = memory if len(kinds) == 1 else memory.view(torch.uint8)
                offset = (parts[name].start - lo) // stored.dtype.itemsize
                if len(kinds) > 1:
                    seen = torch.empty(0, dtype=stored.dtype, device=device).set_(
                        memory.untyped_storage(), offset, stored.shape, parts[name].strides
                    )
                    given.append((name, seen))
                else:
                    given.append((name, seen.as_strided(stored.shape, parts[name].strides, offset)))
            return given

        return lay(label, flat, memory, limits), give

    return ReadRequest(label, (base[0], lo), hi - lo, count * target.itemsize, make)


# -------------------------------------------------------------------------------------------------- tensors to fill


@collected_later
def given_tensors(
    found: Checkpoint, targets: Mapping[str, torch.Tensor], dtype: torch.dtype | str | None, device: torch.device | None
) -> list[ReadRequest]:
    """Wants that fill `targets`, which the checkpoint has, too. Raises CheckpointError naming every one that does not fit."""
    problems = []
    for name, tensor in targets.items():
        problem = _misfit(tensor, found.tensors[name], dtype, device)
        if problem:
            problems.append(f"{name!r} {problem}")
    if problems:
        more = f"\n  and {len(problems) - _NUM_LISTED} more" if len(problems) > _NUM_LISTED else ""
        raise CheckpointError(
            f"{found.name} does not fit what is to be filled; nothing was written:\n  "
            + "\n  ".join(problems[:_NUM_LISTED])
            + more
        )
    return [_given(name, found.tensors[name], targets[name]) for name in _distinct(targets)]


def _misfit(
    tensor: torch.Tensor, stored: TensorEntry, dtype: torch.dtype | str | None, device: torch.device | None
) -> str | None:
    """Why a tensor cannot be filled, if so."""
    return _unfillable(tensor) or _differs(tensor, stored, dtype, device)


def _unfillable(tensor: torch.Tensor) -> str | None:
    if type(tensor).__name__ == "DTensor":
        return "is a DTensor: restore it with dcp.load(state, storage_reader=loaderkit.checkpoint.StreamReader(url))"
    if tensor.is_meta:
        return "is on the meta device and has no memory: call model.to_empty(device=...) first"
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return f"has the layout {tensor.layout}, or is quantised or conjugated: only plain tensors are filled"
    if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return "is expanded: its elements share memory"
    return None


def _differs(
    tensor: torch.Tensor, stored: TensorEntry, dtype: torch.dtype | str | None, device: torch.device | None
) -> str | None:
    if tuple(tensor.shape) != stored.shape:
        return f"has shape {list(tensor.shape)}, and {list(stored.shape)} in the checkpoint"
    if device is not None and not _same_device(tensor.device, device):
        return f"is on {tensor.device}, and device is {device}: leave `device` out, or move it first"
    wanted = (
        tensor.dtype if dtype == "target" and stored.dtype.is_floating_point == tensor.dtype.is_floating_point else None
    )
    wanted = wanted or _cast(stored.dtype, dtype)
    if tensor.dtype != wanted:
        hint = "" if dtype is not None else "; dtype='target' casts to the types given"
        return f"is {tensor.dtype}, and {wanted} {'comes out' if dtype is not None else 'in the checkpoint'}{hint}"
    return None


def _same_device(one: torch.device, other: torch.device) -> bool:
    return one.type == other.type and (one.index is None or other.index is None or one.index == other.index)


def _distinct(targets: Mapping[str, torch.Tensor]) -> list[str]:
    """The names to read. Of names for the same memory (tied weights) the last counts, as with load_state_dict; memory that two
    tensors share in part is refused."""
    last: dict[tuple[Any, ...], str] = {}
    for name, tensor in targets.items():
        key = identity(tensor)
        last[key] = name
    chosen = set(last.values())
    spans = []
    for name, tensor in targets.items():
        if name in chosen and tensor.numel():
            start = tensor.data_ptr()
            spanned = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            spans.append((str(tensor.device), start, start + spanned * tensor.itemsize, name))
    spans.sort()
    open_until: tuple[str, int, int, str] | None = None
    for span in spans:
        meets = open_until is not None and span[0] == open_until[0] and span[1] < open_until[2]
        if meets and open_until is not None and _really_overlap(targets[span[3]], targets[open_until[3]]):
            raise CheckpointError(
                f"{open_until[3]!r} and {span[3]!r} share a part of their memory, so filling one would change the other; "
                "nothing was written. Give each a memory of its own"
            )
        if open_until is None or span[0] != open_until[0] or span[2] > open_until[2]:
            open_until = span
    return [name for name in targets if name in chosen]


def identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What tensors have in common that are the same memory, seen in the same way; unlike that of any other."""
    if not tensor.numel() or tensor.is_meta or tensor.layout != torch.strided:
        return (id(tensor),)
    return (str(tensor.device), tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


def _really_overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors whose spans overlap have a byte in common: columns of one matrix have none."""
    low = min(one.data_ptr(), other.data_ptr())
    marks = []
    for tensor in (one, other):
        if tensor.numel() * tensor.itemsize > _MOST_COMPARED:
            return False  # too large to look at byte by byte
        place = np.array([tensor.data_ptr() - low], np.int64)
        for size, stride in zip((*tensor.shape, tensor.itemsize), (*tensor.stride(), None), strict=True):
            step = 1 if stride is None else stride * tensor.itemsize
            place = (place[:, None] + np.arange(size, dtype=np.int64) * step).reshape(-1)
        marks.append(place)
    return bool(np.intersect1d(marks[0], marks[1]).size)


def _given(name: str, stored: TensorEntry, tensor: torch.Tensor) -> ReadRequest:
    def make(limits: ReadLimits) -> Laid:
        pieces = lay(name, stored, tensor.detach(), limits)

        def give() -> list[tuple[str, Any]]:
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)
            return [(name, tensor)]

        return pieces, give

    return ReadRequest(name, _first(stored), stored.num_bytes, 0, make)


def compare_names(found: Checkpoint, wanted: Mapping[str, Leaf], chosen: Sequence[str], *, strict: bool) -> None:
    """Raise CheckpointError listing what is wanted and not there, and what is there and not wanted (unless not `strict`)."""
    present = set(chosen)
    missing = [name for name in wanted if name not in present]
    if missing:  # except those that are the same memory as something that is there
        tied = {identity(leaf.value) for name, leaf in wanted.items() if name in present and _is_tensor(leaf.value)}
        missing = [n for n in missing if not _is_tensor(wanted[n].value) or identity(wanted[n].value) not in tied]
    unexpected = [name for name in chosen if name not in wanted] if strict else []
    if not missing and not unexpected:
        return
    lines = [f"{found.name} does not have the names that are to be filled; nothing was read or written."]
    if missing:
        lines.append(f"  missing in the checkpoint ({len(missing)}): {_listed(missing)}")
    if unexpected:
        lines.append(
            f"  only in the checkpoint ({len(unexpected)}): {_listed(unexpected)}; strict=False leaves them out"
        )
    if any(".state." in f".{name}" for name in unexpected):
        lines.append(
            "  An optimizer has no state before its first step: take torch.distributed's get_optimizer_state_dict, or"
        )
        lines.append("  restore without `into` and give the result to load_state_dict.")
    raise CheckpointError("\n".join(lines), missing=tuple(missing), unexpected=tuple(unexpected))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_NUM_LISTED]) + (
        f", and {len(names) - _NUM_LISTED} more" if len(names) > _NUM_LISTED else ""
    )
