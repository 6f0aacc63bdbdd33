"""Which names of a checkpoint are restored: chosen by globs, and compared with the names of `into`."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence, Set
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch

from loaderkit.checkpoint.contents import Checkpoint
from loaderkit.checkpoint.names import Leaf, Path, flatten
from loaderkit.checkpoint.restore.requests import identity
from loaderkit.checkpoint.structure import Structure, is_inner, plain_versions
from loaderkit.checkpoint.wrappers import wrapper_hint
from loaderkit.errors import CheckpointError, ConfigError, printable

logger = logging.getLogger("loaderkit")
_NUM_LISTED = 8
_EXTRA_STATE = "_extra_state"
_LOAD_INSTEAD = "Take restore(url, nested=True) and give the module its part by `load_state_dict`"
_MAX_LEAVES = 100_000_000
_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": "float8_e4m3fn", "half": "float16"}
Dtype = torch.dtype | str | None


def parse_dtype(dtype: Dtype) -> torch.dtype | str | None:
    """A dtype by object or name; "target": the dtype of each tensor to be filled. Raises ConfigError."""
    if dtype is None or dtype == "target":
        return dtype
    name = _SHORT_DTYPES.get(str(dtype), str(dtype)).removeprefix("torch.")
    parsed = dtype if isinstance(dtype, torch.dtype) else getattr(torch, name, None)
    if not isinstance(parsed, torch.dtype):
        raise ConfigError(f"dtype {dtype!r} is not a dtype of torch: give torch.bfloat16, 'float16', 'target'")
    if not parsed.is_floating_point:
        raise ConfigError(f"dtype {dtype!r}: only floating-point tensors are cast, to a floating-point type")
    return parsed


def parse_keys(keys: str | Iterable[str] | None) -> tuple[str, ...] | None:
    """The globs in `keys`, or None for all names. Raises ConfigError if there are none."""
    if keys is None:
        return None
    globs = (keys,) if isinstance(keys, str) else tuple(keys)
    if not globs:
        raise ConfigError("keys is empty, so nothing would be restored: leave it out to restore everything")
    return globs


class Strictness(NamedTuple):
    """Globs of names: of `into` that the checkpoint may lack, and of the checkpoint that `into` may lack."""

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


def parse_strict(strict: bool | Mapping[str, str | Iterable[str]]) -> Strictness:
    """What `strict` of `loaderkit.restore` allows. Raises ConfigError."""
    if isinstance(strict, bool):
        return Strictness() if strict else Strictness(unexpected=("*",))
    expected = 'expected True, False, or globs as {"missing": "head.*", "unexpected": [...]}'
    if not isinstance(strict, Mapping) or strict.keys() - {*Strictness._fields}:
        raise ConfigError(f"strict is {strict!r}: {expected}")
    globs = {key: (value,) if isinstance(value, str) else tuple(value or ()) for key, value in strict.items()}
    if not all(isinstance(glob, str) for some in globs.values() for glob in some):
        raise ConfigError(f"strict is {strict!r}: {expected}")
    return Strictness(**globs)


def choose(checkpoint: Checkpoint, keys: str | Iterable[str] | None) -> tuple[list[str], list[str]]:
    """(names of tensors, names of plain values) that match one of the globs `keys`, or all if it is None. Values that
    only the reader needs, such as the kinds of a state's containers, are left out.

    Upper and lower case differ. Raises CheckpointError if a glob matches nothing.
    """
    tensors = [*checkpoint.tensors]
    values = [name for name in (*checkpoint.values, *checkpoint.pickled) if not is_inner(name)]
    if keys is None:
        return tensors, values
    globs = [keys] if isinstance(keys, str) else [*keys]
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name in (*tensors, *values)):
            near = get_close_matches(glob, [*tensors, *values], 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {_listed([*tensors, *values])}"
            raise CheckpointError(f"{checkpoint.name} has no name that matches {glob!r}: {hint}")
    return [name for name in tensors if matches(name, globs)], [name for name in values if matches(name, globs)]


def matches(name: str, globs: Sequence[str]) -> bool:
    """True if a name matches one of the globs."""
    return any(fnmatchcase(name, glob) for glob in globs)


def leaves_of_target(into: Any, contents: Checkpoint) -> dict[str, Leaf]:
    """The leaves of `into` by name. A tuple of tensors is a plain value, as in all checkpoints but torch.save's.

    Raises ConfigError.
    """
    if not isinstance(into, (dict, list)):
        raise ConfigError(
            f"into: expected a state dict, possibly nested, not {type(into).__name__}; for a module pass module.state_dict()"
        )
    return flatten(into, _is_tensor, _MAX_LEAVES, enters=lambda name, value: contents.tells_containers)


def match_names(
    checkpoint: Checkpoint, leaves: dict[str, Leaf], keys: Sequence[str] | None, strict: Strictness
) -> tuple[dict[str, Leaf], list[str], list[str]]:
    """(leaves of `into` that are chosen, names of tensors to fill, names of plain values to set).

    Raises CheckpointError if the names do not fit, or a tensor meets a plain value.
    """
    if keys is not None:
        leaves = {name: leaf for name, leaf in leaves.items() if matches(name, keys)}
    tensors, values = choose(checkpoint, keys)
    if strict.missing and leaves and leaves.keys().isdisjoint((*tensors, *values)):
        hint = wrapper_hint([*leaves], [*tensors, *values])
        raise CheckpointError(
            f"{checkpoint.name} has none of the names in `into`, so nothing would be restored, and strict's `missing` is meant "
            f"for some of them: it has {_listed([*tensors, *values])}, and `into` {_listed([*leaves])}"
            + (f". {hint}" if hint else "; rename={FROM: TO} maps names"),
            missing=tuple(leaves),
        )
    kept = _kept(checkpoint, leaves, {*tensors, *values}, strict)
    leaves = {name: leaf for name, leaf in leaves.items() if name not in kept}
    _compare_names(checkpoint, leaves, [name for name in (*tensors, *values) if name not in kept], strict)
    tensors = [name for name in tensors if name in leaves]
    values = [name for name in values if name in leaves]
    for name in tensors:
        if not isinstance(leaves[name].value, torch.Tensor):
            raise CheckpointError(
                f"{checkpoint.name}: {name!r} is a tensor, and a {type(leaves[name].value).__name__} in `into`; nothing "
                "was written"
            )
    for name in values:
        if isinstance(leaves[name].value, torch.Tensor):
            raise CheckpointError(f"{checkpoint.name}: {name!r} is no tensor, but one in `into`; nothing was written")
        if isinstance(leaves[name].container, tuple):
            raise CheckpointError(
                f"{checkpoint.name}: {name!r} stands in a tuple of `into`, which cannot be changed; nothing was written"
            )
    return leaves, tensors, values


def _kept(checkpoint: Checkpoint, leaves: dict[str, Leaf], chosen: Set[str], strict: Strictness) -> set[str]:
    """Names of the leaves that keep their values: `strict` lets the checkpoint lack them, and it does, or has a tensor
    of another shape, of which a warning says so."""
    allowed = {name: leaf.value for name, leaf in leaves.items() if matches(name, strict.missing)}
    others = [
        name
        for name, value in allowed.items()
        if name in chosen and name in checkpoint.tensors and _is_tensor(value)
        if tuple(value.shape) != checkpoint.tensors[name].shape
    ]
    if others:
        logger.warning(
            "%s: %s %s another shape there and keep%s the values here, as strict's `missing` says",
            *(printable(checkpoint.name), printable(_listed(others))),
            *(("has", "s") if len(others) == 1 else ("have", "")),
        )
    return {*others, *(allowed.keys() - chosen)}


def _compare_names(
    checkpoint: Checkpoint, leaves: Mapping[str, Leaf], chosen: Sequence[str], strict: Strictness
) -> None:
    """Raise CheckpointError that lists names missing in the checkpoint, and names missing in `into` that `strict` forbids."""
    present = set(chosen)
    missing = [name for name in leaves if name not in present]
    if missing:  # a tensor that is the same memory as one in the checkpoint is filled with it
        tied = {identity(leaf.value) for name, leaf in leaves.items() if name in present and _is_tensor(leaf.value)}
        missing = [n for n in missing if not _is_tensor(leaves[n].value) or identity(leaves[n].value) not in tied]
    unexpected = [name for name in chosen if name not in leaves and not matches(name, strict.unexpected)]
    if not missing and not unexpected:
        return
    lines = [f"{checkpoint.name} does not have the names that are to be filled; nothing was read or written."]
    if missing:
        lines.append(f"  missing in the checkpoint ({len(missing)}): {_listed(missing)}")
        lines += [f"  {hint}" for hint in [wrapper_hint(missing, chosen)] if hint]
        lines.append("  strict={'missing': GLOBS} lets what is new here keep its values; rename={FROM: TO} maps names")
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


def check_applied(structure: Structure, into: Any, leaves: Mapping[str, Leaf], name_of_checkpoint: str) -> None:
    """Raise CheckpointError for what a module would not get by filling its tensors in place: what `set_extra_state` takes, and
    tensors of another version of the module, which `load_state_dict` would convert."""
    for name, leaf in leaves.items():
        if name.rpartition(".")[2] == _EXTRA_STATE or any(
            str(key).rpartition(".")[2] == _EXTRA_STATE for key in leaf.path
        ):
            raise CheckpointError(
                f"{name_of_checkpoint}: {name!r} is of the extra state of a module, which gets it by `set_extra_state` only; "
                f"nothing was written. {_LOAD_INSTEAD}, or leave it out of `into` and give strict=False"
            )

    def visit(value: Any, path: Path) -> None:
        here = getattr(value, "_metadata", None)
        there = structure.at(path) if isinstance(here, Mapping) else None
        if isinstance(here, Mapping) and there is not None and there.versions is not None:
            for module, said in plain_versions(here).items():
                saved = there.versions.get(module, said)
                if saved.get("version") != said.get("version"):
                    raise CheckpointError(
                        f"{name_of_checkpoint}: the module {'.'.join(filter(None, (*map(str, path), module)))!r} is of version "
                        f"{said.get('version')}, and {saved.get('version')} in the checkpoint, which `load_state_dict` would "
                        f"convert; nothing was written. {_LOAD_INSTEAD}"
                    )
        items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
        for key, item in items:
            visit(item, (*path, key))

    visit(into, ())


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _listed(names: Sequence[str]) -> str:
    more = f", and {len(names) - _NUM_LISTED} more" if len(names) > _NUM_LISTED else ""
    return ", ".join(names[:_NUM_LISTED]) + more
