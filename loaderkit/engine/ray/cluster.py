"""The connection of this process to a Ray cluster, and what is asked of it for an actor."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError

from loaderkit._internal.config import keys
from loaderkit.errors import ConfigError

_CONNECT_S = 10.0
_ROUNDING = 1e-6  # Ray counts in steps of 0.0001
_PORT = 6379  # Ray's default
_SETTINGS = b"\x04"  # the type of the first frame that each side sends (RFC 9113)
_HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0" + _SETTINGS + b"\0" + b"\0\0\0\0"
NO_CLIENT = "Ray Client has no memory in common with the cluster: run this program on one of its nodes, with auto"


@dataclass(frozen=True)
class RaySettings:
    """Where the cluster is, and what each actor needs."""

    address: str = "auto"
    num_cpus: float = 1.0
    resources: Mapping[str, float] = field(default_factory=dict)
    strategy: str = "spread"

    def options(self) -> dict[str, Any]:
        """The options of an actor."""
        return {
            "num_cpus": self.num_cpus,
            "resources": dict(self.resources) or None,
            "scheduling_strategy": self.strategy.upper(),
            "max_restarts": 0,
            "max_task_retries": 0,
        }

    def needs(self) -> dict[str, float]:
        """The resources of an actor by Ray's names."""
        return {"CPU": self.num_cpus, **self.resources}


def connect(address: str) -> None:
    """Connect this process, unless it is connected. Raises ConfigError if there is no cluster.

    The connection is kept until the program ends or calls `ray.shutdown()`: batches lie in memory that belongs to it.
    """
    with _CONNECTING:
        if not ray.is_initialized():
            _begin(address)
        elif ray.util.client.ray.is_connected():
            raise ConfigError(
                f"{keys.EXECUTOR}: ray: this program has called ray.init with a ray:// address: {NO_CLIENT}"
            )
        else:
            _check_address(address)


_CONNECTING = threading.Lock()  # a process has one connection, whichever of its loaders begins it


def _begin(address: str) -> None:
    key = f"{keys.RAY}.address"
    if address == "auto" and (given := os.environ.get("RAY_ADDRESS")):
        key, address = "RAY_ADDRESS", given
    scheme, separator, _ = address.partition("://")
    if separator:
        why = (
            NO_CLIENT
            if scheme == "ray"
            else "expected HOST:PORT, the port being the head's (6379 unless it was given another)"
        )
        raise ConfigError(f"{key}: {address}: {why}")
    try:
        _check_reachable(address)
        with _kept_handler(signal.SIGTERM):
            ray.init(
                address=address,
                log_to_driver=False,
                include_dashboard=False if address == "local" else None,
                configure_logging=False,
            )
    except (OSError, ValueError, RuntimeError, RayError) as error:
        raise ConfigError(f"{key}: {address}: {_why_not(error, address)}") from error


def _why_not(error: Exception, address: str) -> str:
    """Why there is no connection, and what to do."""
    reason = " ".join((str(error) or type(error).__name__).split()).rstrip(".")
    if type(error).__name__ == "AuthenticationError":  # which old versions of Ray lack
        return f"the cluster asks for a token: {reason}"
    if reason.startswith("Version mismatch"):
        return f"Ray refuses this program ({reason}): install the same versions of Python and Ray on all nodes"
    if reason.startswith("No node info"):
        return (
            f"a cluster answers, but this machine is none of its nodes ({reason}), and batches come through a node's memory: "
            f"run the program on a node, or make this machine one by `ray start --address={address}`"
        )
    return (
        f"there is no Ray cluster that can be reached ({reason}): start one with `ray start --head` on this machine and "
        "`ray start --address=HOST:PORT` on others, give its address (also in RAY_ADDRESS), or use address: local"
    )


