"""A small HTTP server for metrics: one thread waits for connections, and does nothing between two; each request has one."""

from __future__ import annotations

import logging
import socket
import socketserver
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from typing import Any, cast

from loaderkit.metrics.address import ListenAddress

_SILENT_S = 5.0  # a client that sends nothing for so long is let go
_REQUEST_S = 1.0  # for requests that are under way when the server ends
_PAUSE_S = 0.25  # after a connection that could not be taken, as without descriptors
_PATHS = ("/metrics", "/")
logger = logging.getLogger("loaderkit")

Write = Callable[[str], tuple[bytes, str]]
"""From the header Accept to a body and its content type."""


class MetricsServer(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Listens once it is made. `close` ends it with all its threads."""

    allow_reuse_address = True  # a port whose last connections have just ended is free
    daemon_threads = True

    def __init__(self, address: ListenAddress, write: Write) -> None:
        """Raises OSError if it cannot listen there."""
        self.write = write
        self._requests: dict[threading.Thread, socket.socket] = {}
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
            self.handle_request()

    def get_request(self) -> tuple[Any, Any]:
        try:
            return super().get_request()
        except OSError:
            self._is_closing.wait(_PAUSE_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        thread = threading.Thread(
            target=self.process_request_thread,
            args=(request, client_address),
            name="loaderkit-metrics-request",
            daemon=True,
        )
        self._requests[thread] = request
        try:
            thread.start()
        except BaseException:
            del self._requests[thread]
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._requests.pop(threading.current_thread(), None)

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
        for thread, request in [*self._requests.items()]:
            thread.join(_REQUEST_S)
            if thread.is_alive():
                _end(request)
                thread.join()

    def forget(self) -> None:
        """Let go of the socket in a fork's child, where no thread serves it; the parent's goes on."""
        self.socket.close()
        for request in self._requests.values():
            request.close()


def _end(request: socket.socket) -> None:
    with suppress(OSError):  # it has ended by itself
        request.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    timeout = _SILENT_S
    server_version = "loaderkit"
    sys_version = ""

    def do_GET(self) -> None:
        if self.path.partition("?")[0] not in _PATHS:
            self.send_error(404, explain="the metrics are at /metrics")
            return
        assert isinstance(self.server, MetricsServer)
        body, content_type = self.server.write(self.headers.get("Accept", ""))
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 - as it is called
        """Nothing: a scrape is no news."""
