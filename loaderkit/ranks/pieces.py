"""Lets ranks get pieces of one another's tensors over connections of their own, without a collective.

Each rank that has something others need listens, and gives bytes on request from where they lie. The rank that writes a
file asks for them part by part, so no rank holds more than a part. Ranks need not be in step with one another. A rank
that fails says why and closes its connections, and the machine closes the connections of a rank that died: the others
notice at once.
"""

from __future__ import annotations

import hmac
import logging
import queue
import socket
import struct
import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from loaderkit._internal.system.program_end import ProgramEndsError, start_thread
from loaderkit.errors import PeerError
from loaderkit.ranks.sockets import Address, accepted, fill, keep_alive, listen, received

logger = logging.getLogger("loaderkit")
TIMEOUT_S = 300.0
"""How long a rank waits for another to connect."""
_CONNECT_S = 10.0
_FAREWELL_S = 2.0
_HELLO = struct.Struct("<32sQ")  # the token, and who asks
_REQUEST = struct.Struct("<QQQ")  # number, start, length
_DONE = 2**64 - 1  # in place of a number
_FAILED = 2**64 - 2  # then a text of `length` bytes follows
_MAX_REASON = 2000  # bytes
_WELCOME = b"loaderkit"
_DIED = "failed, or died, before it had all parts of a checkpoint"
_GONE = "failed, or died, before it gave all parts of a checkpoint"


class Piece(Protocol):
    """A source of a piece's bytes, which any thread may ask for."""

    num_bytes: int

    def copy(self, start: int, target: NDArray[np.uint8]) -> None:
        """Fill `target` with the bytes from `start` on."""


class PieceServer:
    """Gives pieces of this rank to others. It listens from the start, and answers once `serve` says what there is."""

    def __init__(self) -> None:
        self._listener, self.address = listen()
        self._token = self.address.token
        self._pieces: Sequence[Piece] | None = None
        self._changed = threading.Condition()
        self._connections: set[socket.socket] = set()
        self._main: dict[int, socket.socket] = {}
        self._came: set[int] = set()
        self._left: dict[int, str] = {}  # rank -> "" once it has all, else why it has not
        self._closed = False
        self._failure: ProgramEndsError | None = None
        try:
            start_thread(threading.Thread(target=self._accept, name="loaderkit-pieces", daemon=True))
        except ProgramEndsError:
            self._listener.close()
            raise

    def serve(self, pieces: Sequence[Piece]) -> None:
        """Answer from now on; a request names one of `pieces` by its number."""
        with self._changed:
            self._pieces = pieces
            self._changed.notify_all()

    def wait(self, ranks: Collection[int], timeout_s: float = TIMEOUT_S) -> None:
        """Return once these ranks have all they need. Raises PeerError if one fails, or does not connect within `timeout_s`."""

        def is_over() -> bool:
            is_failed = self._failure is not None or any(self._left.get(rank) for rank in ranks)
            return is_failed or all(self._left.get(rank) == "" for rank in ranks)

        with self._changed:
            while not is_over():
                heard = self._changed.wait(timeout_s)
                if not heard and (missing := sorted(set(ranks) - self._came)):
                    raise PeerError(
                        f"rank {missing[0]} did not come for its parts of a checkpoint within {timeout_s:g} s",
                        ranks=tuple(missing),
                    )
            if self._failure is not None:
                raise self._failure
            if failed := sorted(rank for rank in ranks if self._left.get(rank)):
                raise PeerError(f"rank {failed[0]} {self._left[failed[0]]}", ranks=(failed[0],))

    def close(self, reason: str = "") -> None:
        """Close all connections; ranks that still ask get the `reason`. Idempotent."""
        with self._changed:
            self._closed = True
            connections, main = [*self._connections, self._listener], [*self._main.values()]
            self._changed.notify_all()
        for connection in main:
            with suppress(OSError):
                connection.sendall(reason.encode(errors="replace")[:_MAX_REASON])
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        for connection in accepted(self._listener):
            with self._changed:
                if self._closed:
                    connection.close()
                    return
                self._connections.add(connection)
            thread = threading.Thread(target=self._answer, args=(connection,), name="loaderkit-piece", daemon=True)
            try:
                start_thread(thread)
            except ProgramEndsError as error:
                self._failure = error
                self.close(str(error))
                return

    def _answer(self, connection: socket.socket) -> None:
        rank: int | None = None
        is_main, end = False, _DIED
        try:
            keep_alive(connection)
            connection.settimeout(_CONNECT_S)
            token, number = _HELLO.unpack(received(connection, _HELLO.size))
            if not hmac.compare_digest(token, self._token):
                return
            connection.settimeout(None)
            rank, is_main = number // 2, number % 2 == 1
            connection.sendall(_WELCOME)
            with self._changed:
                self._came.add(rank)
                if is_main:
                    self._main[rank] = connection
            end = self._give(connection)
        except Exception as error:
            logger.debug("a connection of another rank ended: %s", error)  # it says why, or this one does
        finally:
            with self._changed:
                self._connections.discard(connection)
                if rank is not None and is_main:
                    self._left[rank] = end
                    self._main.pop(rank, None)
                self._changed.notify_all()
            connection.close()

    def _give(self, connection: socket.socket) -> str:
        """Answer until the other rank closes. Returns "" if it has said that it has everything, else why it has not."""
        with self._changed:
            self._changed.wait_for(lambda: self._pieces is not None or self._closed)
        while data := connection.recv(_REQUEST.size, socket.MSG_WAITALL):
            number, start, length = _REQUEST.unpack(data)
            if number == _DONE:
                return ""
            if number == _FAILED:
                return f"failed: {received(connection, length).decode(errors='replace')}"
            if self._closed or self._pieces is None:
                break
            buffer = np.empty(length, np.uint8)
            self._pieces[number].copy(start, buffer)
            connection.sendall(buffer.data)
        return _DIED


