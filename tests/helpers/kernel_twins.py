"""The kernels of `native` in NumPy and Python, as oracles: each has the name, the arguments and the results of its C kernel."""

from __future__ import annotations

import os
import stat
import struct
from bisect import bisect_left, insort
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import pairwise
from math import lcm
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from loaderkit._internal.splitmix import GOLDEN, MASK, MIX_1, MIX_2, U64, mix

Int64s = NDArray[np.int64]
Status = tuple[int, int, int, int]
"""(bytes read, mode, size, time of change in ns) of a file."""


# ------------------------------------------------------------------------------------------------ files


def read_range(path: str, start: int, buffer: memoryview, direct: bool) -> Status:
    """Open, stat, read, close; only a regular file is read. `direct` (past the page cache) is ignored here."""
    return _read(path, [start], [buffer])


def read_hashed(
    path: str, start: int, buffer: memoryview, block: int, address: int, direct: bool
) -> tuple[Status, list[int], float]:
    """`read_range`, and XXH3 of its blocks, whatever lies at `address`; the seconds that it took are not told."""
    status = read_range(path, start, buffer, direct)
    return status, [xxhash.xxh3_64_intdigest(buffer[at : at + block]) for at in range(0, len(buffer), block)], 0.0


def gather_ranges(path: str, starts: Int64s, length: int, buffer: memoryview) -> Status:
    """`read_range` of several ranges of `length` bytes, concatenated in `buffer`, up to the first short one."""
    parts = (buffer[begin : begin + length] for begin in range(0, len(starts) * length, length))
    return _read(path, starts.tolist(), parts)


def scatter_ranges(path: str, starts: Int64s, lengths: Int64s, offsets: Int64s, buffer: memoryview) -> Status:
    """`gather_ranges` of ranges that differ in length: range i goes to offsets[i] of the buffer."""
    places = zip(offsets.tolist(), (offsets + lengths).tolist(), strict=True)
    return _read(path, starts.tolist(), (buffer[begin:end] for begin, end in places))


def read_many(
    path_of: Callable[[str], str | None],
    keys: list[str],
    starts: list[int],
    lengths: list[int],
    etags: list[str | None],
    offsets: Sequence[int],
    buffer: memoryview,
) -> Sequence[int] | None:
    """The indices of the ranges that were not read: here all."""
    return range(len(keys))


def _read(path: str, starts: list[int], parts: Iterable[memoryview]) -> Status:
    # O_NONBLOCK: opening a named pipe would wait for a writer.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(fd)
        num_read = 0
        for start, part in zip(starts, parts, strict=True) if stat.S_ISREG(status.st_mode) else ():
            num_read_here = _pread_all(fd, start, part)
            num_read += num_read_here
            if num_read_here < len(part):
                break
    finally:
        os.close(fd)
    return num_read, status.st_mode, status.st_size, status.st_mtime_ns


def _pread_all(fd: int, start: int, buffer: memoryview) -> int:
    num_read = 0
    while start >= 0 and num_read < len(buffer):
        num_more = os.preadv(fd, [buffer[num_read:]], start + num_read)
        if num_more == 0:
            break
        num_read += num_more
    return num_read


# ---------------------------------------------------------------------------------------------- samples


def texts(data: bytes, ends: Int64s, numbers: Int64s) -> list[str]:
    """The texts number `numbers` of the UTF-8 texts concatenated in `data`, which end at `ends`."""
    if len(numbers) and not 0 <= numbers.min() <= numbers.max() < len(ends):
        raise IndexError(f"texts {numbers.min()} to {numbers.max()} of {len(ends)}")
    starts = np.where(numbers > 0, ends[numbers - 1], 0).tolist() if len(numbers) else []
    return [data[a:b].decode("utf-8", "surrogateescape") for a, b in zip(starts, ends[numbers].tolist(), strict=True)]


_BEGIN, _END, _SEGMENT, _FRAME = b"\xff\xd8", b"\xff\xd9", struct.Struct(">BBH"), struct.Struct(">BHHB")
_WITHOUT_LENGTH = frozenset({0x00, 0x01, 0xFF, *range(0xD0, 0xDA)})
_START_OF_SCAN = 0xDA
_USUAL_FRAMES = frozenset({0xC0, 0xC1, 0xC2})  # baseline, extended, progressive
_FRAMES = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})


