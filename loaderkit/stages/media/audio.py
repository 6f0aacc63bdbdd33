"""Reads windows of sounds: float32 [channels, samples]. Only the window and what it depends on is decoded.

A window lies on the grid of the samples that are delivered, and begins where resampling the whole file would have them:
the resampler starts at a multiple of the two rates' period.
"""

from __future__ import annotations

import math
from contextlib import suppress
from fractions import Fraction
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from loaderkit._internal.config.settings import Model
from loaderkit.errors import FormatError
from loaderkit.stages.media.container import container_of, import_av, opened
from loaderkit.stages.media.sound_file import (
    MOST_RATE,
    SoundFile,
    check_size,
    damaged_error,
    is_for_libsndfile,
    opened_sound,
)
from loaderkit.stages.media.sound_stream import LISTED, ListedPackets, NoPlaceError, SoughtPackets, SoundStream

Samples = NDArray[np.float32]
_MOST_BYTES = 1 << 30
_SLACK_S = 0.1  # by which lengths may be wrong: those of MP3 count what a decoder leaves out
_TAPS = 64  # of the resampler's filter, on each side, and more
_LEVELS = {"uint8": (128.0, 128.0), "int16": (0.0, 2.0**15), "int32": (0.0, 2.0**31), "int64": (0.0, 2.0**63)}


class AudioArgs(Model):
    """A window of every sound: float32 [channels, samples], full scale from -1 to 1."""

    rate: PositiveInt | None = Field(
        None, le=MOST_RATE, description="samples a second, to which others are resampled; default: the file's"
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
    if name is not None and is_for_libsndfile(data, name):
        with opened_sound(data, name) as file:
            return _read(file, args, draw, begin_s)
    if name not in LISTED:
        with suppress(NoPlaceError), opened(data) as container:
            return _read(SoundStream(SoughtPackets(container, name, data)), args, draw, begin_s)
    with opened(data) as container:
        return _read(SoundStream(ListedPackets(container, name, data)), args, draw, begin_s)


def _read(sound: SoundFile | SoundStream, args: AudioArgs, draw: float, begin_s: float | None) -> Sound:
    window = _Window.of(args, sound.rate, sound.num, draw, None if begin_s is None else begin_s - sound.begin_s)
    held = sound.samples(window.begin, window.num)
    if begin_s is None and not held.shape[1]:
        if sound.num is None:
            raise FormatError(f"it has no sound at {window.begin / sound.rate:.3f} s")
        if window.begin < sound.num - sound.rate * _SLACK_S:
            raise damaged_error(window.begin / sound.rate)
    return window.of_samples(held, args)


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

    def of_samples(self, held: NDArray[Any], args: AudioArgs) -> Sound:
        """The window of the samples [begin, begin + num) as they are stored, [channels, n]."""
        samples = mixed(_floats(held), args.channels)
        if self.up != self.down:
            check_size(samples.nbytes * self.up // self.down)
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
