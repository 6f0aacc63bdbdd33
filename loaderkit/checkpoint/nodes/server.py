"""Nodes ask one another for what is in their folders, over connections of their own, without a collective.

client ──> token ──> server: welcome
       ──> length of the call, its JSON, its data ──> 0 or 1 (an error), length, answer

A connection carries one call at a time; several are kept. Any number of nodes is asked at once by sending all calls first.
"""

from __future__ import annotations

import hmac
import json
import logging
import queue
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loaderkit._internal.system.program_end import start_thread
from loaderkit.checkpoint.nodes.folder import NodeFolder, encoded
from loaderkit.errors import (
    AccessDeniedError,
    ConnectorError,
    ObjectChangedError,
    ObjectNotFoundError,
    ShortReadError,
    UnreachableError,
)
from loaderkit.ranks.sockets import Address, accepted, fill, keep_alive, listen, received

logger = logging.getLogger("loaderkit")
MAX_READ_BYTES = 8 * 2**20
"""The bytes that one request asks for, at most; a node holds no more of a file in memory."""
_MAX_CALL_BYTES = 2**30  # a description, or a manifest
_CONNECT_S = 10.0
_CALL = struct.Struct("<IQ")  # bytes of the JSON and of the data
_ANSWER = struct.Struct("<BQ")
_WELCOME = b"loaderkit-node"
_ERRORS = {
    kind.__name__: kind
    for kind in (ConnectorError, ObjectNotFoundError, AccessDeniedError, ObjectChangedError, ShortReadError)
}


class NodeServer:
    """Gives other nodes what is in `folder`, and changes it as they say. Its threads end with `close`."""

    def __init__(self, folder: NodeFolder) -> None:
        self._folder = folder
        self._listener, self.address = listen()
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._closed = False
        self._calls: dict[str, Callable[..., Any]] = {
            "put": folder.put,
            "delete": folder.delete,
            "rename": folder.rename,
            "sync": folder.sync,
            "clear": folder.clear,
            "list": lambda prefix: encoded(folder.listing(prefix)),
        }
        start_thread(threading.Thread(target=self._accept, name="loaderkit-node", daemon=True))

    def close(self) -> None:
        """Answer nothing any more. Idempotent."""
        with self._lock:
            self._closed = True
            connections = [self._listener, *self._connections]
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        for connection in accepted(self._listener):
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                self._connections.add(connection)
            try:
                start_thread(
                    threading.Thread(target=self._serve, args=(connection,), name="loaderkit-node", daemon=True)
                )
            except RuntimeError as error:
                logger.warning("another node is not answered: %s", error)
                self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.discard(connection)
        connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            keep_alive(connection)
            connection.settimeout(_CONNECT_S)
            if not hmac.compare_digest(received(connection, len(self.address.token)), self.address.token):
                return
            connection.settimeout(None)
            connection.sendall(_WELCOME)
            while True:
                self._answer(connection)
        except (OSError, ValueError) as error:
            logger.debug("a connection of another node ended: %s", error)
        finally:
            self._drop(connection)

    def _answer(self, connection: socket.socket) -> None:
        num_said, num_bytes = _CALL.unpack(received(connection, _CALL.size))
        if max(num_said, num_bytes) > _MAX_CALL_BYTES:
            raise ValueError(f"a call of {num_said} and {num_bytes} bytes")
        name, *arguments = json.loads(received(connection, num_said))
        data = [received(connection, num_bytes)] if num_bytes or name == "put" else []
        try:
            answer = self._read(*arguments) if name == "read" else self._calls[name](*arguments, *data)
        except Exception as error:
            kind = next((one.__name__ for one in type(error).__mro__ if one.__name__ in _ERRORS), "ConnectorError")
            said = json.dumps([kind, f"{error}" if isinstance(error, ConnectorError) else repr(error)]).encode()
            connection.sendall(_ANSWER.pack(1, len(said)) + said)
            return
        if not isinstance(answer, np.ndarray):
            answer = np.frombuffer(json.dumps(answer).encode(), np.uint8)
        connection.sendall(_ANSWER.pack(0, len(answer)))
        connection.sendall(answer.data)

    def _read(self, key: str, start: int, length: int, etag: str | None) -> Any:
        if not 0 <= length <= MAX_READ_BYTES:
            raise ConnectorError(f"{length} bytes are asked for at once")
        buffer = np.empty(length, np.uint8)
        self._folder.read(key, start, buffer.data, etag)
        return buffer


