"""The packets of a sound: those that are wanted where seeking leads to them, all where it does not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from loaderkit.errors import FormatError
from loaderkit.stages.media.container import import_av, opened, stream_of

LISTED = ("matroska", "ogg")
"""Containers of which all packets are read: behind a seek, times in Ogg are of other packets, and Matroska has no lengths of
streams."""

_COUNTED = (*LISTED, "mp3", "flac")
_FAR = 1 << 60


class NoPlaceError(Exception):
    """Seeking leads nowhere, or behind what was sought."""


class SoughtPackets:
    """The packets of a sound, of which only those are read that are asked for."""

    def __init__(self, container: Any, name: str | None, data: memoryview) -> None:
        self.stream = stream_of(container, "audio")
        self._container, self._name, self._data, self._is_moved = container, name, data, False
        if _is_adpcm(self.stream):
            raise NoPlaceError  # its times behind a seek are guesses
        self.is_told = name != "mp3" or _has_count(data)
        """True if the stream's duration comes from its header, and is no guess."""

    def end(self) -> int | None:
        """When the last one ends, or None for formats whose header says it. Raises FormatError for a FLAC file that ends before
        its header says."""
        if self._name == "mp3":  # behind a seek to its end FFmpeg knows all places, and times are no guesses
            end = _end_behind(self._container, self.stream, _FAR)
            self._seek(0)
            return end
        told = self.stream.duration
        if self._name != "flac":
            return None
        if not told:
            raise NoPlaceError
        with opened(self._data) as container:  # behind a seek, FFmpeg finds other blocks in a damaged file
            end = _end_behind(container, stream_of(container, "audio"), max(0, told - 1))
        if end < told:
            raise cut_error(float(end * self.stream.time_base), float(told * self.stream.time_base))
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
        _seek(self._container, self.stream, time)


class ListedPackets:
    """All packets of a sound. They are read, but only those that are asked for are decoded."""

    def __init__(self, container: Any, name: str | None, data: memoryview) -> None:
        self.stream = stream_of(container, "audio")
        self._listed = list(_packets(container, self.stream))
        is_adpcm = _is_adpcm(self.stream)
        self._is_counted = name in _COUNTED or is_adpcm
        self.is_told = _has_count(data) if name == "mp3" else name != "ogg" and not is_adpcm

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


def cut_error(held_s: float, told_s: float) -> FormatError:
    """For a file whose header says more than it has."""
    return FormatError(f"it has {held_s:.3f} s of sound where its header says {told_s:.3f} s: it is cut")


def _seek(container: Any, stream: Any, time: int) -> None:
    """Raises NoPlaceError."""
    try:
        container.seek(time, stream=stream)
    except import_av().FFmpegError as error:
        raise NoPlaceError from error


def _end_behind(container: Any, stream: Any, time: int) -> int:
    """When the last packet ends, of those behind a time. Raises NoPlaceError."""
    _seek(container, stream, time)
    return _end(_packets(container, stream))


def _is_adpcm(stream: Any) -> bool:
    return bool(stream.codec_context.codec.name.startswith("adpcm_"))


def _has_count(data: memoryview) -> bool:
    """True for an MP3 whose first frame says how many there are."""
    begin = 0
    if bytes(data[:3]) == b"ID3":
        begin = 10 + sum((byte & 0x7F) << 7 * (3 - place) for place, byte in enumerate(bytes(data[6:10])))
    head = bytes(data[begin : begin + 200])
    return b"Xing" in head or b"Info" in head


def _packets(container: Any, stream: Any) -> Iterator[Any]:
    for packet in container.demux(stream):
        if packet.size:
            if packet.is_corrupt:
                raise FormatError("a packet of its sound is damaged or cut")
            yield packet


def _end(packets: Iterable[Any]) -> int:
    """When the last packet ends; damaged packets may have no time."""
    return max((packet.pts + (packet.duration or 0) for packet in packets if packet.pts is not None), default=0)
