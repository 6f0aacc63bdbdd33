"""`StreamReader`: torch.distributed.checkpoint loads through loaderkit's engine, in parallel, ahead, in bounded memory."""

from __future__ import annotations

import io
import logging
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from loaderkit.checkpoint.contents import Checkpoint, TensorShard
from loaderkit.checkpoint.discovery.manifest import Verify
from loaderkit.checkpoint.ranks.exchange import RankExchange, run_beside
from loaderkit.checkpoint.ranks.group import Group, default_store
from loaderkit.checkpoint.restore.api import TIMEOUT_S, OpenCheckpoint, opened
from loaderkit.checkpoint.restore.dcp_plan import Division, PartId, intervals_of, with_division, with_machine
from loaderkit.checkpoint.restore.multi_rank import agree, sharing_of, values_shared
from loaderkit.checkpoint.transfer.layout import ByteSpan, ReadLimits, lay_box
from loaderkit.checkpoint.transfer.plan import Laid, ReadRequest
from loaderkit.checkpoint.transfer.session import name_touched, num_workers_of
from loaderkit.checkpoint.transfer.stages import wait_for_queued
from loaderkit.connectors.base import Connector
from loaderkit.errors import CheckpointError, ConfigError, PeerError
from loaderkit.native.garbage import collected_later

_CPU = torch.device("cpu")
logger = logging.getLogger("loaderkit")


