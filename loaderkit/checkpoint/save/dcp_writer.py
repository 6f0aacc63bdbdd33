"""`StreamWriter`: torch.distributed.checkpoint saves in parallel, in bounded memory, whole or not at all."""

from __future__ import annotations

import copy
import io
import operator
import os
import pickle
import threading
import time
import uuid
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from loaderkit.checkpoint.discovery.description import DCP, SAFETENSORS, Format
from loaderkit.checkpoint.discovery.locate import SaveTarget, save_target
from loaderkit.checkpoint.formats.dcp import MAX_TIED
from loaderkit.checkpoint.planning.held import Held, ItemShare, divided, is_default_planner, part_of
from loaderkit.checkpoint.planning.stored import Stored, described_as_stored
from loaderkit.checkpoint.save.commit import begin, clear_dead, commit
from loaderkit.checkpoint.save.engine import SavedFile, save_files
from loaderkit.checkpoint.save.file_plan import BytesItem, FilePlan, Item, TensorItem
from loaderkit.checkpoint.save.memory import PartBuffers
from loaderkit.checkpoint.save.owner import Heartbeat
from loaderkit.checkpoint.save.placement import Placement, find_placement, put_marker
from loaderkit.checkpoint.save.safetensors.layout import Offer
from loaderkit.checkpoint.save.safetensors.writer import RankWork, SafetensorsSave, kept_plan
from loaderkit.checkpoint.save.staging import HostCopies
from loaderkit.checkpoint.save.tensor_bytes import identity_of, plain_tensor
from loaderkit.checkpoint.tensor_boxes import Box
from loaderkit.connectors.base import Connector, traits_of, writes_of
from loaderkit.errors import CheckpointError, ConfigError, ConnectorError

_REMOTE_WORKERS = 8
_FILE_WORKERS = 4
_VERSION = getattr(filesystem, "CURRENT_DCP_VERSION", None)  # of newer versions of torch


class Local(NamedTuple):
    """What a rank adds to its plan. The token comes back with the coordinator's answer, unless a planner sends a kept
    plan instead."""

    token: str
    held: Held
    offer: Offer | None


class Share(NamedTuple):
    """What the coordinator answers: where this save's files go, the rank's number and, in place of the plan's tensors,
    the parts of tensors that the rank writes (None if it writes the plan's); or, for safetensors, its work."""

    placement: Placement
    rank: int
    token: str | None
    parts: list[ItemShare] | None = None
    work: RankWork | None = None


class _WrittenFiles(NamedTuple):
    """The files that one rank has written, and the plain values that are in none of them."""

    attempt: str
    rank: int
    files: list[SavedFile]
    values: dict[str, Any]


_FILES = MetadataIndex("loaderkit:files")  # of the result that carries them


@dataclass
class _RunningSave:
    """A save as its coordinator knows it. With `is_to_clear` no other rank writes, so what is left of it when it ends
    is cleared at once."""

    placement: Placement
    heartbeat: Heartbeat
    is_to_clear: bool


