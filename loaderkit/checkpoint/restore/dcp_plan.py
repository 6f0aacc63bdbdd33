"""What ranks that load together tell one another through torch's plan: which parts several of them need, and which bytes.

Every rank's plan comes to the coordinator, which looks at all of them, and goes back to the ranks with what concerns them.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan

from loaderkit.checkpoint.contents import SMALL_BLOB, Checkpoint, TensorShard, strides_of
from loaderkit.checkpoint.ranks.group import machine
from loaderkit.checkpoint.ranks.segments import NeededRange, Ranks, overlap
from loaderkit.checkpoint.transfer.layout import ReadLimits, lay_box

Shape = tuple[int, ...]
PartId = tuple[str, Shape]  # a tensor's name, and the offsets of the part


class Local(NamedTuple):
    """What a rank says with its own plan."""

    machine: str


class Box(NamedTuple):
    """A box in a part, and the ranks that need it; None: all."""

    offsets: Shape
    sizes: Shape
    takers: Ranks | None


class Common(NamedTuple):
    """A part that several ranks need. `boxes` are empty if no two of them need the same bytes: then each reads its own."""

    part: PartId
    boxes: tuple[Box, ...]


class Value(NamedTuple):
    """A plain value that several ranks need; None: all."""

    name: str
    takers: Ranks | None


class Division(NamedTuple):
    """What comes back to the rank at place `me`; `common` and `values` are the same for all."""

    load_id: str
    me: int
    num_ranks: int
    num_local: int  # ranks on this machine, which share its memory
    common: tuple[Common, ...]
    values: tuple[Value, ...]

    def ranks(self, takers: Ranks | None) -> Ranks:
        """Those of a box or value, all if it says None."""
        return tuple(range(self.num_ranks)) if takers is None else takers


def with_machine(plan: LoadPlan) -> LoadPlan:
    """A rank's own plan, with what the coordinator needs to know."""
    return replace(plan, storage_data=Local(machine()))


def with_division(plans: Sequence[LoadPlan], found: Checkpoint, *, share: bool) -> list[LoadPlan]:
    """All ranks' plans, each with its `Division`."""
    machines = [
        plan.storage_data.machine if isinstance(plan.storage_data, Local) else str(n) for n, plan in enumerate(plans)
    ]
    num_local = Counter(machines)
    share = share and len(plans) > 1
    common = common_parts(plans, found) if share else ()
    values = common_values(plans, found) if share else ()
    load_id = uuid.uuid4().hex
    return [
        replace(plan, storage_data=Division(load_id, me, len(plans), num_local[machines[me]], common, values))
        for me, plan in enumerate(plans)
    ]


def common_parts(plans: Sequence[LoadPlan], found: Checkpoint) -> tuple[Common, ...]:
    """The parts that several of the plans need."""
    parts = {(name, part.offsets): part for name, stored in found.tensors.items() for part in stored.parts}
    needed: dict[PartId, dict[tuple[Shape, Shape], list[int]]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            part_id = (item.storage_index.fqn, tuple(item.storage_index.offset or ()))
            if item.type == LoadItemType.TENSOR and part_id in parts and 0 not in item.lengths:
                box = (tuple(item.storage_offsets), tuple(item.lengths))
                takers = needed.setdefault(part_id, {}).setdefault(box, [])
                if not takers or takers[-1] != rank:
                    takers.append(rank)
    common = []
    for part_id, boxes in needed.items():
        if len({rank for takers in boxes.values() for rank in takers}) > 1:
            shared = boxes if _meet(parts[part_id], boxes) else {}
            common.append(
                Common(
                    part_id,
                    tuple(
                        Box(*box, None if len(takers) == len(plans) else tuple(takers))
                        for box, takers in shared.items()
                    ),
                )
            )
    return tuple(common)


def common_values(plans: Sequence[LoadPlan], found: Checkpoint) -> tuple[Value, ...]:
    """The values that lie in archives of their own and that several of the plans need."""
    needed: dict[str, list[int]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            name = item.storage_index.fqn
            if item.type == LoadItemType.BYTE_IO and name in found.pickled and rank not in needed.setdefault(name, []):
                needed[name].append(rank)
    return tuple(
        Value(name, None if len(takers) == len(plans) else tuple(takers))
        for name, takers in needed.items()
        if len(takers) > 1
    )


def _meet(part: TensorShard, boxes: Mapping[tuple[Shape, Shape], Sequence[int]]) -> bool:
    """Whether different ranks need the same bytes, or bytes so mixed up that reading the ones reads the others."""
    if part.is_blob and part.length <= SMALL_BLOB:
        return True  # read in one piece
    strides = part.strides or strides_of(part.sizes)  # those of an archive are not known yet: as good as always these
    spans = []
    for (offsets, sizes), takers in boxes.items():
        if len(takers) > 1:
            return True
        start = sum(o * s for o, s in zip(offsets, strides, strict=True))
        end = start + 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
        spans.append((start, end, takers[0]))
    return overlap(spans)


def intervals_of(division: Division, found: Checkpoint, limits: ReadLimits) -> list[NeededRange]:
    """The bytes of tensors that are shared, once the layout of all common parts is known: the same on every rank."""
    intervals = []
    parts = {(name, part.offsets): part for name, stored in found.tensors.items() for part in stored.parts}
    for (name, offsets), boxes in division.common:
        stored, part = found.tensors[name], parts[name, offsets]
        for box in boxes:
            like = torch.empty(box.sizes, dtype=stored.dtype, device="meta")
            pieces = lay_box(name, stored.dtype, part, like, limits, offsets=box.offsets, sizes=box.sizes)
            takers = division.ranks(box.takers)
            intervals += [NeededRange(p.key, p.start, p.start + p.length, name, takers) for p in pieces]
    return intervals
