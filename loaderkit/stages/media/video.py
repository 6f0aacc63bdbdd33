"""Reads clips of videos: some frames of a file. Only these frames and the ones they depend on are decoded.

All packets are taken out of the container, which costs about 2 us a frame and tells when each frame is shown. Then the
decoder gets the packets from the last keyframe before the first wanted frame up to the last wanted frame. Where packets
do not say which frames there are (some AVI), frames are counted by decoding them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, NonNegativeInt, PositiveInt

from loaderkit._internal.config.settings import Model
from loaderkit.errors import FormatError
from loaderkit.samples.values import Clip, Image
from loaderkit.stages.media.container import import_av, opened, stream_of

_MOST_BYTES = 4 << 30
# Frames that no other depends on need not be decoded; these decoders leave them out at NONREF. Measured: 16 frames of x264,
# every fourth wanted, in 0.88 of the time.
_LEAVES_OUT = _REORDERS = frozenset({"h264", "hevc"})


class VideoArgs(Model):
    """A clip of every video: uint8 [T, 3, H, W]."""

    frames: PositiveInt = Field(description="T, the frames of a clip")
    stride: PositiveInt = Field(
        1, description="1: neighbours; n: every n-th frame of the video. A clip spans (frames - 1) * stride + 1"
    )
    start: Literal["random", "first", "middle"] | NonNegativeInt = Field(
        "random",
        description="its first frame: each possible one as likely, the first, that of a clip in the middle, or a number",
    )
    short: Literal["error", "loop", "last"] = Field(
        "error",
        description="what becomes of a video with fewer frames than a clip spans: a bad sample, or the clip begins with its "
        "first frame and goes round (loop), or repeats the last one",
    )
    max_pixels: PositiveInt = Field(1 << 25, description="refuse videos with more pixels a frame; 8K has 33,177,600")


class DecodedClip(NamedTuple):
    """A clip, and the time of its first frame in its file, in seconds."""

    clip: Clip
    begin_s: float


def read_clip(data: memoryview, args: VideoArgs, draw: float) -> DecodedClip:
    """A clip of a video. `draw` from [0, 1) chooses a random start. Frames are those that PyAV's `to_ndarray(format="rgb24")`
    gives, turned upright as the file says. Raises FormatError for what is damaged, cut, too large or too short, and
    MissingExtraError."""
    with opened(data, args.max_pixels) as container:
        stream = stream_of(container, "video")
        _check_size(stream.codec_context, args)
        packets = list(_packets(container, stream))
        if any(packet.is_corrupt for packet in packets):
            raise FormatError(f"a packet of its video is damaged or cut ({len(packets)} packets were read)")
        name = stream.codec_context.name
        # In AVI, H.264's packets have made-up times, which differ from the frames' times.
        times = None if name in _REORDERS and container.format.name == "avi" else _times(packets, name)
        if times is not None:
            places = frame_places(len(times), args, draw)
            wanted = [times[place] for place in places]
            frames = _decoded(stream, _needed(packets, wanted[0]), {*wanted})
            first = next(frames, None)
            # Not so in AVI, where packets say that they are keyframes even if they are none.
            begins_with_key = first is not None and (first.key_frame or container.format.name != "avi")
            found = _found(chain((first,), frames), {*wanted}) if begins_with_key else {}
            if len(found) == len({*wanted}):
                return _clip([found[time] for time in wanted], stream)
    return _counted(data, args, draw)


def frame_places(num: int, args: VideoArgs, draw: float) -> list[int]:
    """Which of a video's `num` frames are in a clip. Raises FormatError for a video that is too short."""
    span = (args.frames - 1) * args.stride + 1
    first = args.start if isinstance(args.start, int) else 0
    if not num:
        raise FormatError("its video has no frames")
    if first + span > num:
        if args.short == "error" or first >= num:
            begin = f", from frame {first} on" if first else ""
            raise FormatError(
                f"its video has {num} frames, and a clip spans {span} ({args.frames} frames, every {args.stride}.){begin}: set "
                "`short: loop` or `last`, fewer `frames` or a smaller `stride`, or leave short ones out "
                "(`errors: {on_bad_sample: skip}`)"
            )
        rest = num - first
        places = range(0, span, args.stride)
        return [first + (place % rest if args.short == "loop" else min(place, rest - 1)) for place in places]
    if args.start == "random":
        first = int(draw * (num - span + 1))
    elif args.start == "middle":
        first = (num - span) // 2
    return list(range(first, first + span, args.stride))


def _packets(container: Any, stream: Any) -> Iterator[Any]:
    return (packet for packet in container.demux(stream) if packet.size)


def _check_size(context: Any, args: VideoArgs) -> None:
    width, height = context.width, context.height
    if width < 1 or height < 1:
        raise FormatError(f"its video has frames of {width} x {height} pixels")
    if width * height > args.max_pixels:
        raise FormatError(f"its frames of {width} x {height} pixels are more than `max_pixels`, {args.max_pixels}")
    num_bytes = args.frames * width * height * 3
    if num_bytes > _MOST_BYTES:
        raise FormatError(
            f"{args.frames} frames of {width} x {height} pixels are {num_bytes} bytes; at most 4 GiB are decoded"
        )


