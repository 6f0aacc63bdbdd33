"""Fill tensors on several ranks at once: each byte is read by one of them, and sent to the others that need it.

    ranges that this rank owns ─> Engine (reads ahead) ─┐
                                                        ├─> one thread, range by range: distribute ─> into the tensors
    ranges that other ranks own ────────────────────────┘

All ranks go through the ranges in the same order, so that each receives what another sends at that moment.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch

from loaderkit._internal.cuda.host_pages import HostPins
from loaderkit._internal.cuda.streams import DeviceStreams
from loaderkit.checkpoint.contents import Checksums
from loaderkit.checkpoint.transfer.layout import ByteSpan, ReadLimits
from loaderkit.checkpoint.transfer.plan import PreparedRead, ReadRequest, ReadTotals
from loaderkit.checkpoint.transfer.session import TransferSession
from loaderkit.checkpoint.transfer.shared_ranges import NeededRange, OwnedRange, assign_owners
from loaderkit.checkpoint.transfer.stages import place_span
from loaderkit.connectors.base import Connector, ObjectInfo
from loaderkit.engine.metrics.snapshot import Snapshot
from loaderkit.ranks.group import RankGroup

_JOIN_S = 15.0  # more than the engine waits for workers that hang


@dataclass
class ExchangeTotals:
    """The counters of an exchange, which any thread may read. This rank read `read_bytes` and received
    `received_bytes`. It spent `waited_s` waiting for its own reads, `passing_s` sending and receiving, and `placing_s`
    on copies."""

    num_segments: int = 0  # owned ranges, of all ranks
    num_bytes: int = 0  # written to tensors
    read_bytes: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    waited_s: float = 0.0
    passing_s: float = 0.0
    placing_s: float = 0.0


def common_limits(limits: Sequence[Sequence[int]]) -> ReadLimits:
    """The limits that all ranks can keep."""
    return ReadLimits(*(min(values) for values in zip(*limits, strict=True)))


class RankExchange:
    """One rank's part of an exchange. `run` it on one thread; the totals are for any."""

    def __init__(
        self,
        group: RankGroup,
        connector: Connector,
        objects: Mapping[str, ObjectInfo],
        *,
        ranges: Sequence[NeededRange],
        spans: Sequence[ByteSpan],
        limits: ReadLimits,
        memory_bytes: int,
        num_parts: int,
        num_workers: int,
        checksums: Mapping[str, Checksums],
        devices: Collection[torch.device] = (),
        touched: set[str],
    ) -> None:
        """`ranges` and `limits` must be the same on all ranks; `spans` are this rank's; they lie in its ranges, and
        their tensors on `devices`. `touched` collects the names of the tensors that are written to. See
        `TransferSession` for the memory, which is for reads alone."""
        self._group = group
        self._connector = connector
        self._objects = objects
        self._memory_bytes = memory_bytes
        self._num_parts = num_parts
        self._num_workers = num_workers
        self._checksums = checksums
        self._devices = devices
        self._streams = DeviceStreams(())  # until `run`
        self._pins = HostPins()
        self._limits = limits
        self._ranges = assign_owners(ranges, limits, len(group))
        self._spans = _by_range(self._ranges, spans)
        self._free: deque[torch.Tensor] = deque()  # buffers of the longest ranges: fresh memory costs page faults
        self._partial: dict[int, tuple[bytearray, int]] = {}  # spans in several ranges: bytes so far, number missing
        self._touched = touched
        self.totals = ExchangeTotals(num_segments=len(self._ranges))
        self.stats: Snapshot | None = None
        self._session: TransferSession | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that this rank needs."""
        return sum(owned.num_bytes for owned in self._ranges if self._group.rank in owned.ranks)

    def run(self) -> None:
        """Go through all ranges. Raises CheckpointError; PeerError where another rank fails."""
        requests = [
            ReadRequest(
                owned.label, (owned.key, owned.start), owned.num_bytes, self._new_bytes(number), self._prepare(number)
            )
            for number, owned in enumerate(self._ranges)
            if owned.owner == self._group.rank
        ]
        with (
            closing(DeviceStreams(self._devices)) as self._streams,
            TransferSession(
                requests,
                self._connector,
                self._objects,
                memory_bytes=self._memory_bytes,
                num_parts=self._num_parts,
                num_workers=self._num_workers,
                checksums=self._checksums,
                counts_made=True,
            ) as session,
        ):
            self._session = session
            reads = _one_by_one(session)
            for number, owned in enumerate(self._ranges):
                if self._group.rank in owned.ranks:
                    self._transfer(number, owned, reads)
                    self.totals.read_bytes = session.totals.fetched_bytes
            self.stats = session.stats()
        self._free.clear()  # it is pinned

    @property
    def reads(self) -> list[ReadTotals]:
        """The counters of this rank's own reads; empty before `run`."""
        return [] if self._session is None else [self._session.totals]

    def stop(self, error: BaseException) -> None:
        """Make `run` raise an error if it waits for a read; from any thread."""
        if self._session is not None:
            self._session.engine.fail(error)

    def _transfer(self, number: int, owned: OwnedRange, reads: Iterator[torch.Tensor]) -> None:
        """Read or receive one range, send it, and copy it into the tensors."""
        where = f"bytes {owned.start} to {owned.end} of {owned.key!r}"
        totals, group, begin_s = self.totals, self._group, time.perf_counter()
        if owned.owner == group.rank:
            group.doing = f"reading {where}"
            data = next(reads)
        else:
            data = self._buffer(number)
        read_s = time.perf_counter()
        totals.waited_s += read_s - begin_s
        if len(owned.ranks) > 1:
            group.doing = f"waiting for rank {group.global_ranks[owned.owner]} to pass on {where}"
            group.distribute(number, data, owned.owner, owned.ranks)
            if owned.owner == group.rank:
                totals.sent_bytes += owned.num_bytes
            else:
                totals.received_bytes += owned.num_bytes
        passed_s = time.perf_counter()
        totals.passing_s += passed_s - read_s
        group.doing = f"placing {where}"
        self._place(number, owned, data)
        totals.placing_s += time.perf_counter() - passed_s

    # -------------------------------------------------------------------------------------------- memory for the bytes

    def _direct(self, number: int) -> ByteSpan | None:
        """The span whose own memory can hold a whole range, if there is one."""
        owned, spans = self._ranges[number], self._spans[number]
        if len(spans) == 1 and spans[0].target is not None:
            span = spans[0]
            if span.start == owned.start and span.length == owned.num_bytes:
                return span
        return None

    def _new_bytes(self, number: int) -> int:
        return 0 if self._direct(number) is not None else self._ranges[number].num_bytes

    def _buffer(self, number: int) -> torch.Tensor:
        """Memory for a range's bytes: the tensor's own, or staging memory."""
        span = self._direct(number)
        if span is not None:
            self._touched.add(span.label)
            return torch.frombuffer(span.target, dtype=torch.uint8)
        size = self._ranges[number].num_bytes
        if size < self._limits.most_bytes // 2:
            return torch.empty(size, dtype=torch.uint8)
        try:
            whole = self._free.pop()
        except IndexError:
            whole = torch.from_numpy(self._pins.pages(self._limits.most_bytes, self._streams.device))
        return whole[:size]

    def _prepare(self, number: int) -> Callable[[ReadLimits], PreparedRead]:
        owned = self._ranges[number]

        def prepare(limits: ReadLimits) -> PreparedRead:
            data = self._buffer(number)
            span = ByteSpan(owned.label, owned.key, owned.start, owned.num_bytes, data.numpy().data, None)
            return [span], lambda: [(str(number), data)]

        return prepare

    def _place(self, number: int, owned: OwnedRange, data: torch.Tensor) -> None:
        if self._direct(number) is None:
            view = data.numpy().data
            with self._streams.current():  # the bytes' memory is used again
                for span in self._spans[number]:
                    lo, hi = max(span.start, owned.start), min(span.start + span.length, owned.end)
                    self._copy(span, lo - span.start, view[lo - owned.start : hi - owned.start])
            whole = torch.empty(0, dtype=torch.uint8).set_(data.untyped_storage())
            if len(whole) == self._limits.most_bytes:
                self._free.append(whole)
        self.totals.num_bytes += owned.num_bytes

    def _copy(self, span: ByteSpan, offset: int, data: memoryview) -> None:
        """Copy a part of a span's bytes, from `offset` on; a span without a target waits until all its bytes are there."""
        self._touched.add(span.label)
        if span.target is not None:
            span.target[offset : offset + len(data)] = data
            return
        if len(data) < span.length:
            if id(span) not in self._partial:
                self._partial[id(span)] = bytearray(span.length), span.length
            collected, missing = self._partial.pop(id(span))
            collected[offset : offset + len(data)] = data
            if missing > len(data):
                self._partial[id(span)] = collected, missing - len(data)
                return
            data = memoryview(collected)
        place_span(span, data, self._connector)