class StreamReader(StorageReader):
    """Reads a checkpoint for `dcp.load(state_dict, storage_reader=StreamReader(url))`, whatever its format, with resharding.

    Only the ranges a rank needs are read, also inside the archives of `.distcp` files. With `share`, what several ranks need is
    read by one of them and passed on to the others; what comes out is the same without. The planner is called by the thread
    that called `dcp.load` alone. `memory` bounds the staging memory of all ranks of a machine together, besides at most 24 MiB
    a rank for threads' stacks and torch's kernels; `verify` is that of `loaderkit.restore`; `process_group` the one that
    `dcp.load` is given, if it is. `timeout_s`: how long a rank waits for another before it gives up, naming it. Nothing is
    unpickled: plain values are read by the restricted reader, and written anew before the planner gets them.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        process_group: dist.ProcessGroup | None = None,
        share: bool = True,
        memory: int | str = "2GiB",
        verify: Verify = "auto",
        timeout_s: float = TIMEOUT_S,
        connectors: Mapping[str, Connector] | None = None,
    ) -> None:
        super().__init__()
        self._url = os.fspath(url)
        self._process_group = process_group
        self._share = share
        self._memory = memory
        self._verify = verify
        self._timeout_s = timeout_s
        self._connectors = connectors
        self._open: ExitStack | None = None
        self._source: OpenCheckpoint | None = None
        self._load_id = uuid.uuid4().hex
        self.stats: dict[str, Any] | None = None
        """The engine's accounts of the last load, as `loader.stats().to_dict()`; those of what was shared are in "shared"."""

    # ------------------------------------------------------------------------------------ what dcp.load asks, in order

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another load, maybe of another checkpoint."""
        self._close()
        if checkpoint_id:
            self._url = os.fspath(checkpoint_id)
        self._load_id = uuid.uuid4().hex

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the checkpoint holds, as torch's own records. Raises CheckpointError, FormatError, ConnectorError."""
        source = self._opened()
        metadata = metadata_of(source.found)
        metadata.storage_meta = StorageMeta(checkpoint_id=self._url, load_id=self._load_id)
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: `read_metadata` has opened it, or `read_data` will."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """With a word for the coordinator."""
        return with_machine(plan)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """On the coordinator: who shares what. Raises ConfigError if these are not the plans of the process group."""
        share = self._share and dist.is_available() and dist.is_gloo_available()
        if share and len(plans) > 1 and len(plans) != (size := dist.get_world_size(self._process_group)):
            raise ConfigError(
                f"dcp.load has {len(plans)} ranks, and the process group has {size}: give dcp.load and StreamReader the same "
                "process_group"
            )
        return with_division(plans, self._opened().found, share=share)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill what the planner resolves; complete when it returns. Raises as `loaderkit.restore`, and PeerError."""
        try:
            self._read(plan, planner)
        except PeerError as error:
            # dcp.load asks all ranks for the outcome now. Of one that died it hears nothing, and fails without saying why.
            logger.error("%s", error)
            raise
        finally:
            self._close()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @property
    def checkpoint_id(self) -> str:
        return self._url

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it can be a URL or path."""
        return bool(os.fspath(checkpoint_id))

    # --------------------------------------------------------------------------------------------------------- reading

    def _opened(self) -> OpenCheckpoint:
        if self._source is None:
            stack = ExitStack()
            self._source = stack.enter_context(opened(self._url, self._connectors, self._memory, self._verify))
            self._open = stack
        return self._source

    def _close(self) -> None:
        stack, self._open, self._source = self._open, None, None
        if stack is not None:
            stack.close()

    def _read(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        touched: set[str] = set()
        try:
            self._fill(plan, planner, touched)
        except BaseException as error:
            name_touched(error, touched)
            raise

    def _fill(self, plan: LoadPlan, planner: LoadPlanner, touched: set[str]) -> None:
        """Tensors are written to once all plain values are there, and `touched` is given their names."""
        division = plan.storage_data if isinstance(plan.storage_data, Division) else None
        group = self._joined(division) if division is not None and (division.common or division.values) else None
        try:
            source = self._opened()
            if division is not None:
                source.num_alike = division.num_local
            wanted = self._resolved(plan, planner)
        except BaseException as error:
            if group is not None:
                group.fail(error)
            raise
        wait_for_queued(one.target.device for one in wanted)
        items = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        names, shared = [item.storage_index.fqn for item in items], None
        if group is not None and division is not None:
            sharing = _SharedLoad(source, group, division, wanted, names=names, touched=touched)
            run_beside(group, sharing.run, stop=sharing.stop)
            source.found, values, shared = sharing.found, sharing.values, sharing.stats()
            for one in wanted:
                if one.part_id in sharing.done:
                    planner.commit_tensor(one.item, one.target)
            wanted = [one for one in wanted if one.part_id not in sharing.done]
        else:
            values = source.plain_values(names)
        self._read_own(source, wanted, planner, touched)
        if self.stats is not None:
            self.stats["shared"] = shared
        for item in items:
            planner.load_bytes(item, _pickled(values[item.storage_index.fqn]))

    def _joined(self, division: Division) -> Group:
        ranks = dist.get_process_group_ranks(self._process_group or dist.group.WORLD)
        return Group(default_store(), division.load_id, ranks, division.me, timeout_s=self._timeout_s)

    def _resolved(self, plan: LoadPlan, planner: LoadPlanner) -> list[_Wanted]:
        """What is to be filled, with its memory."""
        found = []
        for item in plan.items:
            if item.type == LoadItemType.TENSOR:
                target = planner.resolve_tensor(item).detach()
                if tuple(target.shape) != tuple(item.lengths):
                    raise CheckpointError(
                        f"{self._url}: {item.storage_index.fqn!r}: the planner gave {list(target.shape)} for "
                        f"{list(item.lengths)}"
                    )
                found.append(_Wanted(item, target))
        return found

    def _read_own(
        self, source: OpenCheckpoint, wanted: Sequence[_Wanted], planner: LoadPlanner, touched: set[str]
    ) -> None:
        """Read what this rank shares with no other."""
        parts = _parts_of(source.found)
        needed = {one.part_id for one in wanted if one.part_id in parts}
        layouts = source.layouts((name, parts[name, offsets]) for name, offsets in needed)
        requests = []
        for one in wanted:
            part = layouts.get(one.part_id, parts.get(one.part_id))
            if part is not None:
                requests.append(_want(one.item, source.found.tensors[one.part_id[0]].dtype, part, one.target))
            elif one.target.numel():
                raise CheckpointError(
                    f"{self._url}: no piece of {one.part_id[0]!r} lies at {one.item.storage_index.offset}"
                )
        by_number = {id(one.item): one.item for one in wanted}
        with source.filling(requests, _device_of(wanted), touched=touched) as filling:
            for given in filling:
                for number, target in given:
                    planner.commit_tensor(by_number[int(number)], target)
            self.stats = filling.stats().to_dict()


class _Wanted(NamedTuple):
    """An item of the plan, and the memory for it."""

    item: ReadItem
    target: torch.Tensor

    @property
    def part_id(self) -> PartId:
        return self.item.storage_index.fqn, tuple(self.item.storage_index.offset or ())


def _parts_of(found: Checkpoint) -> dict[PartId, TensorShard]:
    return {(name, part.offsets): part for name, stored in found.tensors.items() for part in stored.parts}


def _device_of(wanted: Sequence[_Wanted]) -> torch.device:
    return next((one.target.device for one in wanted if one.target.device.type != "cpu"), _CPU)


class _SharedLoad:
    """The part of a load that ranks share. After `run`: the checkpoint as it was found to be, the plain values of the names
    that this rank wants, and which parts of tensors are `done`."""

    def __init__(
        self,
        source: OpenCheckpoint,
        group: Group,
        division: Division,
        wanted: Sequence[_Wanted],
        *,
        names: Sequence[str],
        touched: set[str],
    ) -> None:
        self.found = source.found
        self.values: dict[str, Any] = {}
        self.done = {common.part for common in division.common if common.boxes}
        self._source = source
        self._group = group
        self._division = division
        self._wanted = wanted
        self._names = names
        self._touched = touched
        self._running: list[RankExchange] = []

    def run(self) -> None:
        """On a thread of its own; not the planner's."""
        source, group, division = self._source, self._group, self._division
        parts, num_workers = _parts_of(source.found), num_workers_of(source.found.connector, "auto")
        self.found, limits = agree(
            group, source, [(c.part[0], parts[c.part]) for c in division.common], num_workers=num_workers
        )
        parts = _parts_of(self.found)
        pieces: list[ByteSpan] = []
        for one in self._wanted:
            if one.part_id in self.done:
                name, item = one.part_id[0], one.item
                dtype, part = self.found.tensors[name].dtype, parts[one.part_id]
                offsets, sizes = tuple(item.storage_offsets), tuple(item.lengths)
                pieces += lay_box(name, dtype, part, one.target, limits, offsets=offsets, sizes=sizes)
        takers = {value.name: division.ranks(value.takers) for value in division.values}
        intervals, pickled, archives = values_shared(self.found, takers, group.me)
        sharing = sharing_of(group, source, limits, num_workers=num_workers, device=_device_of(self._wanted))
        first = sharing(intervals=intervals, pieces=pickled, touched=set())
        second = sharing(intervals=intervals_of(division, self.found, limits), pieces=pieces, touched=self._touched)
        self._running += (first, second)
        first.run()
        self.values = source.plain_values([*self._names], archives)
        group.exchange(b"")  # no rank writes to a tensor before all have their values
        second.run()

    def stop(self, error: BaseException) -> None:
        """Make `run` raise an error if it waits for a read."""
        for sharing in self._running:
            sharing.stop(error)

    def stats(self) -> dict[str, Any]:
        """What sharing took, and the accounts of the engine that read for it."""
        totals = [asdict(sharing.totals) for sharing in self._running]
        return {key: sum(one[key] for one in totals) for key in totals[0]} | {"reading": self._running[-1].accounts}


