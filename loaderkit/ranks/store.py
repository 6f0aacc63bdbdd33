"""The store of torch.distributed, through which the ranks of a job leave messages for one another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from loaderkit.errors import ConfigError

if dist.is_available():  # not in every build of torch
    from torch.distributed import distributed_c10d as c10d

_MAX_LISTED = 8


def default_store() -> Any:
    """The store of torch.distributed. Raises ConfigError without one."""
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError(
            "ranks are given, and torch.distributed is not initialised: call torch.distributed.init_process_group('gloo') first"
        )
    return c10d._get_default_store()  # there is no public name for it; torch's own packages use this one


def own_connection(store: Any, prefix: str) -> Any:
    """The keys of `store` below `prefix`, over a connection of its own, because calls over one connection exclude one
    another."""
    clone = getattr(store, "clone", None)  # from torch 2.8 on
    return c10d.PrefixStore(prefix, store if clone is None else clone())


def listed(ranks: Sequence[int]) -> str:
    """The numbers of ranks, for a message."""
    more = f" and {len(ranks) - _MAX_LISTED} more" if len(ranks) > _MAX_LISTED else ""
    return ", ".join(map(str, ranks[:_MAX_LISTED])) + more