def _one_by_one(session: TransferSession) -> Iterator[torch.Tensor]:
    for delivered in session:
        for _, data in delivered:
            yield data


def _by_range(ranges: Sequence[OwnedRange], spans: Sequence[ByteSpan]) -> list[list[ByteSpan]]:
    """The spans that have bytes in each range."""
    inside: list[list[ByteSpan]] = [[] for _ in ranges]
    starts = [(owned.key, owned.start) for owned in ranges]
    for span in spans:
        first = max(0, bisect_right(starts, (span.key, span.start)) - 1)
        end, covered = span.start + span.length, 0
        for number in range(first, len(ranges)):
            owned = ranges[number]
            if starts[number] >= (span.key, end):
                break
            common = min(end, owned.end) - max(span.start, owned.start)
            if owned.key == span.key and common > 0:
                inside[number].append(span)
                covered += common
        assert covered == span.length, f"bytes of {span.label} are in no range"
    return inside


def run_in_thread(
    group: RankGroup, work: Callable[[], None], *, stop: Callable[[BaseException], None], tick: Callable[[], None]
) -> None:
    """Run `work` on a thread of its own, so that this one can take Ctrl-C and answer other ranks; raises what `work` raises.

    `stop` makes `work` raise an error where it waits for reads; `tick` is called every half second, in this thread.
    """
    done = threading.Event()
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
            group.finish()
        except BaseException as error:  # raised again below, in the calling thread
            group.fail(error)
            raised.append(error)
        finally:
            done.set()

    thread = threading.Thread(target=run, name="loaderkit-exchange", daemon=True)
    try:
        thread.start()
        failed = group.watch(done, tick)
        if failed is not None:
            raise failed
    except BaseException as error:  # Ctrl-C, or the other ranks have named this one, which hangs, as the one at fault
        group.fail(error)
        stop(error)
        if thread.ident is not None:
            thread.join(_JOIN_S)
        raise
    thread.join()
    if raised:
        raise raised[0]
