"""Sounds by FFmpeg: the samples of a part, of which no more packets are decoded than it depends on.

Packets are sought where seeking leads to them. Where it does not, all are read, and those are decoded that are needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fractions import Fraction
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from loaderkit.errors import FormatError
from loaderkit.stages.media.container import behind_id3, import_av, stream_of
from loaderkit.stages.media.sound_file import check_kind, check_size, damaged_error

LISTED = ("matroska", "ogg", "avi", "flac")
"""Containers of which all packets are read: behind a seek, times in Ogg are of other packets; Matroska has no lengths of
streams, and AVI wrong ones; FLAC is here if it does not say its length."""

_RUN_UP_S = {"opus": 1.0, "libopus": 1.0}  # decoded before a part, as a decoder remembers what was; else 0.25
_RESERVOIR = (12 * 1152, 30 * 576)  # of MP3 from 32 kHz on, and below: the packets that 511 and 255 bytes may come from
_FORGETS = ("flac", "alac", "pcm_")  # decoders that remember nothing
_FRAME = 1152  # samples of MP3's
_FAR = 1 << 60
_DURATION, _CLUSTER = b"\x44\x89", b"\x1f\x43\xb6\x75"  # elements of Matroska; the first is before the second
_HEAD_BYTES = 1 << 20


class SoundStream:
    """A sound by its packets. Raises FormatError for one without samples, and NoPlaceError."""

    def __init__(self, packets: SoughtPackets | ListedPackets) -> None:
        self._packets, self._stream = packets, packets.stream
        end = packets.end()
        self._blocks = _blocks(self._stream, packets.all())
        first = next(self._blocks, None)
        if first is None:
            raise FormatError("its sound has no samples")
        self._first = first
        self.rate: int = first.rate
        self.num = _num_samples(self._stream, end, first, packets.told_s)
        """How many samples it has; None: that is not known."""
        self.begin_s: float = first.position / first.rate
        """When it begins, in the time of its file."""

    def samples(self, begin: int, num: int | None) -> NDArray[Any]:
        """The samples [begin, begin + num) as they are stored, [channels, n]; all from `begin` on if `num` is None. Fewer where
        it ends before. Raises FormatError for damaged ones and above 1 GiB, NoPlaceError where seeking does not lead there."""
        stream, origin = self._stream, self._first.position
        begin += origin
        end = None if num is None else begin + num
        run_up = begin - self._num_remembered()
        if run_up <= origin:
            return _joined(chain((self._first,), self._blocks), begin, end)
        packets = self._packets.behind(int(run_up / self.rate / stream.time_base))
        blocks = _blocks(stream, packets, run_up_end=begin)
        found = next(blocks, None)
        if found is not None and found.position <= begin:
            return _joined(chain((found,), blocks), begin, end)
        return _joined(_blocks(stream, self._packets.all()), begin, end)

    def _num_remembered(self) -> int:
        """How many samples back a decoder looks."""
        codec = self._stream.codec_context.codec.name
        if codec.startswith("mp3"):
            return _RESERVOIR[self.rate < 32000]
        return 0 if codec.startswith(_FORGETS) else int(_RUN_UP_S.get(codec, 0.25) * self.rate)


class NoPlaceError(Exception):
    """Seeking leads nowhere, or behind what was sought."""


class SoughtPackets:
    """The packets of a sound, of which only those are read that are asked for."""

    def __init__(self, container: Any, name: str | None, data: memoryview) -> None:
        self.stream = stream_of(container, "audio")
        self._container, self._name, self._is_moved = container, name, False
        if _is_adpcm(self.stream):
            raise NoPlaceError  # its times behind a seek are guesses
        self.told_s = _told_s(self.stream, name, data)
        """The duration that its header says, or None."""

    def end(self) -> int | None:
        """When the last one ends, or None for formats whose header says it."""
        if self._name == "mp3":  # behind a seek to its end FFmpeg knows all places, and times are no guesses
            self._seek(_FAR)
            end = _end(_packets(self._container, self.stream))
            self._seek(0)
            return end
        return None

    def all(self) -> Iterable[Any]:
        """From the first one on. Raises NoPlaceError behind a place that was sought in vain."""
        if self._is_moved:
            raise NoPlaceError
        return _packets(self._container, self.stream)

    def behind(self, time: int) -> Iterable[Any]:
        """From one on that begins at a time or before it."""
        self._is_moved = True
        self._seek(time)
        return _packets(self._container, self.stream)

    def _seek(self, time: int) -> None:
        try:
            self._container.seek(time, stream=self.stream)
        except import_av().FFmpegError as error:
            raise NoPlaceError from error


class ListedPackets:
    """All packets of a sound. They are read, but only those that are asked for are decoded."""

    def __init__(self, container: Any, name: str | None, data: memoryview) -> None:
        self.stream = stream_of(container, "audio")
        self._listed = list(_packets(container, self.stream))
        self._is_counted = name in (*LISTED, "mp3") or _is_adpcm(self.stream)
        self.told_s = _told_s(self.stream, name, data)

    def end(self) -> int | None:
        """When the last one ends, or None for formats whose header says it."""
        return _end(self._listed) if self._is_counted else None

    def all(self) -> Iterable[Any]:
        """From the first one on."""
        self.stream.codec_context.flush_buffers()
        return self._listed

    def behind(self, time: int) -> Iterable[Any]:
        """Those that end behind a time."""
        self.stream.codec_context.flush_buffers()
        return [one for one in self._listed if one.pts is not None and one.pts + (one.duration or 0) > time]


def _is_adpcm(stream: Any) -> bool:
    return bool(stream.codec_context.codec.name.startswith("adpcm_"))


def _told_s(stream: Any, name: str | None, data: memoryview) -> Fraction | None:
    """The duration that a sound's header says; None where it says none, and FFmpeg guesses one."""
    if name in ("ogg", "avi", "flac") or _is_adpcm(stream) or stream.duration is None:
        return None
    if name == "matroska" and _DURATION not in bytes(data[:_HEAD_BYTES]).partition(_CLUSTER)[0]:  # of a live stream
        return None
    told_s: Fraction = stream.duration * stream.time_base
    if name != "mp3":
        return told_s
    frame_s = Fraction(_FRAME if stream.rate >= 32000 else _FRAME // 2, stream.rate)
    counted_s = _num_frames(data) * frame_s
    # FFmpeg leaves out what an encoder has added. Of a file with more bytes than its header counts, as of a cover, it guesses.
    return (told_s if abs(told_s - counted_s) < 3 * frame_s else counted_s) or None


def _num_frames(data: memoryview) -> int:
    """How many frames the header of an MP3 counts; 0: it does not say."""
    begin = behind_id3(data)
    head = bytes(data[begin : begin + 200])
    place = max(head.find(b"Xing"), head.find(b"Info"))
    flags, count = (int.from_bytes(head[place + at : place + at + 4], "big") for at in (4, 8))
    return count if place >= 0 and flags & 1 else 0


def _packets(container: Any, stream: Any) -> Iterator[Any]:
    for packet in container.demux(stream):
        if packet.size:
            if packet.is_corrupt:
                raise FormatError("a packet of its sound is damaged or cut")
            yield packet


def _end(packets: Iterable[Any]) -> int:
    """When the last packet ends; damaged packets may have no time."""
    return max((packet.pts + (packet.duration or 0) for packet in packets if packet.pts is not None), default=0)


class _Block(NamedTuple):
    """A decoded frame of `num` samples, and the place of the first in the stream."""

    frame: Any
    position: int
    num: int
    rate: int
    num_channels: int


def _blocks(stream: Any, packets: Iterable[Any], run_up_end: int = 0) -> Iterator[_Block]:
    """The frames of packets, one after the other: a gap in their times makes no gap in the samples. Packets before
    `run_up_end` that cannot be decoded are skipped, since a decoder that starts in the middle may lack earlier packets.

    Raises FormatError for a change of rate, channels or kind of samples."""
    position, kind = None, None
    is_flac = stream.container.format.name == "flac"
    frames = _frames(stream.codec_context, packets, passes_over=run_up_end > 0)
    for frame in _in_time(frames) if run_up_end else frames:
        found = frame.sample_rate, frame.layout.nb_channels, frame.format.name
        if kind is None or position is None:
            kind = found
            check_kind(found[0], found[1])
            position = 0 if frame.pts is None else round(frame.pts * frame.time_base * found[0])
        elif found != kind:
            raise FormatError(f"its sound changes from {_said(*kind)} to {_said(*found)}")
        elif is_flac and (frame.pts is None or frame.pts * frame.time_base * found[0] != position):
            raise damaged_error(position / found[0])  # FFmpeg leaves out blocks whose checksums are wrong
        yield _Block(frame, position, frame.samples, *found[:2])
        position += frame.samples


def _joined(blocks: Iterable[_Block], begin: int, end: int | None) -> NDArray[Any]:
    """The samples [begin, end) of blocks, as they are stored, [channels, n]. Raises FormatError above 1 GiB."""
    held, num = list[_Block](), 0
    for block in blocks:
        stop = block.position + block.num
        if stop > begin:
            held.append(block)
            num += block.num
            check_size(num * block.num_channels * block.frame.format.bytes)
        if end is not None and stop >= end:
            break
    if not held:
        return np.empty((1, 0), np.float32)
    first = held[0]
    is_planar = first.frame.format.is_planar
    num_rows, width = (first.num_channels, 1) if is_planar else (1, first.num_channels)
    joined = np.empty((num_rows, num * width), first.frame.to_ndarray().dtype)
    place = 0
    for block in held:
        size = block.num * width
        for row, plane in zip(joined, block.frame.planes, strict=True):
            row[place : place + size] = np.frombuffer(plane, joined.dtype, size)
        place += size
    array = joined if is_planar else joined.reshape(num, width).T
    return array[:, max(0, begin - first.position) : None if end is None else end - first.position]


def _frames(context: Any, packets: Iterable[Any], *, passes_over: bool) -> Iterator[Any]:
    """`passes_over`: skip packets that cannot be decoded before the first one that can."""
    av = import_av()
    for packet in chain(packets, (None,)):
        try:
            frames = context.decode(packet)
        except av.InvalidDataError:
            if not passes_over or packet is None:
                raise
            continue
        for frame in frames:
            passes_over = False
            yield frame


def _in_time(frames: Iterator[Any]) -> Iterator[Any]:
    """The frames, from the first one on that ends where the next one begins. FFmpeg gives too late a time to the first
    packet of a page of Vorbis, if it is a long block behind a short one."""
    held: Any = None
    for frame in frames:
        if held is not None and held.pts is not None and frame.pts is not None:
            off = (frame.pts - held.pts) * frame.time_base - Fraction(held.samples, max(1, held.sample_rate))
            if abs(off) > 2 * frame.time_base:  # Matroska's time base is rounded
                held = frame
                continue
        if held is not None:
            yield held
            yield frame
            yield from frames
            return
        held = frame
    if held is not None:
        yield held


def _said(rate: int, num_channels: int, kind: str) -> str:
    return f"{num_channels} channels of {rate} samples ({kind}) a second"


def _num_samples(stream: Any, end: int | None, first: _Block, told: Fraction | None) -> int | None:
    """The number of samples of a sound, or None if it is not known. `end` is its last packet's, if it is known; `told` the
    duration in seconds that its header says. Raises FormatError for a file that has less."""
    unit, rate = stream.time_base, first.rate
    if end is None:
        return None if not told else max(0, int((told + (stream.start_time or 0) * unit) * rate) - first.position)
    num: int = max(0, round(end * unit * rate) - first.position)
    if told is None:
        return num
    if num + _FRAME < told * rate:  # some writers count the frame that has the count
        raise FormatError(f"it has {num / rate:.3f} s of sound where its header says {float(told):.3f} s: it is cut")
    return min(num, int(told * rate))
