"""Handles the names that wrappers of modules change. What `torch.compile` and DistributedDataParallel add is left out
of a checkpoint; wrappers are recognised by the modules' types. Where only names are there, an error says what a wrapper
has added."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from loaderkit.errors import ConfigError

_WRAPPERS = {"_orig_mod": "torch.compile", "module": "DistributedDataParallel"}
FLAT_PARAM = "_flat_param"
"""FSDP1's name of the parameter that holds the shards of several."""
FLAT_REMEDY = (
    "put an object into the state whose state_dict() is torch's get_optimizer_state_dict(model, optimizer, "
    "options=StateDictOptions(full_state_dict=True)) and whose load_state_dict(state) is set_optimizer_state_dict with the "
    "same options (both in torch.distributed.checkpoint.state_dict), or shard the model by FSDP2's fully_shard, whose "
    "optimizer is saved as it is"
)
_UNNAMED = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module")  # which are in no name of a state_dict


def own_names(module: torch.nn.Module) -> Callable[[str], str]:
    """A function that maps a name in the module's state, or of a parameter, to the name without what wrappers add.
    torch.distributed.checkpoint.state_dict gives the same name."""
    added: set[tuple[str, ...]] = set()
    for path, inner in module.named_modules(remove_duplicate=False):
        part = _part_of(inner)
        if part:
            added.add((*_named(path), part))
    if not added:
        return lambda name: ".".join(_named(name))

    def own(name: str) -> str:
        parts = _named(name)
        return ".".join(part for number, part in enumerate(parts) if parts[: number + 1] not in added)

    return own


def _named(name: str) -> tuple[str, ...]:
    return tuple(part for part in name.split(".") if part and part not in _UNNAMED)


def _part_of(module: torch.nn.Module) -> str:
    """What a wrapper adds to the names in the module that it wraps; "" if the module is no wrapper."""
    if isinstance(module, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)):
        return "module"
    inner = vars(module).get("_modules", {}).get("_orig_mod")
    return "_orig_mod" if inner is not None and type(module).__name__ == "OptimizedModule" else ""


def unwrapped_state(module: torch.nn.Module) -> Any:
    """The `state_dict` of a module under its own names."""
    state = module.state_dict()
    own = own_names(module)
    if all(own(name) == name for name in state):
        return state
    renamed = type(state)((own(name), value) for name, value in state.items())
    versions = getattr(state, "_metadata", None)
    if versions is not None:
        vars(renamed)["_metadata"] = type(versions)((own(name), said) for name, said in versions.items())
    return renamed


def parameter_names(optimizer: torch.optim.Optimizer, modules: Iterable[torch.nn.Module]) -> list[str] | None:
    """The names of an optimizer's parameters, in its order, in the first module that has all of them, or None if no
    module has."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for module in modules:
        own = own_names(module)
        names = {id(param): own(name) for name, param in module.named_parameters()}
        found = [names.get(id(param)) for param in params]
        if params and None not in found and len({*found}) == len(found):
            return [str(name) for name in found]
    return None


def check_not_flat(name: str, optimizer: torch.optim.Optimizer, modules: Iterable[torch.nn.Module]) -> None:
    """Raise ConfigError for an optimizer of FSDP1 whose parameters are pieces of this rank alone, under names of all ranks."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    sharded = {
        id(param)
        for module in modules
        for inner in module.modules()
        if _is_sharded_by_fsdp1(inner)
        for param in inner.parameters()
    }
    if any(_is_flat_shard(param) or id(param) in sharded for param in params):
        raise ConfigError(
            f"state: the optimizer {name!r} is of a model under FSDP1, and has on each rank the state of that rank's piece of "
            f"the parameters, whose places nothing tells: it would fit no other rank. Instead, {FLAT_REMEDY}"
        )


def _is_flat_shard(param: Any) -> bool:
    whole = getattr(param, "_unpadded_unsharded_size", None)
    return getattr(param, "_is_flat_param", False) and whole is not None and whole.numel() > param.numel()


def _is_sharded_by_fsdp1(module: Any) -> bool:
    if type(module).__name__ != "FullyShardedDataParallel":
        return False
    strategy = getattr(getattr(module, "sharding_strategy", None), "name", "")
    return getattr(module, "world_size", 1) > 1 and strategy != "NO_SHARD"


def check_names(name: str, table: Mapping[Any, Any]) -> None:
    """Raise ConfigError for a table of tensors, such as a `state_dict`, that has names of a wrapper."""
    keys = [key for key, value in table.items() if type(key) is str and isinstance(value, torch.Tensor)]
    found = next((key for key in keys if "_orig_mod" in key.split(".")), None)
    if found is None and keys and len(keys) == len(table) and all(key.startswith("module.") for key in keys):
        distributed = torch.distributed
        found = keys[0] if distributed.is_available() and distributed.is_initialized() else None
    if found is not None:
        maker = _makers(part for part in found.split(".") if part in _WRAPPERS)
        raise ConfigError(
            f"state: {name!r} has {found!r}, a name that {maker} has made, and would fit no model without it: put the module "
            "itself into the state, whose own names are then saved, or the state_dict of the module in it"
        )


def wrapper_hint(missing: Sequence[str], there: Iterable[str]) -> str:
    """What to do where a name of the state is missing in the checkpoint, which has it with or without what a wrapper adds.

    "" if it has neither. `there` are the names in the checkpoint.
    """
    plain = {_plain(name): name for name in there}
    for name in sorted(missing):
        found = plain.get(_plain(name))
        if found is None:
            continue
        said = f"{name!r} is {found!r} in the checkpoint: "
        here_only, there_only = _added(name, found), _added(found, name)
        if here_only:
            said += (
                f"here the model is wrapped by {_makers(here_only)}, and where it was saved it was not: put the module in it, "
                f"model.{'.'.join(here_only)}, into the state"
            )
        if there_only:
            said += (
                f"{'; and ' if here_only else ''}it was saved wrapped by {_makers(there_only)}, and here it is not: restore "
                f"into one that is, and from then on save the module in it, model.{'.'.join(there_only)}, whose names are the "
                "model's own"
            )
        if not here_only and not there_only:
            makers = _makers(part for part in name.split(".") if part in _WRAPPERS)
            said += (
                f"the model is wrapped by {makers} in another order than it was: wrap it as it was, and from then on save the "
                "module in all of them, whose names are the model's own"
            )
        return said
    return ""


def _plain(name: str) -> tuple[str, ...]:
    return tuple(part for part in name.split(".") if part not in _WRAPPERS)


def _added(name: str, other: str) -> list[str]:
    """The parts of a name that wrappers have added, and that the other has not."""
    left = Counter(part for part in other.split(".") if part in _WRAPPERS)
    added = []
    for part in name.split("."):
        if part in _WRAPPERS:
            if not left[part]:
                added.append(part)
            left[part] -= 1
    return added


def _makers(parts: Iterable[str]) -> str:
    return " and ".join(dict.fromkeys(_WRAPPERS[part] for part in parts))
