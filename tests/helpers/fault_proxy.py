"""A proxy in front of a real server that injects what networks and stores do: for one request at a time, as a test says."""

from __future__ import annotations

import re
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Fault:
    """What happens to a request.

    wait_s: before it is passed on. reset: the connection is reset instead; lost: it is passed on, and reset instead of the
    answer. hang: no answer until the proxy is closed.
    answer: (status, error code) instead of the server's. keep_bytes: of the body, then the connection is closed.
    drip: of the body one byte, and then nothing until the proxy is closed. flip: the byte at this place of the body is changed.
    """

    wait_s: float = 0.0
    reset: bool = False
    lost: bool = False
    hang: bool = False
    answer: tuple[int, str] | None = None
    keep_bytes: int | None = None
    drip: bool = False
    flip: int | None = None


@dataclass(frozen=True)
class Request:
    """A request on its way: its method, its path with the query, and how many came before it."""

    method: str
    path: str
    number: int
    headers: dict[str, str] = field(default_factory=dict)


_JOIN_S = 60.0
Rule = Callable[[Request], Fault | None]


class FaultProxy:
    """Passes requests on to `port` of this machine; `rule` says what goes wrong. `endpoint` is where it listens."""

    def __init__(self, port: int, rule: Rule = lambda request: None) -> None:
        self._upstream = port
        self.rule = rule
        self.requests: list[Request] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._connections: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port: int = self._listener.getsockname()[1]
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._start(self._accept)

    def __enter__(self) -> FaultProxy:
        self._before = set(threading.enumerate())
        return self

    def __exit__(self, *error: object) -> None:
        """Close, and wait until the threads have ended that were in a request: other tests look for threads."""
        self.close()
        for thread in set(threading.enumerate()) - self._before:
            if thread.name.startswith("loaderkit"):
                thread.join(_JOIN_S)
                assert not thread.is_alive() or error[0] is not None, thread.name

    def close(self) -> None:
        """Break off everything."""
        self._closed.set()
        self.go_down()
        for thread in self._threads:
            thread.join(10)

    def go_down(self) -> None:
        """Refuse connections, and break off those there are."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for connection in self._connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def come_up(self) -> None:
        """Listen again on the same port."""
        self._listener = socket.create_server(("127.0.0.1", self.port), backlog=256)
        self._start(self._accept)

    def _start(self, function: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=function, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        listener = self._listener
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._connections.add(connection)
            self._start(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection.makefile("rb") as stream:
                while self._serve_one(connection, stream):
                    pass
        except (OSError, ValueError):
            pass
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _serve_one(self, connection: socket.socket, stream: object) -> bool:
        head = _read_head(stream)
        if not head:
            return False
        method, path = head.split(b" ", 2)[:2]
        headers = dict(_headers(head))
        with self._lock:
            request = Request(method.decode(), path.decode(), len(self.requests), headers)
            self.requests.append(request)
        fault = self.rule(request) or Fault()
        body = b""
        is_asked = headers.get("expect") == "100-continue"
        if is_asked and fault.answer is None:
            connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        if not is_asked or fault.answer is None:  # else the client sends none
            body = stream.read(int(headers.get("content-length", 0)))  # type: ignore[attr-defined]
        if fault.wait_s:
            self._closed.wait(fault.wait_s)
        if fault.hang:
            self._closed.wait()
            return False
        if fault.reset:
            _reset(connection)
            return False
        if fault.answer is not None:
            connection.sendall(_error(*fault.answer, has_body=method != b"HEAD"))
            return True
        return self._pass_on(connection, head, body, fault, is_head=method == b"HEAD")

    def _pass_on(self, connection: socket.socket, head: bytes, body: bytes, fault: Fault, *, is_head: bool) -> bool:
        with socket.create_connection(("127.0.0.1", self._upstream)) as server, server.makefile("rb") as answer:
            server.sendall(
                re.sub(rb"(?im)^(connection|expect):.*\r\n", b"", head[:-2]) + b"Connection: close\r\n\r\n" + body
            )
            found = _read_head(answer)
            payload = b"" if is_head else answer.read()
        if fault.lost:
            _reset(connection)
            return False
        found = re.sub(rb"(?im)^connection:.*\r\n", b"", found)
        if re.search(rb"(?im)^transfer-encoding: *chunked", found):
            connection.sendall(found[:-2] + b"Connection: close\r\n\r\n" + payload)
            return False
        if fault.flip is not None and fault.flip < len(payload):
            payload = payload[: fault.flip] + bytes([payload[fault.flip] ^ 1]) + payload[fault.flip + 1 :]
        if fault.drip:
            connection.sendall(found + payload[:1])
            self._closed.wait()
            return False
        if fault.keep_bytes is not None and fault.keep_bytes < len(payload):
            connection.sendall(found + payload[: fault.keep_bytes])
            return False
        connection.sendall(found + payload)
        return True


def _reset(connection: socket.socket) -> None:
    """Closing it resets it."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _read_head(stream: object) -> bytes:
    lines = []
    while line := stream.readline():  # type: ignore[attr-defined]
        lines.append(line)
        if line == b"\r\n":
            return b"".join(lines)
    return b""


def _headers(head: bytes) -> list[tuple[str, str]]:
    pairs = [line.partition(b":") for line in head.split(b"\r\n")[1:] if b":" in line]
    return [(name.decode().lower().strip(), value.decode("latin-1").strip()) for name, _, value in pairs]


def error_document(code: str) -> bytes:
    """What the proxy answers with."""
    return f"<?xml version='1.0'?><Error><Code>{code}</Code><Token-0>SESSION-TOKEN</Token-0></Error>".encode()


def _error(status: int, code: str, *, has_body: bool) -> bytes:
    body = error_document(code)
    head = f"HTTP/1.1 {status} Fault\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    return head + (body if has_body else b"")
