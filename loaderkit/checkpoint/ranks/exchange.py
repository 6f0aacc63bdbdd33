"""Fill tensors of several ranks at once: each byte is read by one of them, and passed on to those that need it, too.

    segments of this rank ─> Engine (reads ahead) ─┐
                                                   ├─> one thread, segment by segment: pass on ─> into the tensors
    segments of other ranks ───────────────────────┘

All ranks go through the segments in the same order, so that what one sends is what the other waits for.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from loaderkit.checkpoint.checksums import Checksums
from loaderkit.checkpoint.ranks.group import Group
from loaderkit.checkpoint.ranks.segments import NeededRange, OwnedRange, divided
from loaderkit.checkpoint.transfer.layout import ByteSpan, ReadLimits
from loaderkit.checkpoint.transfer.plan import Laid, ReadRequest, ReadTotals
from loaderkit.checkpoint.transfer.session import TransferSession
from loaderkit.checkpoint.transfer.stages import place_span, stream_of
from loaderkit.connectors.base import Connector, ObjectInfo

_CPU = torch.device("cpu")
_LEAVE_S = 15.0  # for the thread, which waits a little for workers that hang


@dataclass
class Shared:
    """What sharing has done so far, for any thread. `read_bytes` were read of the checkpoint here, `received_bytes` came from
    other ranks; `waited_s` for this rank's own reads, `passing_s` in sending and receiving, `placing_s` in copying."""

    num_segments: int = 0
    num_bytes: int = 0  # put into tensors
    read_bytes: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    waited_s: float = 0.0
    passing_s: float = 0.0
    placing_s: float = 0.0


def agreed(limits: Sequence[Sequence[int]]) -> ReadLimits:
    """What all ranks can keep to."""
    return ReadLimits(*(min(values) for values in zip(*limits, strict=True)))


class RankExchange:
    """One rank's part. `run` on one thread; the numbers are for any."""

    def __init__(
        self,
        group: Group,
        connector: Connector,
        objects: Mapping[str, ObjectInfo],
        *,
        intervals: Sequence[NeededRange],
        pieces: Sequence[ByteSpan],
        limits: ReadLimits,
        memory_bytes: int,
        num_parts: int,
        num_workers: int,
        checksums: Mapping[str, Checksums],
        device: torch.device = _CPU,
        touched: set[str],
    ) -> None:
        """`intervals` and `limits` must be the same on all ranks; `pieces`, this rank's own, lie in its intervals. `touched`
        is given the names of those that are written to. See `TransferSession` for the memory, of reading alone."""
        self._group = group
        self._connector = connector
        self._objects = objects
        self._memory_bytes = memory_bytes
        self._num_parts = num_parts
        self._num_workers = num_workers
        self._checksums = checksums
        self._device = device
        self._limits = limits
        self._segments = divided(intervals, self._limits, len(group))
        self._pieces = _by_segment(self._segments, pieces)
        self._free: deque[torch.Tensor] = (
            deque()
        )  # staging memory for the longest segments: fresh memory costs page faults
        self._partial: dict[
            int, tuple[bytearray, int]
        ] = {}  # pieces in several segments: bytes so far, how many are missing
        self._touched = touched
        self.totals = Shared(num_segments=len(self._segments))
        self.accounts: dict[str, Any] | None = None
        self._filling: TransferSession | None = None

    @property
    def num_bytes(self) -> int:
        """That this rank needs."""
        return sum(segment.num_bytes for segment in self._segments if self._group.me in segment.takers)

    def run(self) -> None:
        """Go through all segments. Raises CheckpointError; PeerError for what another rank has to answer for."""
        requests = [
            ReadRequest(
                segment.label, (segment.key, segment.start), segment.num_bytes, self._made(number), self._lay(number)
            )
            for number, segment in enumerate(self._segments)
            if segment.owner == self._group.me
        ]
        with TransferSession(
            requests,
            self._connector,
            self._objects,
            memory_bytes=self._memory_bytes,
            num_parts=self._num_parts,
            num_workers=self._num_workers,
            checksums=self._checksums,
            counts_made=True,
        ) as filling:
            self._filling = filling
            reads = _one_by_one(filling)
            for number, segment in enumerate(self._segments):
                if self._group.me in segment.takers:
                    self._take(number, segment, reads)
                    self.totals.read_bytes = filling.totals.fetched_bytes
            self.accounts = filling.stats().to_dict()

    @property
    def reads(self) -> list[ReadTotals]:
        """What this rank has read for it so far; none before it runs."""
        return [] if self._filling is None else [self._filling.totals]

    def stop(self, error: BaseException) -> None:
        """Make `run` raise an error if it waits for a read; from any thread."""
        if self._filling is not None:
            self._filling.engine.fail(error)

    def _take(self, number: int, segment: OwnedRange, reads: Iterator[torch.Tensor]) -> None:
        where = f"bytes {segment.start} to {segment.end} of {segment.key!r}"
        totals, group, begin_s = self.totals, self._group, time.perf_counter()
        if segment.owner == group.me:
            group.doing = f"reading {where}"
            data = next(reads)
        else:
            data = self._buffer(number)
        read_s = time.perf_counter()
        totals.waited_s += read_s - begin_s
        if len(segment.takers) > 1:
            group.doing = f"waiting for rank {group.names[segment.owner]} to pass on {where}"
            group.pass_on(number, data, segment.owner, segment.takers)
            if segment.owner == group.me:
                totals.sent_bytes += segment.num_bytes
            else:
                totals.received_bytes += segment.num_bytes
        passed_s = time.perf_counter()
        totals.passing_s += passed_s - read_s
        group.doing = f"placing {where}"
        self._land(number, segment, data)
        totals.placing_s += time.perf_counter() - passed_s

    # -------------------------------------------------------------------------------------------- where bytes are put

    def _direct(self, number: int) -> ByteSpan | None:
        """The piece whose own memory takes a segment, if it is one and the same."""
        segment, pieces = self._segments[number], self._pieces[number]
        if len(pieces) == 1 and pieces[0].target is not None:
            piece = pieces[0]
            if piece.start == segment.start and piece.length == segment.num_bytes:
                return piece
        return None

    def _made(self, number: int) -> int:
        return 0 if self._direct(number) is not None else self._segments[number].num_bytes

    def _buffer(self, number: int) -> torch.Tensor:
        """Memory for a segment's bytes: that of the tensor itself, or staging memory."""
        piece = self._direct(number)
        if piece is not None:
            self._touched.add(piece.label)
            return torch.frombuffer(piece.target, dtype=torch.uint8)
        size = self._segments[number].num_bytes
        if size < self._limits.most_bytes // 2:
            return torch.empty(size, dtype=torch.uint8)
        try:
            whole = self._free.pop()
        except IndexError:
            whole = torch.empty(self._limits.most_bytes, dtype=torch.uint8)
        return whole[:size]

    def _lay(self, number: int) -> Callable[[ReadLimits], Laid]:
        segment = self._segments[number]

        def make(limits: ReadLimits) -> Laid:
            data = self._buffer(number)
            piece = ByteSpan(segment.label, segment.key, segment.start, segment.num_bytes, data.numpy().data, None)
            return [piece], lambda: [(str(number), data)]

        return make

    def _land(self, number: int, segment: OwnedRange, data: torch.Tensor) -> None:
        if self._direct(number) is None:
            view = data.numpy().data
            with stream_of(self._device):
                for piece in self._pieces[number]:
                    lo, hi = max(piece.start, segment.start), min(piece.start + piece.length, segment.end)
                    self._put(piece, lo - piece.start, view[lo - segment.start : hi - segment.start])
                if self._device.type == "cuda":
                    torch.cuda.current_stream(self._device).synchronize()
            whole = torch.empty(0, dtype=torch.uint8).set_(data.untyped_storage())
            if len(whole) == self._limits.most_bytes:
                self._free.append(whole)
        self.totals.num_bytes += segment.num_bytes

    def _put(self, piece: ByteSpan, offset: int, data: memoryview) -> None:
        """A part of a piece's bytes, from `offset` on."""
        self._touched.add(piece.label)
        if piece.target is not None:
            piece.target[offset : offset + len(data)] = data
            return
        if len(data) < piece.length:
            begun = self._partial.pop(id(piece)) if id(piece) in self._partial else None
            known, missing = begun if begun is not None else (bytearray(piece.length), piece.length)
            known[offset : offset + len(data)] = data
            if missing > len(data):
                self._partial[id(piece)] = known, missing - len(data)
                return
            data = memoryview(known)
        place_span(piece, data, self._connector)


