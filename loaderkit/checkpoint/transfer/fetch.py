"""Reads byte ranges by a few threads: into tensors, as a restore needs them, or into memory of its own.

each thread: the next chunk of reads ──> read, verified ──> place        the caller: one work item after the other
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import Any, Literal, NamedTuple

import torch

from loaderkit._internal.cuda.streams import DeviceStreams
from loaderkit._internal.system.cgroups import num_cpus
from loaderkit._internal.torch_threads import ONE_AT_A_TIME, new_thread_default_kept
from loaderkit.checkpoint.contents import Checksums
from loaderkit.checkpoint.transfer.layout import ByteSpan, ReadLimits
from loaderkit.checkpoint.transfer.plan import (
    LATENCY_GAP,
    PreparedRead,
    ReadRequest,
    TensorPlan,
    TensorWork,
    limits_of,
    memory_of_worker,
)
from loaderkit.checkpoint.transfer.stages import TransferStages
from loaderkit.connectors.base import ByteRange, Connector, ObjectInfo, bulk_of, traits_of
from loaderkit.connectors.page_cache import cached_share, parts_of
from loaderkit.engine.watchdog import HangReport, Patience, describe_wait, stack_of
from loaderkit.engine.work import Chunk
from loaderkit.errors import ConfigError

_PATIENCE_S = 60.0  # of the caller, who hears of reads that hang
_JOIN_S, _SHORT_JOIN_S = 10.0, 2.0  # for threads inside a read: after an error, and after Ctrl-C
_FEW = 4  # ranges, for which threads are not worth their start
_LEAST_MEMORY = 128 * 2**10  # bytes of a worker that reads descriptions
_LABEL = "its description"
_REMOTE_WORKERS = 16
_SPLITTING_WORKERS = 8  # each has several requests in flight
# Tensors of this size take 60 us and more of Python, and 10 us to read. 4,000 tensors, with one thread and with two, in ms: of
# 1 KiB 461 and 635 (dcp), 257 and 290 (safetensors); of 16 KiB 492 and 595, 272 and 276; of 64 KiB 520 and 605, 342 and 325.
_SMALL_BYTES = 64 * 2**10
# On two CPUs, two threads read from the page cache as fast as eight. From a disk eight are faster, and past the page cache up
# to 24, because some are busy with copies. A thread takes 0.3 ms to start, and must have enough to do.
_DISK_WORKERS = 8
_DIRECT_WORKERS = 24
_WORTH_A_WORKER = 32 * 2**20
_FROM_MEMORY = 0.9  # share in the page cache from which on the disk does not matter
_WORTH_KEEPING = 0.1  # share in the page cache from which on the rest is read through it, too
# Of torchrun and most other launchers, Slurm, Open MPI, MPICH.
_NUMBERS_OF_PROCESSES = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
logger = logging.getLogger("loaderkit")


class Access(NamedTuple):
    """How a store is read: the number of threads, and whether they read past the page cache."""

    num_workers: int
    direct: bool = False


def num_workers_of(
    connector: Connector, concurrency: int | Literal["auto"], requests: Sequence[ReadRequest] | None = None
) -> int:
    """The number of threads that read: one a CPU for files, but only one if `requests` are small on average, because
    Python then takes longer than reading. Most for a store with latency, fewer if the connector splits long `requests`
    itself.

    Raises ConfigError for a `concurrency` that is no such number.
    """
    if concurrency != "auto":
        if type(concurrency) is not int or concurrency < 1:
            raise ConfigError(f"concurrency {concurrency!r}: expected 'auto', or a number of threads from 1 on")
        return concurrency
    mean = _mean_bytes(requests)
    traits = traits_of(connector)
    if traits.coalesce_gap >= LATENCY_GAP:
        is_split = mean is not None and mean >= traits.part_size // 4 > 0
        return _SPLITTING_WORKERS if is_split else _REMOTE_WORKERS
    return 1 if mean is not None and mean < _SMALL_BYTES else max(2, num_cpus())


def plan_access(
    connector: Connector, concurrency: int | Literal["auto"], requests: Sequence[ReadRequest], memory_bytes: int
) -> Access:
    """How a rank that shares nothing reads `requests`: from a disk with more threads than CPUs, as far as memory allows, and
    past the page cache. Raises ConfigError as `num_workers_of`."""
    num_workers = num_workers_of(connector, concurrency, requests)
    if traits_of(connector).coalesce_gap >= LATENCY_GAP or (_mean_bytes(requests) or 0) < _SMALL_BYTES:
        return Access(num_workers)
    paths = parts_of(connector, ((*request.start, request.num_bytes) for request in requests))
    share = cached_share(paths) if paths else 1.0
    is_from_disk = share is not None and share < _WORTH_KEEPING
    direct = is_from_disk and bulk_of(connector).read_direct is not None and not _has_other_processes()
    if concurrency == "auto" and (share is None or share < _FROM_MEMORY):
        useful = _DISK_WORKERS
        if direct:
            num_bytes = sum(request.num_bytes for request in requests)
            useful = max(useful, min(_DIRECT_WORKERS, num_bytes // _WORTH_A_WORKER))
        num_workers = max(num_workers, min(useful, memory_bytes // memory_of_worker(connector)))
    return Access(num_workers, direct)


def _mean_bytes(requests: Sequence[ReadRequest] | None) -> float | None:
    return sum(request.num_bytes for request in requests) / len(requests) if requests else None


def _has_other_processes() -> bool:
    """True if other processes may read the same bytes, and should find them in the page cache."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        return True
    return any(os.environ.get(name, "1") != "1" for name in _NUMBERS_OF_PROCESSES)


