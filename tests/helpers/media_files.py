"""Small videos and sounds, by PyAV, and what it reads of them by itself."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

from loaderkit.stages.media.audio import AudioArgs, Sound, read_sound

VIDEOS = {  # container, codec, format of pixels, options
    "mp4": ("mp4", "libx264", "yuv420p", {"g": "12", "bf": "3", "preset": "ultrafast", "x264-params": "scenecut=0"}),
    "open-gop": ("mp4", "libx264", "yuv420p", {"g": "10", "bf": "4", "x264-params": "open-gop=1:b-pyramid=normal"}),
    "mov": ("mov", "mpeg4", "yuv420p", {"g": "9", "bf": "2"}),
    "mkv": ("matroska", "libx264", "yuv420p", {"g": "30", "preset": "ultrafast"}),
    "hevc": ("matroska", "libx265", "yuv420p", {"preset": "ultrafast", "x265-params": "log-level=none:keyint=10"}),
    "webm": ("webm", "libvpx", "yuv420p", {"g": "15", "auto-alt-ref": "1", "lag-in-frames": "16", "cpu-used": "8"}),
    "avi": ("avi", "mpeg4", "yuv420p", {"g": "12"}),
    "avi-h264": ("avi", "libx264", "yuv420p", {"g": "12", "bf": "3"}),
    "mjpeg": ("avi", "mjpeg", "yuvj420p", {}),
    "gif": ("gif", "gif", "rgb8", {}),
}
SOUNDS = {  # container, codec, rate, options
    "wav": ("wav", "pcm_s16le", 44100, {}),
    "wav-24": ("wav", "pcm_s24le", 22050, {}),
    "wav-float": ("wav", "pcm_f32le", 48000, {}),
    "flac": ("flac", "flac", 44100, {}),
    "mp3": ("mp3", "libmp3lame", 44100, {}),
    "ogg": ("ogg", "vorbis", 44100, {"strict": "-2"}),
    "opus": ("ogg", "libopus", 48000, {}),
    "m4a": ("ipod", "aac", 44100, {"aac_pns": "0"}),  # with PNS a decoder adds noise of its own
}


def video(
    kind: str = "mp4",
    seed: int = 0,
    num: int = 50,
    size: tuple[int, int] = (48, 64),
    *,
    varies: bool = False,
    turn: int = 0,
) -> bytes:
    """`num` frames of a texture that moves under noise; `size` = (height, width). `varies`: frames last unequally long.
    `turn`: it says that it is to be turned by so many degrees."""
    container, codec, pixels, options = VIDEOS[kind]
    rng, file = np.random.default_rng(seed), io.BytesIO()
    height, width = size
    base = rng.integers(0, 200, (-(-height // 8), -(-width // 8), 3)).repeat(8, 0).repeat(8, 1)[:height, :width]
    time = 0
    with quiet(), av.open(file, "w", format=container) as out:
        stream: Any = out.add_stream(codec, rate=25, options=options)
        stream.width, stream.height, stream.pix_fmt = width, height, pixels
        if turn:
            stream.set_display_rotation(turn)
        for number in range(num):
            moved = np.roll(base, (number, 2 * number), (0, 1)) + rng.integers(0, 40, base.shape)
            frame = av.VideoFrame.from_ndarray(moved.astype(np.uint8), format="rgb24")
            if varies:
                frame.pts, frame.time_base = time, Fraction(1, 25)
                time += int(rng.integers(1, 5))
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    return file.getvalue()


def without_first(data: bytes, num: int) -> bytes:
    """The packets of a video from number `num` on in a file of their own, as cutting without encoding leaves them."""
    file = io.BytesIO()
    with av.open(io.BytesIO(data)) as held, av.open(file, "w", format="matroska") as out:
        track = held.streams.video[0]
        stream = out.add_stream_from_template(track)
        for number, packet in enumerate(held.demux(track)):
            if packet.size and number >= num:
                packet.stream = stream
                out.mux(packet)
    return file.getvalue()


def sound(kind: str = "wav", seed: int = 0, seconds: float = 3.0, channels: int = 2) -> bytes:
    """Chirps and some noise."""
    container, codec, rate, options = SOUNDS[kind]
    samples = waves(seed, int(seconds * rate), rate, channels)
    file = io.BytesIO()
    with av.open(file, "w", format=container) as out:
        layout = "mono" if channels == 1 else "stereo"
        stream: Any = out.add_stream(codec, rate=rate, layout=layout, options=options)
        write_samples(out, stream, samples, rate)
    return file.getvalue()


def video_with_sound(seed: int = 0, seconds: float = 3.0, delay_s: float = 0.0) -> bytes:
    """mp4, with 25 frames and 16,000 samples a second; its sound begins later by `delay_s`."""
    rng, file = np.random.default_rng(seed), io.BytesIO()
    with quiet(), av.open(file, "w", format="mp4") as out:
        stream: Any = out.add_stream("mpeg4", rate=25)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        track: Any = out.add_stream("aac", rate=16000, layout="mono", options={"aac_pns": "0"})
        for _ in range(int(25 * seconds)):
            frame = rng.integers(0, 256, (6, 8, 3), np.uint8).repeat(8, 0).repeat(8, 1)
            out.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        out.mux(stream.encode(None))
        write_samples(out, track, waves(seed, int(seconds * 16000), 16000, 1), 16000, round(delay_s * 16000))
    return file.getvalue()


def waves(seed: int, num: int, rate: int, channels: int) -> NDArray[np.float32]:
    rng, time = np.random.default_rng(seed), np.arange(num) / rate
    tones = [np.sin(2 * np.pi * (rng.uniform(100, 2000) + rng.uniform(0, 300) * time) * time) for _ in range(channels)]
    return (0.4 * np.stack(tones) + rng.normal(0, 0.01, (channels, num))).astype(np.float32)


def write_samples(out: Any, stream: Any, samples: NDArray[np.float32], rate: int, first: int = 0) -> None:
    frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout="mono" if len(samples) == 1 else "stereo")
    frame.sample_rate, frame.pts, frame.time_base = rate, first, Fraction(1, rate)
    out.mux(stream.encode(frame))
    out.mux(stream.encode(None))


def frames_of(data: bytes) -> list[NDArray[np.uint8]]:
    """All frames of a video."""
    with av.open(io.BytesIO(data)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def samples_of(data: bytes) -> tuple[NDArray[np.float32], int]:
    """All samples of a sound, float32 [channels, n], by FFmpeg's own conversion, and their rate."""
    parts = []
    with av.open(io.BytesIO(data)) as container:
        resampler = av.AudioResampler(format="fltp")
        for frame in container.decode(audio=0):
            rate = frame.sample_rate
            parts += [part.to_ndarray() for part in resampler.resample(frame)]
    return np.concatenate(parts, 1), rate


@contextmanager
def quiet() -> Iterator[None]:
    """Encoders write to standard error."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def window(data: bytes, draw: float = 0.0, begin_s: float | None = None, **args: object) -> Sound:
    """What the stage `decode` reads of a sound with `audio: args`."""
    return read_sound(memoryview(data), AudioArgs.model_validate(args), draw, begin_s=begin_s)
