"""Sounds as other programs write them: without lengths, with tags and covers, in few or many pages; and damaged ones."""

from __future__ import annotations

import io
import random
import re
from contextlib import suppress
from typing import Any

import av
import numpy as np
import pytest
import soundfile
from media_files import samples_of, sound, window, write_samples

from loaderkit.errors import FormatError
from loaderkit.stages.media.container import behind_id3


def tone(rng: random.Random, rate: int, seconds: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    """[n]: a tone that comes and goes, and noise that does."""
    place = np.arange(int(seconds * rate)) / rate
    noise = np.random.default_rng(rng.randrange(2**32)).normal(0, rng.choice([0, 1e-4, 0.05]), len(place))
    loud = np.sin(3 * place) > rng.uniform(-1, 0.5)
    return (rng.choice([0.01, 0.3]) * np.sin(2 * np.pi * rate / 40 * place) * loud + noise).astype(np.float32)


def by_soundfile(samples: Any, rate: int, **kind: Any) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, **kind)
    return file.getvalue()


@pytest.mark.parametrize("rate", [8000, 16000, 44100])
def test_vorbis_and_opus_of_any_length(rate: int, rng: random.Random) -> None:
    """FFmpeg takes a file of one page for one of a day."""
    for seconds in (0.1, 0.4, 1.1, 6.0):
        for kind in ("VORBIS", "OPUS") if rate < 44100 else ("VORBIS",):
            data = by_soundfile(
                tone(rng, rate, seconds), rate, format="OGG", subtype=kind, compression_level=rng.random()
            )
            whole, _ = soundfile.read(io.BytesIO(data), dtype="float32")
            np.testing.assert_allclose(window(data).samples[0], whole, rtol=0, atol=1e-5)
            num = len(whole) // 3
            for start in ("random", "middle", "first"):
                draw = rng.random()
                found = window(data, draw, start=start, seconds=num / rate)
                begin = {"random": int(draw * (len(whole) - num + 1)), "middle": (len(whole) - num) // 2, "first": 0}[
                    start
                ]
                assert found.num_real == num
                expected = whole[begin : begin + num]
                np.testing.assert_allclose(found.samples[0], expected, rtol=0, atol=2e-3 if kind == "OPUS" else 1e-5)


@pytest.mark.parametrize("kind", ["ogg", "opus"])
def test_a_damaged_page_in_the_middle_is_refused(kind: str, rng: random.Random) -> None:
    """FFmpeg and libsndfile leave it out."""
    data = bytearray(sound(kind, seconds=8.0))
    pages = [found.start() for found in re.finditer(b"OggS", data)]
    assert len(pages) > 5
    place = rng.randrange(3, len(pages) - 1)
    if rng.random() < 0.5:
        data[rng.randrange(pages[place] + 6, pages[place + 1])] ^= 1 << rng.randrange(8)
    else:
        del data[pages[place] : pages[place + 1]]
    with pytest.raises(FormatError, match=r"checksum|is missing"):
        window(bytes(data))


