"""What ranks agree on before they share a checkpoint, and `loaderkit.restore` for several ranks."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from loaderkit.checkpoint.contents import Checkpoint, TensorShard
from loaderkit.checkpoint.discovery.manifest import needed_objects
from loaderkit.checkpoint.ranks.exchange import RankExchange, agreed, run_beside
from loaderkit.checkpoint.ranks.group import Group, check_same, default_store, machine
from loaderkit.checkpoint.ranks.segments import NeededRange, Ranks
from loaderkit.checkpoint.restore.api import OpenCheckpoint
from loaderkit.checkpoint.restore.progress import Progress, slowest_object
from loaderkit.checkpoint.restore.requests import new_tensors
from loaderkit.checkpoint.transfer.layout import ByteSpan, ReadLimits
from loaderkit.checkpoint.transfer.plan import ReadRequest, limits_of
from loaderkit.checkpoint.transfer.session import num_workers_of
from loaderkit.errors import ConfigError

_HALVES = 2  # of a rank's memory: one is for reading, the other for what is received


class Agreed(NamedTuple):
    """The checkpoint with the layouts of the parts that were asked for, and how ranges are cut; the same on all ranks."""

    found: Checkpoint
    limits: ReadLimits


def agree(
    group: Group, source: OpenCheckpoint, parts: Sequence[tuple[str, TensorShard]], *, num_workers: int, about: str = ""
) -> Agreed:
    """Find the layouts of `parts`, each by one rank, and compare what the ranks see; `about` must be the same for all.

    Raises CheckpointError where ranks see different checkpoints, and PeerError.
    """
    mine = source.layouts(parts[group.me :: len(group)])
    said = {
        "checkpoint": _digest(source.found, source.checksums),
        "about": about,
        "limits": limits_of(
            source.found.connector,
            source.memory_bytes,
            num_workers,
            is_checked=bool(source.checksums),
            num_parts=_HALVES * source.num_alike,
        ),
        "layouts": [[name, part.offsets, part.start, part.length, part.strides] for (name, _), part in mine.items()],
    }
    heard = [json.loads(data) for data in group.exchange(json.dumps(said).encode())]
    check_same(group, "what the checkpoint is", [item["checkpoint"] for item in heard])
    check_same(group, "what is to be restored", [item["about"] for item in heard])
    known = {(name, part.offsets): part for name, part in parts}
    layouts = {}
    for item in heard:
        for name, offsets, start, length, strides in item["layouts"]:
            place = (name, tuple(offsets))
            layouts[place] = replace(known[place], start=start, length=length, strides=tuple(strides), is_blob=False)
    return Agreed(source.with_layouts(layouts), agreed([item["limits"] for item in heard]))


def _digest(found: Checkpoint, checksums: Any) -> str:
    """Of the names and sizes of its files; tags differ where every machine has a copy of its own. Logs beside them may grow."""
    sizes = sorted((info.key[len(found.prefix) :], info.size) for info in needed_objects(found))
    return hashlib.sha256(json.dumps([found.format, sizes, bool(checksums)]).encode()).hexdigest()


def values_shared(
    found: Checkpoint, takers: Mapping[str, Ranks], me: int
) -> tuple[list[NeededRange], list[ByteSpan], dict[str, bytearray]]:
    """Which bytes the archives of plain values are, what reads those that rank `me` takes, and the memory they come to."""
    intervals, pieces, archives = [], [], {}
    for name, ranks in takers.items():
        place = found.pickled[name]
        intervals.append(NeededRange(place.key, place.start, place.start + place.length, name, ranks))
        if me in ranks:
            data = archives[name] = bytearray(place.length)
            pieces.append(ByteSpan(name, place.key, place.start, place.length, memoryview(data), None))
    return intervals, pieces, archives


def sharing_of(
    group: Group, source: OpenCheckpoint, limits: ReadLimits, *, num_workers: int, device: torch.device
) -> Callable[..., RankExchange]:
    """What makes a `RankExchange` of `intervals`, `pieces` and `touched`."""
    return partial(
        RankExchange,
        group,
        source.found.connector,
        source.objects,
        limits=limits,
        memory_bytes=source.memory_bytes,
        num_parts=_HALVES * source.num_alike,
        num_workers=num_workers,
        checksums=source.checksums,
        device=device,
    )


@contextmanager
def joined(rank: int, world_size: int, timeout_s: float) -> Iterator[Group]:
    """The group of all ranks of torch.distributed; an error in between is told to the others. Raises ConfigError, PeerError."""
    store = default_store()
    if (rank, world_size) != (dist.get_rank(), dist.get_world_size()):
        raise ConfigError(
            f"rank {rank} of {world_size} is given, and torch.distributed says {dist.get_rank()} of {dist.get_world_size()}: "
            "all of its ranks restore together, or each for itself without `rank` and `world_size`"
        )
    number = store.add(f"loaderkit/restores/{rank}", 1)  # all ranks count alike, as they all restore together
    group = Group(store, f"restore-{number}", range(world_size), rank, timeout_s=timeout_s)
    try:
        yield group
    except BaseException as error:
        group.fail(error)
        raise


def bring(
    source: OpenCheckpoint,
    group: Group,
    names: Sequence[str],
    values: Sequence[str],
    wants_of: Callable[[Checkpoint], list[ReadRequest]],
    *,
    device: torch.device,
    progress: Callable[[Progress], None] | None,
    concurrency: int | Literal["auto"],
    touched: set[str],
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Fill what `wants_of` makes of the tensors `names`, each byte read by one rank: (tensors, plain values), by name.

    No tensor is written to on any rank before every rank has its plain values, and everything fits on all of them.
    """
    begin_s = time.perf_counter()
    made: dict[str, torch.Tensor] = {}
    given: dict[str, Any] = {}
    running: list[RankExchange] = []
    everyone = tuple(range(len(group)))
    num_workers = num_workers_of(source.found.connector, concurrency)

    def work() -> None:
        source.num_alike = group.num_alike(machine())
        parts = [(name, part) for name in names for part in source.found.tensors[name].parts]
        about = hashlib.sha256(json.dumps([*names, 0, *values]).encode()).hexdigest()
        found, limits = agree(group, source, parts, num_workers=num_workers, about=about)
        laid = [request.lay(limits) for request in wants_of(found)]
        pickled = {name: everyone for name in values if name in found.pickled}
        intervals, pieces, archives = values_shared(found, pickled, group.me)
        sharing = sharing_of(group, source, limits, num_workers=num_workers, device=device)
        first = sharing(intervals=intervals, pieces=pieces, touched=set())
        second = sharing(
            intervals=_whole(found, names, limits, everyone),
            pieces=[piece for some, _ in laid for piece in some],
            touched=touched,
        )
        running.extend((first, second))
        first.run()
        given.update(source.plain_values([*values], archives))
        group.exchange(b"")
        second.run()
        for _, give in laid:
            made.update(give())

    def tick() -> None:
        if progress is not None and running:
            totals = [sharing.totals for sharing in running]
            num_bytes, read_bytes = sum(one.num_bytes for one in totals), sum(one.read_bytes for one in totals)
            needed, seconds = sum(sharing.num_bytes for sharing in running), time.perf_counter() - begin_s
            slowest = slowest_object(source.found, [reads for sharing in running for reads in sharing.reads])
            progress(Progress(num_bytes, needed, read_bytes, seconds, slowest))

    def stop(error: BaseException) -> None:
        for sharing in running:
            sharing.stop(error)

    run_beside(group, work, stop=stop, tick=tick)
    tick()
    return made, given


def _whole(found: Checkpoint, names: Sequence[str], limits: ReadLimits, takers: Ranks) -> list[NeededRange]:
    """The bytes of these tensors, wherever a rank puts them."""
    requests = new_tensors(found, names, torch.device("meta"), None)
    pieces = [piece for request in requests for piece in request.lay(limits)[0]]
    return [NeededRange(p.key, p.start, p.start + p.length, p.label, takers) for p in pieces]
