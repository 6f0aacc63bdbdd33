"""The regular files of one tar archive, compactly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray


class Member(NamedTuple):
    """One regular file inside an archive: where its bytes lie in the archive."""

    name: str
    start: int
    size: int


class TarIndex(Sequence[Member]):
    """The members of one archive in archive order: 16 bytes a member, and its name.

    `starts` and `sizes` are int64 [number of members], in bytes from the archive's beginning. `packed_names` holds
    the names as they are in the archive (UTF-8, or whatever it has), each ended by a NUL. `is_whole` is False when
    something about the archive's end looked wrong and was warned about.
    """

    def __init__(
        self, starts: NDArray[np.int64], sizes: NDArray[np.int64], packed_names: bytes, *, is_whole: bool = True
    ) -> None:
        ends = np.flatnonzero(np.frombuffer(packed_names, np.uint8) == 0)
        if not len(starts) == len(sizes) == len(ends) or (packed_names and packed_names[-1]):
            raise ValueError(f"{len(starts)} starts, {len(sizes)} sizes and {len(ends)} names do not fit together")
        self.starts = starts
        self.sizes = sizes
        self.packed_names = packed_names
        self.is_whole = is_whole
        self._name_ends = ends.astype(np.int64)

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, place: int) -> Member: ...
    @overload
    def __getitem__(self, place: slice) -> list[Member]: ...
    def __getitem__(self, place: int | slice) -> Member | list[Member]:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        if not -len(self) <= place < len(self):
            raise IndexError(f"member {place} of {len(self)}")
        place %= len(self)
        first = int(self._name_ends[place - 1]) + 1 if place else 0
        name = self.packed_names[first : int(self._name_ends[place])]
        return Member(name.decode("utf-8", "surrogateescape"), int(self.starts[place]), int(self.sizes[place]))

    def __iter__(self) -> Iterator[Member]:
        return map(Member, self.names(), self.starts.tolist(), self.sizes.tolist())

    def names(self) -> list[str]:
        """All names; bytes that are not UTF-8 become lone surrogates, as in `os.fsdecode`."""
        return self.packed_names.decode("utf-8", "surrogateescape").split("\0")[:-1]

    def members(self) -> list[Member]:
        """All members, in archive order."""
        return list(self)


def sample_key_and_extension(name: str) -> tuple[str, str] | None:
    """Split a member's name at the first dot of its base name: the sample's key and the extension, as written.

    None for what belongs to no sample: hidden files, and names without an extension.
    """
    base = name.rfind("/") + 1
    dot = name.find(".", base)
    return None if dot <= base or dot == len(name) - 1 else (name[:dot], name[dot + 1 :])
