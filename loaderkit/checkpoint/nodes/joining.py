"""Finds out which ranks share a local folder, which is what makes a node, and connects the nodes.

each rank writes a small file ──> each looks which of them it sees ──> ranks that see the same are a node; the first one serves
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from loaderkit.checkpoint.discovery.manifest import NAME
from loaderkit.checkpoint.nodes.connector import NodesConnector
from loaderkit.checkpoint.nodes.folder import NodeFolder
from loaderkit.checkpoint.nodes.replication import Replication
from loaderkit.checkpoint.nodes.server import NodeServer
from loaderkit.connectors.base import writes_of
from loaderkit.connectors.file import FileConnector
from loaderkit.errors import ConfigError, ConnectorError
from loaderkit.ranks.board import Board
from loaderkit.ranks.sockets import Address

logger = logging.getLogger("loaderkit")
_KEY = "nodes"
_PROBE = ".loaderkit-node-"
_DOING = "the nodes of a job find one another"


class JobNodes:
    """The nodes of a job, as this rank sees them. `members` are the ranks of each, by number; `store` is all their folders."""

    def __init__(
        self, path: str, board: Board | None, timeout_s: float, *, replicated: Callable[[], None] = lambda: None
    ) -> None:
        """`replicated` is called on rank 0 when all nodes have a step's replicas.

        Raises ConfigError if the folder cannot be written to, or another node cannot be reached; PeerError.
        """
        self._server: NodeServer | None = None
        self._replication: Replication | None = None
        self._num_finished = 0
        self._board = board
        try:
            os.makedirs(path, exist_ok=True)
            self.members = [(0,)] if board is None else _members(path, board)
            self._connect(path, timeout_s, replicated)
        except BaseException as failure:
            self.close()
            error: BaseException = failure
            if isinstance(failure, (ConnectorError, OSError)):
                error = ConfigError(f"local: {path} does not serve as the folder of a node: {failure}")
            if board is not None:
                board.fail(_KEY, error)
            raise error from failure

    def _connect(self, path: str, timeout_s: float, replicated: Callable[[], None]) -> None:
        board = self._board
        rank = 0 if board is None else board.rank
        here = next(number for number, ranks in enumerate(self.members) if rank in ranks)
        addresses: dict[int, Address] = {}
        if board is not None and len(self.members) > 1:
            is_first = rank == self.members[here][0]
            if is_first:
                self._server = NodeServer(NodeFolder(path))
            board.post(f"{_KEY}/serves/{rank}", _packed(None if self._server is None else self._server.address))
            said = [_unpacked(data) for data in board.collect(f"{_KEY}/serves", about=_KEY, doing=_DOING)]
            for number, ranks in enumerate(self.members):
                address = said[ranks[0]]
                if number != here and address is not None:
                    addresses[number] = address
        self.store = NodesConnector(path, here, addresses, writes_all=rank == 0, timeout_s=timeout_s)
        if board is None or not addresses:
            if rank == 0:
                logger.warning("replicas: all ranks share %s, so there is no other node to keep a replica on", path)
            return
        files = self.store.view("step-").files  # a node that cannot be reached shows now
        if self._server is not None:
            self._replication = Replication(
                self.store.folder,
                self.store.clients[(here - 1) % len(self.members)],
                board,
                [ranks[0] for ranks in self.members],
                last=max((key for key in files if key.endswith(f"/{NAME}")), default="").partition("/")[0],
                replicated=replicated,
            )
        board.post(f"{_KEY}/connected/{rank}")
        board.collect(f"{_KEY}/connected", about=_KEY, doing=_DOING)

    def committed(self, name: str) -> None:
        """The step in the directory `name` is committed; every rank is told."""
        if self._replication is not None:
            self._replication.add(name)

    def stays(self) -> set[str]:
        """On rank 0: the steps that are not to be removed before newer ones have replicas."""
        return set() if self._replication is None else self._replication.stays()

    def finish(self, within_s: float | None = None) -> None:
        """Return once all nodes have the replicas of what was committed, or after `within_s`; every rank calls it. Raises
        PeerError."""
        if self._board is None or len(self.members) == 1:
            return
        key = f"{_KEY}/finished-{self._num_finished}"
        self._num_finished += 1
        with self._board.alive(key):
            if self._replication is not None:
                self._replication.finish(within_s)
            self._board.post(f"{key}/{self._board.rank}")
            self._board.collect(key, doing="the nodes copy one another's checkpoints")

    def stats(self) -> dict[str, float]:
        """Of the replicas that this rank has made."""
        return {} if self._replication is None else self._replication.stats()

    def close(self) -> None:
        """Give other nodes nothing any more. Idempotent."""
        if self._replication is not None:
            self._replication.close()
        if self._server is not None:
            self._server.close()
        if hasattr(self, "store"):
            self.store.close()


def _members(path: str, board: Board) -> list[tuple[int, ...]]:
    """The ranks of each node, by their first rank."""
    store = FileConnector(path)
    name = f"{_PROBE}{secrets.token_hex(8)}"
    try:
        writes_of(store).put(name, b"")
        board.post(f"{_KEY}/wrote/{board.rank}", name.encode())
        names = board.collect(f"{_KEY}/wrote", about=_KEY, doing=_DOING)
        there = {*os.listdir(path)}
        seen = [rank for rank, other in enumerate(names) if other.decode() in there]
        board.post(f"{_KEY}/sees/{board.rank}", json.dumps(seen).encode())
        views = [tuple(json.loads(data)) for data in board.collect(f"{_KEY}/sees", about=_KEY, doing=_DOING)]
        for other in there - {other.decode() for other in names}:  # of a start that was killed here
            if other.startswith(_PROBE):
                writes_of(store).delete(other)
    finally:
        with suppress(ConnectorError):
            writes_of(store).delete(name)
    nodes = sorted(set(views))
    if sorted(rank for ranks in nodes for rank in ranks) != list(range(len(board))):
        raise ConfigError(
            f"local: which ranks share a folder is not clear ({', '.join(map(str, nodes[:4]))}): give each machine a folder "
            "that none of the others sees"
        )
    return nodes


def _packed(address: Address | None) -> bytes:
    return json.dumps(None if address is None else [*address[:3], address.token.hex()]).encode()


def _unpacked(data: bytes) -> Address | None:
    said: Any = json.loads(data)
    return None if said is None else Address(said[0], tuple(said[1]), said[2], bytes.fromhex(said[3]))
