"""The engine's plan for tensors. One work item is a large tensor, or several small ones.

Work items come in the order of their first bytes. When one is opened, its byte spans are sorted by object and start,
neighbours are coalesced to one read, and reads are put into chunks of at most `limits.most_bytes`, the size of staging memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

from loaderkit._internal.units import say_bytes
from loaderkit.checkpoint.contents import MAX_BLOCK_BYTES
from loaderkit.checkpoint.transfer.layout import ByteSpan, ReadLimits
from loaderkit.connectors.base import Connector, traits_of
from loaderkit.engine.work import Chunk, WorkItem
from loaderkit.errors import ConfigError
from loaderkit.sampling.shard import Shard

_CHUNK_BYTES = 8 * 2**20
_MIN_CHUNK = 64 * 2**10
_MIN_CHECKED_CHUNK = 2**20
_MAX_GROUP = 256  # small tensors in one work item: their memory is made under the engine's lock, 10 us each
LATENCY_GAP = 256 * 2**10  # a store whose `coalesce_gap` is as large has latency

PreparedRead = tuple[list[ByteSpan], Callable[[], list[tuple[str, Any]]]]


@dataclass(frozen=True)
class ReadRequest:
    """A tensor, or several views of one storage, to be read. `prepare` makes its memory, unless the caller has, and returns
    its byte spans and `deliver`, which is called once all of them are read and returns names with their tensors."""

    label: str
    start: tuple[str, int]  # (key, offset) of its first byte
    num_bytes: int  # needed of the checkpoint
    new_bytes: int  # of memory that `prepare` makes
    prepare: Callable[[ReadLimits], PreparedRead]


class CoalescedRead(NamedTuple):
    """Neighbouring spans that one read covers: bytes [start, end) of an object. `is_direct`: it is one span, read
    straight into its target."""

    key: str
    start: int
    end: int
    spans: tuple[ByteSpan, ...]
    is_direct: bool


class ReadChunk(Chunk):
    """Some reads of one work item."""

    __slots__ = ("buffers", "number", "reads")
    number: int  # among all chunks
    reads: tuple[CoalescedRead, ...]
    buffers: list[memoryview]

    def index_of(self, row: int) -> int:
        return self.number


class TensorWork(WorkItem):
    """Tensors being filled. `deliver` are the functions of their requests."""

    __slots__ = ("deliver", "new_bytes", "num_bytes")
    deliver: list[Callable[[], list[tuple[str, Any]]]]
    new_bytes: int
    num_bytes: int

    def __str__(self) -> str:
        return f"group {self.begin} of tensors"


@dataclass
class ObjectTotals:
    """Reads of one object, and the seconds that these reads and the work on their bytes took, summed over all threads."""

    num_bytes: int = 0
    num_reads: int = 0
    seconds: float = 0.0  # in reads
    verify_s: float = 0.0
    copy_s: float = 0.0  # copies of bytes as they are
    cast_s: float = 0.0  # copies to another dtype, to strides, out of an archive, or to a GPU


@dataclass
class ReadTotals:
    """All reads so far; for any thread."""

    needed_bytes: int = 0
    fetched_bytes: int = 0
    num_reads: int = 0
    num_reread: int = 0
    objects: dict[str, ObjectTotals] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add_read(self, key: str, num_bytes: int, seconds: float) -> None:
        """Count one read of an object."""
        with self.lock:
            totals = self.objects.setdefault(key, ObjectTotals())
            totals.num_bytes += num_bytes
            totals.num_reads += 1
            totals.seconds += seconds
            self.fetched_bytes += num_bytes
            self.num_reads += 1

    def add_work(self, key: str, *, verify_s: float = 0.0, copy_s: float = 0.0, cast_s: float = 0.0) -> None:
        """Count work on the bytes of an object."""
        with self.lock:
            totals = self.objects.setdefault(key, ObjectTotals())
            totals.verify_s += verify_s
            totals.copy_s += copy_s
            totals.cast_s += cast_s


def chunk_bytes_of(connector: Connector) -> int:
    """Bytes that are read at once where memory allows."""
    return max(_CHUNK_BYTES, traits_of(connector).part_size)


def memory_of_worker(connector: Connector) -> int:
    """Staging memory, in bytes, of a worker whose reads memory does not limit."""
    return 2 * chunk_bytes_of(connector)


def limits_of(
    connector: Connector, memory_bytes: int, num_workers: int, *, is_checked: bool, num_parts: int = 1
) -> ReadLimits:
    """The limits with which all workers' staging memory stays within one of `num_parts` equal parts of `memory_bytes`.

    `is_checked`: blocks have checksums, so a read extends to the boundaries of its blocks. Raises ConfigError.
    """
    # Each worker has one staging buffer, which may be a quarter larger than requested, and copies within it.
    unit = MAX_BLOCK_BYTES if is_checked else 4096  # so that cuts are at boundaries of blocks
    most_bytes = min(chunk_bytes_of(connector), memory_bytes // (2 * num_workers * num_parts) // unit * unit)
    least = _MIN_CHECKED_CHUNK if is_checked else _MIN_CHUNK
    if most_bytes < least:
        raise ConfigError(
            f"memory is {say_bytes(memory_bytes)}, and the least is {say_bytes(2 * num_workers * num_parts * least)} with "
            f"{num_workers} workers{' on every rank of this machine' if num_parts > 1 else ''}: allow that much"
        )
    # With checksums, the rest of the two blocks at a read's ends is read to staging memory, too.
    return ReadLimits(
        most_bytes, traits_of(connector).coalesce_gap, most_bytes // 16, 2 * MAX_BLOCK_BYTES if is_checked else 0
    )


class TensorPlan:
    """Reads `requests` once, in the order of their first bytes. Implements the engine's `Plan`."""

    def __init__(
        self,
        requests: Sequence[ReadRequest],
        *,
        limits: ReadLimits,
        memory_bytes: int = 0,
        staging_bytes: int = 0,
        depth: int = 1,
        counts_made: bool = False,
    ) -> None:
        """`counts_made`: new tensors count as memory until they are delivered, because the consumer may then drop them."""
        self.is_prepared = True
        self.memory_bytes = memory_bytes
        self.totals = ReadTotals()
        self._limits = limits
        self._staging_bytes = staging_bytes
        self._depth = depth
        self._counts_made = counts_made
        self._groups = _grouped(sorted(requests, key=attrgetter("start")), limits.most_bytes)
        self._next = 0
        self._made_bytes = 0
        self._labels: list[str] = []  # of chunks, by number

    def __len__(self) -> int:
        """The number of work items."""
        return len(self._groups)

    @property
    def num_bytes(self) -> int:
        """Bytes needed of the checkpoint."""
        return sum(request.num_bytes for group in self._groups for request in group)

    @property
    def batch_size(self) -> int:
        return 1

    @property
    def next_position(self) -> tuple[int, int]:
        return 0, self._next

    @property
    def room(self) -> tuple[int, bool]:
        if not self._counts_made or self._made_bytes == 0 or self._next >= len(self._groups):
            return self._depth, False
        new_bytes = sum(request.new_bytes for request in self._groups[self._next])
        fits = self._staging_bytes + self._made_bytes + new_bytes <= self.memory_bytes
        return (self._depth, False) if fits else (0, True)

    def prepare(self) -> None:
        raise AssertionError("tensors are known from the start")

    def seek(self, epoch: int, position: int, shard: Shard | None = None) -> None:
        self._next = position

    def close(self) -> None:
        """Nothing to do: the memory is the user's."""

    def begins_at(self, epoch: int, position: int, shard: Shard | None = None) -> tuple[int, int]:
        return 0, position

    def redeal(self, border: tuple[int, int], shard: Shard | None) -> None:
        raise AssertionError("one engine reads all tensors")

    def share(self, shard: Shard) -> None:
        raise AssertionError("one engine reads all tensors")

    def set_depth(self, num_batches: int | None, memory_bytes: int | None) -> None:
        self._depth = num_batches or self._depth
        self.memory_bytes = memory_bytes or self.memory_bytes

    def key(self, index: int) -> str:
        return self._labels[index]

    def preparing(self) -> None:
        return None

    def memory_stats(self, num_open: int) -> dict[str, int]:
        return {
            "slab_bytes": self._limits.most_bytes,
            "batch_bytes": self._limits.most_bytes,
            "open_bytes": self._staging_bytes + self._made_bytes,
            "live_bytes": self._made_bytes,
            "allocated_bytes": self._staging_bytes + self._made_bytes,
        }

    def open(self, chunk_size: int) -> TensorWork | None:
        if self._next >= len(self._groups):
            return None
        group = self._groups[self._next]
        work_item = TensorWork(0, self._next, self._next + 1, len(group))
        self._next += 1
        spans: list[ByteSpan] = []
        work_item.deliver = []
        for request in group:
            prepared, deliver = request.prepare(self._limits)
            spans += prepared
            work_item.deliver.append(deliver)
        work_item.new_bytes = sum(request.new_bytes for request in group)
        work_item.num_bytes = sum(request.num_bytes for request in group)
        self._made_bytes += work_item.new_bytes
        for reads in _in_chunks(coalesce(spans, self._limits), self._limits) or [[]]:
            work_item.chunks.append(self._chunk(work_item, reads))
        work_item.num_pending = len(work_item.chunks)
        return work_item

    def _chunk(self, work_item: TensorWork, reads: Sequence[CoalescedRead]) -> ReadChunk:
        number = len(self._labels)
        self._labels.append(_label(reads))
        slot = len(work_item.chunks)
        chunk = ReadChunk(work_item, slot, slot + 1)
        chunk.number = number
        chunk.reads = tuple(reads)
        chunk.buffers = []
        return chunk

    def finish(self, work_item: WorkItem) -> list[tuple[str, Any]]:
        assert isinstance(work_item, TensorWork)
        delivered = [item for deliver in work_item.deliver for item in deliver()]
        work_item.deliver = []
        with self.totals.lock:
            self.totals.needed_bytes += work_item.num_bytes
        return delivered

    def context(self, work_item: WorkItem) -> None:
        """No stage works on whole results."""

    def release(self, work_item: WorkItem) -> None:
        assert isinstance(work_item, TensorWork)
        self._made_bytes -= work_item.new_bytes


