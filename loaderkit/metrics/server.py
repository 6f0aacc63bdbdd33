"""The HTTP server for metrics: Python's own, with a bound on its connections and one deadline for a request.

One thread waits for connections, and does nothing else; each request has a thread of its own. Whatever clients do, they
use no more than `_MOST_REQUESTS` descriptors and threads of the training process.
"""

from __future__ import annotations

import logging
import math
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Any, cast

from loaderkit.metrics.address import ListenAddress

_MOST_REQUESTS = 16  # at once; for another one the oldest is ended
_REQUEST_S = 5.0  # for a request, from its connection to the last byte of the answer
_CLOSE_S = 1.0  # for all answers that are under way when the server ends
_PAUSE_S = 0.25  # after a connection that could not be taken, as without descriptors
_PATHS = ("/metrics", "/")
logger = logging.getLogger("loaderkit")

Write = Callable[[str], tuple[bytes, str]]
"""A function from the header Accept to a body and its content type."""


@dataclass
class _Request:
    """A connection, and the time at which the server ends it. It is ended only once."""

    connection: socket.socket
    deadline_s: float
    is_asked: bool = False  # all that the client has to say is there

    def end(self) -> None:
        """End the connection. Its thread, which waits for the client, then continues."""
        with suppress(OSError):  # it has ended by itself
            self.connection.shutdown(socket.SHUT_RDWR)
        self.deadline_s = math.inf


class MetricsServer(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Listens from its creation on. `close` ends it with all its threads."""

    allow_reuse_address = True  # a port whose last connections have just ended is free
    daemon_threads = True
    request_queue_size = 128  # which wait for a thread, and hold no descriptor

    def __init__(self, address: ListenAddress, write: Write) -> None:
        """Raises OSError if it cannot listen there."""
        self.write = write
        self._requests: dict[threading.Thread, _Request] = {}
        self._places = threading.Semaphore(_MOST_REQUESTS)
        self._is_closing = threading.Event()
        (self.address_family, _, _, _, where), *_ = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
        super().__init__(cast(tuple[str, int], where), _Handler)
        self._thread = threading.Thread(target=self._serve, name="loaderkit-metrics", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self.server_close()
            raise

    def _serve(self) -> None:
        while not self._is_closing.is_set():
            self.timeout = self._end_late_ones()
            self.handle_request()

    def _end_late_ones(self) -> float | None:
        """End the requests whose deadline has come; returns the seconds until the next deadline, or None if there is none."""
        now_s = time.monotonic()
        for request in self._open():
            if request.deadline_s <= now_s:
                request.end()
        next_s = min((request.deadline_s for request in self._open()), default=math.inf)
        return None if next_s == math.inf else next_s - now_s

    def _open(self) -> list[_Request]:
        """The requests, the oldest first."""
        return [*self._requests.values()]

    def get_request(self) -> tuple[Any, Any]:
        try:
            return super().get_request()
        except OSError:
            self._is_closing.wait(_PAUSE_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._has_place():
            self.shutdown_request(request)
            return
        thread = threading.Thread(
            target=self.process_request_thread,
            args=(request, client_address),
            name="loaderkit-metrics-request",
            daemon=True,
        )
        self._requests[thread] = _Request(request, time.monotonic() + _REQUEST_S)
        try:
            thread.start()
        except BaseException:
            self._leave(thread)
            raise

    def _has_place(self) -> bool:
        """True once there is a place for one more request; False if even the oldest request, which is ended for it,
        does not stop."""
        if self._places.acquire(blocking=False):
            return True
        ongoing = [request for request in self._open() if request.deadline_s < math.inf]
        for request in ongoing[:1]:
            request.end()
        return self._places.acquire(timeout=_PAUSE_S)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._leave(threading.current_thread())

    def note_asked(self) -> None:
        """What this thread's client asks for is known."""
        self._requests[threading.current_thread()].is_asked = True

    def _leave(self, thread: threading.Thread) -> None:
        del self._requests[thread]
        self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no concern of training's."""
        logger.debug("a request for metrics from %s failed", client_address, exc_info=True)

    def close(self) -> None:
        """Answer what has been asked, and end. May be called again if it was interrupted."""
        self._is_closing.set()
        with suppress(OSError):  # it was, before
            self.socket.shutdown(socket.SHUT_RDWR)  # ends the wait for connections
        self._thread.join()
        self.server_close()
        for request in self._open():
            if not request.is_asked:
                request.end()
        deadline_s = time.monotonic() + _CLOSE_S
        for thread, request in [*self._requests.items()]:
            thread.join(max(0.0, deadline_s - time.monotonic()))
            if thread.is_alive():
                request.end()
                thread.join()

    def forget(self) -> None:
        """Close the socket in a fork's child, where no thread serves it; the parent's server continues."""
        self.socket.close()
        for request in self._requests.values():
            request.connection.close()


class _Handler(BaseHTTPRequestHandler):
    server_version = "loaderkit"
    sys_version = ""

    def do_GET(self) -> None:
        assert isinstance(self.server, MetricsServer)
        self.server.note_asked()
        if self.path.partition("?")[0] not in _PATHS:
            self.send_error(404, explain="the metrics are at /metrics")
            return
        body, content_type = self.server.write(self.headers.get("Accept", ""))
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 - as it is called
        """Nothing: a scrape is no news."""
