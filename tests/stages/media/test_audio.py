"""Windows of sounds against soundfile, and against what PyAV decodes and resamples of the whole file."""

from __future__ import annotations

import io
import random
from contextlib import suppress

import av
import numpy as np
import pytest
import soundfile
from media_files import SOUNDS, samples_of, sound, video, video_with_sound, window, write_samples

from loaderkit.errors import FormatError
from loaderkit.stages.media.audio import resampled
from loaderkit.stages.media.video import VideoArgs, read_clip

OF_SOUNDFILE = {"wav": 0, "wav-24": 0, "wav-float": 0, "flac": 0, "ogg": 1e-6, "opus": 1e-6, "mp3": 1e-5}
# Opus predicts from what was before, and comes close to that in what is decoded before a window.
TOLERANCE = {"ogg": 1e-6, "opus": 1e-3}


@pytest.mark.parametrize("kind", SOUNDS)
def test_samples_are_those_of_the_whole_file(kind: str, rng: random.Random) -> None:
    data = sound(kind, rng.randrange(2**32), rng.uniform(2, 4))
    whole, rate = samples_of(data)
    held = whole.shape[1] - (whole.shape[1] % 1024 if kind == "m4a" else 0)  # its last block is filled up with zeros
    for _ in range(4):
        seconds = rng.uniform(0.1, 1.0)
        start = rng.uniform(0, held / rate - seconds)
        found = window(data, start=start, seconds=seconds, channels=2)
        begin, num = round(start * rate), round(seconds * rate)
        assert found.samples.shape == (2, num)
        assert found.samples.dtype == np.float32
        expected = whole[:, begin : begin + num]
        np.testing.assert_allclose(found.samples[:, : expected.shape[1]], expected, rtol=0, atol=TOLERANCE.get(kind, 0))
        assert found.num_real == num


@pytest.mark.parametrize("kind", OF_SOUNDFILE)
def test_whole_files_are_as_soundfile_has_them(kind: str, rng: random.Random) -> None:
    data = sound(kind, rng.randrange(2**32), 1.5)
    expected, _ = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    found = window(data, channels=2)
    assert found.num_real == found.samples.shape[1] == len(expected)
    np.testing.assert_allclose(found.samples, expected.T, rtol=0, atol=OF_SOUNDFILE[kind])


@pytest.mark.parametrize("goal", [8000, 16000, 22050, 44000, 48000])
def test_a_window_lies_on_the_grid_of_the_whole_file_resampled(goal: int, rng: random.Random) -> None:
    data = sound("wav", rng.randrange(2**32), 3)
    whole, rate = samples_of(data)
    expected = resampled(whole.mean(0, dtype=np.float32, keepdims=True), rate, goal)
    for draw in (0.0, rng.random(), rng.random(), 1 - 1e-9):
        found = window(data, draw, rate=goal, seconds=0.7)
        num = round(0.7 * goal)
        begin = int(draw * (expected.shape[1] - num + 1))
        assert found.num_real == num
        np.testing.assert_allclose(found.samples, expected[:, begin : begin + num], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("container", "kind", "channels"), [
    ("OGG", "VORBIS", 1), ("FLAC", "PCM_16", 1), ("WAV", "IMA_ADPCM", 2), ("WAV", "MS_ADPCM", 1), ("ogg", "flac", 1),
])  # fmt: skip
def test_windows_of_what_ffmpeg_seeks_badly(container: str, kind: str, channels: int) -> None:
    """Times behind a seek are guesses in Ogg and of ADPCM, of Vorbis even those of packets, and in FLAC of noise no place is
    found."""
    rng = np.random.default_rng(3)
    noise = (rng.uniform(-0.5, 0.5, (882000, channels)) * np.sin(np.arange(882000) / 900)[:, None]).astype(np.float32)
    file = io.BytesIO()
    if container.isupper():
        soundfile.write(file, noise, 44100, format=container, subtype=kind)
    else:
        with av.open(file, "w", format=container) as out:
            write_samples(out, out.add_stream(kind, rate=44100, layout="mono"), noise.T, 44100)
    if container in ("OGG", "WAV"):
        whole, rate = soundfile.read(io.BytesIO(file.getvalue()), dtype="float32", always_2d=True)[0].T, 44100
    else:
        whole, rate = samples_of(file.getvalue())
    whole = whole.mean(0)
    for start in (*rng.uniform(0, 19, 12), 4.5, 17.73):
        found = window(file.getvalue(), start=float(start), seconds=0.05).samples[0]
        begin = round(start * rate)
        np.testing.assert_allclose(found, whole[begin : begin + len(found)], rtol=0, atol=1e-6)
    last = window(file.getvalue(), 1 - 1e-12, start="random", seconds=0.05)
    np.testing.assert_allclose(last.samples[0], whole[-last.samples.shape[1] :], rtol=0, atol=1e-6)


def test_resampling_keeps_a_tone() -> None:
    time = np.arange(44100) / 44100
    found = resampled(np.sin(2 * np.pi * 440 * time, dtype=np.float32)[None], 44100, 16000)
    expected = np.sin(2 * np.pi * 440 * np.arange(found.shape[1]) / 16000)
    assert abs(found.shape[1] - 16000) <= 1
    np.testing.assert_allclose(found[0, 100:-100], expected[100:-100], atol=2e-3)


