"""`StreamReader`: torch.distributed.checkpoint loads through loaderkit's engine, in parallel, ahead, in bounded memory."""

from __future__ import annotations

import io
import logging
import os
import uuid
from collections.abc import Mapping, Sequence
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

from loaderkit._internal.garbage import collector_off
from loaderkit.checkpoint.contents import Checkpoint, ShardId, TensorShard
from loaderkit.checkpoint.discovery.manifest import Verify
from loaderkit.checkpoint.restore.dcp_plan import SharePlan, shared_ranges, with_machine, with_share_plans
from loaderkit.checkpoint.restore.multi_rank import TIMEOUT_S, RestoreSession
from loaderkit.checkpoint.restore.renamed import Renaming
from loaderkit.checkpoint.restore.source import OpenCheckpoint
from loaderkit.checkpoint.restore.task import name_touched
from loaderkit.checkpoint.transfer.fetch import num_workers_of
from loaderkit.checkpoint.transfer.layout import ByteSpan, ReadLimits, box_spans
from loaderkit.checkpoint.transfer.plan import PreparedRead, ReadRequest
from loaderkit.checkpoint.transfer.stages import wait_for_queued
from loaderkit.connectors.base import Connector
from loaderkit.diagnosis.stats import Stats
from loaderkit.engine.metrics.snapshot import Snapshot
from loaderkit.errors import CheckpointError, ConfigError, PeerError
from loaderkit.ranks.group import RankGroup
from loaderkit.ranks.store import default_store

logger = logging.getLogger("loaderkit")


