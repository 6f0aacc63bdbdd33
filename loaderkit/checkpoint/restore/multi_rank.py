"""Restores on several ranks: what several of them need is read by one and sent to the others.

A `RestoreSession` is one such restore, of `loaderkit.restore` or of `StreamReader`:

    agree (the same checkpoint, layouts, limits) ─> exchange of plain values ─> exchange of tensors
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist

from loaderkit._internal.system.machine import machine
from loaderkit.checkpoint.contents import Checkpoint, TensorShard
from loaderkit.checkpoint.discovery.manifest import needed_objects
from loaderkit.checkpoint.restore.requests import new_tensors
from loaderkit.checkpoint.restore.source import OpenCheckpoint
from loaderkit.checkpoint.restore.task import Progress, Restored, RestoreTask, slowest_object
from loaderkit.checkpoint.transfer.exchange import RankExchange, common_limits, run_in_thread
from loaderkit.checkpoint.transfer.fetch import num_workers_of
from loaderkit.checkpoint.transfer.layout import ByteSpan, ReadLimits
from loaderkit.checkpoint.transfer.plan import limits_of
from loaderkit.checkpoint.transfer.shared_ranges import NeededRange, Ranks
from loaderkit.engine.metrics.snapshot import Snapshot
from loaderkit.errors import CheckpointError, ConfigError
from loaderkit.ranks.group import RankGroup
from loaderkit.ranks.store import default_store

TIMEOUT_S = 300.0  # for which a rank waits for another
_HALVES = 2  # of a rank's memory: one for reading, one for what is received
_META = torch.device("meta")


@contextmanager
def rank_group(rank: int, world_size: int, timeout_s: float) -> Iterator[RankGroup]:
    """The group of all ranks of torch.distributed; an error inside is sent to the others. Raises ConfigError, PeerError."""
    store = default_store()
    if (rank, world_size) != (dist.get_rank(), dist.get_world_size()):
        raise ConfigError(
            f"rank {rank} of {world_size} is given, and torch.distributed says {dist.get_rank()} of {dist.get_world_size()}: "
            "all of its ranks restore together, or each for itself without `rank` and `world_size`"
        )
    number = store.add(f"loaderkit/restores/{rank}", 1)  # equal on all ranks, as all of them call every restore
    group = RankGroup(store, f"restore-{number}", range(world_size), rank, timeout_s=timeout_s)
    try:
        yield group
    except BaseException as error:
        group.fail(error)
        raise


class RestoreSession:
    """One restore by the ranks of `group`. `run` it; inside, `agree` and then `exchange`, both on its thread."""

    def __init__(
        self,
        group: RankGroup,
        source: OpenCheckpoint,
        *,
        num_workers: int,
        devices: Collection[torch.device],
        touched: set[str],
        num_local: int | None = None,
    ) -> None:
        """`devices`: where the tensors are. `num_local` ranks share the memory of this machine; with None `agree`
        counts them."""
        self.contents = source.contents
        self._group = group
        self._source = source
        self._num_workers = num_workers
        self._devices = devices
        self._touched = touched
        self._num_local = num_local
        self._exchanges: list[RankExchange] = []

    def run(self, work: Callable[[], None], tick: Callable[[], None] = lambda: None) -> None:
        """Do `work` on a thread of its own; this thread calls `tick` every half second. Raises what `work` raises."""
        run_in_thread(self._group, work, stop=self._stop, tick=tick)

    def _stop(self, error: BaseException) -> None:
        for exchange in self._exchanges:
            exchange.stop(error)

    # ------------------------------------------------------------------------------------------ on the thread of `run`

    def agree(self, shards: Sequence[tuple[str, TensorShard]], about: str = "") -> tuple[Checkpoint, ReadLimits]:
        """(the contents with the layouts of `shards`, the limits to reads), the same on all ranks; so must be `about`.

        The layout of each shard is read by one rank. Raises CheckpointError where ranks see different checkpoints; PeerError.
        """
        group, source = self._group, self._source
        if self._num_local is None:
            self._num_local = group.count_equal(machine())
        mine = source.layouts(shards[group.rank :: len(group)], self._num_local)
        sent = {
            "checkpoint": _digest(source),
            "about": about,
            "limits": limits_of(
                source.contents.connector,
                source.memory_bytes,
                self._num_workers,
                is_checked=bool(source.checksums),
                num_parts=_HALVES * self._num_local,
            ),
            "layouts": [[name, s.offsets, s.start, s.length, s.strides] for (name, _), s in mine.items()],
        }
        received = [json.loads(data) for data in group.exchange(json.dumps(sent).encode())]
        _check_same(group, "the checkpoint", [item["checkpoint"] for item in received])
        _check_same(group, "what to restore", [item["about"] for item in received])
        archives = {(name, shard.offsets): shard for name, shard in shards}
        plain = {}
        for item in received:
            for name, offsets, start, length, strides in item["layouts"]:
                shard_id = (name, tuple(offsets))
                plain[shard_id] = replace(
                    archives[shard_id], start=start, length=length, strides=tuple(strides), is_archive=False
                )
        self.contents = source.contents.with_shards(plain)
        return self.contents, common_limits([item["limits"] for item in received])

    def exchange(
        self,
        names: list[str],
        pickled: Mapping[str, Ranks],
        ranges: Sequence[NeededRange],
        spans: Sequence[ByteSpan],
        limits: ReadLimits,
    ) -> dict[str, Any]:
        """Fill `spans`, this rank's part of `ranges`; the plain values `names`, of which `pickled` are needed by those ranks.

        No tensor is written to on any rank before all ranks have their plain values.
        """
        num_local = self._num_local or 1
        pickled_ranges, pickled_spans, archives = self._archives(pickled)
        values_exchange = self._exchange_of(pickled_ranges, pickled_spans, limits, (), set())
        tensors_exchange = self._exchange_of(ranges, spans, limits, self._devices, self._touched)
        self._exchanges += (values_exchange, tensors_exchange)
        values_exchange.run()
        values = self._source.plain_values(names, archives, num_local)
        self._group.exchange(b"")
        tensors_exchange.run()
        return values

    def _archives(self, pickled: Mapping[str, Ranks]) -> tuple[list[NeededRange], list[ByteSpan], dict[str, bytearray]]:
        """The ranges of the archives of plain values; the spans and the memory of those that this rank needs."""
        ranges, spans, archives = [], [], {}
        for name, ranks in pickled.items():
            stored = self.contents.pickled[name]
            ranges.append(NeededRange(stored.key, stored.start, stored.start + stored.length, name, ranks))
            if self._group.rank in ranks:
                data = archives[name] = bytearray(stored.length)
                spans.append(ByteSpan(name, stored.key, stored.start, stored.length, memoryview(data), None))
        return ranges, spans, archives

    def _exchange_of(
        self,
        ranges: Sequence[NeededRange],
        spans: Sequence[ByteSpan],
        limits: ReadLimits,
        devices: Collection[torch.device],
        touched: set[str],
    ) -> RankExchange:
        source = self._source
        return RankExchange(
            self._group,
            source.contents.connector,
            source.objects,
            ranges=ranges,
            spans=spans,
            limits=limits,
            memory_bytes=source.memory_bytes,
            num_parts=_HALVES * (self._num_local or 1),
            num_workers=self._num_workers,
            checksums=source.checksums,
            devices=devices,
            touched=touched,
        )

    # ----------------------------------------------------------------------------------------------- for any thread

    def progress(self, seconds: float) -> Progress | None:
        """The progress of both exchanges; None before they begin."""
        if not self._exchanges:
            return None
        totals = [exchange.totals for exchange in self._exchanges]
        return Progress(
            sum(one.num_bytes for one in totals),
            sum(exchange.num_bytes for exchange in self._exchanges),
            sum(one.read_bytes for one in totals),
            seconds,
            slowest_object(self.contents, [reads for exchange in self._exchanges for reads in exchange.reads]),
        )

    def totals(self) -> dict[str, Any]:
        """The totals of both exchanges."""
        totals = [asdict(exchange.totals) for exchange in self._exchanges]
        return {key: sum(one[key] for one in totals) for key in totals[0]}

    @property
    def reading(self) -> Snapshot | None:
        """The engine's stats of reading tensors for this rank and others, once that is done."""
        return self._exchanges[-1].stats