def _one_by_one(filling: TransferSession) -> Iterator[torch.Tensor]:
    for given in filling:
        for _, data in given:
            yield data


def _by_segment(segments: Sequence[OwnedRange], pieces: Sequence[ByteSpan]) -> list[list[ByteSpan]]:
    """The pieces that have bytes in each segment."""
    found: list[list[ByteSpan]] = [[] for _ in segments]
    places = [(segment.key, segment.start) for segment in segments]
    for piece in pieces:
        first = max(0, bisect_right(places, (piece.key, piece.start)) - 1)
        end, covered = piece.start + piece.length, 0
        for number in range(first, len(segments)):
            segment = segments[number]
            if places[number] >= (piece.key, end):
                break
            common = min(end, segment.end) - max(piece.start, segment.start)
            if segment.key == piece.key and common > 0:
                found[number].append(piece)
                covered += common
        assert covered == piece.length, f"bytes of {piece.label} are in no segment"
    return found


def run_beside(
    group: Group,
    work: Callable[[], None],
    *,
    stop: Callable[[BaseException], None],
    tick: Callable[[], None] = lambda: None,
) -> None:
    """Run `work` on a thread of its own, so that this one stays free for Ctrl-C and the roll call; what it raises is raised.

    `stop` makes it raise an error where it waits for reads; `tick` is called now and then, in this thread.
    """
    done = threading.Event()
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
            group.finish()
        except BaseException as error:  # raised again below, in the thread that asked for it
            group.fail(error)
            raised.append(error)
        finally:
            done.set()

    thread = threading.Thread(target=run, name="loaderkit-sharing", daemon=True)
    try:
        thread.start()
        failed = group.attend(done, tick)
        if failed is not None:
            raise failed
    except BaseException as error:  # Ctrl-C, or this rank hangs and the others have given it up
        group.fail(error)
        stop(error)
        if thread.ident is not None:
            thread.join(_LEAVE_S)
        raise
    thread.join()
    if raised:
        raise raised[0]
