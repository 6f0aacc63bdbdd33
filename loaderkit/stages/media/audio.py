"""Reads windows of sounds: float32 [channels, samples]. Only the window and what it depends on is decoded.

A window lies on the grid of the samples that are delivered, and begins where resampling the whole file would have them:
the resampler starts at a multiple of the two rates' period.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from fractions import Fraction
from itertools import chain
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from loaderkit._internal.config.settings import Model
from loaderkit.errors import FormatError
from loaderkit.stages.media.container import container_of, import_av, opened
from loaderkit.stages.media.packets import LISTED, ListedPackets, NoPlaceError, SoughtPackets, cut_error

Samples = NDArray[np.float32]
_MOST_BYTES = 1 << 30
_MOST_RATE = 1_000_000
_MOST_CHANNELS = 64
_RUN_UP_S = 0.25  # decoded before a window: what a decoder remembers, as Opus's 80 ms and the reservoir of MP3
_FORGETS = ("flac", "alac", "pcm_")  # decoders that remember nothing
_SLACK = {"flac": 0, "ogg": 8192}  # samples that may be missing by their times: as many as a block of Vorbis
_FRAME = 1152  # samples of MP3's
_TAPS = 64  # of the resampler's filter, on each side, and more
_LEVELS = {"uint8": (128.0, 128.0), "int16": (0.0, 2.0**15), "int32": (0.0, 2.0**31), "int64": (0.0, 2.0**63)}


class AudioArgs(Model):
    """A window of every sound: float32 [channels, samples], full scale from -1 to 1."""

    rate: PositiveInt | None = Field(
        None, le=_MOST_RATE, description="samples a second, to which others are resampled; default: the file's"
    )
    seconds: PositiveFloat | None = Field(
        None, description="length of the window, padded with zeros if the sound is shorter; default: the whole sound"
    )
    channels: Literal[1, 2] = Field(1, description="1: the mean of all; 2: both, or the one twice")
    start: Literal["random", "first", "middle"] | NonNegativeFloat = Field(
        "random",
        description="of the window: each place as likely, the first, the middle, or seconds from the beginning",
    )
    length: str | None = Field(
        None, min_length=1, description="name of a field for the number of samples that are no padding; default: none"
    )
    of_video: str | None = Field(
        None,
        min_length=1,
        description="name of a field for the sound of each video, from where its clip begins, with `video`; default: none",
    )


class Sound(NamedTuple):
    """A window of a sound: float32 [channels, samples], and how many of these samples come from the file; the rest is
    padding."""

    samples: Samples
    num_real: int


def read_sound(data: memoryview, args: AudioArgs, draw: float, *, begin_s: float | None = None) -> Sound:
    """A window of a sound, or of the sound of a video. `draw` from [0, 1) chooses a random start; with `begin_s` it starts at
    that time of the file: the time before the first sample is filled with zeros.

    Without resampling and mixing the samples are the same as soundfile's: whole numbers divided by 2^(bits - 1). Raises
    FormatError for a file that is damaged or cut, and for a start behind its end; MissingExtraError.
    """
    name = container_of(data)
    if name not in LISTED:
        with suppress(NoPlaceError), opened(data) as container:
            return _read(SoughtPackets(container, name, data), args, draw, begin_s)
    with opened(data) as container:
        return _read(ListedPackets(container, name, data), args, draw, begin_s)


def _read(packets: SoughtPackets | ListedPackets, args: AudioArgs, draw: float, begin_s: float | None) -> Sound:
    """The window. Raises NoPlaceError where seeking does not lead to it."""
    stream, end = packets.stream, packets.end()
    blocks = _blocks(stream, packets.all())
    first = next(blocks, None)
    if first is None:
        raise FormatError("its sound has no samples")
    origin, rate = first.position, first.rate
    num = _num_samples(stream, end, first, is_told=packets.is_told)
    window = _Window.of(args, rate, num, draw, None if begin_s is None else begin_s - origin / rate)
    begin = origin + window.begin
    forgets = stream.codec_context.codec.name.startswith(_FORGETS)
    run_up = begin if forgets else begin - int(_RUN_UP_S * rate)
    if run_up <= origin:
        return window.of_blocks(chain((first,), blocks), origin, args)
    blocks = _blocks(stream, packets.behind(int(run_up / rate / stream.time_base)), run_up_end=begin)
    found = next(blocks, None)
    if found is not None and found.position <= begin:
        return window.of_blocks(chain((found,), blocks), origin, args)
    return window.of_blocks(_blocks(stream, packets.all()), origin, args)


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

    Raises FormatError for a change of rate, channels or kind of samples, and where FFmpeg has left out damaged ones."""
    position, kind = None, None
    slack = _SLACK.get(stream.container.format.name)
    frames = _frames(stream.codec_context, packets, passes_over=run_up_end > 0)
    for frame in _in_time(frames) if run_up_end else frames:
        found = frame.sample_rate, frame.layout.nb_channels, frame.format.name
        if kind is None or position is None:
            kind = found
            if not 0 < found[0] <= _MOST_RATE or not 0 < found[1] <= _MOST_CHANNELS:
                raise FormatError(f"its sound has {found[1]} channels of {found[0]} samples a second")
            position = 0 if frame.pts is None else round(frame.pts * frame.time_base * found[0])
        elif found != kind:
            raise FormatError(f"its sound changes from {_said(*kind)} to {_said(*found)}")
        elif slack is not None and (frame.pts is None or frame.pts * frame.time_base * found[0] > position + slack):
            raise _damaged(position / found[0])
        yield _Block(frame, position, frame.samples, *found[:2])
        position += frame.samples
    if slack == 0 and kind is not None and stream.duration and position < stream.duration * stream.time_base * kind[0]:
        raise _damaged(position / kind[0])


