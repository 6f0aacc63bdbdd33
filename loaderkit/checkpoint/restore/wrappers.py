"""Names that wrappers of modules change: an error says so, and no name is changed silently."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

_WRAPPERS = {"_orig_mod": "torch.compile", "module": "DistributedDataParallel"}


def wrapper_hint(missing: Sequence[str], there: Iterable[str]) -> str:
    """What to do where a name of the state is missing in the checkpoint, which has it with or without what a wrapper adds.

    "" if that is not so. `there` are the names in the checkpoint.
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
