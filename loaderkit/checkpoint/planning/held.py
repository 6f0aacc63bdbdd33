"""What the ranks hold of a state, as local plans of torch.distributed.checkpoint say, and which parts of it each writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from loaderkit.checkpoint.planning.boxes import Box, boxes_in
from loaderkit.checkpoint.planning.division import HeldBox, divide
from loaderkit.errors import CheckpointError


@dataclass(frozen=True)
class DescribedPlan(SavePlan):
    """A local plan that says what its items do not: which lie in the same memory, which cannot be cut, and what is in them."""

    tied: tuple[int, ...] = ()
    """By item the number of the first one in the same memory."""
    uncut: frozenset[int] = frozenset()
    samples: tuple[bytes, ...] = ()
    """By item some of what the tensor holds (`sample_of`); b"": not known."""


_Key = tuple[str, tuple[int, ...], tuple[int, ...], torch.dtype]


class Held(NamedTuple):
    """The items of a rank's local plan, with `tied`, `uncut` and `samples` as in DescribedPlan. `left_out` are the numbers of
    those that a lower rank holds with other values."""

    items: list[WriteItem]
    tied: tuple[int, ...]
    uncut: frozenset[int]
    samples: tuple[bytes, ...]
    left_out: frozenset[int] = frozenset()

    @classmethod
    def of(cls, plan: SavePlan) -> Held:
        """What a local plan says; nothing is taken for tied unless it is a DescribedPlan."""
        if isinstance(plan, DescribedPlan):
            return cls(plan.items, plan.tied, plan.uncut, plan.samples)
        return cls(plan.items, tuple(range(len(plan.items))), frozenset(), ())

    def holds(self) -> Iterator[tuple[int, _Key]]:
        """The number and key of each tensor that it has and is not left out."""
        for number, item in enumerate(self.items):
            key = _key(item)
            if key is not None and number not in self.left_out:
                yield number, key


def check_alike(plans: Sequence[SavePlan]) -> None:
    """Raise CheckpointError if a tensor's shape or dtype differs by rank: parts of each would be saved."""
    known: dict[str, tuple[int, str]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            if item.tensor_data is None:
                continue
            name, data = item.index.fqn, item.tensor_data
            is_here = f"{data.properties.dtype} of shape {list(data.size)}"
            first, is_there = known.setdefault(name, (rank, is_here))
            if is_here != is_there:
                raise CheckpointError(
                    f"{name!r} is {is_there} on rank {first}, and {is_here} on rank {rank}, so nothing is saved: tensors of "
                    "one name are one tensor. Give what each rank has of its own a name with the rank in it"
                )


def without_unlike(held: Sequence[Held]) -> tuple[list[Held], list[str]]:
    """What the ranks hold, where samples differ on the lowest rank only, as one tensor is that of one rank; and the names."""
    known: dict[_Key, set[bytes]] = {}
    for one in held:
        for number, key in one.holds():
            known.setdefault(key, set()).add(one.samples[number])
    unlike = {key for key, samples in known.items() if len(samples) > 1}
    seen: set[_Key] = set()
    kept = []
    for one in held:
        mine = {number: key for number, key in one.holds() if key in unlike}
        kept.append(one._replace(left_out=frozenset(number for number, key in mine.items() if key in seen)))
        seen.update(mine.values())
    return kept, sorted({key[0] for key in unlike})


def shared(held: Sequence[Held]) -> list[dict[tuple[int, ...], list[int]]]:
    """By rank, for each group of ranks that it is in: the numbers of the tensors that these ranks hold, in the same order."""
    numbers: dict[_Key, dict[int, int]] = {}
    for rank, one in enumerate(held):
        for number, key in one.holds():
            numbers.setdefault(key, {}).setdefault(rank, number)
    groups: list[dict[tuple[int, ...], list[int]]] = [{} for _ in held]
    for by_rank in numbers.values():
        if len(by_rank) > 1:
            for rank, number in by_rank.items():
                groups[rank].setdefault(tuple(by_rank), []).append(number)
    return groups


class ItemShare(NamedTuple):
    """What a rank writes of item `number` of its local plan: the box of the item's own tensor, or all of it."""

    number: int
    box: Box | None


def divided(held: Sequence[Held], chosen: Sequence[Sequence[WriteItem]]) -> list[list[ItemShare]] | None:
    """What each rank writes of the tensors, by rank. `chosen` are the items, each once, that a planner has dealt out.

    What several ranks hold is divided among them; names of the same memory, on all ranks that hold them, stay together.
    None: an item of `chosen` is not that of any rank, so the planner's word stands.
    """
    wanted = [key for items in chosen for key in map(_key, items) if key is not None]
    holders: dict[_Key, dict[int, int]] = {key: {} for key in wanted}
    for rank, one in enumerate(held):
        for number, key in one.holds():
            if key in holders:
                holders[key].setdefault(rank, number)
    if not all(holders.values()):
        return None
    members: dict[tuple[tuple[int, ...], tuple[tuple[int, int], ...]], list[_Key]] = {}
    for key, numbers in holders.items():
        same = tuple((rank, held[rank].tied[number]) for rank, number in numbers.items())
        members.setdefault((key[2], same), []).append(key)
    tied = list(members.values())
    blocks = [_block(keys, [holders[key] for key in keys], held) for keys in tied]
    parts: list[list[ItemShare]] = []
    for rank, spans in enumerate(divide(blocks, len(held))):
        parts.append([])
        for number, first, end in spans:
            shape = blocks[number].shape
            is_whole = end - first == blocks[number].num_bytes // blocks[number].itemsize
            for box in (None,) if is_whole else boxes_in(shape, first, end):
                parts[rank] += [ItemShare(holders[key][rank], box) for key in tied[number]]
    return parts


def _key(item: WriteItem) -> _Key | None:
    """Equal for the same box of the same tensor; None for a plain value."""
    data = item.tensor_data
    if data is None:
        return None
    return item.index.fqn, tuple(data.chunk.offsets), tuple(data.chunk.sizes), data.properties.dtype


def _block(keys: Sequence[_Key], holders: Sequence[dict[int, int]], held: Sequence[Held]) -> HeldBox:
    _, _, shape, dtype = keys[0]
    all_items = [(rank, number) for numbers in holders for rank, number in numbers.items()]
    is_dense = all(
        data is not None and data.properties.layout == torch.strided
        for data in (held[rank].items[number].tensor_data for rank, number in all_items)
    )
    can_cut = is_dense and not any(number in held[rank].uncut for rank, number in all_items)
    return HeldBox(shape, dtype.itemsize, tuple(sorted(holders[0])), can_cut)


def part_of(item: WriteItem, box: Box) -> WriteItem:
    """The item for a box of the tensor of `item`: in a checkpoint's table it is a shard."""
    data = item.tensor_data
    assert data is not None
    offsets = [begin + more for begin, more in zip(data.chunk.offsets, box.offsets, strict=True)]
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(box.sizes))
    return WriteItem(
        MetadataIndex(item.index.fqn, offsets), WriteItemType.SHARD, tensor_data=replace(data, chunk=chunk)
    )


def is_default_planner(planner: SavePlanner) -> bool:
    """True if each rank is to write what torch's default planner deals out, for the sake of bytes only."""
    kind: Any = type(planner)
    return (
        isinstance(planner, DefaultSavePlanner)
        and not planner.dedup_save_to_lowest_rank
        and kind.create_global_plan is DefaultSavePlanner.create_global_plan
        and kind.finish_plan is DefaultSavePlanner.finish_plan
    )
