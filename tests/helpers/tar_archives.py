"""Archives for tests of the tar index, and what Python's tarfile reads in them."""

from __future__ import annotations

import io
import tarfile

from loaderkit.connectors.memory import MemoryConnector
from loaderkit.sources.formats.tar_index import (
    TarIndex,
    scan_tar,
)
from loaderkit.sources.formats.tar_index.index import Member

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


class Recording(MemoryConnector):
    """Notes every read: key, start, number of bytes."""

    def __init__(self, objects: dict[str, bytes] | None = None) -> None:
        super().__init__(objects)
        self.reads: list[tuple[str, int, int]] = []

    def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        self.reads.append((key, start, len(buffer)))
        super().read_into(key, start, buffer, etag=etag)


def archive(members: list[tarfile.TarInfo | tuple[str, bytes]], form: str = "pax") -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=FORMATS[form], errors="surrogateescape") as tar:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member)
            else:
                info = tarfile.TarInfo(member[0])
                info.size = len(member[1])
                tar.addfile(info, io.BytesIO(member[1]))
    return file.getvalue()


def scanned(data: bytes, key: str = "shard.tar") -> TarIndex:
    connector = MemoryConnector({key: data})
    return scan_tar(connector, connector.stat(key))


def by_tarfile(data: bytes) -> list[Member]:
    """What Python's own reader finds."""
    with tarfile.open(fileobj=io.BytesIO(data), errors="surrogateescape") as tar:
        return [Member(m.name, m.offset_data, m.size) for m in tar if m.isreg()]


def other_kind(name: str, kind: bytes, target: str = "target") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    info.linkname = target
    return info
