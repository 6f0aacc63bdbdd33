"""`StreamReader`: torch.distributed.checkpoint loads through loaderkit's engine, in parallel, ahead, in bounded memory."""

from __future__ import annotations

import io
import os
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
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

from loaderkit.checkpoint.laying import Limits, lay_box
from loaderkit.checkpoint.manifest import Verify
from loaderkit.checkpoint.plan import Laid, Want
from loaderkit.checkpoint.records import Checkpoint, Part
from loaderkit.checkpoint.restoring import Source, opened
from loaderkit.errors import CheckpointError
from loaderkit.types import Connector

_CPU = torch.device("cpu")


class StreamReader(StorageReader):
    """Reads a checkpoint for `dcp.load(state_dict, storage_reader=StreamReader(url))`, whatever its format, with resharding.

    Only the ranges a rank needs are read, also inside the archives of `.distcp` files. The planner is called by the thread that
    called `dcp.load` alone. `memory` bounds this rank's staging memory; `verify` is that of `loaderkit.restore`.
    Nothing is unpickled: plain values are read by the restricted reader, and written anew before the planner gets them.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        memory: int | str = "2GiB",
        verify: Verify = "auto",
        connectors: Mapping[str, Connector] | None = None,
    ) -> None:
        super().__init__()
        self._url = os.fspath(url)
        self._memory = memory
        self._verify = verify
        self._connectors = connectors
        self._open: ExitStack | None = None
        self._source: Source | None = None
        self._load_id = uuid.uuid4().hex
        self.stats: dict[str, Any] | None = None
        """The engine's accounts of the last load, as `loader.stats().to_dict()`."""

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
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill what the planner resolves; complete when it returns. Raises as `loaderkit.restore`."""
        try:
            self._read(plan, planner)
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

    def _opened(self) -> Source:
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
        source = self._opened()
        tensors = [item for item in plan.items if item.type == LoadItemType.TENSOR]
        values = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        found = source.resolved(dict.fromkeys(item.storage_index.fqn for item in tensors))
        parts = {(n, part.offsets): part for n, stored in found.tensors.items() for part in stored.parts}
        read = source.plain_values([item.storage_index.fqn for item in values])
        wants = []
        device = _CPU
        for item in tensors:
            target = planner.resolve_tensor(item).detach()
            if tuple(target.shape) != tuple(item.lengths):
                raise CheckpointError(
                    f"{self._url}: {item.storage_index.fqn!r}: the planner gave {list(target.shape)} for {list(item.lengths)}"
                )
            device = target.device if target.device.type != "cpu" else device
            part = parts.get((item.storage_index.fqn, tuple(item.storage_index.offset or ())))
            if part is not None:
                wants.append(_want(item, found, part, target))
            elif target.numel():
                raise CheckpointError(
                    f"{self._url}: no piece of {item.storage_index.fqn!r} lies at {item.storage_index.offset}"
                )
        by_number = {id(item): item for item in tensors}
        with source.filling(wants, device, names_touched=True) as filling:
            for given in filling:
                for number, target in given:
                    planner.commit_tensor(by_number[int(number)], target)
            self.stats = filling.stats().to_dict()
        for item in values:
            planner.load_bytes(item, _pickled(read[item.storage_index.fqn]))


def _want(item: ReadItem, found: Checkpoint, part: Part, target: torch.Tensor) -> Want:
    name = item.storage_index.fqn
    dtype = found.tensors[name].dtype
    offsets, sizes = tuple(item.storage_offsets), tuple(item.lengths)

    def make(limits: Limits) -> Laid:
        return lay_box(name, dtype, part, target, limits, offsets=offsets, sizes=sizes), _given(id(item), target)

    start = part.start
    if not part.is_blob:
        start += sum(o * s for o, s in zip(offsets, part.strides, strict=True)) * dtype.itemsize
    return Want(name, (part.key, start), target.numel() * dtype.itemsize, 0, make)


def _given(number: int, target: torch.Tensor) -> Callable[[], list[tuple[str, Any]]]:
    return lambda: [(str(number), target)]


def _pickled(value: Any) -> io.BytesIO:
    """A plain value as torch.save writes it: the planner unpickles what it gets, so it gets only what we have written."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


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