def _damaged(at_s: float) -> FormatError:
    return FormatError(f"its sound is damaged at {at_s:.3f} s")


def _joined(blocks: Iterable[_Block], begin: int, end: int | None) -> tuple[NDArray[Any] | None, int]:
    """The samples of the blocks that reach into [begin, end), [channels, n], as they are stored, and the place of their first;
    None if there are none. Raises FormatError above 1 GiB."""
    fifo, place, held_bytes = import_av().AudioFifo(), 0, 0
    for block in blocks:
        stop = block.position + block.num
        if stop > begin:
            place = place if held_bytes else block.position
            held_bytes += block.num * block.num_channels * block.frame.format.bytes
            if held_bytes > _MOST_BYTES:
                raise FormatError("its sound takes more than 1 GiB: set `seconds`")
            block.frame.pts = None  # or a gap would be an error
            fifo.write(block.frame)
        if end is not None and stop >= end:
            break
    if not held_bytes:
        return None, begin
    frame = fifo.read(0, True)
    array: NDArray[Any] = frame.to_ndarray()
    return array if frame.format.is_planar else array.reshape(frame.samples, -1).T, place


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


def _floats(array: NDArray[Any]) -> Samples:
    """Samples as they are stored as float32."""
    if array.dtype.kind == "f":
        return array.astype(np.float32, copy=False)
    zero, scale = _LEVELS[array.dtype.name]
    levels: Samples = array.astype(np.float32 if array.itemsize < 4 else np.float64)
    if zero:
        levels -= zero
    levels /= scale
    return levels.astype(np.float32, copy=False)


def _num_samples(stream: Any, end: int | None, first: _Block, *, is_told: bool) -> int | None:
    """The number of samples of a sound, or None if it is not known. `end` is its last packet's, if it is known; `is_told`: its
    duration comes from its header, and is no guess. Raises FormatError for a file that has less."""
    unit, rate = stream.time_base, first.rate
    told = None if stream.duration is None or not is_told else stream.duration * unit
    if end is None:
        return None if not told else max(0, int((told + (stream.start_time or 0) * unit) * rate) - first.position)
    num: int = max(0, round(end * unit * rate) - first.position)
    if told is None:
        return num
    if num + _FRAME < told * rate:  # some writers count the frame that has the count
        raise cut_error(num / rate, float(told))
    return min(num, int(told * rate))