class StreamReader(StorageReader):
    """Reads a checkpoint for `dcp.load(state_dict, storage_reader=StreamReader(url))`, of any format, with resharding.

    Only the ranges that a rank needs are read, also inside the archives of `.distcp` files. With `share`, what several ranks
    need is read by one of them and sent to the others; the result is the same without. The planner is only called by the
    thread that called `dcp.load`. `memory` bounds the staging memory of all ranks of a machine together, besides at most
    24 MiB a rank for threads' stacks and torch's kernels; `verify` is that of `loaderkit.restore`; `process_group` is the one
    that `dcp.load` is given. `timeout_s`: how long a rank waits for another before it raises an error that names it. Nothing
    is unpickled: plain values are read by the restricted reader, and pickled anew for the planner. `rename` is that of
    `loaderkit.restore`: the planner knows the names here. Which names may be missing is the planner's to say, as by
    `DefaultLoadPlanner(allow_partial_load=True)`.
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
        rename: Mapping[str, str] | None = None,
    ) -> None:
        if rename:
            Renaming(rename)  # raises ConfigError
        super().__init__()
        self._url = os.fspath(url)
        self._process_group = process_group
        self._share = share
        self._memory = memory
        self._verify = verify
        self._timeout_s = timeout_s
        self._connectors = connectors
        self._rename = rename
        self._source: OpenCheckpoint | None = None
        self._load_id = uuid.uuid4().hex
        self._stats: Snapshot | None = None
        self._shared: tuple[dict[str, Any], Snapshot | None] | None = (
            None  # totals, and stats of reading for other ranks
        )

    @property
    def stats(self) -> dict[str, Any] | None:
        """The engine's stats of the last load, as `loader.stats().to_dict()`; the stats of shared ranges are in "shared"."""
        if self._stats is None:
            return None
        shared = None
        if self._shared is not None:
            totals, reading = self._shared
            shared = totals | {"reading": None if reading is None else Stats.of(reading).to_dict()}
        return Stats.of(self._stats).to_dict() | {"shared": shared}

    # ------------------------------------------------------------------------------------ what dcp.load asks, in order

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another load, of the same or of another checkpoint."""
        self._close()
        if checkpoint_id:
            self._url = os.fspath(checkpoint_id)
        self._load_id = uuid.uuid4().hex

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The contents of the checkpoint, as torch's own records. Raises CheckpointError, FormatError, ConnectorError."""
        metadata = metadata_of(self._opened().contents)
        metadata.storage_meta = StorageMeta(checkpoint_id=self._url, load_id=self._load_id)
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: `read_metadata` has opened the checkpoint, or `read_data` will."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan with the name of this machine, for the coordinator."""
        return with_machine(plan)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """On the coordinator: which ranks share what. Raises ConfigError if these are not the plans of the process group."""
        share = self._share and dist.is_available() and dist.is_gloo_available()
        if share and len(plans) > 1 and len(plans) != (size := dist.get_world_size(self._process_group)):
            raise ConfigError(
                f"dcp.load has {len(plans)} ranks, and the process group has {size}: give dcp.load and StreamReader the same "
                "process_group"
            )
        return with_share_plans(plans, self._opened().contents, share=share)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors that the planner resolves, before it returns. Raises as `loaderkit.restore`, and PeerError."""
        touched: set[str] = set()
        try:
            self._fill(plan, planner, touched)
        except BaseException as error:
            name_touched(error, touched)
            if isinstance(error, PeerError):
                # dcp.load now asks all ranks for the outcome. It hears nothing from a dead rank, and fails without a reason.
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
        """True if it can be a URL or path."""
        return bool(os.fspath(checkpoint_id))

    # --------------------------------------------------------------------------------------------------------- reading

    def _opened(self) -> OpenCheckpoint:
        if self._source is None:
            self._source = OpenCheckpoint.open(
                self._url, self._connectors, self._memory, self._verify, rename=self._rename
            )
        return self._source

    def _close(self) -> None:
        source, self._source = self._source, None
        if source is not None:
            source.close()

    def _fill(self, plan: LoadPlan, planner: LoadPlanner, touched: set[str]) -> None:
        """Fill tensors once all plain values are there; `touched` collects the names of the tensors that are written to."""
        share = plan.storage_data if isinstance(plan.storage_data, SharePlan) else None
        group = self._joined(share) if share is not None and (share.shards or share.values) else None
        try:
            source = self._opened()
            targets = self._resolved(plan, planner)
        except BaseException as error:
            if group is not None:
                group.fail(error)
            raise
        wait_for_queued(_devices_of(targets))
        items = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        names = [item.storage_index.fqn for item in items]
        num_local = 1 if share is None else share.num_local
        contents, self._shared = source.contents, None
        if group is not None and share is not None:
            num_workers = num_workers_of(contents.connector, "auto")
            session = RestoreSession(
                group,
                source,
                num_workers=num_workers,
                devices=_devices_of(targets),
                touched=touched,
                num_local=num_local,
            )
            values = _read_shared(session, source, share, targets, names)
            contents, self._shared = session.contents, (session.totals(), session.reading)
            shared = {shard.shard_id for shard in share.shards if shard.boxes}
            for target in targets:
                if target.shard_id in shared:
                    planner.commit_tensor(target.item, target.memory)
            targets = [target for target in targets if target.shard_id not in shared]
        else:
            values = source.plain_values(names, num_parts=num_local)
        self._read_own(contents, targets, planner, num_local, touched)
        for item in items:
            planner.load_bytes(item, _pickled(values[item.storage_index.fqn]))

    def _joined(self, share: SharePlan) -> RankGroup:
        ranks = dist.get_process_group_ranks(self._process_group or dist.group.WORLD)
        return RankGroup(default_store(), share.load_id, ranks, share.rank, timeout_s=self._timeout_s)

    def _resolved(self, plan: LoadPlan, planner: LoadPlanner) -> list[_Target]:
        """The tensors to fill."""
        targets = []
        for item in plan.items:
            if item.type == LoadItemType.TENSOR:
                memory = planner.resolve_tensor(item).detach()
                if tuple(memory.shape) != tuple(item.lengths):
                    raise CheckpointError(
                        f"{self._url}: {item.storage_index.fqn!r}: the planner gave {list(memory.shape)} for "
                        f"{list(item.lengths)}"
                    )
                targets.append(_Target(item, memory))
        return targets

    def _read_own(
        self, contents: Checkpoint, targets: Sequence[_Target], planner: LoadPlanner, num_local: int, touched: set[str]
    ) -> None:
        """Read the tensors that this rank shares with no other."""
        source, shards = self._opened(), contents.shards_by_id()
        needed = {target.shard_id for target in targets if target.shard_id in shards}
        shards |= source.layouts(((shard_id[0], shards[shard_id]) for shard_id in needed), num_local)
        requests = []
        for target in targets:
            shard = shards.get(target.shard_id)
            if shard is not None:
                requests.append(target.request(contents.tensors[target.name].dtype, shard))
            elif target.memory.numel():
                raise CheckpointError(
                    f"{self._url}: no shard of {target.name!r} lies at {target.item.storage_index.offset}"
                )
        items = {id(target.item): target.item for target in targets}
        with source.transfer(requests, _devices_of(targets), num_parts=num_local, touched=touched) as session:
            for delivered in session:
                for number, tensor in delivered:
                    planner.commit_tensor(items[int(number)], tensor)
            self._stats = session.stats()


class _Target(NamedTuple):
    """An item of the plan, and the tensor to fill with it."""

    item: ReadItem
    memory: torch.Tensor

    @property
    def name(self) -> str:
        return self.item.storage_index.fqn

    @property
    def shard_id(self) -> ShardId:
        return self.name, tuple(self.item.storage_index.offset or ())

    def spans(self, dtype: torch.dtype, shard: TensorShard, limits: ReadLimits) -> list[ByteSpan]:
        """The spans that fill it from `shard`."""
        offsets, sizes = tuple(self.item.storage_offsets), tuple(self.item.lengths)
        return box_spans(self.name, dtype, shard, self.memory, limits, offsets=offsets, sizes=sizes)

    def request(self, dtype: torch.dtype, shard: TensorShard) -> ReadRequest:
        """The request that fills it from `shard`, and delivers it under the item's id."""

        def prepare(limits: ReadLimits) -> PreparedRead:
            return self.spans(dtype, shard, limits), lambda: [(str(id(self.item)), self.memory)]

        start = shard.start
        if not shard.is_archive:
            offsets = zip(self.item.storage_offsets, shard.strides, strict=True)
            start += sum(offset * stride for offset, stride in offsets) * dtype.itemsize
        return ReadRequest(self.name, (shard.key, start), self.memory.numel() * dtype.itemsize, 0, prepare)