def test_channels() -> None:
    stereo, mono = sound("wav", channels=2, seconds=0.2), sound("wav", channels=1, seconds=0.2)
    both = window(stereo, channels=2).samples
    np.testing.assert_array_equal(window(stereo).samples, both.mean(0, keepdims=True))
    twice = window(mono, channels=2).samples
    np.testing.assert_array_equal(twice[0], twice[1])
    file = io.BytesIO()
    soundfile.write(file, np.zeros((100, 6)), 8000, format="WAV")
    with pytest.raises(FormatError, match="6 channels, which are not mixed to 2"):
        window(file.getvalue(), channels=2)
    assert window(file.getvalue()).samples.shape == (1, 100)


def test_short_ones_are_padded() -> None:
    data = sound("flac", seconds=0.5)
    for start in ("random", "middle", "first"):
        found = window(data, 0.9, start=start, seconds=0.8, channels=2)
        assert found.samples.shape == (2, round(0.8 * 44100))
        assert found.num_real == 22050
        np.testing.assert_array_equal(found.samples[:, :22050], window(data, channels=2).samples)
        assert not found.samples[:, 22050:].any()
    with pytest.raises(FormatError, match=r"0\.500 s of sound, and `start` is at 0\.6 s"):
        window(data, start=0.6, seconds=0.1)


def test_the_middle() -> None:
    data = sound("wav", seconds=1.0)
    whole, rate = samples_of(data)
    np.testing.assert_array_equal(
        window(data, start="middle", seconds=0.5, channels=2).samples, whole[:, rate // 4 : rate // 4 + rate // 2]
    )


def test_a_video_s_sound_begins_where_its_clip_does(rng: random.Random) -> None:
    data = video_with_sound(rng.randrange(2**32))
    whole, rate = samples_of(data)
    for start in (0, rng.randrange(1, 20), 50):
        clip = read_clip(memoryview(data), VideoArgs(frames=4, start=start), 0)
        found = window(data, begin_s=clip.begin_s, seconds=0.5)
        begin = start * rate // 25
        np.testing.assert_array_equal(found.samples, whole[:, begin : begin + rate // 2])


def test_a_sound_that_begins_later_than_its_video() -> None:
    data, late = video_with_sound(delay_s=1.0), 16000 - 1024  # of AAC's first frame
    whole = samples_of(data)[0]
    in_file = np.concatenate([np.zeros((1, late), np.float32), whole], 1)
    for begin_s, goal in ((0.2, None), (0.8, None), (1.5, None), (0.2, 8000), (0.8, 8000), (1.5, 8000)):
        found = window(data, begin_s=begin_s, seconds=0.5, rate=goal)
        expected = in_file if goal is None else resampled(in_file, 16000, goal)
        rate = goal or 16000
        begin = round(begin_s * rate)
        assert found.num_real == rate // 2
        np.testing.assert_allclose(
            found.samples, expected[:, begin : begin + rate // 2], rtol=0, atol=2e-3 * bool(goal)
        )
    np.testing.assert_array_equal(window(data, begin_s=0.2).samples, in_file[:, 3200:])


@pytest.mark.parametrize("kind", SOUNDS)
def test_cut_sounds(kind: str, rng: random.Random) -> None:
    """Wherever the window is. Of MP3 and FLAC the last block but one is told apart from the end, and no more."""
    data = sound(kind, seconds=0.7)
    most = len(data) - 1 if kind not in ("mp3", "flac") else int(0.85 * len(data))
    for place in (0, 1, most, *(rng.randrange(most) for _ in range(12))):
        with pytest.raises(FormatError):
            window(data[:place], start="first", seconds=0.05)


@pytest.mark.parametrize("kind", ["flac", "mp3", "ogg", "m4a", "wav"])
def test_flipped_bytes(kind: str) -> None:
    """Packets that lose their times among them."""
    rng = np.random.default_rng(0)
    data = np.frombuffer(sound(kind, seconds=0.4), np.uint8)
    for _ in range(60):
        damaged = data.copy()
        places = rng.integers(0, len(data) if rng.random() < 0.5 else 400, 4)
        damaged[places] = rng.integers(0, 256, 4)
        with suppress(FormatError):
            assert window(damaged.tobytes(), float(rng.random()), seconds=0.1).samples.shape[0] == 1


def test_what_is_no_sound() -> None:
    with pytest.raises(FormatError, match="it has no audio, only video"):
        window(video("mp4", num=5))
    with pytest.raises(FormatError, match="no video or sound that is opened"):
        window(b"#EXTM3U\n/etc/passwd\n")
    with pytest.raises(FormatError, match="more than 1 GiB"):
        window(sound("wav", seconds=0.1), seconds=1e6)


def test_a_bomb_is_bounded() -> None:
    """FLAC packs silence to almost nothing."""
    file = io.BytesIO()
    with av.open(file, "w", format="flac") as out:
        stream = out.add_stream("flac", rate=8000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 2_000_000), np.int16), format="s16", layout="mono")
        frame.sample_rate = 8000
        out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    assert len(file.getvalue()) < 100_000
    assert window(file.getvalue(), 0.5, seconds=0.1).samples.shape == (1, 800)


def test_damaged_flac_is_refused_as_soundfile_refuses_it(rng: random.Random) -> None:
    """FFmpeg leaves damaged blocks out, or decodes noise, unless it is told to look at their checksums."""
    num_refused = 0
    for number in range(40):
        whole = sound("flac", number % 4, rng.uniform(0.3, 1.5))
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            place, num = rng.randrange(len(data)), rng.randrange(1, 10)
            data[place : place + num] = rng.randbytes(num)
        try:
            soundfile.read(io.BytesIO(bytes(data)))
        except soundfile.LibsndfileError:
            num_refused += 1
            with pytest.raises(FormatError):
                window(bytes(data))
        else:
            np.testing.assert_array_equal(window(bytes(data)).samples, window(whole).samples)
    assert num_refused > 20
