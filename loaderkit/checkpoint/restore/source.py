"""An open checkpoint: its contents, its checksums, and sessions that read its tensors."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Any, Literal

import torch

from loaderkit._internal.cuda.device import resolve_device
from loaderkit._internal.units import parse_bytes
from loaderkit.checkpoint.contents import SMALL_ARCHIVE, Checkpoint, Checksums, ShardId, TensorShard
from loaderkit.checkpoint.discovery.locate import CheckpointLocation, locate
from loaderkit.checkpoint.discovery.manifest import Verify, read_manifest
from loaderkit.checkpoint.discovery.open import open_checkpoint
from loaderkit.checkpoint.formats import torch_zip
from loaderkit.checkpoint.formats.shard_archive import read_shard
from loaderkit.checkpoint.formats.zip_records import Read
from loaderkit.checkpoint.names import opaque_in, settle
from loaderkit.checkpoint.restore.renamed import Renaming
from loaderkit.checkpoint.restore.requests import new_tensors
from loaderkit.checkpoint.restore.selection import Dtype, parse_dtype
from loaderkit.checkpoint.restore.task import Restored, RestoreTask, progress_of
from loaderkit.checkpoint.structure import Structure, parsed_structure, structure_names
from loaderkit.checkpoint.transfer.fetch import Fill, fetch_of, fetch_ranges, plan_access
from loaderkit.checkpoint.transfer.layout import as_tensor, unpacked
from loaderkit.checkpoint.transfer.plan import ReadRequest
from loaderkit.checkpoint.transfer.session import TransferSession
from loaderkit.connectors.base import ByteRange, Connector
from loaderkit.errors import CheckpointError, ConfigError, FormatError, printable

logger = logging.getLogger("loaderkit")
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
_ARCHIVE_HEAD = 4096  # bytes of a shard's archive that hold its pickle and its record's header
_ARCHIVE_TAIL = 4096  # bytes that hold its directory
_UNKNOWN = Structure()
_MAX_ARCHIVES = 1024  # whose heads and tails are read at once, in 8 MiB


class OpenCheckpoint:
    """The contents of a checkpoint, the checksums of its objects by key, and the bound on staging memory.

    Where several ranks share a machine's memory, the bound is divided into `num_parts` equal parts, and this rank uses
    one. Close it; it is a context manager.
    """

    def __init__(
        self, location: CheckpointLocation, contents: Checkpoint, checksums: Mapping[str, Checksums], memory_bytes: int
    ) -> None:
        self.contents = contents
        self.checksums = checksums
        self.memory_bytes = memory_bytes
        self.objects = {info.key: info for info in contents.objects.values()}
        self._location = location
        self._structure: Structure | None = None  # what is known of it already
        self._renaming: Renaming | None = None

    @classmethod
    def open(
        cls,
        url: str | os.PathLike[str],
        connectors: Mapping[str, Connector] | None,
        memory: int | str,
        verify: Verify,
        *,
        export: bool = False,
        rename: Mapping[str, str] | None = None,
    ) -> OpenCheckpoint:
        """Find the checkpoint, or with `export` the export, and read its description. Raises the same errors as
        `loaderkit.restore`."""
        renaming = Renaming(rename) if rename else None
        try:
            memory_bytes = parse_bytes(memory)
        except ValueError as error:
            raise ConfigError(f"memory: expected {error}") from None
        location = locate(url, connectors or {})
        try:
            fetch = fetch_of(location.connector, memory_bytes)
            contents = open_checkpoint(location, fetch, export=export)
            location = location.of(contents)
            opened = cls(location, contents, read_manifest(location, contents, verify, fetch), memory_bytes)
            return opened if renaming is None else opened.renamed(renaming)
        except BaseException:
            location.close()
            raise

    def renamed(self, renaming: Renaming) -> OpenCheckpoint:
        """The same checkpoint under the names that its parts have here. Raises CheckpointError."""
        structure = renaming.structure(self.structure())
        self.contents = renaming.renamed(self.contents)
        self._structure, self._renaming = structure, renaming
        return self

    def tell_beside(self) -> None:
        """Warn of files and folders with weights that are no part of the checkpoint."""
        if beside := self.contents.beside:
            more = f" and {len(beside) - 3} more" if len(beside) > 3 else ""
            logger.warning(
                "%s is restored without what lies beside it (%s%s): name that to restore it",
                *(printable(self.contents.name), printable(", ".join(beside[:3])), more),
            )

    def close(self) -> None:
        """Close the connector, unless the caller gave it. Idempotent."""
        self._location.close()

    def __enter__(self) -> OpenCheckpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --------------------------------------------------------------------------------------------------- tensors

    def restored(self, task: RestoreTask) -> Restored:
        """Read what `task` names, all of it on this rank. No tensor is written to before all plain values are read."""
        requests = task.make_requests(self.resolved(task.tensors))
        values = self.plain_values(task.values)
        tensors: dict[str, torch.Tensor] = {}
        begin_s = time.perf_counter()
        fill = Fill(
            requests,
            self.contents.connector,
            self.objects,
            memory_bytes=self.memory_bytes,
            access=plan_access(self.contents.connector, task.concurrency, requests, self.memory_bytes),
            checksums=self.checksums,
            devices=task.devices,
            touched=task.touched,
        )
        for delivered in fill:
            tensors.update(delivered)
            if task.progress is not None:
                seconds = time.perf_counter() - begin_s
                task.progress(progress_of(self.contents, fill.plan.totals, fill.plan.num_bytes, seconds))
        return tensors, values

    def transfer(
        self,
        requests: list[ReadRequest],
        devices: Collection[torch.device],
        concurrency: int | Literal["auto"] = "auto",
        *,
        num_parts: int = 1,
        **settings: Any,
    ) -> TransferSession:
        """A session that reads `requests`, for tensors on `devices`; `settings` are arguments of `TransferSession`."""
        connector = self.contents.connector
        access = plan_access(connector, concurrency, requests, self.memory_bytes // num_parts)
        return TransferSession(
            requests,
            connector,
            self.objects,
            memory_bytes=self.memory_bytes,
            num_parts=num_parts,
            num_workers=access.num_workers,
            direct=access.direct,
            checksums=self.checksums,
            devices=devices,
            **settings,
        )

    def transfer_new(self, names: list[str], device: torch.device, dtype: Dtype, **settings: Any) -> TransferSession:
        """A session that makes these tensors and delivers them as they become whole."""
        parsed = parse_dtype(dtype)
        if parsed == "target":
            raise ConfigError("dtype 'target' needs tensors to be filled: see loaderkit.restore(url, into=...)")
        return self.transfer(new_tensors(self.resolved(names), names, device, parsed), [device], **settings)

    def _fetch(self, ranges: Sequence[ByteRange], num_parts: int) -> list[bytes]:
        return fetch_ranges(
            self.contents.connector, self.objects, ranges, memory_bytes=self.memory_bytes, num_parts=num_parts
        )

    # ------------------------------------------------------------------------------------- archives inside of files

    def resolved(self, names: Iterable[str]) -> Checkpoint:
        """The contents with the layouts of these tensors' large archives."""
        return self.contents.with_shards(self.layouts(self.contents.shards_of(names)))

    def layouts(self, shards: Iterable[tuple[str, TensorShard]], num_parts: int = 1) -> dict[ShardId, TensorShard]:
        """The shards in large archives as plain bytes. It takes two small reads a shard."""
        archives = [(name, shard) for name, shard in shards if shard.is_archive and shard.length > SMALL_ARCHIVE]
        plain = {}
        for lo in range(0, len(archives), _MAX_ARCHIVES):
            plain.update(self._layouts(archives[lo : lo + _MAX_ARCHIVES], num_parts))
        return plain

    def _layouts(self, archives: Sequence[tuple[str, TensorShard]], num_parts: int) -> dict[ShardId, TensorShard]:
        ranges = []
        for _, shard in archives:
            etag = self.objects[shard.key].etag
            ranges.append(ByteRange(shard.key, shard.start, _ARCHIVE_HEAD, etag))
            ranges.append(ByteRange(shard.key, shard.start + shard.length - _ARCHIVE_TAIL, _ARCHIVE_TAIL, etag))
        read = self._fetch(ranges, num_parts)
        plain = {}
        for (name, shard), head, tail in zip(archives, read[::2], read[1::2], strict=True):
            try:
                stored = read_shard(self._reader_inside(shard, head, tail), shard.length)
                plain[name, shard.offsets] = unpacked(shard, self.contents.tensors[name].dtype, stored)
            except FormatError as error:
                raise FormatError(
                    f"{self.contents.describe(shard.key)}: {name!r} from byte {shard.start} on: {error}"
                ) from None
        return plain

    def _reader_inside(self, shard: TensorShard, head: bytes, tail: bytes) -> Read:
        """Reads in an archive whose head and tail are in memory already."""
        tail_start = shard.length - len(tail)

        def read(start: int, buffer: memoryview) -> None:
            end = start + len(buffer)
            if end <= len(head):
                buffer[:] = head[start:end]
            elif start >= tail_start:
                buffer[:] = tail[start - tail_start : end - tail_start]
            else:
                etag = self.objects[shard.key].etag
                self.contents.connector.read_into(shard.key, shard.start + start, buffer, etag=etag)

        return read

    # ------------------------------------------------------------------------------------------------- plain values

    def structure(self) -> Structure:
        """What the checkpoint says of its containers. Raises CheckpointError."""
        contents = self.contents
        if self._structure is not None:
            return self._structure
        if contents.tells_containers:
            return Structure(contents.containers, is_complete=True)
        if contents.containers:  # of Megatron's `common.pt`, and of nothing else
            return Structure(contents.containers, is_complete=False)
        if not contents.values and not contents.pickled:
            return _UNKNOWN
        return parsed_structure(self.plain_values(structure_names((*contents.values, *contents.pickled))))

    def plain_values(
        self, names: list[str], archives: Mapping[str, bytes | bytearray] = MappingProxyType({}), num_parts: int = 1
    ) -> dict[str, Any]:
        """Plain values by name. Their archives are read, except those given in `archives`.

        Raises CheckpointError for a value that only code from the file could make.
        """
        if not names:
            return {}
        pickled = {n: self.contents.pickled[n] for n in names if n in self.contents.pickled and n not in archives}
        read = self._fetch([*pickled.values()], num_parts)
        archives = {**archives, **dict(zip(pickled, read, strict=True))}
        values: dict[str, Any] = {}
        for name in names:
            value = self.contents.values.get(name)
            tensor: Callable[[Any], Any] = _unchanged
            if name in archives:
                value, tensor = self._unpickled(name, archives[name])
            if (unknown := opaque_in(value)) is not None:
                raise CheckpointError(
                    f"{self.contents.name}: {name!r} holds an object of {unknown.what}, which only code from the file could "
                    "make: leave it out with `keys`, or save it as numbers, text and containers"
                )
            value = settle(value, tensor)
            values[name] = value if self._renaming is None else self._renaming.value(name, value)
        return values

    def _unpickled(self, name: str, data: bytes | bytearray) -> tuple[Any, Callable[[Any], Any]]:
        """(the value in an archive, what makes a tensor of a `View` in it)."""
        view = memoryview(data)

        def read(start: int, buffer: memoryview) -> None:
            buffer[:] = view[start : start + len(buffer)]

        try:
            archive = torch_zip.read_archive(read, len(data))
        except FormatError as error:
            raise FormatError(f"{self.contents.name}: the value {name!r}: {error}") from None

        def tensor(item: Any) -> Any:
            if not isinstance(item, torch_zip.View):
                return item
            if not item.num_spanned:
                return torch.empty(item.shape, dtype=item.dtype)
            start = archive.starts[item.storage.key] + item.offset * item.dtype.itemsize
            spanned = view[start : start + item.num_spanned * item.dtype.itemsize]
            # The bytes are copied, not the elements: an expanded tensor may have any number of elements.
            return as_tensor(memoryview(bytearray(spanned)), item.dtype, item.shape, item.strides)

        return archive.value, tensor


def parse_device(device: str | torch.device | None) -> torch.device | None:
    """The device of this name; "auto": a GPU if there is one. Raises ConfigError."""
    if device is None:
        return None
    try:
        if isinstance(device, str) and not _DEVICE.fullmatch(device):
            raise ValueError(f"expected auto, cpu, cuda or cuda:N, not {device!r}")
        parsed = device if isinstance(device, torch.device) else resolve_device(device)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"device: {error}") from error
    if str(parsed) == "cuda":  # the current device of this thread: a worker thread has one of its own
        return torch.device("cuda", torch.cuda.current_device())
    return parsed


def _unchanged(value: Any) -> Any:
    return value
