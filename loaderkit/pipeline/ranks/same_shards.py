"""Ranks that leave out other shards than one another, or keep other listings, would go by other orders."""

from __future__ import annotations

from hashlib import blake2b

import torch.distributed as dist

from loaderkit.errors import SourceError
from loaderkit.pipeline.opened import OpenedPipeline
from loaderkit.ranks.store import default_store, own_connection

_OF_DATA = frozenset({"data", "sources", "bad_shards", "classes"})


def check_same_shards(plan: OpenedPipeline) -> None:
    """Raise SourceError if another rank's loader of this pipeline has other samples, where damaged shards are left out or
    listings are kept: a copy on one node may be damaged and whole on others, or was listed on another day. Nothing is compared
    without a process group.

    No rank waits: the first one writes its fingerprint to the store of torch.distributed, and all others compare theirs
    with it.
    """
    sources = (plan.config.source, *(one.args for one in plan.config.members))
    may_differ = plan.config.errors.on_bad_shard != "raise" or any(map(_is_kept, sources))
    if not may_differ or not (dist.is_available() and dist.is_initialized()):
        return
    fingerprint, rank = plan.fingerprint(), dist.get_rank()
    urls = [getattr(args, "url", "") for args in sources]
    same = repr([plan.config.name, urls, sorted(set(fingerprint.items()) - {*_parts(fingerprint)})])
    store = own_connection(default_store(), f"loaderkit/shards/{blake2b(same.encode(errors='replace')).hexdigest()}")
    number = store.add(f"loaders of {rank}", 1)  # a program may build several, one behind another
    mine = repr(_parts(fingerprint))
    left_out = fingerprint.get("bad_shards", "no shard")
    theirs = store.compare_set(str(number), "", f"{rank}\n{left_out}\n{mine}").decode()
    other, there, parts = theirs.split("\n", 2)
    if parts != mine and any(map(_is_kept, sources)):
        raise SourceError(
            f"rank {rank} has other samples than rank {other}: listings were kept (`source.listing`) on other days, or the "
            "data differs. Start once with `listing: fresh` on all nodes, or keep one listing in a folder that they share "
            "(LOADERKIT_CACHE_DIR)"
        )
    if parts != mine:
        raise SourceError(
            f"rank {rank} leaves out {left_out}, and rank {other} {there}: their data differs, so they would go by different "
            "orders. Mend the copies, or leave the damaged shards out of the source (`include`)"
        )


def _is_kept(args: object) -> bool:
    return getattr(args, "listing", "fresh") != "fresh"


def _parts(fingerprint: dict[str, str]) -> list[tuple[str, str]]:
    """The parts of the fingerprint that say which samples there are."""
    return sorted((name, value) for name, value in fingerprint.items() if name in _OF_DATA)
