"""The folders of all nodes as one store: a file is read from any node that has it, and written to the own one.

Rank 0 writes small files to all nodes, and renames and deletes on all: on the others first, so that a step that this node has
under its name is there on all.
"""

from __future__ import annotations

import builtins
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from loaderkit.checkpoint.nodes.folder import OWN, NodeFolder, decoded
from loaderkit.checkpoint.nodes.server import NodeClient
from loaderkit.checkpoint.nodes.view import HeldFile, NodesView, merged
from loaderkit.connectors.base import BulkConnector, ConnectorTraits, ObjectInfo, Writes, traits_of
from loaderkit.connectors.writing import WritesLayer
from loaderkit.errors import ConnectorError, ObjectChangedError, ObjectNotFoundError, ShortReadError
from loaderkit.ranks.sockets import Address


class NodesConnector(BulkConnector):
    """The store as node `here` sees it. It can be pickled to a process of the same node."""

    def __init__(
        self, path: str, here: int, addresses: Mapping[int, Address], *, writes_all: bool, timeout_s: float
    ) -> None:
        """`path` is this node's folder, `addresses` where the other nodes answer; `writes_all`: this is rank 0's."""
        self._settings = path, here, dict(addresses), writes_all, timeout_s
        self.folder = NodeFolder(path)
        self.here = here
        self.clients = {node: NodeClient(node, address, timeout_s) for node, address in addresses.items()}
        self.traits: ConnectorTraits = traits_of(self.folder.store)
        self._writes_all = writes_all
        self._lock = threading.Lock()
        self._known: dict[str, HeldFile] = {}

    def __reduce__(self) -> Any:
        return _made, self._settings

    def view(self, prefix: str = "") -> NodesView:
        """What all nodes hold now that begins with `prefix`. Raises ConnectorError if a node does not answer."""
        asked = {node: client.send("list", prefix) for node, client in self.clients.items()}
        listings = {self.here: self.folder.listing(prefix)} | {
            node: decoded(answer()) for node, answer in asked.items()
        }
        view = merged(listings, self.here)
        with self._lock:
            self._known = {key: held for key, held in self._known.items() if not key.startswith(prefix)} | view.files
        return view

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """The files on any node."""
        folder, slash, _ = prefix.partition("/")
        # Whether a step is whole shows in all of its files.
        files = self.view(folder + slash).files
        return iter(sorted((held.info for held in files.values() if held.info.key.startswith(prefix)), key=_order))

    def stat(self, key: str) -> ObjectInfo:
        """Of the file on the node from which it would be read now."""
        return self._held(key).info

    def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        """From this node, or from another that has the file."""
        with self._lock:
            held = self._known.get(key)
        if held is None or etag not in (None, held.info.etag):
            held = self._held(key)
        if etag not in (None, held.info.etag):
            raise ObjectChangedError(f"{self.describe(key)} was changed since it was listed; start again")
        if start < 0 or start + len(buffer) > held.info.size:
            raise ShortReadError(
                f"{self.describe(key)}: {len(buffer)} bytes at {start}, and it has {held.info.size} bytes"
            )
        where = self.folder if held.node == self.here else self.clients[held.node]
        where.read(held.area + key, start, buffer, held.info.etag if _has_time(held.info) else None)

    def modified_s(self, key: str) -> float | None:
        """Of small files, by the clock of the node that has them."""
        info = self.stat(key)
        return int(info.etag.partition("-")[0], 16) / 1e9 if _has_time(info) else None

    def copies_of(self, key: str) -> builtins.list[bytes]:
        """What each node has itself under this key, if anything."""
        found = []
        for node in (self.here, *self.clients):
            listing = self.folder.listing(key) if node == self.here else decoded(self.clients[node].call("list", key))
            for info in listing.files[OWN]:
                if info.key == key:
                    data = memoryview(bytearray(info.size))
                    (self.folder if node == self.here else self.clients[node]).read(key, 0, data)
                    found.append(bytes(data))
        return found

    def writes(self) -> Writes:
        """Files of tensors to this node; the rest, from rank 0, to all."""
        return _NodesWrites(self.folder, [*self.clients.values()] if self._writes_all else [])

    def counters(self) -> dict[str, float]:
        """What was written to this node."""
        return self.folder.store.counters()

    def describe(self, key: str) -> str:
        """The path that it has, or would have, on this node."""
        return self.folder.store.describe(key)

    def close(self) -> None:
        """Close the connections to other nodes; a later call makes new ones."""
        for client in self.clients.values():
            client.close()

    def _held(self, key: str) -> HeldFile:
        folder, slash, _ = key.partition("/")
        held = self.view(folder + slash if slash else key).files.get(key)
        if held is None:
            raise ObjectNotFoundError(f"{self.describe(key)} is on none of {len(self.clients) + 1} nodes")
        return held


def _made(path: str, here: int, addresses: Mapping[int, Address], writes_all: bool, timeout_s: float) -> NodesConnector:
    return NodesConnector(path, here, addresses, writes_all=writes_all, timeout_s=timeout_s)


def _has_time(info: ObjectInfo) -> bool:
    """True for an etag that a node gave, as of one of its files; files of tensors have one that holds for all copies."""
    return "-" in info.etag


def _order(info: ObjectInfo) -> bytes:
    return info.key.encode(errors="surrogateescape")


class _NodesWrites(WritesLayer):
    """Creates in the own folder; does all else in that of each of the `others`, too."""

    def __init__(self, folder: NodeFolder, others: Sequence[NodeClient]) -> None:
        super().__init__(folder.writes)
        self._folder, self._others = folder, others

    def put(self, key: str, data: bytes | bytearray | memoryview) -> ObjectInfo:
        self._tell("put", key, data=bytes(data))
        return self.inner.put(key, data)

    def delete(self, key: str) -> None:
        self._tell("delete", key)
        self._folder.delete(key)

    def rename(self, prefix: str, new_prefix: str) -> bool:
        there = self._tell("rename", prefix, new_prefix)
        return self._folder.rename(prefix, new_prefix) and all(there)

    def sync(self, prefix: str) -> None:
        self._tell("sync", prefix)
        self._folder.sync(prefix)

    def clear(self, prefix: str, *, deep: bool = True) -> None:
        self._tell("clear", prefix, deep)
        self._folder.clear(prefix, deep)

    def _tell(self, name: str, *arguments: Any, data: bytes | None = None) -> list[Any]:
        """Call all the others at once; their answers. Raises the first error, once all have answered."""
        begun: list[Callable[[], Any]] = []
        answers: list[Any] = []
        error: ConnectorError | None = None
        try:
            begun += (client.send(name, *arguments, data=data) for client in self._others)
        finally:
            for answer in begun:
                try:
                    answers.append(answer())
                except ConnectorError as failure:
                    error = error or failure
        if error is not None:
            raise error
        return answers
