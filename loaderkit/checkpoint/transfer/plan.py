"""The plan of tensors: what `prefetch.plan.BatchPlan` is for batches. One destination is a large tensor, or some small ones.

Destinations come in the order in which their first bytes lie. When one is opened, its pieces are sorted by object and place,
neighbours are joined to runs, and runs are dealt to chunks of at most `chunk_bytes`: so no staging memory is larger.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from loaderkit._internal.units import say_bytes
from loaderkit.checkpoint.checksums import MOST_BLOCK_BYTES
from loaderkit.checkpoint.transfer.layout import ByteSpan, ReadLimits
from loaderkit.connectors.base import Connector, traits_of
from loaderkit.engine.work import Chunk, FieldSpec, WorkItem
from loaderkit.errors import ConfigError

_CHUNK_BYTES = 8 * 2**20
_LEAST_CHUNK = 64 * 2**10
_LEAST_CHECKED_CHUNK = 2**20
_MOST_IN_GROUP = 256  # small tensors in one destination: their memory is made under the engine's lock, 10 us each
SMALL_GAP = 256 * 2**10  # connectors with a larger one answer late

Laid = tuple[list[ByteSpan], Callable[[], list[tuple[str, Any]]]]


@dataclass(frozen=True)
class ReadRequest:
    """Something to be filled. `lay` makes its memory, if it has none, and its pieces; what it then returns is called when all
    of them have landed, and says what to deliver: names with their tensors."""

    label: str
    first: tuple[str, int]  # where its bytes begin
    num_bytes: int  # that are needed of the checkpoint
    made_bytes: int  # of memory that is made for it
    lay: Callable[[ReadLimits], Laid]


class CoalescedRead(NamedTuple):
    """Neighbouring pieces that are read at once: bytes [start, end) of an object. `is_direct`: one piece, to its target."""

    key: str
    start: int
    end: int
    byte_spans: tuple[ByteSpan, ...]
    is_direct: bool


class ReadChunk(Chunk):
    """Some runs of one destination."""

    __slots__ = ("buffers", "runs")
    runs: tuple[CoalescedRead, ...]
    buffers: list[memoryview]


class TensorWork(WorkItem):
    """Some tensors being filled. `gives` are called for what to deliver."""

    __slots__ = ("gives", "made_bytes", "num_bytes")
    gives: list[Callable[[], list[tuple[str, Any]]]]
    made_bytes: int
    num_bytes: int


@dataclass
class ObjectTotals:
    """What was read of one object, and how long that and what came after took, over all threads together."""

    num_bytes: int = 0
    num_reads: int = 0
    seconds: float = 0.0  # in reads
    verify_s: float = 0.0
    copy_s: float = 0.0  # of bytes as they are
    cast_s: float = 0.0  # to another type, to strides, out of an archive, or to a GPU


@dataclass
class ReadTotals:
    """What has happened so far; for any thread."""

    needed_bytes: int = 0
    fetched_bytes: int = 0
    num_reads: int = 0
    num_reread: int = 0
    objects: dict[str, ObjectTotals] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, key: str, num_bytes: int, seconds: float) -> None:
        """One read of an object is done."""
        with self.lock:
            totals = self.objects.setdefault(key, ObjectTotals())
            totals.num_bytes += num_bytes
            totals.num_reads += 1
            totals.seconds += seconds
            self.fetched_bytes += num_bytes
            self.num_reads += 1

    def note_work(self, key: str, *, verify_s: float = 0.0, copy_s: float = 0.0, cast_s: float = 0.0) -> None:
        """What was read of an object has been worked on."""
        with self.lock:
            totals = self.objects.setdefault(key, ObjectTotals())
            totals.verify_s += verify_s
            totals.copy_s += copy_s
            totals.cast_s += cast_s


def gap_of(connector: Connector) -> int:
    """How many bytes cost less to read than another request: little in a file, much in an object store."""
    return traits_of(connector).coalesce_gap


def chunk_bytes_of(connector: Connector) -> int:
    """How much is read at once where memory allows."""
    return max(_CHUNK_BYTES, spread_of(connector))


def spread_of(connector: Connector) -> int:
    """From how many bytes on a read is several requests at a time; 0: it never is."""
    return traits_of(connector).part_size


def memory_of_worker(connector: Connector) -> int:
    """Staging memory, in bytes, of each worker that reads as much at once as it likes."""
    return 2 * chunk_bytes_of(connector)


def limits_of(
    connector: Connector, memory_bytes: int, num_workers: int, *, is_checked: bool, num_parts: int = 1
) -> ReadLimits:
    """How ranges are cut so that all workers' staging memory stays within one of `num_parts` equal parts of the bound.

    `is_checked`: there are checksums, of blocks, and a range is read up to the borders of its blocks. Raises ConfigError.
    """
    # Each worker has one staging buffer, which may be a quarter larger than what was asked for, and copies within it.
    unit = MOST_BLOCK_BYTES if is_checked else 4096  # so that cuts are at borders of blocks
    found = min(chunk_bytes_of(connector), memory_bytes // (2 * num_workers * num_parts) // unit * unit)
    least = _LEAST_CHECKED_CHUNK if is_checked else _LEAST_CHUNK
    if found < least:
        raise ConfigError(
            f"memory is {say_bytes(memory_bytes)}, and the least is {say_bytes(2 * num_workers * num_parts * least)} with "
            f"{num_workers} workers{' on every rank of this machine' if num_parts > 1 else ''}: allow that much"
        )
    # With checksums the rest of the two blocks in which a run ends is read to staging memory, too.
    return ReadLimits(found, gap_of(connector), found // 16, 2 * MOST_BLOCK_BYTES if is_checked else 0)


class TensorPlan:
    """Fills `requests` once, from the first to the last. Implements `prefetch.plan.Plan`."""

    def __init__(
        self,
        requests: Sequence[ReadRequest],
        *,
        limits: ReadLimits,
        memory_bytes: int,
        staging_bytes: int,
        depth: int,
        counts_made: bool,
    ) -> None:
        """`counts_made`: the tensors made count as memory until they are delivered, because the consumer may drop them."""
        self.specs: Mapping[str, FieldSpec] | None = MappingProxyType({})
        self.memory_bytes = memory_bytes
        self.totals = ReadTotals()
        self._limits = limits
        self._staging_bytes = staging_bytes
        self._depth = depth
        self._counts_made = counts_made
        self._groups = _grouped(sorted(requests, key=lambda request: request.first), limits.most_bytes)
        self._next = 0
        self._made_bytes = 0
        self._labels: list[str] = []  # of chunks, by number

    def __len__(self) -> int:
        """Destinations in all."""
        return len(self._groups)

    @property
    def num_bytes(self) -> int:
        """That are needed of the checkpoint."""
        return sum(request.num_bytes for group in self._groups for request in group)

    @property
    def batch_size(self) -> int:
        return 1

    @property
    def place(self) -> tuple[int, int]:
        return 0, self._next

    @property
    def room(self) -> tuple[int, bool]:
        if not self._counts_made or self._made_bytes == 0 or self._next >= len(self._groups):
            return self._depth, False
        wanted = sum(request.made_bytes for request in self._groups[self._next])
        fits = self._staging_bytes + self._made_bytes + wanted <= self.memory_bytes
        return (self._depth, False) if fits else (0, True)

    def prepare(self) -> None:
        raise AssertionError("tensors are known from the start")

    def seek(self, epoch: int, position: int) -> None:
        self._next = position

    def begins_at(self, epoch: int, position: int) -> tuple[int, int]:
        return 0, position

    def set_depth(self, num_batches: int | None, memory_bytes: int | None) -> None:
        self._depth = num_batches or self._depth
        self.memory_bytes = memory_bytes or self.memory_bytes

    def key(self, index: int) -> str:
        return self._labels[index]

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
        numbers = np.arange(self._next, self._next + len(group), dtype=np.int64)
        work_item = TensorWork(
            epoch=0, step=self._next, positions=numbers, indices=numbers, begin=self._next, end=self._next + 1
        )
        self._next += 1
        byte_spans: list[ByteSpan] = []
        work_item.gives = []
        for request in group:
            laid, give = request.lay(self._limits)
            byte_spans += laid
            work_item.gives.append(give)
        work_item.made_bytes = sum(request.made_bytes for request in group)
        work_item.num_bytes = sum(request.num_bytes for request in group)
        self._made_bytes += work_item.made_bytes
        runs = joined(byte_spans, self._limits)
        for dealt in _dealt(runs, self._limits) or [[]]:
            work_item.chunks.append(self._chunk(work_item, dealt))
        work_item.num_pending = len(work_item.chunks)
        return work_item

    def _chunk(self, work_item: TensorWork, runs: Sequence[CoalescedRead]) -> ReadChunk:
        number = len(self._labels)
        self._labels.append(_label(runs))
        place = len(work_item.chunks)
        chunk = ReadChunk(work_item, place, place + 1, 0, np.array([number], np.int64))
        chunk.runs = tuple(runs)
        chunk.buffers = []
        return chunk

    def finish(self, work_item: WorkItem) -> list[tuple[str, Any]]:
        assert isinstance(work_item, TensorWork)
        found = [item for give in work_item.gives for item in give()]
        work_item.gives = []
        with self.totals.lock:
            self.totals.needed_bytes += work_item.num_bytes
        return found

    def release(self, work_item: WorkItem) -> None:
        assert isinstance(work_item, TensorWork)
        self._made_bytes -= work_item.made_bytes


def _grouped(requests: Sequence[ReadRequest], most_bytes: int) -> list[list[ReadRequest]]:
    """Neighbours together until they are a chunk's worth."""
    groups: list[list[ReadRequest]] = []
    size = most_bytes
    for request in requests:
        if not groups or size + request.num_bytes > most_bytes or len(groups[-1]) >= _MOST_IN_GROUP:
            groups.append([])
            size = 0
        groups[-1].append(request)
        size += request.num_bytes
    return groups


