"""Opens the bytes of a video or a sound with FFmpeg, through PyAV.

A file is recognised by its first bytes, and read by the one demuxer of its format: nothing is guessed. The demuxers in
`CONTAINERS` read only their own bytes. FFmpeg's other demuxers (playlists, lists of files, subtitles, devices) open
files and addresses that data name, so they are not used, and no protocol is.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from loaderkit.errors import FormatError, MissingExtraError
from loaderkit.stages.media.ogg import check_pages

CONTAINERS: dict[str, re.Pattern[bytes]] = {
    name: re.compile(pattern, re.DOTALL)
    for name, pattern in {
        "mov": rb"....(ftyp|moov|mdat|wide|free|skip|pnot)",
        "matroska": rb"\x1a\x45\xdf\xa3",
        "avi": rb"RIFF....AVI ",
        "gif": rb"GIF8[79]a",
        "wav": rb"(RIFF|RF64)....WAVE",
        "flac": rb"fLaC",
        "ogg": rb"OggS",
        "mp3": rb"ID3|\xff[\xe2-\xe7\xf2-\xf7\xfa-\xff]",
    }.items()
}
"""FFmpeg's name of each container that is opened, and how its files begin."""

# fmt: off
DECODERS = frozenset({
    "h264", "hevc", "libdav1d", "av1", "vp8", "vp9", "libvpx", "libvpx-vp9", "mpeg4", "msmpeg4", "msmpeg4v2",
    "mpeg1video", "mpeg2video", "h263", "mjpeg", "theora", "prores", "dnxhd", "ffv1", "huffyuv", "ffvhuff",
    "dvvideo", "rawvideo", "qtrle", "png", "gif", "aac", "mp3float", "mp3", "mp2float", "mp2", "vorbis", "opus",
    "libopus", "flac", "alac", "ac3", "eac3", "adpcm_ms", "adpcm_ima_wav", "adpcm_ima_qt", "pcm_s16le",
    "pcm_s16be", "pcm_s24le", "pcm_s24be", "pcm_s32le", "pcm_s32be", "pcm_u8", "pcm_s8", "pcm_f32le",
    "pcm_f32be", "pcm_f64le", "pcm_f64be", "pcm_alaw", "pcm_mulaw",
})
# fmt: on
"""FFmpeg's decoders that may run."""

_LEAST_VERSION = 18  # earlier ones lack arguments that are given here
_MOST_STREAMS = 64
_TAIL_BYTES = 1 << 16
_BUFFER_BYTES = 1 << 18


def container_of(data: memoryview) -> str | None:
    """FFmpeg's name of the container that begins with these bytes, or None if no such container is opened."""
    head = bytes(data[:16])
    if head[:3] == b"ID3" and bytes(data[(begin := behind_id3(data)) : begin + 4]) == b"fLaC":
        return "flac"
    return next((name for name, pattern in CONTAINERS.items() if pattern.match(head)), None)


def behind_id3(data: memoryview) -> int:
    """Where a file goes on behind its ID3v2 tags."""
    begin = 0
    while bytes(data[begin : begin + 3]) == b"ID3":
        head = bytes(data[begin : begin + 10]).ljust(10, b"\0")
        size = sum((byte & 0x7F) << 7 * (3 - place) for place, byte in enumerate(head[6:]))
        begin += 10 + size + (10 if head[5] & 0x10 else 0)
    return begin


def import_av() -> Any:
    """PyAV. Raises MissingExtraError."""
    try:
        import av
    except ImportError as error:
        raise MissingExtraError(f"video and sound need PyAV ({error}): pip install 'loaderkit[media]'") from error
    if version_of(av) < _LEAST_VERSION:
        raise MissingExtraError(
            f"video and sound need PyAV {_LEAST_VERSION} or later, and {av.__version__} is installed: pip install "
            "'loaderkit[media]'"
        )
    return av


def version_of(av: Any) -> int:
    """The first number of PyAV's version."""
    return int(av.__version__.partition(".")[0])


class BytesFile:
    """Bytes as a file that is read: io.BytesIO copies them."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._position = data.cast("B"), 0

    def read(self, num: int) -> bytes:
        found = bytes(self._data[self._position : self._position + num])
        self._position += len(found)
        return found

    def readinto(self, buffer: Any) -> int:
        found = self.read(len(buffer))
        buffer[: len(found)] = found
        return len(found)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        begin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._data.nbytes}[whence]
        self._position = max(0, begin + offset)
        return self._position

    def tell(self) -> int:
        return self._position


@contextmanager
def opened(data: memoryview, max_pixels: int = 1) -> Iterator[Any]:
    """PyAV's container of a whole file. Frames above `max_pixels` are refused by the decoder, before it takes memory for one.
    FFmpeg's errors, also in the block, become FormatError."""
    av = import_av()
    name = container_of(data)
    if not data.nbytes:
        raise FormatError("the file is empty (0 bytes)")
    if name is None:
        raise FormatError(
            f"{data.nbytes} bytes that begin {bytes(data[:8])!r} are no video or sound that is opened: mp4, mov, mkv, webm, "
            "avi, gif, wav, flac, mp3 and ogg are"
        )
    check_whole(data, name)
    options = {
        "format_whitelist": name,
        "protocol_whitelist": "none",
        "codec_whitelist": ",".join(DECODERS),
        "max_streams": str(_MOST_STREAMS),
        "max_pixels": str(max_pixels),
        "threads": "1",
    }
    # Titles in an unknown encoding are no error: from PyAV 19 on they never are.
    lenient = {"metadata_errors": "replace"} if version_of(av) < 19 else {}
    try:
        with av.open(BytesFile(data), format=name, options=options, buffer_size=_BUFFER_BYTES, **lenient) as container:
            yield container
    except av.FFmpegError as error:
        raise FormatError(f"{name}, {data.nbytes} bytes: {error.strerror or error}") from error
    except (OverflowError, UnicodeDecodeError, ZeroDivisionError) as error:  # of numbers in damaged headers, in PyAV
        raise FormatError(f"{name}, {data.nbytes} bytes, has a damaged header: {error}") from error