def transfer(group: RankGroup, source: OpenCheckpoint, task: RestoreTask) -> Restored:
    """Read what `task` names on all ranks of `group`. See `OpenCheckpoint.restored`, which has the same task and result."""
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, Any] = {}
    all_ranks = tuple(range(len(group)))
    session = RestoreSession(
        group,
        source,
        num_workers=num_workers_of(source.contents.connector, task.concurrency),
        devices=task.devices,
        touched=task.touched,
    )

    def work() -> None:
        about = hashlib.sha256(json.dumps([*task.tensors, 0, *task.values]).encode()).hexdigest()
        contents, limits = session.agree(source.contents.shards_of(task.tensors), about)
        prepared = [request.prepare(limits) for request in task.make_requests(contents)]
        pickled = {name: all_ranks for name in task.values if name in contents.pickled}
        ranges = _whole_ranges(contents, task.tensors, limits, all_ranks)
        spans = [span for spans, _ in prepared for span in spans]
        values.update(session.exchange(task.values, pickled, ranges, spans, limits))
        for _, deliver in prepared:
            tensors.update(deliver())

    begin_s = time.perf_counter()

    def tick() -> None:
        progress = session.progress(time.perf_counter() - begin_s)
        if task.progress is not None and progress is not None:
            task.progress(progress)

    session.run(work, tick)
    tick()
    return tensors, values


def _whole_ranges(contents: Checkpoint, names: Sequence[str], limits: ReadLimits, ranks: Ranks) -> list[NeededRange]:
    """The ranges of these tensors, which do not depend on the memory that a rank reads them into."""
    requests = new_tensors(contents, names, _META, None)
    spans = [span for request in requests for span in request.prepare(limits)[0]]
    return [NeededRange(span.key, span.start, span.start + span.length, span.label, ranks) for span in spans]


def _digest(source: OpenCheckpoint) -> str:
    """A digest of the files' names and sizes. Etags differ if every machine has its own copy; a log beside them may grow."""
    contents = source.contents
    sizes = sorted((info.key[len(contents.prefix) :], info.size) for info in needed_objects(contents))
    return hashlib.sha256(json.dumps([contents.format, sizes, bool(source.checksums)]).encode()).hexdigest()


def _check_same(group: RankGroup, what: str, received: Sequence[Any]) -> None:
    """Raise CheckpointError unless all ranks sent the same."""
    different = [group.global_ranks[n] for n, item in enumerate(received) if item != received[0]]
    if different:
        raise CheckpointError(
            f"the ranks do not agree on {what}: rank {different[0]} differs from rank {group.global_ranks[0]}; nothing was "
            "written. All ranks must pass the same arguments and the same checkpoint"
        )