class StreamWriter(StorageWriter, AsyncStager):
    """Writes a checkpoint for `dcp.save(state_dict, storage_writer=StreamWriter(url))` and `dcp.async_save`.

    The checkpoint is the directory `url` (a path, s3:// or what a connector writes), in torch's format: `dcp.load` reads it,
    and so do `loaderkit.restore` and `StreamReader`, at any world size. It is there whole or not at all, with a manifest of
    checksums made while writing; one that is there already is replaced by one step. Each rank writes one file, in parts, by
    `workers` threads that each hold one part (at most 8 MiB; more for S3 objects of more than 80 GB).

    What several ranks hold is divided among them by bytes: a tensor of 16 KiB or more may be cut. Another planner than
    torch's default, one that is to save on the lowest rank, or one that keeps plans is left to its own.

    `format="safetensors"`: whole tensors in files that Hugging Face's loaders read, in place of `dcp.load`. What is
    under the key "model" goes into model.safetensors, or in model-00001-of-00002.safetensors and so on with an index,
    under the model's own names; every other key has files of its own, and plain values are JSON. Ranks that have shards
    of a tensor send them to the one that writes it, over connections of their own.

    For `async_save` the state is copied to host memory first, which is kept for the next save with the same StreamWriter.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        workers: int | Literal["auto"] = "auto",
        format: Format = "dcp",  # noqa: A002 (as in the YAML)
        unique_names: bool = False,
        connectors: Mapping[str, Connector] | None = None,
        copies: HostCopies | None = None,
    ) -> None:
        """`unique_names`: the time is part of files' names, so that no earlier save of the same checkpoint has given
        them, and a copy of it can be replaced by one step, too. `copies` makes the copies for `async_save`; default in
        memory of this process.

        Raises ConfigError if `workers` is no number from 1 on, and for an unknown format.
        """
        super().__init__()
        if format not in ("dcp", "safetensors"):
            raise ConfigError(f"format {format!r}: expected 'dcp' or 'safetensors'")
        if workers != "auto" and (type(workers) is not int or workers < 1):
            raise ConfigError(f"workers {workers!r}: expected 'auto', or a number of threads from 1 on")
        self._url = os.fspath(url)
        self._workers = workers
        self._unique_names = unique_names
        self._kind = DCP if format == "dcp" else SAFETENSORS
        self._whole: SafetensorsSave | None = None
        self._connectors = connectors
        self._save_id = uuid.uuid4().hex
        self._token = ""
        self._held = Held([], (), frozenset(), ())
        self._target: SaveTarget | None = None
        self._running: _RunningSave | None = None
        self._buffers = PartBuffers()
        self._copies = HostCopies() if copies is None else copies
        self._stats: dict[str, Any] | None = None
        self._lock = threading.Lock()

    def __reduce__(self) -> Any:
        """Another process gets the settings only."""
        settled = partial(StreamWriter, workers=self._workers, format=self.format, unique_names=self._unique_names)
        return partial(settled, connectors=self._connectors), (self._url,)

    @property
    def format(self) -> Format:
        """The format that is written."""
        return "dcp" if self._kind == DCP else "safetensors"

    @property
    def stats(self) -> dict[str, Any] | None:
        """What the last save took, on this rank or, at the coordinator, on all: by rank and file its bytes, and the
        seconds of its workers together for staging, hashing, waiting for one another, writing and syncing; and the
        seconds of the commit."""
        return self._stats

    # ------------------------------------------------------------------------------------ what dcp.save asks, in order

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another save, of the same or of another checkpoint."""
        with self._alone():
            self._end()
        if checkpoint_id:
            self._url = os.fspath(checkpoint_id)
        self._save_id = uuid.uuid4().hex

    def storage_meta(self) -> StorageMeta | None:
        """Names the checkpoint and the save."""
        return StorageMeta(checkpoint_id=self._url, save_id=self._save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raises ConfigError without collectives, because then nothing says when all ranks are done."""
        if not kwargs.get("use_collectives", True):
            raise ConfigError("StreamWriter commits a checkpoint once all ranks are done: leave use_collectives True")
        with self._alone():
            self._end()

    def prepare_local_plan(self, plan: SavePlan, *, is_alone: bool | None = None) -> SavePlan:
        """The plan with this save's token and what this rank holds. `is_alone`: no other rank holds anything; the
        default is as torch.distributed says."""
        self._token, self._held = uuid.uuid4().hex, Held.of(plan)
        if self._kind == SAFETENSORS:
            self._whole = self._new_save(plan, is_alone)
        offer = None if self._whole is None else self._whole.offer
        return replace(plan, storage_data=Local(self._token, self._held, offer))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: clear what dead saves left, and tell each rank where its files go, and which parts it writes.

        Raises CheckpointError, ConnectorError.
        """
        target = self._opened()
        writes = writes_of(target.connector)
        try:
            placement = begin(target, writes, self._kind, time.time_ns() // 1_000_000 if self._unique_names else 0)
        except ConnectorError:
            _clear_failed(target)
            raise
        renew = partial(put_marker, target, writes, placement)
        self._running = _RunningSave(placement, Heartbeat(placement.attempt, renew), is_to_clear=len(plans) == 1)
        local = [plan.storage_data if isinstance(plan.storage_data, Local) else None for plan in plans]
        tokens = [None if one is None else one.token for one in local]
        if self._whole is not None:
            offers = [one.offer for one in local if one is not None and one.offer is not None]
            if len(offers) < len(plans):
                raise kept_plan(self._url)
            work = self._whole.divide(plans, offers, placement.generation)
            shares = [Share(placement, rank, tokens[rank], work=one) for rank, one in enumerate(work)]
        else:
            parts: list[list[ItemShare]] | None = None
            if len(plans) > 1 and None not in local:
                parts = divided([one.held for one in local if one is not None], [plan.items for plan in plans])
            shares = [
                Share(placement, rank, token, None if parts is None else parts[rank])
                for rank, token in enumerate(tokens)
            ]
        return [replace(plan, storage_data=share) for plan, share in zip(plans, shares, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file before it returns. Raises CheckpointError, ConnectorError."""
        with self._alone():
            try:
                results = self._write(plan, planner)
            except BaseException:
                self._end()
                raise
            if self._running is None:
                self._end()
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, once all ranks have written: make it the checkpoint. Raises CheckpointError, ConnectorError."""
        with self._alone():
            try:
                if self._running is not None:
                    self._running.is_to_clear = True
                self._commit(metadata, results)
            finally:
                self._end()

    @property
    def checkpoint_id(self) -> str:
        return self._url

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """True if it can be a URL or path."""
        return bool(os.fspath(checkpoint_id))

    # ------------------------------------------------------------------------------------------ what dcp.async_save asks

    _synchronize_after_execute = False  # `stage` has copied all when it returns

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A copy of the state in host memory, which is used again once nothing refers to the copy."""
        copied: dict[str, Any] = self._copies.copy(state_dict)
        return copied

    def synchronize_staging(self) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        """Free the memory that is kept. Another save may follow."""
        self._copies.close()
        self._buffers = PartBuffers()

    # --------------------------------------------------------------------------------------------------------- writing

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Raises ConfigError if another thread saves with this object now."""
        if not self._lock.acquire(blocking=False):
            raise ConfigError(
                "a save is running with this StreamWriter: wait for its future, or use another StreamWriter"
            )
        try:
            yield
        finally:
            self._lock.release()

    def _opened(self) -> SaveTarget:
        if self._target is None:
            self._target = save_target(self._url, self._connectors or {})
        return self._target

    def _end(self) -> None:
        """This save is over. What it has written and not committed is cleared; if other ranks may still write, the next
        save does that."""
        running, self._running = self._running, None
        if running is not None:
            running.heartbeat.stop()
            if running.is_to_clear and self._target is not None:
                _clear_failed(self._target)
        whole, self._whole = self._whole, None
        if whole is not None:
            whole.close()
        target, self._target = self._target, None
        if target is not None:
            target.close()

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        target = self._opened()
        share = self._share(target, plan)
        if self._whole is not None:
            return self._write_whole(self._whole, target, share, plan, planner)
        resolved = _resolved(self._work(plan, share, planner), planner, self._copies)
        items = list({id(item): item for _, item in resolved}.values())
        items.sort(key=lambda item: isinstance(item, TensorItem))  # plain values first, as torch does
        plans = [FilePlan(share.placement.file_name(share.rank), items)] if items else []
        files = self._save_files(target, share, plans)
        results = [self._written(share, files, {})]
        for file in plans:
            starts = {id(item): start for item, start in zip(file.items, file.starts, strict=True)}
            for write_item, item in resolved:
                info = filesystem._StorageInfo(file.name, starts[id(item)], item.size)
                data = write_item.tensor_data
                stored = Stored(info, None if data is None else data.chunk.sizes)
                results.append(WriteResult(write_item.index, item.size, stored))
        return results

    def _work(self, plan: SavePlan, share: Share, planner: SavePlanner) -> list[tuple[WriteItem, Box | None]]:
        """The items to write, each with the box to be written, or None for all of it."""
        if share.parts is None or not is_default_planner(planner):
            return [(item, None) for item in plan.items]
        values = [(item, None) for item in plan.items if item.tensor_data is None]
        return values + [(self._held.items[number], box) for number, box in share.parts]

    def _new_save(self, plan: SavePlan, is_alone: bool | None) -> SafetensorsSave:
        return SafetensorsSave(plan, is_alone=is_alone)

    def _write_whole(
        self, whole: SafetensorsSave, target: SaveTarget, share: Share, plan: SavePlan, planner: SavePlanner
    ) -> list[WriteResult]:
        assert share.work is not None
        files, values = whole.write(share.work, plan, planner, partial(self._save_files, target, share))
        return [self._written(share, files, values)]

    def _save_files(self, target: SaveTarget, share: Share, plans: Sequence[FilePlan]) -> list[SavedFile]:
        workers = _REMOTE_WORKERS if traits_of(target.connector).is_remote else _FILE_WORKERS
        return save_files(
            plans,
            writes_of(target.connector),
            share.placement.folder,
            num_workers=workers if self._workers == "auto" else self._workers,
            buffers=self._buffers,
        )

    def _written(self, share: Share, files: list[SavedFile], values: dict[str, Any]) -> WriteResult:
        self._stats = {"ranks": {share.rank: _times_of(files)}, "commit_s": None}
        return WriteResult(_FILES, 0, _WrittenFiles(share.placement.attempt, share.rank, files, values))

    def _share(self, target: SaveTarget, plan: SavePlan) -> Share:
        """What the coordinator says to this rank. Raises CheckpointError."""
        share = plan.storage_data
        if not isinstance(share, Share):
            raise CheckpointError(
                f"{self._url}: the planner {type(plan).__name__} did not keep `storage_data`, which says where files go"
            )
        if self._kind == SAFETENSORS and share.token != self._token:
            raise kept_plan(self._url)
        if share.token == self._token:
            return share
        # The planner keeps plans (enable_plan_caching), so this is what the coordinator said at an earlier save.
        share = share._replace(parts=None)
        if self._running is not None:
            return share._replace(placement=self._running.placement)
        placement = find_placement(target, share.placement.owner)
        if placement is None:
            raise CheckpointError(
                f"{self._url}: the coordinator (process {share.placement.owner.pid} on {share.placement.owner.host}) left no "
                "word of this save there. Is it the same directory on all machines?"
            )
        return share._replace(placement=placement)

    def _commit(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        target, running = self._target, self._running
        if target is None or running is None:
            raise CheckpointError(
                f"{self._url}: another save was begun with this StreamWriter before this one was finished"
            )
        written: list[_WrittenFiles] = []
        stored: dict[MetadataIndex, Stored] = {}
        for result in chain.from_iterable(results):
            if isinstance(result.storage_data, _WrittenFiles):
                written.append(result.storage_data)
            else:
                stored.setdefault(result.index, result.storage_data)
        if strangers := [item.rank for item in written if item.attempt != running.placement.attempt]:
            raise CheckpointError(f"{self._url}: rank {strangers[0]} has written for another save: save again")
        if self._whole is None:
            description = self._described(metadata, stored)
        else:
            description = self._whole.describe({name: value for item in written for name, value in item.values.items()})
        begin_s = time.perf_counter()
        files = [file for item in written for file in item.files]
        commit(target, writes_of(target.connector), running.placement, files, description, kind=self._kind)
        running.is_to_clear = False
        ranks = {item.rank: _times_of(item.files) for item in written}
        self._stats = {"ranks": ranks, "commit_s": time.perf_counter() - begin_s}

    def _described(self, metadata: Metadata, stored: dict[MetadataIndex, Stored]) -> bytes:
        """The `.metadata`. Raises CheckpointError."""
        try:
            metadata.state_dict_metadata = described_as_stored(metadata, stored)
        except ValueError as error:
            raise CheckpointError(f"{self._url} is not committed: {error}") from error
        metadata.storage_data = {index: item.info for index, item in stored.items()}
        metadata.storage_meta = self.storage_meta()
        if _VERSION is not None:
            metadata.version = _VERSION
        return pickle.dumps(metadata)


def _clear_failed(target: SaveTarget) -> None:
    """Clear what a failed save left on a disk, which may be full. In a remote store, which may not answer, the next
    save does it."""
    if not traits_of(target.connector).is_remote:
        with suppress(ConnectorError):  # the error of the save says more
            clear_dead(target, writes_of(target.connector))


def _resolved(
    work: Sequence[tuple[WriteItem, Box | None]], planner: SavePlanner, copies: HostCopies
) -> list[tuple[WriteItem, Item]]:
    """What the planner gives for each item. Names of the same memory, such as tied weights, have one item."""
    known: dict[tuple[Any, ...], tuple[TensorItem, set[str]]] = {}
    resolved: list[tuple[WriteItem, Item]] = []
    uncut: set[MetadataIndex] = set()
    for write_item, box in work:
        name, value = write_item.index.fqn, _data_of(write_item, planner)
        tensor = plain_tensor(value)
        if isinstance(value, io.BytesIO):
            resolved.append((write_item, BytesItem(name, value.getvalue())))
        elif tensor is None:
            # A wrapper, or a sparse one: as torch.distributed.checkpoint does. It is not cut, so each rank that was to write a
            # part writes all of it.
            if write_item.index not in uncut:
                uncut.add(write_item.index)
                file = io.BytesIO()
                torch.save(value.detach().cpu(), file)
                resolved.append((write_item, BytesItem(name, file.getvalue())))
        else:
            part = tensor if box is None else tensor[box.slices]
            identity = identity_of(part)
            item, names = known.get(identity, (None, set()))
            if item is None or not part.numel() or name in names or len(names) == MAX_TIED:
                item, names = known[identity] = TensorItem(name, part, is_fixed=copies.owns(part)), set()
            names.add(name)
            resolved.append((write_item if box is None else part_of(write_item, box), item))
    return resolved


def _data_of(item: WriteItem, planner: SavePlanner) -> Any:
    """What the planner gives for an item. A plain value with tensors is pickled with copies of them: the tensors of a
    staged state are views of one memory, all of which would be pickled."""
    if item.type == WriteItemType.BYTE_IO and isinstance(planner, DefaultSavePlanner):
        value = planner.lookup_object(item.index)
        if (apart := _apart(value)) is not value:
            return planner.transform_object(item, apart)
    return planner.resolve_data(item)


def _apart(value: Any) -> Any:
    """A plain value with copies of the tensors in its tuples, lists and tables; the same one without tensors."""
    if isinstance(value, torch.Tensor) and plain_tensor(value) is not None:
        return value.detach().clone()
    if type(value) in (list, tuple):
        items = [_apart(item) for item in value]
        return value if all(map(operator.is_, items, value)) else type(value)(items)
    if type(value) in (dict, OrderedDict, defaultdict):  # others may refuse to be changed
        table = {key: _apart(item) for key, item in value.items()}
        if all(table[key] is item for key, item in value.items()):
            return value
        made = copy.copy(value)  # an OrderedDict stays one
        for key, item in table.items():
            made[key] = item
        return made
    return value


def _times_of(files: Sequence[SavedFile]) -> dict[str, Any]:
    return {file.name: {"num_bytes": file.num_bytes, **asdict(file.times)} for file in files}
