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

from loaderkit.errors import ConfigError

_CONNECT_S = 10.0
_ROUNDING = 1e-6  # Ray counts in steps of 0.0001


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
        if ray.is_initialized():
            _check_address(address)
        else:
            _begin(address)


_CONNECTING = threading.Lock()  # a process has one connection, whichever of its loaders begins it


def _begin(address: str) -> None:
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS") or address
    try:
        _check_reachable(address)
        with _kept_handler(signal.SIGTERM):
            ray.init(
                address=address,
                log_to_driver=False,
                include_dashboard=False if address == "local" else None,
                configure_logging=False,
            )
    except (OSError, ValueError, RuntimeError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"prefetch.ray.address: {address}: there is no Ray cluster that can be reached "
            f"({reason}): start one with `ray start --head` on this machine and `ray start "
            "--address=HOST:PORT` on others, give its address (also in RAY_ADDRESS), or use address: local"
        ) from error


def _check_reachable(address: str) -> None:
    """Raise OSError unless something answers there: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if port.isdecimal():
        socket.create_connection((host, int(port)), _CONNECT_S).close()


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
            f"prefetch.ray.address: {address}: this program is connected to the cluster at {connected}, and a process has one "
            "connection: use address: auto, or call ray.shutdown() first"
        )


def node_here() -> str:
    """The node of this process: its address, and the beginning of its number, as several may have one address."""
    address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
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
    """How many more actors the cluster's nodes have free resources for; 0 while this process is not connected. What is free on
    several nodes makes no place together."""
    cluster: Any = ray  # these functions have no types
    if not cluster.is_initialized():
        return 0
    return sum(
        min(int(free.get(name, 0.0) / amount + _ROUNDING) for name, amount in settings.needs().items())
        for free in _free_by_node().values()
    )


def _free_by_node() -> dict[str, dict[str, float]]:
    """What is free on each node that is alive. Ray's own, for its libraries: its public sum does not say where."""
    free: dict[str, dict[str, float]] = ray._private.state.available_resources_per_node()  # type: ignore[no-untyped-call]
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
        lacking = "; no node has as many: make prefetch.ray.num_cpus or resources smaller, or add a node"
    return f"ray: waits for {', and for '.join(parts)}{lacking}"


def _name_of(resource: str) -> str:
    return "CPUs" if resource == "CPU" else repr(resource)