def _grouped(requests: Sequence[ReadRequest], most_bytes: int) -> list[list[ReadRequest]]:
    """Neighbours in one group until it has a chunk's bytes."""
    groups: list[list[ReadRequest]] = []
    size = most_bytes
    for request in requests:
        if not groups or size + request.num_bytes > most_bytes or len(groups[-1]) >= _MAX_GROUP:
            groups.append([])
            size = 0
        groups[-1].append(request)
        size += request.num_bytes
    return groups


def coalesce(spans: Sequence[ByteSpan], limits: ReadLimits) -> list[CoalescedRead]:
    """The reads of all `spans`: gaps up to the limit are read over; large spans with a target are read by themselves."""
    reads: list[list[ByteSpan]] = []
    end = 0
    for span in sorted(spans, key=attrgetter("key", "start")):
        current = reads[-1] if reads else None
        if (
            current is None
            or current[0].key != span.key
            or span.start - end > limits.coalesce_gap
            or max(end, span.start + span.length) - current[0].start > limits.most_bytes
            or (span.target is not None and span.length >= limits.least_direct)
            or (current[0].target is not None and current[0].length >= limits.least_direct)
        ):
            reads.append([span])
            end = span.start + span.length
        else:
            current.append(span)
            end = max(end, span.start + span.length)
    return [_read_of(neighbours) for neighbours in reads]