@pytest.mark.parametrize("size", ["RF64", "of data", "of RIFF", "unknown"])
def test_wav_by_its_sizes(size: str, rng: random.Random) -> None:
    """A cut file says so by the size of its samples; a writer that could not go back leaves sizes that say nothing."""
    samples = tone(rng, 8000, 1.0)
    data = bytearray(by_soundfile(samples, 8000, format="RF64" if size == "RF64" else "WAV", subtype="FLOAT"))
    if size in ("of data", "unknown"):
        data[4:8] = b"\xff" * 4
    if size == "unknown":
        place = data.index(b"data") + 4
        data[place : place + 4] = rng.choice([b"\xff\xff\xff\xff", b"\x00\xf0\xff\x7f"])
    np.testing.assert_array_equal(window(bytes(data)).samples[0], samples)
    if size != "unknown":
        np.testing.assert_array_equal(window(bytes(data) + b"LIST").samples[0], samples)
    cut = bytes(data[: rng.randrange(len(data) // 2, len(data))])
    if size == "unknown":
        np.testing.assert_array_equal(window(cut).samples[0], samples[: window(cut).num_real])
    else:
        with pytest.raises(FormatError, match="it is cut"):
            window(cut, start="first", seconds=0.1)


def test_flac_without_a_length_and_behind_tags(rng: random.Random) -> None:
    samples = (tone(rng, 16000, 2.0) * 2**14).astype(np.int16)
    whole = by_soundfile(samples, 16000, format="FLAC")
    streamed = bytearray(whole)
    streamed[21] &= 0xF0
    streamed[22:26] = bytes(4)
    tagged = b"ID3\4\0\0\0\0\1\0" + bytes(128) + whole
    for data in (bytes(streamed), tagged):
        np.testing.assert_array_equal(window(data).samples[0], samples / np.float32(2**15))
        found = window(data, 0.7, seconds=0.5).samples[0]
        begin = int(0.7 * (len(samples) - 8000 + 1))
        np.testing.assert_array_equal(found, samples[begin : begin + 8000] / np.float32(2**15))
    for place in rng.sample(range(len(streamed) // 4, len(streamed)), 10):
        damaged = bytearray(streamed)
        damaged[place] ^= 1 << rng.randrange(8)
        with pytest.raises(FormatError):
            window(bytes(damaged))


def test_mp3_between_tags(rng: random.Random) -> None:
    """FFmpeg then guesses a duration by the size of the file."""
    data = sound("mp3", seconds=2.0)
    whole = window(data, channels=2).samples
    tag = b"ID3\4\0\0\0\0\x07\x68" + bytes(1000)
    for odd in (data + b"APETAGEX" + bytes(len(data) // 4), tag + data, tag + tag + data):
        found = window(odd, channels=2).samples
        np.testing.assert_array_equal(found[:, : whole.shape[1]], whole)
        assert found.shape[1] - whole.shape[1] < 1152
    with pytest.raises(FormatError, match="it is cut"):
        window(data[: int(0.8 * len(data))] + b"APETAGEX")
    plain = sound("mp3", seconds=0.5)
    begin = behind_id3(memoryview(plain))
    for place in range(190, 200):  # the name of a header, which is none, at the end of what is looked at
        marked = bytearray(plain)
        marked[begin + place : begin + place + 4] = b"Info"
        with suppress(FormatError):
            window(bytes(marked))


@pytest.mark.parametrize("codec", ["libmp3lame", "ac3", "alac"])
def test_live_matroska(codec: str, rng: random.Random) -> None:
    """It says no duration."""
    file = io.BytesIO()
    with av.open(file, "w", format="matroska", options={"live": "1"}) as out:
        write_samples(out, out.add_stream(codec, rate=44100, layout="mono"), tone(rng, 44100, 4.0)[None], 44100)
    whole, _ = samples_of(file.getvalue())
    assert window(file.getvalue()).samples.shape == whole.shape


def test_the_end_of_avi(rng: random.Random) -> None:
    file = io.BytesIO()
    with av.open(file, "w", format="avi") as out:
        write_samples(out, out.add_stream("pcm_s16le", rate=16000, layout="mono"), tone(rng, 16000, 20.0)[None], 16000)
    whole, _ = samples_of(file.getvalue())
    last = window(file.getvalue(), 1 - 1e-12, start="random", seconds=0.05)
    assert last.num_real == 800
    np.testing.assert_array_equal(last.samples, whole[:, -800:])


@pytest.mark.parametrize("rate", [8000, 11025, 16000, 22050, 24000, 32000, 44100, 48000])
def test_windows_of_mp3_of_any_rate(rate: int, rng: random.Random) -> None:
    """Of many kinds of bit rate, with and without a count in the header: a packet may need the bytes of up to 25 before it."""
    place = np.arange(6 * rate) / rate
    loud = (np.sin(place * rng.uniform(0.5, 3)) > 0) * np.random.default_rng(rng.randrange(2**32)).normal(
        0, 0.1, len(place)
    )
    samples = (0.4 * np.sin(2 * np.pi * rate / 40 * place) + loud).astype(np.float32)[None]
    for options in ({}, {"flags": "+qscale", "global_quality": str(118 * rng.randrange(1, 10))}, {"b": "8000"}):
        file = io.BytesIO()
        with av.open(file, "w", format="mp3", options={"write_xing": rng.choice("01")}) as out:
            write_samples(out, out.add_stream("libmp3lame", rate=rate, layout="mono", options=options), samples, rate)
        whole, _ = samples_of(file.getvalue())
        for _ in range(8):
            begin = rng.randrange(whole.shape[1] - 3000)
            found = window(file.getvalue(), start=begin / rate, seconds=3000 / rate).samples
            np.testing.assert_array_equal(found, whole[:, begin : begin + 3000])
