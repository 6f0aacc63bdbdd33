"""What the ranks hold of a state, as local plans of torch.distributed.checkpoint say, and which parts of it each writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from loaderkit.checkpoint.planning.division import HeldBox, divide
from loaderkit.checkpoint.tensor_boxes import Box, boxes_in
from loaderkit.errors import CheckpointError


@dataclass(frozen=True)
class DescribedPlan(SavePlan):
    """A local plan that also says which of its items lie in the same memory, which cannot be cut, and what is in them."""

    tied: tuple[int, ...] = ()
    """For each item the number of the first item in the same memory."""
    uncut: frozenset[int] = frozenset()
    samples: tuple[bytes, ...] = ()
    """By item some of what the tensor holds (`sample_of`), or a digest of the plain value; b"" if it is not known."""
    objects: tuple[str, ...] = ()
    """Names of the objects whose state is taken from one rank."""


_Key = tuple[str, tuple[int, ...], tuple[int, ...], torch.dtype | None]


class Held(NamedTuple):
    """The items of a rank's local plan, with `tied`, `uncut`, `samples` and `objects` as in DescribedPlan. `left_out`
    are the numbers of the items that a lower rank holds with other values."""

    items: list[WriteItem]
    tied: tuple[int, ...]
    uncut: frozenset[int]
    samples: tuple[bytes, ...]
    objects: tuple[str, ...] = ()
    left_out: frozenset[int] = frozenset()

    @classmethod
    def of(cls, plan: SavePlan) -> Held:
        """What a local plan says; items count as tied only if it is a DescribedPlan."""
        if isinstance(plan, DescribedPlan):
            return cls(plan.items, plan.tied, plan.uncut, plan.samples, plan.objects)
        return cls(plan.items, tuple(range(len(plan.items))), frozenset(), ())

    def holds(self) -> Iterator[tuple[int, _Key]]:
        """The number and key of each tensor and value that it has and is not left out."""
        for number, item in enumerate(self.items):
            if number not in self.left_out:
                yield number, _key(item)


def check_alike(held: Sequence[Held]) -> None:
    """Raise CheckpointError if a tensor's shape or dtype differs by rank, or if it is a plain value on another, or if a table's
    and a value's names are the same: parts of each would be saved."""
    known: dict[str, tuple[int, str]] = {}
    for rank, one in enumerate(held):
        for number, item in enumerate(one.items):
            if number in one.left_out:
                continue
            name, data = item.index.fqn, item.tensor_data
            is_here = "a plain value" if data is None else f"{data.properties.dtype} of shape {list(data.size)}"
            first, is_there = known.setdefault(name, (rank, is_here))
            if is_here != is_there:
                raise CheckpointError(
                    f"{name!r} is {is_there} on rank {first}, and {is_here} on rank {rank}, so nothing is saved: tensors of "
                    "one name are one tensor. Give what each rank has of its own a name with the rank in it"
                )
    if ambiguous := sorted(_ambiguous(held)):
        raise CheckpointError(
            f"{ambiguous[0]!r} is a value on one rank and a table on another, so nothing is saved: give what each rank has of "
            "its own a name with the rank in it, or put it into loaderkit.checkpoint.PerRank"
        )


class Unlike(NamedTuple):
    """Names of what ranks hold differently: tensors, and plain values."""

    tensors: frozenset[str] = frozenset()
    values: frozenset[str] = frozenset()


def without_unlike(held: Sequence[Held]) -> tuple[list[Held], Unlike]:
    """What the ranks hold. Where samples of a tensor differ, only the lowest rank holds it, as a tensor is saved from
    one rank. And the names of these.

    If any part of an object differs, the whole object is taken from one rank.
    """
    kept, apart = _objects_of_one_rank(held)
    known: dict[_Key, set[bytes]] = {}
    for one in kept:
        for number, key in one.holds():
            known.setdefault(key, set()).add(one.samples[number])
    unlike = {key for key, samples in known.items() if len(samples) > 1}
    seen: set[_Key] = set()
    for rank, one in enumerate(kept):
        mine = {number: key for number, key in one.holds() if key in unlike}
        kept[rank] = one._replace(left_out=one.left_out | {number for number, key in mine.items() if key in seen})
        seen.update(mine.values())
    tensors = {name for name, _, _, dtype in unlike if dtype is not None}
    return kept, Unlike(frozenset(tensors), frozenset({key[0] for key in unlike} - tensors | apart))