def _read_of(spans: list[ByteSpan]) -> CoalescedRead:
    first = spans[0]
    if len(spans) == 1:
        return CoalescedRead(first.key, first.start, first.start + first.length, (first,), first.target is not None)
    return CoalescedRead(first.key, first.start, max(s.start + s.length for s in spans), tuple(spans), False)


def _in_chunks(reads: Sequence[CoalescedRead], limits: ReadLimits) -> list[list[CoalescedRead]]:
    """Reads in chunks of at most `limits.most_bytes`, or of one read.

    For a store with latency each read is a chunk: the reads of one chunk follow one another.
    """
    if limits.coalesce_gap >= LATENCY_GAP:
        return [[read] for read in reads]
    chunks: list[list[CoalescedRead]] = []
    size = 0
    for read in reads:
        length = read.end - read.start + limits.edge_bytes
        if not chunks or size + length > limits.most_bytes:
            chunks.append([])
            size = 0
        chunks[-1].append(read)
        size += length
    return chunks


def _label(reads: Sequence[CoalescedRead]) -> str:
    if not reads:
        return "nothing"
    names = [span.label for read in reads for span in read.spans]
    more = f" and {len(set(names)) - 1} more" if len(set(names)) > 1 else ""
    return f"{names[0]}{more}, bytes {reads[0].start} to {reads[-1].end} of {reads[0].key}"
