"""Clips against what PyAV decodes of the whole file by itself, on files drawn at random."""

from __future__ import annotations

import random
import re
import struct
from collections.abc import Callable
from typing import Any

import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from media_files import VIDEOS, frames_of, sound, video, without_first
from memory_peak import forget_peak, peak_bytes

from loaderkit.errors import FormatError, MissingExtraError
from loaderkit.stages.media import video as of_video
from loaderkit.stages.media.container import check_whole, container_of
from loaderkit.stages.media.video import VideoArgs, frame_places, read_clip


def pixels_of(data: bytes, args: VideoArgs, draw: float) -> list[Any]:
    return [frame.pixels for frame in read_clip(memoryview(data), args, draw).clip.frames]


@pytest.mark.parametrize("varies", [False, True], ids=["", "varies"])
@pytest.mark.parametrize("kind", VIDEOS)
def test_frames_are_those_of_pyav(kind: str, varies: bool, rng: random.Random) -> None:
    num = rng.randrange(30, 45)
    data = video(kind, rng.randrange(2**32), num, varies=varies)
    frames = frames_of(data)
    assert len(frames) == num
    for start in ("random", "random", "middle", rng.randrange(10)):
        args = VideoArgs(frames=rng.randrange(1, 6), stride=rng.randrange(1, 5), start=start)
        draw = rng.random()
        places = frame_places(num, args, draw)
        for place, pixels in zip(places, pixels_of(data, args, draw), strict=True):
            assert np.array_equal(pixels, frames[place])


@pytest.mark.parametrize("kind", ["mp4", "hevc", "open-gop"])
@pytest.mark.parametrize("first", [5, 12, 20])
def test_frames_of_a_video_that_begins_between_keyframes(kind: str, first: int) -> None:
    """Those that are not decoded are not counted."""
    data = without_first(video(kind), first)
    frames = frames_of(data)
    for start in (0, 3, 14):
        found = pixels_of(data, VideoArgs(frames=3, stride=2, start=start), 0)
        assert all(np.array_equal(pixels, frames[start + 2 * number]) for number, pixels in enumerate(found))


