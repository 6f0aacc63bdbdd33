"""`loaderkit.restore`: a checkpoint's tensors, new or in place, and the plain values beside them."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import torch

from loaderkit._internal.device import resolve_device
from loaderkit._internal.units import parse_bytes
from loaderkit.checkpoint.checksums import Checksums
from loaderkit.checkpoint.contents import SMALL_BLOB, Checkpoint, TensorEntry, TensorShard
from loaderkit.checkpoint.discovery.locate import open_place
from loaderkit.checkpoint.discovery.manifest import Verify, read_manifest
from loaderkit.checkpoint.discovery.open import open_checkpoint
from loaderkit.checkpoint.formats import dcp, torch_zip
from loaderkit.checkpoint.names import Leaf, flatten, nest, opaque_in, settle
from loaderkit.checkpoint.restore.progress import Progress, progress_of
from loaderkit.checkpoint.restore.requests import (
    Dtype,
    choose,
    compare_names,
    given_tensors,
    matches,
    new_tensors,
    parse_dtype,
)
from loaderkit.checkpoint.transfer.fetch import fetch_of, fetch_ranges
from loaderkit.checkpoint.transfer.layout import as_tensor, unpacked
from loaderkit.checkpoint.transfer.plan import ReadRequest, ReadTotals
from loaderkit.checkpoint.transfer.session import TransferSession, access_to, name_touched
from loaderkit.checkpoint.transfer.stages import wait_for_queued
from loaderkit.connectors.base import ByteRange, Connector
from loaderkit.errors import CheckpointError, ConfigError, FormatError

if TYPE_CHECKING:
    from loaderkit.checkpoint.ranks.group import Group

TIMEOUT_S = 300.0  # for which a rank waits for another
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
_MOST_LEAVES = 100_000_000
_BLOB_HEAD = 4096  # of a piece's archive: its pickle, and its record's header
_BLOB_TAIL = 4096  # its directory
_MOST_LAYOUTS = 1024  # are looked for at once, in 8 MiB


def restore(
    url: str | os.PathLike[str],
    into: Any = None,
    *,
    device: str | torch.device | None = None,
    dtype: Dtype = None,
    keys: str | Iterable[str] | None = None,
    strict: bool = True,
    nested: bool = False,
    rank: int | None = None,
    world_size: int | None = None,
    memory: int | str = "2GiB",
    verify: Verify = "auto",
    progress: Callable[[Progress], None] | None = None,
    concurrency: int | Literal["auto"] = "auto",
    timeout_s: float = TIMEOUT_S,
    connectors: Mapping[str, Connector] | None = None,
) -> Any:
    """Bring a checkpoint's tensors back: as a dict, name -> tensor or plain value, or into the nested state dict `into`.

    `url` is a file, a directory, or either inside a tar: safetensors, torch.save, or torch.distributed.checkpoint. Names are
    dotted paths ("optimizer.state.0.step"). With `into` nothing is read or written before every name, shape and dtype fits;
    then its tensors are filled where they are, its plain values replaced, and `into` is returned.

    `device`: where new tensors are made ("cpu", "cuda"; default cpu). `dtype`: cast floating-point tensors to it; "target": to
    those of `into`. `keys`: only the names that match one of these globs. `strict=False` lets the checkpoint have more names
    than `into`. `nested=True` gives the state as it was saved, tables in tables, for `load_state_dict`. `memory`: bound on
    staging memory, besides the tensors; at most 24 MiB come to it for 24 threads' stacks and torch's kernels, and 2 MiB a
    thread where files are read past the page cache. `verify`: "auto" compares with the manifest if there is one, True demands
    one, False does not look. `progress` is called in this thread as tensors become whole.

    With `rank` and `world_size`, those of torch.distributed, all ranks call it for the same names, and every one gets
    everything: each byte is read by one rank and passed on to the others. `memory` is then that of all ranks of a machine
    together, `concurrency` the threads that read on each, and `timeout_s` how long a rank waits for another before it gives
    up, naming it.

    Raises CheckpointError (partial, damaged, or not fitting; its `touched` names what was written to before), PeerError
    (another rank failed), FormatError, ConnectorError, ConfigError.
    """
    with ExitStack() as stack:
        group = None
        if rank is not None or world_size is not None:
            if rank is None or world_size is None or not 0 <= rank < world_size:
                raise ConfigError(
                    f"rank {rank!r} of world_size {world_size!r}: give both, the rank from 0 to world_size - 1"
                )
            if world_size > 1:
                from loaderkit.checkpoint.restore.multi_rank import joined

                group = stack.enter_context(joined(rank, world_size, timeout_s))
        source = stack.enter_context(opened(url, connectors, memory, verify))
        source.group = group
        return source.restore(
            into,
            device=device,
            dtype=dtype,
            keys=keys,
            strict=strict,
            nested=nested,
            progress=progress,
            concurrency=concurrency,
        )


@contextmanager
def opened(
    url: str | os.PathLike[str], connectors: Mapping[str, Connector] | None, memory: int | str, verify: Verify
) -> Iterator[OpenCheckpoint]:
    """A checkpoint that was found whole, to restore from; its connector is closed in the end."""
    try:
        memory_bytes = parse_bytes(memory)
    except ValueError as error:
        raise ConfigError(f"memory: expected {error}") from None
    place = open_place(url, connectors or {})
    try:
        fetch = fetch_of(place.connector, memory_bytes)
        found = open_checkpoint(place, fetch)
        yield OpenCheckpoint(found, read_manifest(place, found, verify, fetch), memory_bytes)
    finally:
        place.close()


class OpenCheckpoint:
    """An open checkpoint, its checksums by object, and the bound on memory."""

    def __init__(self, found: Checkpoint, checksums: Mapping[str, Checksums], memory_bytes: int) -> None:
        self.found = found
        self.checksums = checksums
        self.memory_bytes = memory_bytes
        self.num_alike = 1  # ranks that restore together on this machine, and divide this memory
        self.objects = {info.key: info for info in found.objects.values()}
        self.totals: ReadTotals | None = None
        self.stats: dict[str, Any] | None = None
        self.group: Group | None = None  # the ranks that restore together

    def restore(
        self,
        into: Any,
        *,
        device: str | torch.device | None,
        dtype: Dtype,
        keys: str | Iterable[str] | None,
        strict: bool,
        nested: bool,
        progress: Callable[[Progress], None] | None,
        concurrency: int | Literal["auto"],
    ) -> Any:
        """See `loaderkit.restore`."""
        kind = parse_dtype(dtype)
        place = parse_device(device)
        keys = _globs(keys)
        if into is None:
            if kind == "target":
                raise ConfigError(
                    "dtype 'target' needs `into`: without it there are no tensors whose types could be meant"
                )
            tensors, values = choose(self.found, keys)
            on = place or torch.device("cpu")
            wait_for_queued([on])
            new = partial(new_tensors, names=tensors, device=on, dtype=kind)
            made, given = self._bring(
                tensors, values, new, device=on, progress=progress, concurrency=concurrency, touched=set()
            )
            flat = {name: made[name] for name in tensors} | given
            return nest(flat, self.found.paths, self.found.empty if keys is None else ()) if nested else flat
        leaves, tensors, values = self._fit(into, keys, strict)
        targets = {name: leaves[name].value for name in tensors}
        for name in values:
            _check_settable(self.found, name, leaves[name])
        fitted = partial(given_tensors, targets=targets, dtype=kind, device=place)
        wait_for_queued(t.device for t in targets.values())
        on = next((t.device for t in targets.values() if t.device.type != "cpu"), torch.device("cpu"))
        touched: set[str] = set()
        try:
            _, given = self._bring(
                tensors, values, fitted, device=on, progress=progress, concurrency=concurrency, touched=touched
            )
        except BaseException as error:
            name_touched(error, touched)
            raise
        for name, value in given.items():
            leaves[name].container[leaves[name].key] = value
        return into

    def _bring(
        self,
        names: list[str],
        values: list[str],
        wants_of: Callable[[Checkpoint], list[ReadRequest]],
        *,
        device: torch.device,
        progress: Callable[[Progress], None] | None,
        concurrency: int | Literal["auto"],
        touched: set[str],
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """(tensors, plain values) by name, alone or together with other ranks; `touched`: what has been written to."""
        if self.group is not None:
            from loaderkit.checkpoint.restore.multi_rank import bring

            return bring(
                self,
                self.group,
                names,
                values,
                wants_of,
                device=device,
                progress=progress,
                concurrency=concurrency,
                touched=touched,
            )
        requests = wants_of(self.resolved(names))
        given = self.plain_values(values)
        return dict(self._fill(requests, device, progress, concurrency, touched)), given

    def _fit(
        self, into: Any, keys: tuple[str, ...] | None, strict: bool
    ) -> tuple[dict[str, Leaf], list[str], list[str]]:
        """(leaves of `into`, names of tensors to fill, names of values to set), names compared."""
        if not isinstance(into, (dict, list)):
            raise ConfigError(
                f"into: expected a state dict, possibly nested, not {type(into).__name__}; of a module give module.state_dict()"
            )
        leaves = {name: leaf for name, leaf in flatten(into, _is_tensor, _MOST_LEAVES).items() if matches(name, keys)}
        tensors, values = choose(self.found, keys)
        compare_names(self.found, leaves, [*tensors, *values], strict=strict)
        tensors, values = ([name for name in names if name in leaves] for names in (tensors, values))
        for name in tensors:
            if not _is_tensor(leaves[name].value):
                raise CheckpointError(
                    f"{self.found.name}: {name!r} is a tensor, and a {type(leaves[name].value).__name__} in `into`; nothing "
                    "was written"
                )
        for name in values:
            if _is_tensor(leaves[name].value):
                raise CheckpointError(
                    f"{self.found.name}: {name!r} is no tensor, but one in `into`; nothing was written"
                )
        return leaves, tensors, values

    def fill_new(self, names: list[str], device: torch.device, dtype: Dtype, **settings: Any) -> TransferSession:
        """What yields these tensors, new, as they become whole."""
        kind = parse_dtype(dtype)
        if kind == "target":
            raise ConfigError("dtype 'target' needs tensors to be filled: see loaderkit.restore(url, into=...)")
        return self.filling(new_tensors(self.resolved(names), names, device, kind), device, **settings)

    def filling(
        self,
        requests: list[ReadRequest],
        device: torch.device,
        concurrency: int | Literal["auto"] = "auto",
        **settings: Any,
    ) -> TransferSession:
        """The engine for `requests`."""
        connector = self.found.connector
        num_workers, direct = access_to(connector, concurrency, requests, self.memory_bytes // self.num_alike)
        return TransferSession(
            requests,
            connector,
            self.objects,
            memory_bytes=self.memory_bytes,
            num_parts=self.num_alike,
            num_workers=num_workers,
            direct=direct,
            checksums=self.checksums,
            device=device,
            **settings,
        )

    def _fetch(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        return fetch_ranges(
            self.found.connector, self.objects, ranges, memory_bytes=self.memory_bytes, num_parts=self.num_alike
        )

    def _fill(
        self,
        requests: list[ReadRequest],
        device: torch.device,
        progress: Callable[[Progress], None] | None,
        concurrency: int | Literal["auto"],
        touched: set[str],
    ) -> Iterator[tuple[str, Any]]:
        begin_s = time.perf_counter()
        with self.filling(requests, device, concurrency, touched=touched) as filling:
            self.totals = filling.totals
            total = filling.plan.num_bytes
            for given in filling:
                yield from given
                if progress is not None:
                    progress(progress_of(self.found, filling.totals, total, time.perf_counter() - begin_s))
            self.stats = filling.stats().to_dict()

    # ------------------------------------------------------------------------------------- archives inside of files

    def resolved(self, names: Iterable[str]) -> Checkpoint:
        """The checkpoint with the large pieces of these tensors found in their archives."""
        return self.with_layouts(
            self.layouts((name, part) for name in names for part in self.found.tensors[name].parts)
        )

    def with_layouts(self, layouts: Mapping[tuple[str, tuple[int, ...]], TensorShard]) -> Checkpoint:
        """The checkpoint with some parts, by name and offsets, replaced by what was found of them."""
        if not layouts:
            return self.found
        tensors = dict(self.found.tensors)
        for name in dict.fromkeys(name for name, _ in layouts):
            stored = tensors[name]
            parts = tuple(layouts.get((name, part.offsets), part) for part in stored.parts)
            tensors[name] = TensorEntry(stored.dtype, stored.shape, parts, stored.storage)
        return replace(self.found, tensors=tensors)

    def layouts(self, wanted: Iterable[tuple[str, TensorShard]]) -> dict[tuple[str, tuple[int, ...]], TensorShard]:
        """The large ones of these parts as plain bytes, by name and offsets: two small reads a part."""
        parts = [(name, part) for name, part in wanted if part.is_blob and part.length > SMALL_BLOB]
        found = {}
        for lo in range(0, len(parts), _MOST_LAYOUTS):
            found.update(self._layouts(parts[lo : lo + _MOST_LAYOUTS]))
        return found

    def _layouts(self, parts: Sequence[tuple[str, TensorShard]]) -> dict[tuple[str, tuple[int, ...]], TensorShard]:
        ranges = []
        for _, part in parts:
            etag = self.objects[part.key].etag
            ranges.append(ByteRange(part.key, part.start, _BLOB_HEAD, etag))
            ranges.append(ByteRange(part.key, part.start + part.length - _BLOB_TAIL, _BLOB_TAIL, etag))
        read = self._fetch(ranges)
        found = {}
        for (name, part), head, tail in zip(parts, read[::2], read[1::2], strict=True):
            try:
                blob = dcp.read_blob(self._reader_inside(part, head, tail), part.length)
                found[name, part.offsets] = unpacked(part, self.found.tensors[name].dtype, blob)
            except FormatError as error:
                raise FormatError(
                    f"{self.found.describe(part.key)}: {name!r} from byte {part.start} on: {error}"
                ) from None
        return found

    def _reader_inside(self, part: TensorShard, head: bytes, tail: bytes) -> torch_zip.Read:
        """Reads in an archive whose beginning and end are there already."""
        tail_start = part.length - len(tail)

        def read(start: int, buffer: memoryview) -> None:
            end = start + len(buffer)
            if end <= len(head):
                buffer[:] = head[start:end]
            elif start >= tail_start:
                buffer[:] = tail[start - tail_start : end - tail_start]
            else:
                etag = self.objects[part.key].etag
                self.found.connector.read_into(part.key, part.start + start, buffer, etag=etag)

        return read

    # ------------------------------------------------------------------------------------------------- plain values

    def plain_values(
        self, names: list[str], known: Mapping[str, bytes | bytearray] = MappingProxyType({})
    ) -> dict[str, Any]:
        """Plain values by name, read where they lie in archives of their own unless the archive is `known`.

        Raises CheckpointError for what is not made.
        """
        pickled = {n: self.found.pickled[n] for n in names if n in self.found.pickled and n not in known}
        read = self._fetch([*pickled.values()])
        blobs = {**known, **dict(zip(pickled, read, strict=True))}
        found: dict[str, Any] = {}
        for name in names:
            value = self.found.values.get(name)
            tensor: Callable[[Any], Any] = _unchanged
            if name in blobs:
                value, tensor = self._unpickled(name, blobs[name])
            if (unknown := opaque_in(value)) is not None:
                raise CheckpointError(
                    f"{self.found.name}: {name!r} holds an object of {unknown.what}, which only code from the file could "
                    "make: leave it out with `keys`, or save it as numbers, text and containers"
                )
            found[name] = settle(value, tensor)
        return found

    def _unpickled(self, name: str, data: bytes | bytearray) -> tuple[Any, Callable[[Any], Any]]:
        view = memoryview(data)

        def read(start: int, buffer: memoryview) -> None:
            buffer[:] = view[start : start + len(buffer)]

        try:
            archive = torch_zip.read_archive(read, len(data))
        except FormatError as error:
            raise FormatError(f"{self.found.name}: the value {name!r}: {error}") from None

        def tensor(item: Any) -> Any:
            if not isinstance(item, torch_zip.View):
                return item
            if not item.num_spanned:
                return torch.empty(item.shape, dtype=item.dtype)
            start = archive.starts[item.storage.key] + item.offset * item.dtype.itemsize
            part = view[start : start + item.num_spanned * item.dtype.itemsize]
            # The bytes are copied, not the elements: an expanded tensor has any number of them.
            return as_tensor(memoryview(bytearray(part)), item.dtype, item.shape, item.strides)

        return archive.value, tensor


def parse_device(device: str | torch.device | None) -> torch.device | None:
    """The device meant by its name; "auto": a GPU if there is one. Raises ConfigError."""
    if device is None:
        return None
    try:
        if isinstance(device, str) and not _DEVICE.fullmatch(device):
            raise ValueError(f"expected auto, cpu, cuda or cuda:N, not {device!r}")
        found = device if isinstance(device, torch.device) else resolve_device(device)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"device: {error}") from error
    if str(found) == "cuda":  # this thread's: workers have a current device of their own
        return torch.device("cuda", torch.cuda.current_device())
    return found


def _globs(keys: str | Iterable[str] | None) -> tuple[str, ...] | None:
    """`keys` to be gone through more than once; None: all."""
    if keys is None:
        return None
    found = (keys,) if isinstance(keys, str) else tuple(keys)
    if not found:
        raise ConfigError("keys is empty, so nothing would be restored: leave it out to restore everything")
    return found


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _unchanged(value: Any) -> Any:
    return value


def _check_settable(found: Checkpoint, name: str, leaf: Leaf) -> None:
    if isinstance(leaf.container, tuple):
        raise CheckpointError(
            f"{found.name}: {name!r} stands in a tuple of `into`, which cannot be changed; nothing was written"
        )