def stream_of(container: Any, kind: str) -> Any:
    """The first stream of a kind, "video" or "audio", that is no cover picture, with one decoding thread: others decode other
    samples. Raises FormatError."""
    found = [stream for stream in container.streams if stream.type == kind]
    found = [stream for stream in found if not int(stream.disposition) & _ATTACHED]
    if not found:
        held = ", ".join(f"{stream.type}" for stream in container.streams) or "nothing"
        raise FormatError(f"it has no {kind}, only {held}")
    stream = found[0]
    context = stream.codec_context
    if context is None or context.codec.name not in DECODERS:
        name = "a codec that FFmpeg does not know" if context is None else repr(context.codec.name)
        raise FormatError(f"its {kind} is in {name}, which is not opened")
    context.thread_count = 1
    if context.codec.name == "flac":  # which has checksums, and without this would give noise or leave samples out
        context.options = {"err_detect": "crccheck+explode"}
    return stream


_ATTACHED = 0x400  # AV_DISPOSITION_ATTACHED_PIC


def check_whole(data: memoryview, name: str) -> None:
    """Raise FormatError for a file that is shorter than it says, which FFmpeg would read as far as it goes."""
    if name == "ogg":
        check_pages(data)
    num_bytes = _SIZES[name](data) if name in _SIZES else None
    if num_bytes is not None and num_bytes > data.nbytes:
        raise FormatError(f"{name}: it has {data.nbytes} bytes of {num_bytes} or more: it is cut")


def _riff_bytes(data: memoryview) -> int | None:
    size = int.from_bytes(data[4:8], "little")
    return None if size in (0, 0xFFFFFFFF) else size + 8  # both of files whose writer could not go back


def _wave_bytes(data: memoryview) -> int | None:
    """The end of a WAV file's samples; None if its writer did not know, as it could not go back."""
    position, num_bytes = 12, None
    while position + 8 <= data.nbytes:
        name, size = bytes(data[position : position + 4]), int.from_bytes(data[position + 4 : position + 8], "little")
        position += 8
        if name == b"ds64":
            num_bytes = int.from_bytes(data[position + 8 : position + 16], "little")
        elif name == b"data":
            size = num_bytes if num_bytes is not None and size == 0xFFFFFFFF else size
            return None if size == 0 or 0x7FFFF000 <= size <= 0xFFFFFFFF else position + size
        position += size + size % 2
    return _riff_bytes(data)


def _box_bytes(data: memoryview) -> int | None:
    """The end of the last of an mp4's boxes, which follow one another."""
    position, num_bytes = 0, data.nbytes
    while position < num_bytes:
        head = bytes(data[position : position + 16])
        if not any(head):
            return None  # padding
        size = int.from_bytes(head[:4], "big")
        if size == 0:
            return None  # it ends with the file
        if size == 1:
            size = int.from_bytes(head[8:16], "big") if len(head) == 16 else 16
        position += max(size, 8)
    return position


def _element_bytes(data: memoryview) -> int | None:
    """The end of a Matroska file's segment, behind its header."""
    position = 4
    size, length = _number(data, position)
    position += length + (size or 0)
    if bytes(data[position : position + 4]) != b"\x18\x53\x80\x67":
        return position + 4 if position + 4 > data.nbytes else None
    size, length = _number(data, position + 4)
    return None if size is None else position + 4 + length + size


def _number(data: memoryview, position: int) -> tuple[int | None, int]:
    """(value, bytes) of a number in EBML; the value is None for an unknown size."""
    first = data[position] if position < data.nbytes else 0
    if not first:
        return 0, 1
    length = 9 - first.bit_length()
    value = int.from_bytes(bytes([first & (0xFF >> length)]) + bytes(data[position + 1 : position + length]), "big")
    return (None if value == (1 << 7 * length) - 1 else value), length


def _gif_bytes(data: memoryview) -> int | None:
    return None if bytes(data[-_TAIL_BYTES:]).rstrip(b"\0")[-1:] == b";" else data.nbytes + 1


_SIZES = {
    "avi": _riff_bytes,
    "wav": _wave_bytes,
    "mov": _box_bytes,
    "matroska": _element_bytes,
    "gif": _gif_bytes,
}