def _objects_of_one_rank(held: Sequence[Held]) -> tuple[list[Held], set[str]]:
    """What the ranks hold, where an object that differs between ranks is kept only on the lowest rank that has it; and
    the names that differ."""
    objects = {name for one in held for name in one.objects}
    inside = [[(number, owner) for number, owner in enumerate(_owners(one, objects)) if owner] for one in held]
    looks: dict[str, set[Any]] = {}
    for one, numbers in zip(held, inside, strict=True):
        for number, _ in numbers:
            item = one.items[number]
            if item.type != WriteItemType.SHARD:
                looks.setdefault(item.index.fqn, set()).add((_key(item), one.samples[number]))
    differing = {name for name, found in looks.items() if len(found) > 1} | (_ambiguous(held) & looks.keys())
    apart: dict[str, int] = {}  # object -> the rank whose it is
    for rank, (one, numbers) in enumerate(zip(held, inside, strict=True)):
        for number, owner in numbers:
            if one.items[number].index.fqn in differing:
                apart.setdefault(owner, rank)
    kept = []
    for rank, (one, numbers) in enumerate(zip(held, inside, strict=True)):
        others = {
            number
            for number, owner in numbers
            if apart.get(owner, rank) != rank and one.items[number].type != WriteItemType.SHARD
        }
        kept.append(one._replace(left_out=one.left_out | others))
    return kept, differing


def _owners(held: Held, objects: set[str]) -> Iterator[str]:
    """For each item the object that it belongs to, or "" for none."""
    for item in held.items:
        parts = item.index.fqn.split(".") if objects else []
        names = (".".join(parts[:size]) for size in range(1, len(parts) + 1))
        yield next((name for name in names if name in objects), "")


def _ambiguous(held: Sequence[Held]) -> set[str]:
    """Names of values on one rank that are tables with values in them on another."""
    by_rank = [{item.index.fqn for number, item in enumerate(one.items) if number not in one.left_out} for one in held]
    everywhere = set.union(*by_rank)
    if all(names == everywhere for names in by_rank):
        return set()
    found = set()
    for name in everywhere:
        for end, letter in enumerate(name):
            if letter == "." and name[:end] in everywhere and not any({name, name[:end]} <= names for names in by_rank):
                found |= {name, name[:end]}
    return found


def shared(held: Sequence[Held]) -> list[dict[tuple[int, ...], list[int]]]:
    """By rank, for each group of ranks that it is in: the numbers of what these ranks hold, in the same order."""
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
    """What each rank writes of the tensors, by rank. `chosen` are the items, each once, as a planner has assigned them
    to ranks.

    What several ranks hold is divided among them; names of the same memory, on all ranks that hold them, stay together.
    None if no rank holds an item of `chosen`: the planner's own plan is then used.
    """
    wanted = [_key(item) for items in chosen for item in items if item.tensor_data is not None]
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


def _key(item: WriteItem) -> _Key:
    """Equal for the same box of the same tensor, or for the same plain value, which has no dtype."""
    data = item.tensor_data
    if data is None:
        return item.index.fqn, (), (), None
    return item.index.fqn, tuple(data.chunk.offsets), tuple(data.chunk.sizes), data.properties.dtype


def _block(keys: Sequence[_Key], holders: Sequence[dict[int, int]], held: Sequence[Held]) -> HeldBox:
    _, _, shape, dtype = keys[0]
    assert dtype is not None
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
    """True if torch's default planner assigns the items to ranks, and only balances bytes by it."""
    kind: Any = type(planner)
    return (
        isinstance(planner, DefaultSavePlanner)
        and not planner.dedup_save_to_lowest_rank
        and kind.create_global_plan is DefaultSavePlanner.create_global_plan
        and kind.finish_plan is DefaultSavePlanner.finish_plan
    )
