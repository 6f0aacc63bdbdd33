"""Clients of the metrics endpoint that do not behave: they hold few connections, for a short time, and no close."""

from __future__ import annotations

import random
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest
from leftovers import nothing_left  # noqa: F401 - a fixture for every test here
from scraping import free_port
from waiting import wait_for

from loaderkit.metrics import server as module
from loaderkit.metrics.address import ListenAddress
from loaderkit.metrics.server import MetricsServer

ASK = b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
LARGE = b"x" * (32 << 20)  # more than a socket's buffers take


@pytest.fixture
def clients() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def connected(clients: ExitStack, port: int, said: bytes = b"") -> socket.socket:
    client = clients.enter_context(socket.create_connection(("127.0.0.1", port)))
    client.sendall(said)
    return client


def whole_answer(client: socket.socket) -> bytes:
    return b"".join(iter(lambda: client.recv(1 << 16), b""))


def has_ended(client: socket.socket) -> bool:
    """True if the server has ended it; what it answered before is read."""
    while select.select([client], [], [], 0)[0]:
        try:
            if not client.recv(1 << 16):
                return True
        except ConnectionError:
            return True
    return False


def drawn_words(rng: random.Random) -> bytes:
    """The begin of a request, or nothing of it."""
    return ASK[: rng.choice([0, 1, rng.randrange(len(ASK))])]


def test_any_number_of_clients_hold_few_connections_and_no_scrape(rng: random.Random, clients: ExitStack) -> None:
    port = free_port()
    server = MetricsServer(ListenAddress("127.0.0.1", port), lambda accept: (b"numbers", "text/plain"))
    clients.callback(server.close)
    silent: list[socket.socket] = []
    for _ in range(4):
        silent += [connected(clients, port, drawn_words(rng)) for _ in range(rng.randint(10, 40))]
        assert whole_answer(connected(clients, port, ASK)).endswith(b"numbers")
    wait_for(lambda: sum(not has_ended(client) for client in silent) < 16)
    assert sum(thread.name == "loaderkit-metrics-request" for thread in threading.enumerate()) <= 16


def test_a_request_has_one_deadline_however_often_its_client_says_something(
    rng: random.Random, clients: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    monkeypatch.setattr(module, "_REQUEST_S", 0.2)
    server = MetricsServer(ListenAddress("127.0.0.1", port), lambda accept: (LARGE, "text/plain"))
    clients.callback(server.close)
    slow = connected(clients, port)
    reader = connected(clients, port, ASK)
    assert reader.recv(10)
    num_said = 0
    while not has_ended(slow):
        with suppress(ConnectionError):  # it is ended just now
            slow.send(rng.choice([b"G", b"x"]))
        num_said += 1
        assert num_said < 1000, "it goes on for as long as the client does"
        select.select([slow], [], [], 0.01)
    wait_for(lambda: not any(thread.name == "loaderkit-metrics-request" for thread in threading.enumerate()))


def test_the_end_waits_for_answers_and_for_no_client(
    rng: random.Random, clients: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    monkeypatch.setattr(module, "_CLOSE_S", 3600.0)
    is_asked, goes_on = threading.Event(), threading.Event()

    def write(accept: str) -> tuple[bytes, str]:
        is_asked.set()
        goes_on.wait()
        return b"numbers", "text/plain"

    server = MetricsServer(ListenAddress("127.0.0.1", port), write)
    silent = [connected(clients, port, drawn_words(rng)) for _ in range(rng.randint(1, 9))]
    asking = connected(clients, port, ASK)
    is_asked.wait()
    closing = threading.Thread(target=server.close)
    closing.start()
    assert [whole_answer(client) for client in silent] == [b""] * len(silent)
    goes_on.set()
    closing.join()
    assert whole_answer(asking).endswith(b"numbers")


def test_nor_for_a_client_that_does_not_read(clients: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setattr(module, "_CLOSE_S", 0.01)
    server = MetricsServer(ListenAddress("127.0.0.1", port), lambda accept: (LARGE, "text/plain"))
    readers = [connected(clients, port, ASK) for _ in range(9)]
    assert all(reader.recv(1) for reader in readers)
    server.close()
    assert all(len(whole_answer(reader)) < len(LARGE) for reader in readers)