class _Window(NamedTuple):
    """The samples [begin, begin + num) of the decoded file, to its end if `num` is None. `begin` is a multiple of
    `down`. `rate` is the file's; of the resampled samples, `wanted` are taken from number `skipped` on, behind
    `silence` zeros."""

    rate: int
    begin: int
    num: int | None
    skipped: int
    wanted: int | None
    up: int
    down: int
    silence: int

    @classmethod
    def of(cls, args: AudioArgs, rate: int, total: int | None, draw: float, begin_s: float | None) -> _Window:
        """The window for a sound of `rate` and `total` samples; `begin_s` is from its first one on. Raises FormatError."""
        goal = args.rate or rate
        common = math.gcd(goal, rate)
        up, down = goal // common, rate // common
        wanted = None if args.seconds is None else max(1, round(args.seconds * goal))
        if wanted is not None and wanted * args.channels * 4 > _MOST_BYTES:
            raise FormatError(f"a window of {wanted} samples takes more than 1 GiB")
        num_out = None if total is None else -(-total * up // down)
        first = _first(args, goal, wanted=wanted, num=num_out, draw=draw, begin_s=begin_s)
        silence = max(0, -first) if wanted is None else min(max(0, -first), wanted)
        if silence * args.channels * 4 > _MOST_BYTES:
            raise FormatError(f"its sound begins {silence / goal:.3f} s behind its clip: set `seconds`")
        first, wanted = max(0, first), None if wanted is None else wanted - silence
        margin = _TAPS * max(1, -(-down // up)) if up != down else 0
        begin = max(0, first * down // up - margin) // down * down
        last = None if wanted is None else (first + wanted) * down // up + margin + 1 - begin
        return cls(rate, begin, last, first - begin * up // down, wanted, up, down, silence)

    def of_blocks(self, blocks: Iterable[_Block], origin: int, args: AudioArgs) -> Sound:
        """The window of a stream's blocks, the first of which begins at it or before."""
        begin, end = self.begin + origin, None if self.num is None else self.begin + origin + self.num
        held, position = _joined(blocks, begin, end)
        if held is None:
            held = np.empty((args.channels, 0), np.float32)
        held = held[:, max(0, begin - position) : None if end is None else end - position]
        samples = mixed(_floats(held), args.channels)
        if self.up != self.down:
            samples = resampled(samples, self.rate, self.rate // self.down * self.up)
        samples = samples[:, self.skipped :]
        num = samples.shape[1] if self.wanted is None else self.wanted
        num_real = self.silence + min(samples.shape[1], num)
        window = np.zeros((args.channels, self.silence + num), np.float32)
        window[:, self.silence : num_real] = samples[:, :num]
        return Sound(window, num_real)


def _first(
    args: AudioArgs, goal: int, *, wanted: int | None, num: int | None, draw: float, begin_s: float | None
) -> int:
    """The first sample of the window, of `num` resampled ones, below 0 if `begin_s` is. Raises FormatError."""
    if begin_s is not None:
        return round(begin_s * goal)
    start = args.start
    if not isinstance(start, str):
        first = round(start * goal)
        if num is not None and first >= num:
            raise FormatError(f"it has {num / goal:.3f} s of sound, and `start` is at {start:g} s")
        return first
    if wanted is None or start == "first":
        return 0
    if num is None:
        raise FormatError(f"its header does not say how long it is: `start: {start}` cannot be found")
    room = max(0, num - wanted)
    return room // 2 if start == "middle" else int(draw * (room + 1))


def mixed(samples: Samples, num_channels: int) -> Samples:
    """[1, n], the mean of all channels, or [2, n]. Raises FormatError if more than two channels are to become two."""
    held = len(samples)
    if held == num_channels:
        return samples
    if num_channels == 1:
        if held == 2:  # as `mean`, in a third of the time
            return (samples[:1] + samples[1:]) * np.float32(0.5)
        mean: Samples = samples.mean(0, dtype=np.float32, keepdims=True)
        return mean
    if held > 2:
        raise FormatError(f"its sound has {held} channels, which are not mixed to 2: `channels: 1` is their mean")
    return samples.repeat(2, 0)


def resampled(samples: Samples, rate: int, goal: int) -> Samples:
    """float32 [channels, n] at another rate, by FFmpeg's resampler (a windowed sinc of 32 taps at the lower rate)."""
    av = import_av()
    if not samples.shape[1]:
        return samples
    layout = "mono" if len(samples) == 1 else "stereo"
    resampler = av.AudioResampler(format="fltp", layout=layout, rate=goal)
    frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples), format="fltp", layout=layout)
    frame.sample_rate, frame.pts, frame.time_base = rate, 0, Fraction(1, rate)
    parts = [part.to_ndarray() for given in (frame, None) for part in resampler.resample(given)]
    return np.concatenate(parts, 1) if parts else samples[:, :0]
