"""WAV, FLAC and Opus by libsndfile, which reads a part in one call; FFmpeg takes a call, and the GIL, for every packet.

Of Vorbis only short files: where all of it is in one page, FFmpeg is wrong about where packets are. libsndfile at times is when
it seeks, so here all before a part is read, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loaderkit.errors import FormatError, MissingExtraError
from loaderkit.stages.media.container import BytesFile, behind_id3, check_whole
from loaderkit.stages.media.ogg import codec_of, has_pages

_MOST_BYTES = 1 << 30
_MOST_SKIPPED = 1 << 16
_NUM_PAGES = 5  # of Vorbis, from which on it is not short: two have headers
MOST_RATE = 1_000_000
_MOST_CHANNELS = 64


class SoundFile:
    """A sound in a file of its own."""

    begin_s = 0.0

    def __init__(self, file: Any, *, seeks: bool) -> None:
        """`seeks`: False if seeking leads elsewhere, so that all before a part is read, too."""
        self._file, self._seeks = file, seeks
        self.rate: int = file.samplerate
        self.num: int = file.frames

    def samples(self, begin: int, num: int | None) -> NDArray[np.float32]:
        """The samples [begin, begin + num), [channels, n], full scale from -1 to 1; all from `begin` on if `num` is None. Fewer
        where it ends before. Raises FormatError for damaged ones and above 1 GiB."""
        begin = min(begin, self.num)
        wanted = self.num - begin if num is None else min(num, self.num - begin)
        check_size(wanted * self._file.channels * 4)
        if self._seeks:
            self._read(self.num - 1, 1)  # or a file that is cut would do for a part of it
            return self._read(begin, wanted).T
        while begin > 0:
            begin -= len(self._read(None, min(begin, _MOST_SKIPPED)))
        return self._read(None, wanted).T

    def _read(self, begin: int | None, num: int) -> NDArray[np.float32]:
        if begin is not None:
            self._file.seek(begin)
        place = self._file.tell()
        samples: NDArray[np.float32] = self._file.read(num, dtype="float32", always_2d=True)
        if len(samples) < num:
            raise damaged_error((place + len(samples)) / self.rate)
        return samples


def is_for_libsndfile(data: memoryview, name: str | None) -> bool:
    """True for a file of FFmpeg's format `name` that libsndfile reads, and FFmpeg does not. Raises FormatError."""
    if name == "flac":  # it says how many samples it has, unless its writer could not go back
        begin = behind_id3(data) + 21
        return int.from_bytes(data[begin : begin + 5], "big") & 0xF_FFFF_FFFF > 0
    if name == "ogg":
        codec = codec_of(data)
        return codec == "opus" or (codec == "vorbis" and not has_pages(data, _NUM_PAGES))
    return name == "wav"


@contextmanager
def opened_sound(data: memoryview, name: str) -> Iterator[SoundFile]:
    """A whole file, of which FFmpeg's name is `name`. libsndfile's errors, also in the block, become FormatError. Raises
    MissingExtraError."""
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: libsndfile is not there
        raise MissingExtraError(
            f"WAV, FLAC and Ogg need soundfile ({error}): pip install 'loaderkit[media]'"
        ) from error
    check_whole(data, name)
    try:
        with soundfile.SoundFile(BytesFile(data)) as file:
            check_kind(file.samplerate, file.channels)
            if not file.frames:
                raise FormatError("its sound has no samples")
            if not file.seekable():
                raise FormatError(f"its sound is in {file.subtype_info}, of which no parts are read")
            yield SoundFile(file, seeks=name != "ogg" or codec_of(data) == "opus")
    except soundfile.LibsndfileError as error:
        raise FormatError(f"{name}, {data.nbytes} bytes: {error.error_string or 'its sound is damaged'}") from error


def check_kind(rate: int, num_channels: int) -> None:
    """Raise FormatError for a sound that is none."""
    if not 0 < rate <= MOST_RATE or not 0 < num_channels <= _MOST_CHANNELS:
        raise FormatError(f"its sound has {num_channels} channels of {rate} samples a second")


def check_size(num_bytes: int) -> None:
    """Raise FormatError for more than is decoded of one sound."""
    if num_bytes > _MOST_BYTES:
        raise FormatError("its sound takes more than 1 GiB: set `seconds`")


def damaged_error(at_s: float) -> FormatError:
    """For samples that a file should have."""
    return FormatError(f"its sound is damaged at {at_s:.3f} s")