def _devices_of(targets: Sequence[_Target]) -> set[torch.device]:
    return {target.memory.device for target in targets}


def _read_shared(
    session: RestoreSession, source: OpenCheckpoint, share: SharePlan, targets: Sequence[_Target], names: list[str]
) -> dict[str, Any]:
    """Fill what ranks share; the plain values `names`, shared or not."""
    values: dict[str, Any] = {}
    shared = {shard.shard_id for shard in share.shards if shard.boxes}
    pickled = {value.name: share.ranks(value.ranks) for value in share.values}

    def work() -> None:
        shards = source.contents.shards_by_id()
        contents, limits = session.agree([(shard.shard_id[0], shards[shard.shard_id]) for shard in share.shards])
        shards = contents.shards_by_id()
        spans: list[ByteSpan] = []
        for target in targets:
            if target.shard_id in shared:
                spans += target.spans(contents.tensors[target.name].dtype, shards[target.shard_id], limits)
        values.update(session.exchange(names, pickled, shared_ranges(share, contents, limits), spans, limits))

    session.run(work)
    return values


def _pickled(value: Any) -> io.BytesIO:
    """A plain value as torch.save writes it: the planner unpickles it, so it gets only what was pickled here."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


@collector_off()
def metadata_of(contents: Checkpoint) -> Metadata:
    """The contents of a checkpoint of any format, as torch.distributed.checkpoint describes them."""
    described: dict[str, Any] = {}
    for name, entry in contents.tensors.items():
        chunks = [ChunkStorageMetadata(torch.Size(s.offsets), torch.Size(s.sizes)) for s in entry.shards]
        if not chunks:
            zero = torch.Size([0] * len(entry.shape))
            chunks = [ChunkStorageMetadata(zero, torch.Size(entry.shape))]
        described[name] = TensorStorageMetadata(TensorProperties(dtype=entry.dtype), torch.Size(entry.shape), chunks)
    for name in (*contents.values, *contents.pickled):
        described[name] = BytesStorageMetadata()
    paths = {name: contents.paths.get(name, (name,)) for name in described}
    shards = {MetadataIndex(name, offsets): shard for (name, offsets), shard in contents.shards_by_id().items()}
    return Metadata(described, planner_data=paths, storage_data=shards)
