"""WAV and FLAC files by libsndfile, which reads a part in one call; FFmpeg takes a call, and the GIL, for every packet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loaderkit.errors import FormatError, MissingExtraError
from loaderkit.stages.media.container import BytesFile, check_whole

_MOST_BYTES = 1 << 30
MOST_RATE = 1_000_000
_MOST_CHANNELS = 64


class SoundFile:
    """A sound in a file of its own."""

    begin_s = 0.0

    def __init__(self, file: Any) -> None:
        self._file = file
        self.rate: int = file.samplerate
        self.num: int = file.frames

    def samples(self, begin: int, num: int | None) -> NDArray[np.float32]:
        """The samples [begin, begin + num), [channels, n], full scale from -1 to 1; all from `begin` on if `num` is None. Fewer
        where it ends before. Raises FormatError for damaged ones and above 1 GiB."""
        begin = min(begin, self.num)
        wanted = self.num - begin if num is None else min(num, self.num - begin)
        check_size(wanted * self._file.channels * 4)
        self._file.seek(self.num - 1)  # a file that is cut
        if not len(self._file.read(1)):
            raise damaged_error((self.num - 1) / self.rate)
        self._file.seek(begin)
        samples: NDArray[np.float32] = self._file.read(wanted, dtype="float32", always_2d=True)
        if len(samples) < wanted:
            raise damaged_error((begin + len(samples)) / self.rate)
        return samples.T


@contextmanager
def opened_sound(data: memoryview, name: str) -> Iterator[SoundFile]:
    """A whole file, of which FFmpeg's name is `name`. libsndfile's errors, also in the block, become FormatError. Raises
    MissingExtraError."""
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: libsndfile is not there
        raise MissingExtraError(f"WAV and FLAC need soundfile ({error}): pip install 'loaderkit[media]'") from error
    check_whole(data, name)
    try:
        with soundfile.SoundFile(BytesFile(data)) as file:
            check_kind(file.samplerate, file.channels)
            if not file.frames:
                raise FormatError("its sound has no samples")
            yield SoundFile(file)
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
