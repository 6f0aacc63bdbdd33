"""Connections between the processes of a job, beside those of torch.distributed: where one listens, and whole reads."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loaderkit._internal.system.machine import machine

_TOKEN_BYTES = 32


class Address(NamedTuple):
    """Where a process listens: its machine, names of its host to be tried in order, the port, and what one must say there."""

    machine: str
    hosts: tuple[str, ...]
    port: int
    token: bytes

    def reachable(self) -> tuple[str, ...]:
        """The hosts to try from here."""
        return ("127.0.0.1", *self.hosts) if self.machine == machine() else self.hosts


def listen() -> tuple[socket.socket, Address]:
    """A socket that listens on a free port of all addresses, and where that is, with a new token."""
    is_dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    listener = socket.create_server(("", 0), family=family, backlog=1024, dualstack_ipv6=is_dual)
    return listener, Address(machine(), _own_hosts(), listener.getsockname()[1], secrets.token_bytes(_TOKEN_BYTES))


def accepted(listener: socket.socket) -> Iterator[socket.socket]:
    """The connections that come, until the listener is closed."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        yield connection


def keep_alive(connection: socket.socket) -> None:
    """Notice within minutes that the other machine is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def received(connection: socket.socket, num_bytes: int) -> bytes:
    """The next bytes. Raises ConnectionError if the other side closes first."""
    data = np.empty(num_bytes, np.uint8)
    fill(connection, data)
    return data.tobytes()


def fill(connection: socket.socket, target: NDArray[np.uint8]) -> None:
    """Fill `target` with the next bytes. Raises ConnectionError if the other side closes first."""
    view, done = target.data, 0
    while done < len(target):
        count = connection.recv_into(view[done:])
        if not count:
            raise ConnectionError("the connection was closed")
        done += count


def _own_hosts() -> tuple[str, ...]:
    """Names of this host that others may know: its address towards the job's first rank, and its own name."""
    hosts: list[str] = []
    if master := os.environ.get("MASTER_ADDR"):
        for family in (socket.AF_INET, socket.AF_INET6):
            with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((master, 9))  # sends nothing, but chooses the way
                hosts.append(probe.getsockname()[0])
    hosts.append(socket.gethostname())
    with suppress(OSError):
        hosts.append(socket.gethostbyname(socket.gethostname()))
    return tuple(dict.fromkeys(hosts))
