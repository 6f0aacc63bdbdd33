"""What `decode` makes of the bytes of a video or a sound."""

from __future__ import annotations

from typing import Any

from loaderkit.samples.values import FieldGroup
from loaderkit.sources.fields import AUDIO_EXTENSIONS, VIDEO_EXTENSIONS
from loaderkit.stages.media.audio import AudioArgs, Sound, read_sound
from loaderkit.stages.media.container import container_of
from loaderkit.stages.media.video import VideoArgs, read_clip

_SOUNDS = frozenset({"wav", "flac", "ogg", "mp3"})


class MediaDecoder:
    """Reads clips, windows of sounds, or both of a video. All of a sample begin at the same draw, so a sound beside its video,
    in a file of its own and as long, begins where the clip does."""

    def __init__(self, video: VideoArgs | None, audio: AudioArgs | None) -> None:
        self._video = video
        self._audio = audio
        self.extensions = VIDEO_EXTENSIONS | ({"gif"} if video is not None else set())
        if audio is not None:
            self.extensions |= AUDIO_EXTENSIONS

    def takes(self, data: memoryview, *, is_named: bool) -> bool:
        """True for bytes that begin as what is decoded; of MP3, which begins as much else does, only in a field that is
        named."""
        name = container_of(data)
        if name == "gif":
            return self._video is not None
        if name in _SOUNDS:
            return self._audio is not None and (is_named or name != "mp3" or bytes(data[:3]) == b"ID3")
        return name is not None

    def read(self, data: memoryview, field: str, draws: Any, scratch: Any = None) -> Any:
        """A clip, the samples of a sound, or several fields. Raises FormatError, MissingExtraError."""
        draw = float(draws[0]) if draws is not None and len(draws) else 0.0
        audio = self._audio
        if self._video is None or container_of(data) in _SOUNDS:
            assert audio is not None
            return self._of_sound(field, read_sound(data, audio, draw))
        made = read_clip(data, self._video, draw)
        if audio is None or audio.of_video is None:
            return made.clip
        group: dict[str, Any] = {field: made.clip}
        sound = read_sound(data, audio, draw, begin_s=made.begin_s)
        found = self._of_sound(audio.of_video, sound)
        return FieldGroup(group | (found.fields if type(found) is FieldGroup else {audio.of_video: found}))

    def _of_sound(self, field: str, sound: Sound) -> Any:
        assert self._audio is not None
        if self._audio.length is None:
            return sound.samples
        return FieldGroup({field: sound.samples, self._audio.length: sound.num_real})
