"""Reads the members of tar archives as objects, over any connector that holds the archives."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from loaderkit.connectors.base import BulkReads, Connector, ConnectorLayer, ObjectInfo, ReadInto, bulk_of, modified_s_of
from loaderkit.errors import ObjectNotFoundError, ShortReadError
from loaderkit.sources.formats.tar_index.index import Member


@dataclass
class _Archive:
    """One archive as it was when its members were read; `lock` is held while they are read."""

    info: ObjectInfo
    lock: threading.Lock = field(default_factory=threading.Lock)
    members: dict[str, Member] | None = None


class TarConnector(ConnectorLayer):
    """Objects called "<archive's key>/<member's name>": the regular files inside the `.tar` objects of `inner`.

    `members` gives the members of one archive in archive order; it is called once an archive, when that archive is
    first needed, from any thread. Of members with the same name the last counts, as when a tar is extracted. Names are
    only ever looked up, never used as paths. `archive` is the key of one object that is an archive whatever its name
    is.
    """

    def __init__(self, inner: Connector, members: Callable[[ObjectInfo], Sequence[Member]], archive: str = "") -> None:
        super().__init__(inner)
        self._archive_key = archive
        self._members = members
        self._lock = threading.Lock()
        self._archives: dict[str, _Archive] = {}

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """All members whose key starts with `prefix`, ordered by the UTF-8 bytes of the key.

        Reads the members of the archives that can match, one after the other. Raises what `members` raises.
        """
        root = next((archive_key for archive_key, _ in self._splits(prefix)), prefix)
        infos = [
            info
            for info in self.inner.list(root)
            if info.key.endswith(".tar") or info.key == self._archive_key
            if (info.key + "/").startswith(prefix) or prefix.startswith(info.key + "/")
        ]
        # "a.tar-b.tar/x" comes before "a.tar/x", so the order of the archives is not the order of their members.
        infos.sort(key=lambda info: _order(info.key + "/"))
        while infos:
            # A store may hold both "a.tar" and "a.tar/b.tar"; their members then interleave.
            root = infos[0].key + "/"
            together = next((i for i, info in enumerate(infos) if i and not info.key.startswith(root)), len(infos))
            lists = [self._listed(info, prefix) for info in infos[:together]]
            yield from heapq.merge(*lists, key=lambda info: _order(info.key))
            del infos[:together]

    def stat(self, key: str) -> ObjectInfo:
        """Size in bytes and etag of one member: the archive's etag and the member's place in it."""
        return _info(*self._find(key, afresh=True))

    def modified_s(self, key: str) -> float | None:
        """When the archive was last written."""
        return modified_s_of(self.inner, self._find(key)[0].info.key)

    def writes(self) -> None:
        """Gives None, because members of an archive are not written one by one."""

    def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        """Fill `buffer` with the member's bytes from `start` on, or raise; see `Connector.read_into`.

        An archive replaced since its members were read is an `ObjectChangedError`, with or without `etag`, until
        `list` or `stat` has seen the new one.
        """
        self._read(self.inner.read_into, key, start, buffer, etag=etag)

    def bulk(self) -> BulkReads:
        """Reads past the page cache, if `inner` has them."""
        direct = bulk_of(self.inner).read_direct
        return BulkReads(read_direct=direct and partial(self._read, direct))

    def _read(self, read: ReadInto, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        archive, member = self._find(key)
        if start < 0 or start + len(buffer) > member.size:
            raise ShortReadError(
                f"{self.describe(key)} has {member.size} bytes; {len(buffer)} were requested at offset {start}"
            )
        # A member's tag is checked through the archive's: what precedes the last "@" must be the archive's tag.
        archive_etag = archive.info.etag if etag is None else etag.rpartition("@")[0]
        read(archive.info.key, member.start + start, buffer, etag=archive_etag)

    def describe(self, key: str) -> str:
        """The archive's name, "!", and the member's name."""
        for archive_key, name in self._splits(key):
            return f"{self.inner.describe(archive_key)}!{name}"
        return self.inner.describe(key)

    def _find(self, key: str, afresh: bool = False) -> tuple[_Archive, Member]:
        for archive_key, name in self._splits(key):
            archive = None if afresh else self._archives.get(archive_key)
            if archive is None:
                try:
                    archive = self._archive(self.inner.stat(archive_key))
                except ObjectNotFoundError:
                    continue
            member = self._loaded(archive).get(name)
            if member is not None:
                return archive, member
        raise ObjectNotFoundError(f"there is no member {key!r}: a key is '<archive>.tar/<member>'")

    def _splits(self, key: str) -> Iterator[tuple[str, str]]:
        """Every way to read a key as archive and member: a directory, too, may be called "x.tar"."""
        if self._archive_key and key.startswith(f"{self._archive_key}/"):
            yield self._archive_key, key[len(self._archive_key) + 1 :]
        cut = key.find(".tar/")
        while cut >= 0:
            yield key[: cut + 4], key[cut + 5 :]
            cut = key.find(".tar/", cut + 1)

    def _archive(self, info: ObjectInfo) -> _Archive:
        """The record of an archive; a new one if the archive was replaced."""
        with self._lock:
            archive = self._archives.get(info.key)
            if archive is None or archive.info != info:
                archive = self._archives[info.key] = _Archive(info)
            return archive

    def _loaded(self, archive: _Archive) -> dict[str, Member]:
        if archive.members is None:
            with archive.lock:
                if archive.members is None:
                    archive.members = {member.name: member for member in self._members(archive.info)}
        return archive.members

    def _listed(self, info: ObjectInfo, prefix: str) -> Iterator[ObjectInfo]:
        archive = self._archive(info)
        for name in sorted(self._loaded(archive), key=_order):
            if f"{info.key}/{name}".startswith(prefix):
                yield _info(archive, self._loaded(archive)[name])


def _info(archive: _Archive, member: Member) -> ObjectInfo:
    return ObjectInfo(f"{archive.info.key}/{member.name}", member.size, f"{archive.info.etag}@{member.start:x}")


def _order(key: str) -> bytes:
    return key.encode("utf-8", "surrogateescape")