def joined(byte_spans: Sequence[ByteSpan], limits: ReadLimits) -> list[CoalescedRead]:
    """Neighbouring pieces as runs: gaps are read over, up to the bound; large pieces with a target stay by themselves."""
    found: list[list[ByteSpan]] = []
    end = 0
    for byte_span in sorted(byte_spans, key=lambda byte_span: (byte_span.key, byte_span.start)):
        stays = byte_span.target is not None and byte_span.length >= limits.least_direct
        run = found[-1] if found else None
        if (
            run is None
            or stays
            or run[0].key != byte_span.key
            or (run[0].target is not None and run[0].length >= limits.least_direct)
            or byte_span.start - end > limits.coalesce_gap
            or max(end, byte_span.start + byte_span.length) - run[0].start > limits.most_bytes
        ):
            found.append([byte_span])
            end = byte_span.start + byte_span.length
        else:
            run.append(byte_span)
            end = max(end, byte_span.start + byte_span.length)
    return [_run(run) for run in found]


def _run(byte_spans: list[ByteSpan]) -> CoalescedRead:
    end = max(byte_span.start + byte_span.length for byte_span in byte_spans)
    is_direct = len(byte_spans) == 1 and byte_spans[0].target is not None
    return CoalescedRead(byte_spans[0].key, byte_spans[0].start, end, tuple(byte_spans), is_direct)


def _dealt(runs: Sequence[CoalescedRead], limits: ReadLimits) -> list[list[CoalescedRead]]:
    """Runs in chunks of at most so many bytes, with what is read besides them, or one run.

    A store that answers late is asked for each run by itself: a chunk's runs are read one after the other.
    """
    if limits.coalesce_gap >= SMALL_GAP:
        return [[run] for run in runs]
    chunks: list[list[CoalescedRead]] = []
    size = 0
    for run in runs:
        length = run.end - run.start + limits.edge_bytes
        if not chunks or size + length > limits.most_bytes:
            chunks.append([])
            size = 0
        chunks[-1].append(run)
        size += length
    return chunks


def _label(runs: Sequence[CoalescedRead]) -> str:
    if not runs:
        return "nothing"
    names = [byte_span.label for run in runs for byte_span in run.byte_spans]
    more = f" and {len(set(names)) - 1} more" if len(set(names)) > 1 else ""
    return f"{names[0]}{more}, bytes {runs[0].start} to {runs[-1].end} of {runs[0].key}"
