"""A compact table of the regular files of one tar archive."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from loaderkit.errors import FormatError


class Member(NamedTuple):
    """One regular file inside an archive, with the offset of its bytes in the archive."""

    name: str
    start: int
    size: int


class Damage(NamedTuple):
    """Where the members of an archive end too early: the error, and the name of the cut member, or None if that is not
    known."""

    error: FormatError
    next_name: str | None


class TarIndex(Sequence[Member]):
    """The members of one archive in archive order: 16 bytes a member, and its name.

    `starts` (offsets in the archive) and `sizes` are int64 [number of members]. `packed_names` holds the names as bytes of the
    archive (usually UTF-8), each ended by a NUL. `is_whole` is False after a warning about the archive. `damage` comes
    after the last member; None if there is none.
    """

    def __init__(
        self,
        starts: NDArray[np.int64],
        sizes: NDArray[np.int64],
        packed_names: bytes,
        *,
        is_whole: bool = True,
        damage: Damage | None = None,
    ) -> None:
        ends = np.flatnonzero(np.frombuffer(packed_names, np.uint8) == 0)
        if not len(starts) == len(sizes) == len(ends) or (packed_names and packed_names[-1]):
            raise ValueError(f"{len(starts)} starts, {len(sizes)} sizes and {len(ends)} names do not fit together")
        self.starts = starts
        self.sizes = sizes
        self.packed_names = packed_names
        self.is_whole = is_whole
        self.damage = damage
        self._name_ends = ends.astype(np.int64)

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, number: int) -> Member: ...
    @overload
    def __getitem__(self, number: slice) -> list[Member]: ...
    def __getitem__(self, number: int | slice) -> Member | list[Member]:
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        if not -len(self) <= number < len(self):
            raise IndexError(f"member {number} of {len(self)}")
        number %= len(self)
        first = int(self._name_ends[number - 1]) + 1 if number else 0
        name = self.packed_names[first : int(self._name_ends[number])]
        return Member(name.decode("utf-8", "surrogateescape"), int(self.starts[number]), int(self.sizes[number]))

    def __iter__(self) -> Iterator[Member]:
        return map(Member, self.names(), self.starts.tolist(), self.sizes.tolist())

    def names(self) -> list[str]:
        """All names; bytes that are not UTF-8 become lone surrogates, as in `os.fsdecode`."""
        return self.packed_names.decode("utf-8", "surrogateescape").split("\0")[:-1]

    def members(self) -> list[Member]:
        """All members, in archive order."""
        return list(self)


def sample_key_and_extension(name: str) -> tuple[str, str] | None:
    """A member's name split at the first dot of its base name: the sample's key and the extension.

    None for a member of no sample: a hidden file, or a name without an extension.
    """
    base = name.rfind("/") + 1
    dot = name.find(".", base)
    return None if dot <= base or dot == len(name) - 1 else (name[:dot], name[dot + 1 :])