def _times(packets: list[Any], codec: str) -> list[int] | None:
    """When each frame is shown, in order; None where packets do not say that, as a decoder leaves out some frames that
    are cut off from their keyframe."""
    shown = [packet.pts for packet in packets if not packet.is_discard and not _is_hidden(packet, codec)]
    if None in shown or len({*shown}) < len(shown):
        return None
    shown.sort()
    if shown and (not packets[0].is_keyframe or packets[0].pts is None or packets[0].pts > shown[0]):
        return None
    return shown


def _is_hidden(packet: Any, codec: str) -> bool:
    """True for a frame of VP8 that only others are made of."""
    return codec in ("vp8", "libvpx") and not memoryview(packet)[0] & 0x10


def _needed(packets: list[Any], time: int) -> list[Any]:
    """The packets from the keyframe on that the frame at `time` depends on."""
    keys = [
        number
        for number, packet in enumerate(packets)
        if packet.is_keyframe and packet.pts is not None and packet.pts <= time
    ]
    return packets[keys[-1] if keys else 0 :]


def _decoded(stream: Any, packets: Iterable[Any], wanted: set[int] | None) -> Iterator[Any]:
    """The frames of packets; frames that are not `wanted` (None means all are) may be left out."""
    context = stream.codec_context
    for packet in packets:
        if wanted is not None and context.name in _LEAVES_OUT:
            context.skip_frame = "DEFAULT" if packet.pts in wanted else "NONREF"
        yield from context.decode(packet)
    yield from context.decode(None)


def _found(frames: Iterable[Any], wanted: set[int]) -> dict[int, Any]:
    """The decoded frames at the times `wanted`, as RGB."""
    found: dict[int, Any] = {}
    rgb = _Rgb()
    for frame in frames:
        if frame.pts in wanted and frame.pts not in found:
            found[frame.pts] = rgb.of(frame)
            if len(found) == len(wanted):
                break
    return found


class _Frame(NamedTuple):
    pixels: NDArray[np.uint8]
    time_s: float


class _Rgb:
    """Converts frames to RGB, upright."""

    def __init__(self) -> None:
        self._reformatter = import_av().video.reformatter.VideoReformatter()

    def of(self, frame: Any) -> _Frame:
        if frame.is_corrupt:
            raise FormatError(f"its frame at {float(frame.time or 0):.3f} s is damaged")
        rgb = self._reformatter.reformat(frame, format="rgb24", threads=1)
        plane = rgb.planes[0]
        pixels: NDArray[np.uint8] = np.ndarray(
            (rgb.height, rgb.width, 3), np.uint8, plane, strides=(plane.line_size, 3, 1)
        )
        return _Frame(_upright(pixels, frame.side_data.get("DISPLAYMATRIX")), float(frame.time or 0))


def _upright(pixels: NDArray[np.uint8], matrix: Any) -> NDArray[np.uint8]:
    """Turned and mirrored as a display matrix says (ISO/IEC 14496-12, 6.2.2), by the multiple of 90 degrees that is nearest; a
    pixel at (x, y) is shown at (a x + c y, b x + d y). None: as they are."""
    a, b, _, c, d = (1, 0, 0, 0, 1) if matrix is None else np.frombuffer(matrix, np.int32)[:5].tolist()
    if not (a or b or c or d):
        return pixels
    flips_x, flips_y = a < 0, d < 0
    if abs(a) + abs(d) < abs(b) + abs(c):
        pixels = pixels.transpose(1, 0, 2)
        flips_x, flips_y = c < 0, b < 0
    return np.ascontiguousarray(pixels[:: -1 if flips_y else 1, :: -1 if flips_x else 1])


def _clip(frames: list[_Frame], stream: Any) -> DecodedClip:
    shapes = {frame.pixels.shape for frame in frames}
    if len(shapes) > 1:
        listed = " and ".join(f"{width} x {height}" for height, width, _ in sorted(shapes))
        raise FormatError(f"its frames change their size within the clip: {listed}")
    return DecodedClip(Clip(tuple(Image(frame.pixels) for frame in frames)), frames[0].time_s)


def _counted(data: memoryview, args: VideoArgs, draw: float) -> DecodedClip:
    """The clip of a video whose frames are counted as they are decoded, from the first one on."""
    with opened(data, args.max_pixels) as container:
        stream = stream_of(container, "video")
        num = sum(1 for _ in _decoded(stream, _packets(container, stream), None))
    places = frame_places(num, args, draw)
    wanted, last, rgb = {*places}, max(places), _Rgb()
    found = {}
    with opened(data, args.max_pixels) as container:
        stream = stream_of(container, "video")
        for place, frame in enumerate(_decoded(stream, _packets(container, stream), None)):
            if place in wanted:
                found[place] = rgb.of(frame)
            if place == last:
                break
        return _clip([found[place] for place in places], stream)