class Fill:
    """Reads `requests`, and iterates once over the tensors as they become whole. With one worker the caller's thread reads.

    It measures and tunes nothing, and keeps to no bound on new tensors; see `TransferSession` for that.
    """

    def __init__(
        self,
        requests: Sequence[ReadRequest],
        connector: Connector,
        objects: Mapping[str, ObjectInfo],
        *,
        memory_bytes: int,
        num_parts: int = 1,
        access: Access,
        checksums: Mapping[str, Checksums] | None = None,
        devices: Collection[torch.device] = (),
        touched: set[str] | None = None,
    ) -> None:
        """The arguments are the same as those of `TransferSession`."""
        self.plan = TensorPlan(
            requests,
            limits=limits_of(
                connector, memory_bytes, access.num_workers, is_checked=bool(checksums), num_parts=num_parts
            ),
        )
        self._num_workers = access.num_workers
        self._devices = {device for device in devices if device.type == "cuda"}
        self._make_stages = partial(
            TransferStages,
            connector,
            objects,
            self.plan.totals,
            checksums=checksums or {},
            touched=set() if touched is None else touched,
            direct=access.direct,
        )
        self._changed = threading.Condition()  # guards what follows
        self._open: deque[TensorWork] = deque()  # not delivered yet
        self._chunks: deque[Chunk] = deque()  # of those, taken by no thread yet
        self._error: BaseException | None = None
        self._is_over = False

    def __iter__(self) -> Iterator[list[tuple[str, Any]]]:
        """Names with their tensors, of one work item after the other. An error of a read ends all of them."""
        with ExitStack() as entered:
            entered.callback(self._let_go)
            streams = entered.enter_context(closing(DeviceStreams(self._devices))) if self._devices else None
            stages = self._make_stages(streams=streams)
            threads: list[threading.Thread] = []
            scratch: dict[str, Any] = {}
            if self._num_workers > 1:
                entered.push(partial(self._end, threads))
                self._start(stages, threads)
            for _ in range(len(self.plan)):
                while not self._is_next_whole():
                    if threads:
                        self._wait(threads)
                    elif (chunk := self._take(scratch)) is not None:
                        self._run(stages, chunk)
                yield self._delivered(self._open.popleft())

    def _is_next_whole(self) -> bool:
        error, self._error = self._error, None  # whose traceback refers to this object and to the tensors' memory
        try:
            if error is not None:
                raise error
        finally:
            del error
        return bool(self._open) and self._open[0].num_pending == 0

    def _delivered(self, work_item: TensorWork) -> list[tuple[str, Any]]:
        delivered = self.plan.finish(work_item)
        work_item.chunks.clear()  # which refer to it and to the tensors' memory
        return delivered

    def _let_go(self) -> None:
        for work_item in self._open:
            work_item.chunks.clear()

    def _take(self, scratch: dict[str, Any]) -> Chunk | None:
        """The next chunk, for a thread that has the memory `scratch`; None if there is none left."""
        with self._changed:
            while not self._chunks and (work_item := self.plan.open(1)) is not None:
                self._open.append(work_item)
                self._chunks.extend(work_item.chunks)
            if not self._chunks or self._is_over:
                return None
            chunk = self._chunks.popleft()
            chunk.scratch = scratch
            return chunk

    def _run(self, stages: TransferStages, chunk: Chunk) -> None:
        for number, stage in enumerate((stages.read, stages.place)):
            chunk.marks.append((time.monotonic(), number))
            stage(chunk)
        with self._changed:
            chunk.has_landed = True
            chunk.work_item.num_pending -= 1
            if chunk.work_item.num_pending == 0:
                self._changed.notify()

    # ----------------------------------------------------------------------------------------------------------- threads

    def _start(self, stages: TransferStages, threads: list[threading.Thread]) -> None:
        """Start the threads. Returns once torch computes alone in each of them."""
        are_set = threading.Semaphore(0)

        def work() -> None:
            compute_alone()
            are_set.release()
            scratch: dict[str, Any] = {}
            try:
                while (chunk := self._take(scratch)) is not None:
                    self._run(stages, chunk)
            except BaseException as error:  # raised again below, by the caller
                with self._changed:
                    if not self._is_over:  # the first one: others may fail before it is raised
                        self._error, self._is_over = error, True
                    self._changed.notify()

        with ONE_AT_A_TIME, new_thread_default_kept() as compute_alone:
            try:
                for number in range(self._num_workers):
                    thread = threading.Thread(target=work, name=f"loaderkit-read-{number}", daemon=True)
                    thread.start()
                    threads.append(thread)
            finally:
                for _ in threads:
                    are_set.acquire()

    def _wait(self, threads: Sequence[threading.Thread]) -> None:
        """Return once the next work item is whole or a read has failed; warn of what hangs meanwhile."""
        patience = Patience(_PATIENCE_S, raises=False)
        with self._changed:
            while not self._is_next_whole():
                if not self._changed.wait(patience.next_s):
                    patience.ends(partial(self._hang, threads))

    def _hang(self, threads: Sequence[threading.Thread]) -> HangReport:
        return describe_wait(
            self._open[0] if self._open else None,
            time.monotonic(),
            stage_names=("read", "place"),
            key_of=self.plan.key,
            threads=threads,
        )

    def _end(self, threads: Sequence[threading.Thread], kind: type[BaseException] | None, *_: Any) -> None:
        """Join the threads; one that hangs in a read is left behind with a warning."""
        with self._changed:
            self._is_over = True
        join_s = _SHORT_JOIN_S if kind is not None and not issubclass(kind, Exception) else _JOIN_S
        deadline_s = time.monotonic() + join_s
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
            if thread.is_alive():
                logger.warning("%s did not stop within %g s: a read hangs\n%s", thread.name, join_s, stack_of(thread))