class NodeClient:
    """This process's connections to the server of a node. Any thread may call. Errors are those of a store."""

    def __init__(self, number: int, address: Address, timeout_s: float) -> None:
        """`number` is the node's, `timeout_s` how long an answer may take."""
        self._number, self._address, self._timeout_s = number, address, timeout_s
        self._free: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()

    def call(self, name: str, *arguments: Any, data: bytes | None = None) -> Any:
        """What the node answers."""
        return self.send(name, *arguments, data=data)()

    def send(
        self, name: str, *arguments: Any, data: bytes | None = None, target: NDArray[np.uint8] | None = None
    ) -> Callable[[], Any]:
        """Begin a call; what is returned waits for the answer, and is called once. `target` is filled with it."""
        try:
            connection = self._free.get_nowait()
        except queue.Empty:
            connection = self._connected()
        said = json.dumps([name, *arguments]).encode()
        try:
            connection.sendall(_CALL.pack(len(said), len(data or b"")) + said)
            if data:
                connection.sendall(data)
        except OSError as error:
            raise self._gone(connection, error) from error
        return partial(self._answer, connection, target)

    def read(self, key: str, start: int, buffer: memoryview, etag: str | None = None) -> None:
        """Fill `buffer` from a file, whose key begins with its area; at most `MAX_READ_BYTES` are under way at once."""
        view = np.frombuffer(buffer, np.uint8)
        for lo in range(0, len(view), MAX_READ_BYTES):
            part = view[lo : lo + MAX_READ_BYTES]
            self.send("read", key, start + lo, len(part), etag, target=part)()

    def close(self) -> None:
        """Close all connections; calls that wait end with an error. Idempotent."""
        with self._lock:
            connections, self._open = self._open, set()
        for connection in connections:
            connection.close()

    def _answer(self, connection: socket.socket, target: NDArray[np.uint8] | None) -> Any:
        try:
            is_failed, length = _ANSWER.unpack(received(connection, _ANSWER.size))
            if not is_failed and target is not None and length == len(target):
                fill(connection, target)
                answer: Any = None
            else:
                answer = json.loads(received(connection, length))
        except (OSError, ValueError) as error:
            raise self._gone(connection, error) from error
        self._free.put(connection)
        if is_failed:
            kind, message = answer
            raise _ERRORS.get(kind, ConnectorError)(f"node {self._number} ({self._address.hosts[0]}): {message}")
        return answer

    def _gone(self, connection: socket.socket, error: Exception) -> ConnectorError:
        with self._lock:
            self._open.discard(connection)
        connection.close()
        return UnreachableError(
            f"node {self._number} ({', '.join(self._address.hosts)}) answers no more: {error or type(error).__name__}; its "
            "process has ended, or the network between them has failed"
        )

    def _connected(self) -> socket.socket:
        tried = []
        for host in self._address.reachable():
            connection = None
            try:
                connection = socket.create_connection((host, self._address.port), _CONNECT_S)
                keep_alive(connection)
                connection.sendall(self._address.token)
                if received(connection, len(_WELCOME)) != _WELCOME:
                    raise ConnectionError("another program answers")
                connection.settimeout(self._timeout_s)
            except OSError as error:
                tried.append(f"{host}:{self._address.port} ({error})")
                if connection is not None:
                    connection.close()
                continue
            with self._lock:
                self._open.add(connection)
            return connection
        raise UnreachableError(
            f"node {self._number} cannot be reached at {', '.join(tried)}: `replicas` needs connections from node to node"
        )