class PieceClient:
    """This rank's connections to the ranks that give it pieces. Any thread may ask for one."""

    def __init__(self, rank: int, addresses: Mapping[int, Address]) -> None:
        self._rank, self._addresses = rank, addresses
        self._main: dict[int, socket.socket] = {}
        self._free: dict[int, queue.SimpleQueue[socket.socket]] = {rank: queue.SimpleQueue() for rank in addresses}
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()

    def connect(self) -> None:
        """Tell all of them that this rank will ask. Raises PeerError that names one that cannot be reached."""
        for rank in self._addresses:
            self._main[rank] = self._connected(rank, is_main=True)

    def read(self, rank: int, number: int, start: int, target: NDArray[np.uint8]) -> None:
        """Fill `target` with a rank's piece from `start` on. Raises PeerError."""
        try:
            connection = self._free[rank].get_nowait()
        except queue.Empty:
            connection = self._connected(rank, is_main=False)
        try:
            connection.sendall(_REQUEST.pack(number, start, len(target)))
            fill(connection, target)
        except OSError as error:
            raise self._failed(rank) from error
        self._free[rank].put(connection)

    def finish(self) -> None:
        """Tell all of them that this rank has what it needs."""
        for rank, connection in self._main.items():
            try:
                connection.sendall(_REQUEST.pack(_DONE, 0, 0))
            except OSError as error:
                raise self._failed(rank) from error

    def _failed(self, rank: int) -> PeerError:
        """The error that says why a rank gives nothing any more, if it has said so."""
        reason = bytearray()
        connection = self._main.get(rank)
        with suppress(OSError):
            if connection is not None:
                connection.settimeout(_FAREWELL_S)
                while data := connection.recv(_MAX_REASON):
                    reason += data
        said = f"failed: {reason.decode(errors='replace')}" if reason else _GONE
        return PeerError(f"rank {rank} {said}", ranks=(rank,))

    def close(self, reason: str = "") -> None:
        """Close all connections; with a `reason`, ranks that still wait for this one get it. Idempotent."""
        for rank in self._addresses.keys() - self._main.keys():
            with suppress(PeerError):
                self._main[rank] = self._connected(rank, is_main=True, timeout_s=_FAREWELL_S)
        with self._lock:
            connections, self._open = self._open, set()
        text = reason.encode(errors="replace")[:_MAX_REASON]
        for connection in self._main.values() if reason else ():
            with suppress(OSError):
                connection.sendall(_REQUEST.pack(_FAILED, 0, len(text)) + text)
        for connection in connections:
            connection.close()

    def _connected(self, rank: int, *, is_main: bool, timeout_s: float = _CONNECT_S) -> socket.socket:
        address = self._addresses[rank]
        tried = []
        for host in address.reachable():
            connection = None
            try:
                connection = socket.create_connection((host, address.port), timeout_s)
                keep_alive(connection)
                connection.sendall(_HELLO.pack(address.token, 2 * self._rank + is_main))
                if received(connection, len(_WELCOME)) != _WELCOME:
                    raise ConnectionError("another program answers")
                connection.settimeout(None)
            except OSError as error:
                tried.append(f"{host}:{address.port} ({error})")
                if connection is not None:
                    connection.close()
                continue
            with self._lock:
                self._open.add(connection)
            return connection
        raise PeerError(
            f"rank {rank} has failed, or cannot be reached at {', '.join(tried)}: whole tensors are put together from "
            "shards of all ranks: let them connect to one another, or use format dcp",
            ranks=(rank,),
        )


class RemoteElements:
    """A piece of another rank, as a source of bytes."""

    device = torch.device("cpu")

    def __init__(self, client: PieceClient, rank: int, number: int, num_bytes: int) -> None:
        self._client, self._rank, self._number = client, rank, number
        self.num_bytes = num_bytes

    def copy(self, start: int, target: NDArray[np.uint8]) -> None:
        """Fill `target` with the bytes from `start` on. Raises PeerError."""
        self._client.read(self._rank, self._number, start, target)
