"""The part of `decode` that reads videos and sounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from loaderkit.samples.values import FieldGroup
from loaderkit.sources.fields import AUDIO_EXTENSIONS, VIDEO_EXTENSIONS
from loaderkit.stages.media.audio import AudioArgs, Sound, read_sound
from loaderkit.stages.media.container import container_of
from loaderkit.stages.media.video import VideoArgs, read_clip

_SOUNDS = frozenset({"wav", "flac", "ogg", "mp3"})


class MediaDecoder:
    """Reads clips, windows of sounds, or both of a video. All of a sample begin at the same draw. So if a sound is in a
    file of its own beside a video of the same length, it begins where the clip does."""

    def __init__(self, video: VideoArgs | None, audio: AudioArgs | None) -> None:
        self._video = video
        self._audio = audio
        self.readers: dict[str, Callable[..., Any]] = {}
        """By extension: a function `(data, field, draws, ...)` that raises FormatError, MissingExtraError."""
        if audio is not None:
            self.readers |= dict.fromkeys(AUDIO_EXTENSIONS | VIDEO_EXTENSIONS, self._sound)
        if video is not None:
            self.readers |= dict.fromkeys({*VIDEO_EXTENSIONS, "gif"}, self._clip)

    def reader_of(self, data: memoryview, *, is_named: bool) -> Callable[..., Any] | None:
        """The reader of bytes without an extension, by how they begin; None for what is not decoded. MP3, whose
        beginning is like that of many formats, is recognised only in a field that is named."""
        name = container_of(data)
        if name is None or (name == "mp3" and not is_named and bytes(data[:3]) != b"ID3"):
            return None
        if name in _SOUNDS or bytes(data[4:11]) == b"ftypM4A":
            return self.readers.get("wav")
        return self.readers.get("gif" if name == "gif" else "mp4")

    def _clip(self, data: memoryview, field: str, draws: Any, *_: Any) -> Any:
        assert self._video is not None
        audio, draw = self._audio, _of(draws)
        made = read_clip(data, self._video, draw)
        if audio is None or audio.of_video is None:
            return made.clip
        sound = read_sound(data, audio, draw, begin_s=made.begin_s)
        return FieldGroup({field: made.clip, **self._fields(audio.of_video, sound)})

    def _sound(self, data: memoryview, field: str, draws: Any, *_: Any) -> Any:
        assert self._audio is not None
        sound = read_sound(data, self._audio, _of(draws))
        return sound.samples if self._audio.length is None else FieldGroup(self._fields(field, sound))

    def _fields(self, field: str, sound: Sound) -> dict[str, Any]:
        assert self._audio is not None
        counted = {} if self._audio.length is None else {self._audio.length: sound.num_real}
        return {field: sound.samples, **counted}


def _of(draws: Any) -> float:
    return float(draws[0]) if draws is not None and len(draws) else 0.0