@given(st.integers(1, 300), st.integers(1, 20), st.integers(1, 9), st.floats(0, 1, exclude_max=True))
def test_places(num: int, frames: int, stride: int, draw: float) -> None:
    span = (frames - 1) * stride + 1
    for short in ("loop", "last"):
        for start in ("random", "first", "middle"):
            places = frame_places(num, VideoArgs(frames=frames, stride=stride, start=start, short=short), draw)
            assert len(places) == frames
            assert 0 <= min(places) <= max(places) < num
            if span <= num:
                assert {*np.diff(places)} <= {stride}
                assert (
                    places[0]
                    == {"random": int(draw * (num - span + 1)), "first": 0, "middle": (num - span) // 2}[start]
                )
            else:
                wanted = range(0, span, stride)
                assert places == [place % num if short == "loop" else min(place, num - 1) for place in wanted]


def test_each_start_is_as_likely() -> None:
    args = VideoArgs(frames=3, stride=2)
    starts = [frame_places(12, args, (number + 0.5) / 800)[0] for number in range(800)]
    assert np.bincount(starts).tolist() == [100] * 8


def test_only_what_is_needed_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the keyframe before the first wanted frame on, up to the last wanted one and what the codec looks ahead."""
    data = video("mp4", num=120)  # a keyframe each 12
    given_to, decoded = [], of_video._decoded

    def counting(stream: Any, packets: Any, wanted: Any) -> Any:
        return decoded(stream, (given_to.append(packet.pts) or packet for packet in packets), wanted)  # type: ignore[func-returns-value]

    monkeypatch.setattr(of_video, "_decoded", counting)
    read_clip(memoryview(data), VideoArgs(frames=4, stride=2, start=65), 0)
    assert len(given_to) <= 5 + 7 + 5


@pytest.mark.parametrize("turn", [90, 180, -90])
def test_upright(turn: int) -> None:
    data = video("mov", turn=turn, num=5, size=(48, 80))
    args = VideoArgs(frames=2, start="first")
    for pixels, frame in zip(pixels_of(data, args, 0), frames_of(data)[:2], strict=True):
        assert np.array_equal(pixels, np.rot90(frame, turn // 90))


@pytest.mark.parametrize(("matrix", "shown"), [
    ((-1, 0, 0, 1), lambda frame: frame[:, ::-1]), ((1, 0, 0, -1), lambda frame: frame[::-1]),
    ((0, 1, 1, 0), lambda frame: frame.transpose(1, 0, 2)), ((0, 0, 0, 0), lambda frame: frame),
    ((0, -1, -1, 0), lambda frame: frame[::-1, ::-1].transpose(1, 0, 2)),
])  # fmt: skip
def test_mirrored(matrix: tuple[int, ...], shown: Callable[[Any], Any]) -> None:
    """The matrix (a, b, c, d) of a track shows the pixel (x, y) at (a x + c y, b x + d y)."""
    data = bytearray(video("mp4", num=5, size=(48, 80)))
    frame = frames_of(bytes(data))[0]
    a, b, c, d = (number << 16 for number in matrix)
    place = data.index(b"tkhd") + 44
    data[place : place + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30 if any(matrix) else 0)
    assert np.array_equal(pixels_of(bytes(data), VideoArgs(frames=1, start=0), 0)[0], shown(frame))


@pytest.mark.parametrize("codec", ["msmpeg4", "msmpeg4v2", "h263"])
def test_avi_whose_packets_all_say_that_they_are_keyframes(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """H.263, and others without an index."""
    monkeypatch.setitem(VIDEOS, codec, ("avi", codec, "yuv420p", {"g": "9"}))
    data = video(codec, num=20, size=(144, 176)).replace(b"idx1", b"JUNK")
    frames = frames_of(data)
    for start in range(20):
        assert np.array_equal(pixels_of(data, VideoArgs(frames=1, start=start), 0)[0], frames[start])


def test_the_time_of_a_clip() -> None:
    found = read_clip(memoryview(video("mp4")), VideoArgs(frames=2, start=10), 0)
    assert found.begin_s == pytest.approx(10 / 25)


@pytest.mark.parametrize("kind", [kind for kind in VIDEOS if kind != "hevc"])
def test_cut_anywhere(kind: str, rng: random.Random) -> None:
    """Wherever the wanted frames are."""
    data = video(kind, num=16, size=(48, 64))
    name = container_of(memoryview(data))
    assert name is not None
    check_whole(memoryview(data), name)
    for place in (0, 1, len(data) - 1, *(rng.randrange(len(data)) for _ in range(12))):
        with pytest.raises(FormatError):
            read_clip(memoryview(data[:place]), VideoArgs(frames=2, start="first"), 0)


def test_what_is_refused() -> None:
    data = memoryview(video("mp4", num=10))
    with pytest.raises(FormatError, match=r"has 10 frames, and a clip spans 13 \(4 frames, every 4\.\).*short: loop"):
        read_clip(data, VideoArgs(frames=4, stride=4), 0)
    with pytest.raises(FormatError, match=r"has 10 frames.*from frame 20 on"):
        read_clip(data, VideoArgs(frames=1, start=20, short="loop"), 0)
    with pytest.raises(FormatError, match=r"frames of 64 x 48 pixels are more than `max_pixels`, 1000"):
        read_clip(data, VideoArgs(frames=2, max_pixels=1000), 0)
    with pytest.raises(FormatError, match=r"at most 4 GiB"):
        read_clip(data, VideoArgs(frames=2**20), 0)
    with pytest.raises(FormatError, match=r"it has no video, only audio"):
        read_clip(memoryview(sound("wav", seconds=0.1)), VideoArgs(frames=2), 0)
    with pytest.raises(FormatError, match="empty"):
        read_clip(memoryview(b""), VideoArgs(frames=2), 0)


@pytest.mark.parametrize(
    "data",
    [
        b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n/etc/passwd\n#EXT-X-ENDLIST\n",
        b"ffconcat version 1.0\nfile /etc/passwd\n",
        b"v=0\no=- 0 0 IN IP4 127.0.0.1\nm=video 1 RTP/AVP 96\n",
        b"<?xml version='1.0'?><MPD></MPD>",
        b"1\n00:00:01,000 --> 00:00:02,000\nx\n",
    ],
    ids=["hls", "concat", "sdp", "dash", "subtitles"],
)
def test_what_names_other_files_is_not_opened(data: bytes) -> None:
    with pytest.raises(FormatError, match="no video or sound that is opened"):
        read_clip(memoryview(data), VideoArgs(frames=1), 0)


def test_an_absurd_size_takes_no_memory() -> None:
    """The pictures' own headers say 65,500 x 65,500."""
    gif, mjpeg = bytearray(video("gif", num=3)), bytearray(video("mjpeg", num=3))
    gif[6:10] = b"\xdc\xff" * 2
    for frame in re.finditer(rb"\xff\xc0\x00\x11\x08", bytes(mjpeg)):
        mjpeg[frame.end() : frame.end() + 4] = b"\xff\xdc" * 2
    for data in (gif, mjpeg):
        forget_peak()
        before = peak_bytes("VmRSS")
        with pytest.raises(FormatError):
            read_clip(memoryview(data), VideoArgs(frames=1), 0)
        assert peak_bytes("VmHWM") - before < 64 * 2**20


def test_an_earlier_pyav_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(av, "__version__", "16.0.1")
    with pytest.raises(MissingExtraError, match=r"need PyAV 18 or later, and 16\.0\.1 is installed"):
        pixels_of(video("mp4", num=3), VideoArgs(frames=1), 0)
