"""Makes one shard as a tar: the bytes of the archive, and of the index beside it."""

from __future__ import annotations

import tarfile
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from loaderkit.shards.encoding import EncodedField
from loaderkit.shards.layout import Extensions
from loaderkit.sources.formats.tar_index import TarIndex, write_wds_index

_BLOCK = 512
_RECORD = 10_240  # of which GNU tar writes whole ones


class TarShard:
    """Members in the order in which they come; nothing in the bytes depends on time, user or machine."""

    def __init__(self, extensions: Extensions) -> None:
        self.data = bytearray()
        self.used: dict[str, set[str]] = {}  # field -> the extensions of its members
        self._extensions = extensions
        self._starts: list[int] = []
        self._sizes: list[int] = []
        self._names: list[str] = []

    def add(self, key: str, members: Mapping[str, EncodedField]) -> None:
        """Add one sample."""
        for field, member in members.items():
            extension = self._extensions.of(field, member.content)
            self.used.setdefault(field, set()).add(extension)
            self._add(f"{key}.{extension}", member.data)

    def _add(self, name: str, data: bytes) -> None:
        info = tarfile.TarInfo(name)
        info.size, info.mode = len(data), 0o444
        self.data += info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")
        self._starts.append(len(self.data))
        self._sizes.append(len(data))
        self._names.append(name)
        self.data += data
        self.data += bytes(-len(data) % _BLOCK)

    def finish(self) -> None:
        """Add the end of the archive."""
        self.data += bytes(2 * _BLOCK)
        self.data += bytes(-len(self.data) % _RECORD)

    def index(self) -> bytes:
        """The text of the index, as `wds2idx` writes it."""
        names = b"".join(name.encode("utf-8", "surrogateescape") + b"\0" for name in self._names)
        index = TarIndex(np.array(self._starts, np.int64), np.array(self._sizes, np.int64), names)
        return write_wds_index(index).encode("utf-8", "surrogateescape")


def tar_bytes(lengths: NDArray[np.int64], num_members: int) -> NDArray[np.int64]:
    """The bytes that samples take in a tar, from the lengths of their members: int64 [samples, members] -> [samples]."""
    padded = -(-lengths // _BLOCK) * _BLOCK
    total: NDArray[np.int64] = padded.sum(axis=1) + num_members * _BLOCK
    return total
