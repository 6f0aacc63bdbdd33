"""The shards and values that several ranks need, agreed on through the load plans of torch.distributed.checkpoint.

Every rank's plan goes to the coordinator, which compares all of them, and comes back to the ranks with a `SharePlan`.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan

from loaderkit._internal.system.machine import machine
from loaderkit.checkpoint.contents import SMALL_ARCHIVE, Checkpoint, ShardId, TensorShard, strides_of
from loaderkit.checkpoint.transfer.layout import ReadLimits, box_spans
from loaderkit.checkpoint.transfer.shared_ranges import NeededRange, Ranks, overlap

Shape = tuple[int, ...]


class RankInfo(NamedTuple):
    """What a rank adds to its plan for the coordinator."""

    machine: str


class SharedBox(NamedTuple):
    """A box in a shard, and the ranks that need it, or None if all do."""

    offsets: Shape
    sizes: Shape
    ranks: Ranks | None


class SharedShard(NamedTuple):
    """A shard that several ranks need. Without `boxes` no two of them need the same bytes: each reads its own."""

    shard_id: ShardId
    boxes: tuple[SharedBox, ...]


class SharedValue(NamedTuple):
    """A plain value that several ranks need; `ranks` is None if all do."""

    name: str
    ranks: Ranks | None


class SharePlan(NamedTuple):
    """The coordinator's answer to `rank`, a rank of the group; `shards` and `values` are the same for all ranks."""

    load_id: str
    rank: int
    num_ranks: int
    num_local: int  # ranks that share the memory of this machine
    shards: tuple[SharedShard, ...]
    values: tuple[SharedValue, ...]

    def ranks(self, ranks: Ranks | None) -> Ranks:
        """The ranks that a box or value names; all if it says None."""
        return tuple(range(self.num_ranks)) if ranks is None else ranks


def with_machine(plan: LoadPlan) -> LoadPlan:
    """A rank's own plan, with what the coordinator needs to know."""
    return replace(plan, storage_data=RankInfo(machine()))


def with_share_plans(plans: Sequence[LoadPlan], contents: Checkpoint, *, share: bool) -> list[LoadPlan]:
    """All ranks' plans, each with its `SharePlan`."""
    machines = [
        plan.storage_data.machine if isinstance(plan.storage_data, RankInfo) else str(rank)
        for rank, plan in enumerate(plans)
    ]
    num_local = Counter(machines)
    share = share and len(plans) > 1
    shards = _shared_shards(plans, contents) if share else ()
    values = _shared_values(plans, contents) if share else ()
    load_id = uuid.uuid4().hex
    return [
        replace(plan, storage_data=SharePlan(load_id, rank, len(plans), num_local[machines[rank]], shards, values))
        for rank, plan in enumerate(plans)
    ]


def _shared_shards(plans: Sequence[LoadPlan], contents: Checkpoint) -> tuple[SharedShard, ...]:
    """The shards that several of the plans need."""
    shards = contents.shards_by_id()
    needed: dict[ShardId, dict[tuple[Shape, Shape], list[int]]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            shard_id = (item.storage_index.fqn, tuple(item.storage_index.offset or ()))
            if item.type == LoadItemType.TENSOR and shard_id in shards and 0 not in item.lengths:
                box = (tuple(item.storage_offsets), tuple(item.lengths))
                ranks = needed.setdefault(shard_id, {}).setdefault(box, [])
                if not ranks or ranks[-1] != rank:
                    ranks.append(rank)
    shared = []
    for shard_id, boxes in needed.items():
        if len({rank for ranks in boxes.values() for rank in ranks}) > 1:
            common = boxes if _share_bytes(shards[shard_id], boxes) else {}
            shared.append(
                SharedShard(
                    shard_id, tuple(SharedBox(*box, _or_all(ranks, len(plans))) for box, ranks in common.items())
                )
            )
    return tuple(shared)


def _shared_values(plans: Sequence[LoadPlan], contents: Checkpoint) -> tuple[SharedValue, ...]:
    """The values that lie in archives of their own and that several of the plans need."""
    needed: dict[str, list[int]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            name = item.storage_index.fqn
            if (
                item.type == LoadItemType.BYTE_IO
                and name in contents.pickled
                and rank not in needed.setdefault(name, [])
            ):
                needed[name].append(rank)
    return tuple(SharedValue(name, _or_all(ranks, len(plans))) for name, ranks in needed.items() if len(ranks) > 1)


def _or_all(ranks: Sequence[int], num_ranks: int) -> Ranks | None:
    return None if len(ranks) == num_ranks else tuple(ranks)


def _share_bytes(shard: TensorShard, boxes: Mapping[tuple[Shape, Shape], Sequence[int]]) -> bool:
    """True if different ranks need the same bytes, or bytes so interleaved that one read covers both."""
    if shard.is_archive and shard.length <= SMALL_ARCHIVE:
        return True  # it is read whole
    strides = shard.strides or strides_of(shard.sizes)  # an archive's are not known yet, and nearly always these
    extents = []
    for (offsets, sizes), ranks in boxes.items():
        if len(ranks) > 1:
            return True
        start = sum(o * s for o, s in zip(offsets, strides, strict=True))
        end = start + 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
        extents.append((start, end, ranks[0]))
    return overlap(extents)


def shared_ranges(plan: SharePlan, contents: Checkpoint, limits: ReadLimits) -> list[NeededRange]:
    """The ranges of the shared boxes, once the layouts of all shared shards are known: the same on every rank."""
    ranges = []
    shards = contents.shards_by_id()
    for (name, offsets), boxes in plan.shards:
        dtype, shard = contents.tensors[name].dtype, shards[name, offsets]
        for box in boxes:
            like = torch.empty(box.sizes, dtype=dtype, device="meta")
            ranks = plan.ranks(box.ranks)
            spans = box_spans(name, dtype, shard, like, limits, offsets=box.offsets, sizes=box.sizes)
            ranges += [NeededRange(span.key, span.start, span.start + span.length, name, ranks) for span in spans]
    return ranges
