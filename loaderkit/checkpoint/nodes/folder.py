"""The folder of one node: the files that its ranks have written, and below `replicas/` those of the node before it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from loaderkit.checkpoint.discovery.manifest import NAME, parse_manifest
from loaderkit.checkpoint.save.placement import listed, read_object
from loaderkit.connectors.base import ObjectInfo, writes_of
from loaderkit.connectors.file import FileConnector
from loaderkit.errors import ConnectorError, FormatError

OWN, REPLICAS = "", "replicas/"
AREAS = (OWN, REPLICAS)
COPYING = ".copying-"
"""Begins the name of a replica that is not whole."""


class FolderListing(NamedTuple):
    """The files of a node, each as (key, size, etag) without its area; and the sizes of the files that each manifest names, in
    one table or, while a step is replaced, in two. All by area."""

    files: Mapping[str, list[ObjectInfo]]
    manifests: Mapping[str, Mapping[str, list[dict[str, int]]]]


class NodeFolder:
    """The folder at `path`. Any thread may ask. What is done to a name is done to the node's own files and to replicas."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.store = FileConnector(path)
        self.writes = writes_of(self.store)
        self._manifests: dict[tuple[str, str], list[dict[str, int]]] = {}  # by key and etag

    def listing(self, prefix: str) -> FolderListing:
        """What begins with `prefix`."""
        files: dict[str, list[ObjectInfo]] = {}
        manifests: dict[str, dict[str, list[dict[str, int]]]] = {}
        for area in AREAS:
            infos = list(listed(self.store, area + prefix))
            if area == OWN:
                infos = [info for info in infos if not info.key.startswith(REPLICAS)]
            files[area] = [info._replace(key=info.key[len(area) :]) for info in infos]
            told = {info.key: self._sizes(info) for info in infos if info.key.endswith(f"/{NAME}")}
            manifests[area] = {key[len(area) :]: sizes for key, sizes in told.items() if sizes}
        return FolderListing(files, manifests)

    def _sizes(self, info: ObjectInfo) -> list[dict[str, int]]:
        known = self._manifests.get((info.key, info.etag))
        if known is None:
            known = []
            with suppress(ConnectorError, FormatError):  # being removed, or damaged: it makes nothing whole
                tables = parse_manifest(info.key, read_object(self.store, info.key))
                known = [{name: item.num_bytes for name, item in table.items()} for table in tables]
            self._manifests = {**{key: kept for key, kept in self._manifests.items() if key[0] != info.key}}
            self._manifests[info.key, info.etag] = known
        return known

    def put(self, key: str, data: bytes) -> None:
        """Write a small file of the node's own, durably."""
        self.writes.put(key, data)

    def delete(self, key: str) -> None:
        """Delete a file, and its replica."""
        for area in AREAS:
            self.writes.delete(area + key)

    def rename(self, prefix: str, new_prefix: str) -> bool:
        """Rename a directory, and its replica; one that is not there is none. False if the file system cannot."""
        found = [area for area in AREAS if os.path.isdir(f"{self.path}/{area}{prefix}")]
        renamed = [self.writes.rename(area + prefix, area + new_prefix) for area in found]
        return all(renamed)

    def sync(self, prefix: str) -> None:
        """Make the names below a directory durable."""
        for area in AREAS:
            self.writes.sync(area + prefix)

    def clear(self, prefix: str, deep: bool) -> None:
        """See `Writes.clear`."""
        for area in AREAS:
            if os.path.isdir(f"{self.path}/{area}{prefix}"):
                self.writes.clear(area + prefix, deep=deep)

    def read(self, key: str, start: int, buffer: memoryview, etag: str | None = None) -> None:
        """Fill `buffer` from a file, whose key begins with its area."""
        self.store.read_into(key, start, buffer, etag=etag)


def encoded(listing: FolderListing) -> Any:
    """For JSON."""
    files = {area: [list(info) for info in infos] for area, infos in listing.files.items()}
    return {"files": files, "manifests": listing.manifests}


def decoded(data: Any) -> FolderListing:
    """What `encoded` made."""
    files = {area: [ObjectInfo(*info) for info in infos] for area, infos in data["files"].items()}
    return FolderListing(files, data["manifests"])