def _want(item: ReadItem, dtype: torch.dtype, part: TensorShard, target: torch.Tensor) -> ReadRequest:
    name = item.storage_index.fqn
    offsets, sizes = tuple(item.storage_offsets), tuple(item.lengths)

    def make(limits: ReadLimits) -> Laid:
        return lay_box(name, dtype, part, target, limits, offsets=offsets, sizes=sizes), _given(id(item), target)

    start = part.start
    if not part.is_blob:
        start += sum(o * s for o, s in zip(offsets, part.strides, strict=True)) * dtype.itemsize
    return ReadRequest(name, (part.key, start), target.numel() * dtype.itemsize, 0, make)


def _given(number: int, target: torch.Tensor) -> Callable[[], list[tuple[str, Any]]]:
    return lambda: [(str(number), target)]


def _pickled(value: Any) -> io.BytesIO:
    """A plain value as torch.save writes it: the planner unpickles what it gets, so it gets only what we have written."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


@collected_later
def metadata_of(found: Checkpoint) -> Metadata:
    """What a checkpoint of any format holds, as torch.distributed.checkpoint describes it."""
    described: dict[str, Any] = {}
    for name, stored in found.tensors.items():
        chunks = [ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.sizes)) for part in stored.parts]
        if not chunks:
            zero = torch.Size([0] * len(stored.shape))
            chunks = [ChunkStorageMetadata(zero, torch.Size(stored.shape))]
        described[name] = TensorStorageMetadata(TensorProperties(dtype=stored.dtype), torch.Size(stored.shape), chunks)
    for name in (*found.values, *found.pickled):
        described[name] = BytesStorageMetadata()
    paths = {name: found.paths.get(name, (name,)) for name in described}
    places = {
        MetadataIndex(name, part.offsets): part for name, stored in found.tensors.items() for part in stored.parts
    }
    return Metadata(described, planner_data=paths, storage_data=places)