def whole_jpeg_size(data: memoryview) -> tuple[int, int] | None:
    """(height, width) of a JPEG of 8 bits with 1 or 3 channels that is a chain of segments up to its scan, and has its end
    marker; None for all others.

    DALI 2.4.0 may crash some time after it was given a file whose segments are not contiguous; damage inside segments or in
    the scan it only refuses. Decoders on a GPU fill in a missing end without an error.
    """
    if data[:2] != _BEGIN:
        return None
    size = None
    offset = 2
    try:
        while True:
            first, marker, length = _SEGMENT.unpack_from(data, offset)
            if first != 0xFF or marker in _WITHOUT_LENGTH:
                return None
            if marker == _START_OF_SCAN:
                break
            if size is None and marker in _FRAMES:
                precision, height, width, num_channels = _FRAME.unpack_from(data, offset + 4)
                if marker not in _USUAL_FRAMES or precision != 8 or not height * width or num_channels not in (1, 3):
                    return None
                size = height, width
            if length < 2:
                return None
            offset += 2 + length
    except struct.error:  # it ends before its scan
        return None
    return size if _END in bytes(data[max(offset, len(data) - 4096) :]) else None


# ------------------------------------------------------------------------------------------------ order


def interleave(lags: Int64s, weights: Int64s, sources: Int64s, places: Int64s) -> None:
    """Fill `sources` with whose turn it is, turn by turn, and `places` with the number of its turns before; see
    `sampling.interleaving`. `lags` are those before the first turn, and afterwards those after the last."""
    shares, begins = weights.tolist(), lags.tolist()
    total, counts = sum(shares), [0] * len(shares)
    ready: list[tuple[int, int]] = []  # (deadline, source)
    waiting = [
        (max(0, -begin // share), number) for number, (begin, share) in enumerate(zip(begins, shares, strict=True))
    ]
    heapify(waiting)  # (the first turn that it may have, source)
    for turn in range(len(sources)):
        while waiting and waiting[0][0] <= turn:
            number = heappop(waiting)[1]
            due = (counts[number] + 1) * total - begins[number]
            heappush(ready, (-(-due // shares[number]), number))
        number = heappop(ready)[1]
        sources[turn], places[turn] = number, counts[number]
        counts[number] += 1
        since = counts[number] * total - begins[number]
        heappush(waiting, (max(turn + 1, since // shares[number]), number))
    lags += len(sources) * weights - total * np.array(counts, np.int64)


def interleave_lengths(
    lags: Int64s, weights: Int64s, lengths: Int64s, nexts: Int64s, ends: Int64s, rows: Int64s
) -> int:
    """`interleave` with turns of unequal length; see `sampling.token_mixture`. Source m has the turns of the lengths
    [nexts[m], ends[m]). Fills `rows` with the numbers of the lengths that come next, until it is full or a source has no length
    left, and returns how many; leaves `lags` and `nexts` as they are then."""
    shares, sizes, places, last = weights.tolist(), lengths.tolist(), nexts.tolist(), ends.tolist()
    total, common = sum(shares), lcm(*shares)
    behind = lags.tolist()  # at the first turn: source m is behind[m] + now * shares[m] - total * its tokens
    ready: list[tuple[int, int]] = []  # (when a turn should have ended, source), in 1 / common of a token
    waiting = [(-(behind[number] // share), number) for number, share in enumerate(shares)]
    heapify(waiting)  # (the first token at which it may have a turn, source)
    now, num_turns = 0, 0
    while num_turns < len(rows):
        while waiting and waiting[0][0] <= now:
            number = heappop(waiting)[1]
            due = total * sizes[places[number]] - behind[number]
            heappush(ready, (due * (common // shares[number]), number))
        number = heappop(ready)[1]
        rows[num_turns] = places[number]
        now += sizes[places[number]]
        behind[number] -= total * sizes[places[number]]
        places[number] += 1
        num_turns += 1
        if places[number] == last[number]:
            break
        heappush(waiting, (-(behind[number] // shares[number]), number))
    lags[:] = [lag + now * share for lag, share in zip(behind, shares, strict=True)]
    nexts[:] = places
    return num_turns


# 8 rounds are enough for large sets, but leave permutations of 5 elements visibly uneven (chi-square 28 standard
# deviations off over 20,000 keys; 12 rounds 3, 16 rounds none). At 16 rounds a block of 16k positions runs at 10 M/s.
_NUM_ROUNDS = 16


def permute(values: Int64s, sizes: Int64s, a: Int64s, b: Int64s, keys: U64) -> None:
    """Replace positions by their images, in place; see `sampling.permutation`. `sizes`, `a`, `b` and `keys` have one number per
    position, or one for all."""
    sizes, a, b = (column.reshape(()) if column.size == 1 else column for column in (sizes, a, b))
    keys = keys.reshape(()) if keys.size == 1 else keys
    rounds = [mix(np.array(keys + np.uint64((r + 1) * int(GOLDEN) & MASK))) for r in range(_NUM_ROUNDS)]
    values[:] = _pass(values, slice(None), a, b, rounds)
    outside = np.flatnonzero(values >= sizes)
    while outside.size:
        values[outside] = _pass(values[outside], outside, a, b, rounds)
        outside = outside[values[outside] >= (sizes if sizes.ndim == 0 else sizes[outside])]


def _pass(values: Int64s, where: Any, a: Int64s, b: Int64s, keys: list[U64]) -> Int64s:
    if a.ndim:
        a, b = a[where], b[where]
    if keys[0].ndim:
        keys = [key[where] for key in keys]
    left, right = np.divmod(values, b)  # left in Z_a, right in Z_b
    for r in range(0, _NUM_ROUNDS, 2):
        left += _scale(right, keys[r], a)
        left -= a * (left >= a)
        right += _scale(left, keys[r + 1], b)
        right -= b * (right >= b)
    left *= b
    left += right
    return left


def _scale(values: Int64s, key: U64, below: Int64s) -> Int64s:
    """A keyed hash of `values`, spread over [0, below): the hash's upper half times `below`, shifted back (Lemire 2019)."""
    mixed = values.astype(np.uint64)
    mixed *= GOLDEN
    mixed ^= key
    # One multiplication less than `mix`, in the hot loop of the order; the rounds make up for it.
    mixed ^= mixed >> np.uint64(32)
    mixed *= MIX_1
    mixed ^= mixed >> np.uint64(29)
    mixed *= MIX_2
    mixed >>= np.uint64(32)
    mixed *= below.astype(np.uint64)
    mixed >>= np.uint64(32)
    return mixed.view(np.int64)


# ------------------------------------------------------------------------------------------------ packing


def best_fit(sizes: Int64s, capacity: int, bounds: Int64s, bins: Int64s, counts: Int64s) -> None:
    """Packs sizes of 0 to `capacity`, window by window, [bounds[w], bounds[w + 1]), into bins: the largest first, each into the
    bin with the least space that is enough, the newest of several. bins[i] becomes the bin in its window, -1 for a size of 0;
    counts[w] the number of bins of the window."""
    for window, (begin, end) in enumerate(pairwise(bounds.tolist())):
        here = sizes[begin:end]
        bins[begin:end] = -1
        spaces: list[int] = []  # that open bins have left, ascending
        open_bins: dict[int, list[int]] = {}  # by space
        num_bins = 0
        for place in np.argsort(-here, kind="stable").tolist():
            size = int(here[place])
            if size == 0:
                break
            number = bisect_left(spaces, size)
            if number == len(spaces):
                bin_number, left, num_bins = num_bins, capacity - size, num_bins + 1
            else:
                space = spaces[number]
                bin_number, left = open_bins[space].pop(), space - size
                if not open_bins[space]:
                    del spaces[number]
            bins[begin + place] = bin_number
            if left:
                if not open_bins.setdefault(left, []):
                    insort(spaces, left)
                open_bins[left].append(bin_number)
        counts[window] = num_bins


def mark_documents(
    lengths: Int64s,
    firsts: Int64s,
    length: int,
    positions: NDArray[Any],
    documents: NDArray[Any],
    tokens: NDArray[Any],
    begin: int,
    starts: NDArray[np.int32],
    ends: Int64s,
) -> None:
    """Fills int32 [bins, length] of the place of every token in its document, and of its document's number in the bin, -1
    behind the last, where `tokens` are set to 0; a field of no bytes is not wanted. The documents of bin b are those from
    firsts[b] to firsts[b + 1]. `starts`, int32 [documents + bins], gets where documents and paddings begin when the bins lie
    end to end, the first at `begin`; ends[b] where those of bin b end."""
    wanted = positions, documents
    places, end = np.arange(length), 0
    for number, (first, behind) in enumerate(pairwise(firsts.tolist())):
        begins = np.concatenate(([0], np.cumsum(lengths[first:behind])))
        document = np.searchsorted(begins[1:], places, side="right")
        used = begins[-1]
        for field, marks in zip(wanted, (places - begins[document], document), strict=True):
            field[number : number + 1] = marks
        documents[number : number + 1, used:] = -1
        tokens[number, used:] = 0
        begins = begins if used < length else begins[:-1]
        starts[end : end + len(begins)] = begins + (begin + number * length)
        end += len(begins)
        ends[number] = end


def take_pieces(
    samples: Int64s,
    firsts: Int64s,
    lengths: Int64s,
    places: Int64s,
    bounds: Int64s,
    sequences: Int64s,
    length: int,
) -> Any:
    """The pieces of some sequences, those of sequence i from bounds[i] to bounds[i + 1]; `places` are those in sequences that
    lie end to end. Returns the bytes of int64: the same four columns of the pieces taken, and their bounds."""
    counts = bounds[sequences + 1] - bounds[sequences]
    ends = np.concatenate(([0], np.cumsum(counts)))
    slots = np.repeat(np.arange(len(sequences)), counts)
    rows = np.arange(ends[-1]) + (bounds[sequences] - ends[:-1])[slots]
    moved = places[rows] + (slots - sequences[slots]) * length
    return bytearray(
        np.concatenate([samples[rows], firsts[rows], lengths[rows], moved, ends]).astype(np.int64).tobytes()
    )


# ------------------------------------------------------------------------------------------- serial files

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


Field = tuple[int, int, memoryview]
"""The number of a field, the type it has on the wire, and its bytes."""


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """A number, and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        if at == len(data):
            raise ValueError("a number is cut off")
        byte = data[at]
        at += 1
        if shift == 63 and byte > 1:
            break
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a number has more than 64 bits")


def _fields(data: memoryview, most: int, other: int = -1) -> Iterator[Field]:
    """The fields with numbers up to `most`, which have the type of bytes, or `other`."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, kind = tag >> 3, tag & 7
        if tag >> 32 or not number:
            raise ValueError("a field has no number that there is")
        if number <= most and kind not in (_BYTES, other):
            raise ValueError("a field is not of its type")
        begin = at
        if kind == _BYTES:
            size, begin = _varint(data, at)
            at = begin + size
            if at > len(data):
                raise ValueError("a length reaches beyond what holds it")
        elif kind == _VARINT:
            _, at = _varint(data, at)
        elif kind in (_FIXED32, _FIXED64):
            at += 4 if kind == _FIXED32 else 8
            if at > len(data):
                raise ValueError("a value is cut off")
        else:
            raise ValueError("a field is a group")
        if number <= most:
            yield number, kind, data[begin:at]


def parse_example(data: bytes | memoryview, wanted: Container[str] | None) -> dict[str, Any]:
    """The features of a serialised tf.train.Example (`wanted`: only those of these names): a list of bytes, ("f", bytearray) of
    float32 or ("q", bytearray) of int64, little-endian. Features without any kind are left out, and fields that are not known.
    Raises ValueError for what is none, or not whole."""
    features: dict[str, Any] = {}
    for number, _, map_of_features in _fields(memoryview(data), 2):
        if number == 2:
            raise ValueError("it is a SequenceExample, not an Example")
        for _, _, entry in _fields(map_of_features, 1):
            parts: dict[int, memoryview] = {}
            for part, _, content in _fields(entry, 2):
                if part in parts:
                    raise ValueError("a feature has two names or values")
                parts[part] = content
            name = str(parts.get(1, b""), "utf-8")
            if wanted is None or name in wanted:
                values = _values(parts.get(2, memoryview(b"")))
                if values is not None:
                    features[name] = values
    return features


def _values(feature: memoryview) -> Any:
    values: Any = None
    before = 0
    for kind, _, content in _fields(feature, 3):
        if kind != before:  # the last of several kinds holds
            before, values = kind, [] if kind == 1 else bytearray()
        if kind == 1:
            values += [bytes(one) for _, _, one in _fields(content, 1)]
        elif kind == 2:
            for _, _, floats in _fields(content, 1, _FIXED32):
                if len(floats) % 4:
                    raise ValueError("a list of floats is cut off")
                values += floats
        else:
            for _, _, packed in _fields(content, 1, _VARINT):
                at = 0
                while at < len(packed):
                    number, at = _varint(packed, at)
                    values += struct.pack("<Q", number)
    return values if before < 2 else ("f" if before == 2 else "q", values)