def fetch_ranges(
    connector: Connector,
    objects: Mapping[str, ObjectInfo],
    ranges: Sequence[ByteRange],
    *,
    memory_bytes: int,
    num_parts: int = 1,
) -> list[bytes]:
    """The bytes of `ranges`, read by several threads where there are more than a few. Memory: see `TransferSession`."""
    if not ranges:
        return []
    buffers = [bytearray(item.length) for item in ranges]
    if len(ranges) <= _FEW:
        for item, data in zip(ranges, buffers, strict=True):
            connector.read_into(item.key, item.start, memoryview(data), etag=item.etag)
        return [bytes(data) for data in buffers]
    requests = [
        ReadRequest(_LABEL, (item.key, item.start), item.length, 0, _into(item, memoryview(data)))
        for item, data in zip(ranges, buffers, strict=True)
    ]
    workers = max(1, min(num_workers_of(connector, "auto"), memory_bytes // num_parts // _LEAST_MEMORY))
    objects = {**objects, **{item.key: ObjectInfo(item.key, 0, item.etag) for item in ranges if item.etag is not None}}
    fill = Fill(requests, connector, objects, memory_bytes=memory_bytes, num_parts=num_parts, access=Access(workers))
    for _ in fill:
        pass
    return [bytes(data) for data in buffers]


def fetch_of(connector: Connector, memory_bytes: int = 2**28) -> Callable[[Sequence[ByteRange]], list[bytes]]:
    """`fetch_ranges` for one connector, to read the descriptions of a checkpoint."""
    return partial(fetch_ranges, connector, {}, memory_bytes=memory_bytes)


def _into(item: ByteRange, target: memoryview) -> Callable[[ReadLimits], PreparedRead]:
    def prepare(limits: ReadLimits) -> PreparedRead:
        spans = [
            ByteSpan(_LABEL, item.key, item.start + lo, min(limits.most_bytes, item.length - lo), part, None)
            for lo in range(0, item.length, limits.most_bytes)
            for part in (target[lo : lo + limits.most_bytes],)
        ]
        return spans, list

    return prepare