def _check_reachable(address: str) -> None:
    """Raise OSError unless something answers there that speaks HTTP/2, as a head does: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")  # of an IPv6 address
    if not port.isdecimal():
        return
    with socket.create_connection((host, int(port)), _CONNECT_S) as connection:
        if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
            return  # it would want a certificate first
        connection.sendall(_HTTP2_HELLO)
        if connection.recv(9)[3:4] != _SETTINGS:
            raise ConnectionError(
                f"another program answers there: the port is the head's, {_PORT} unless it was given another"
            )


@contextmanager
def _kept_handler(number: signal.Signals) -> Iterator[None]:
    """Put a signal's handler back behind the block: `ray.init` sets its own for SIGTERM, in the main thread."""
    handler = signal.getsignal(number)
    try:
        yield
    finally:
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(number, handler)


def _check_address(address: str) -> None:
    connected = ray.get_runtime_context().gcs_address
    if address not in ("auto", "local") and not _is_same(address, connected):
        raise ConfigError(
            f"{keys.RAY}.address: {address}: this program is connected to the cluster at {connected}, and a process has one "
            "connection: use address: auto, or call ray.shutdown() first"
        )


def node_here() -> str:
    """The node of this process: its address, and the beginning of its number, as several may have one address."""
    address = ray.util.get_node_ip_address()
    return _say_node(address, ray.get_runtime_context().get_node_id())


def cpus_of(node: str) -> float | None:
    """The CPUs that a node, named as by `node_here`, has for actors and tasks; None if it is gone."""
    cluster: Any = ray  # this function has no types
    for found in cluster.nodes():
        if _say_node(found["NodeManagerAddress"], found["NodeID"]) == node:
            return float(found["Resources"].get("CPU", 0.0))
    return None


def _say_node(address: str, number: str) -> str:
    return f"{address} ({number[:8]})"


def _is_same(address: str, other: str) -> bool:
    """True if two addresses lead to one place, by whatever names."""
    (host, _, port), (other_host, _, other_port) = address.rpartition(":"), other.rpartition(":")
    if address == other or port != other_port:
        return address == other
    try:
        return socket.gethostbyname(host) == socket.gethostbyname(other_host)
    except OSError:
        return False


def num_that_fit(settings: RaySettings) -> int:
    """How many more actors the cluster's nodes have free resources for; 0 while this process is not connected. Free
    resources on several nodes do not add up to one place."""
    cluster: Any = ray  # these functions have no types
    if not cluster.is_initialized():
        return 0
    return sum(
        min(int(free.get(name, 0.0) / amount + _ROUNDING) for name, amount in settings.needs().items())
        for free in _free_by_node().values()
    )


def _free_by_node() -> dict[str, dict[str, float]]:
    """What is free on each node that is alive. This uses a function that Ray has for its own libraries: the public sum
    does not say where."""
    free: dict[str, dict[str, float]] = ray._private.state.available_resources_per_node()
    return free


def describe_wait(settings: RaySettings) -> str:
    """Why an actor has not answered yet, for the watchdog."""
    wanted = settings.needs()
    cluster: Any = ray  # these functions have no types
    total, free = cluster.cluster_resources(), cluster.available_resources()
    asks = ", and for ".join(f"{amount:g} {_name_of(name)}" for name, amount in wanted.items())
    if num_that_fit(settings):
        return f"ray: an actor for {asks} has not answered yet: as many are free, so its process may be starting"
    parts = [
        f"{amount:g} {_name_of(name)}; the cluster has {total.get(name, 0.0):g}, of which {free.get(name, 0.0):g} are free"
        for name, amount in wanted.items()
    ]
    fits = any(
        node["Alive"] and all(node["Resources"].get(name, 0.0) >= amount for name, amount in wanted.items())
        for node in cluster.nodes()
    )
    is_spread = fits and all(free.get(name, 0.0) >= amount for name, amount in wanted.items())
    lacking = "; no node has as many free" if is_spread else ""
    if not fits:
        lacking = f"; no node has as many: make {keys.RAY}.num_cpus or resources smaller, or add a node"
    return f"ray: waits for {', and for '.join(parts)}{lacking}"


def _name_of(resource: str) -> str:
    return "CPUs" if resource == "CPU" else repr(resource)
