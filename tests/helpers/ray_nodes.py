"""Ray clusters on this machine: a head, and nodes that are processes of their own."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.experimental import get_local_object_locations
from ray_clusters import RAY, ray_folder
from waiting import wait_for

import loaderkit
from loaderkit import Pipeline
from loaderkit.engine.ray.actor_process import ActorProcess
from loaderkit.engine.ray.cluster import RaySettings
from loaderkit.engine.ray.connection import Connection
from loaderkit.engine.ray.shared_engine import SharedEngine

STORE_BYTES = 150 * 2**20
# A node that was lost is noticed within 3 s, and no process is begun before it is asked for.
_SYSTEM = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 1000,
    "health_check_failure_threshold": 3,
    "enable_worker_prestart": False,
    "worker_niceness": 0,  # at 15, its own, programs beside a busy machine's would wait for minutes
}


class Nodes:
    """A cluster to whose nodes tests add, and which they take away. Its head has no CPUs."""

    def __init__(self) -> None:
        head = {"num_cpus": 0, "include_dashboard": False, "_system_config": _SYSTEM}
        self._cluster = Cluster(initialize_head=True, head_node_args={**head, "object_store_memory": STORE_BYTES})
        self.address: str = self._cluster.address
        self._nodes: list[Any] = []

    def add(self, num: int = 1, num_cpus: int = 4, **resources: float) -> list[Any]:
        """Add nodes with these CPUs."""
        more = {"object_store_memory": STORE_BYTES, "resources": resources or None}
        added = [self._cluster.add_node(num_cpus=num_cpus, wait=True, **more) for _ in range(num)]
        self._nodes += added
        return added

    def named(self, name: str) -> Any:
        """The node that the stats call so."""
        return next(node for node in self._nodes if f"({node.node_id[:8]})" in name)

    def lose(self, node: Any) -> None:
        """Kill a node's raylet; its actors end with it."""
        self._nodes.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        """End all that was started."""
        own: Any = self._cluster
        connection: Any = ray
        connection.shutdown()
        own.shutdown()


@contextmanager
def cluster_of(num_nodes: int) -> Iterator[Nodes]:
    """A cluster to which this process is connected."""
    with ray_folder():
        nodes = Nodes()
        try:
            nodes.add(num_nodes)
            ray.init(address=nodes.address, log_to_driver=False, logging_level=logging.ERROR)
            yield nodes
        finally:
            nodes.close()


class _Shared:
    """One cluster for all tests of a folder that a process runs one after the other: to begin one takes 9 s of CPU, and idle it
    takes some from tests that need none."""

    def __init__(self) -> None:
        self._open = ExitStack()
        self._nodes: Nodes | None = None

    def nodes(self) -> Nodes:
        """The cluster; begun, if none runs."""
        if self._nodes is None:
            self._nodes = self._open.enter_context(cluster_of(3))
        return self._nodes

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        """End it with the last test of a folder."""
        if nextitem is None or nextitem.path.parent != item.path.parent:
            self._nodes = None
            self._open.close()


_shared = _Shared()


def shared_nodes(config: pytest.Config) -> Nodes:
    """The cluster of the fixture `ray_nodes`."""
    if not config.pluginmanager.is_registered(_shared):
        config.pluginmanager.register(_shared)
    return _shared.nodes()


def build_ray(pipeline: Pipeline | str, num: int = 2, **overrides: Any) -> loaderkit.Loader:
    """A loader with `num` actors, for the cluster that this process is connected to."""
    more = {"prefetch.processes": num, **overrides}
    return loaderkit.build(pipeline, overrides={**RAY, **more})


def actor_maker() -> dict[str, Any]:
    """What makes the processes of an engine actors of the cluster that this process is connected to."""
    connection = Connection("auto")
    engine = SharedEngine(connection)
    return {"make": partial(ActorProcess, RaySettings(num_cpus=0.5), connection, engine), "free": engine.free}


def live_actors() -> list[str]:
    """The actors of the cluster that are not dead."""
    actors: dict[str, Any] = ray._private.state.actors()
    return [number for number, actor in actors.items() if actor["State"] != "DEAD"]


def references() -> dict[Any, Any]:
    """The objects in the cluster's stores that this process has made or refers to."""
    gc.collect()  # frames of an error that was caught
    worker: Any = ray._private.worker.global_worker
    counts: dict[Any, Any] = worker.core_worker.get_all_reference_counts()
    return counts


def object_sizes() -> list[int]:
    """The bytes of each object in the cluster's stores that this process has made or refers to, as it knows now."""
    refs: list[Any] = [ray.ObjectRef(bytes.fromhex(number.decode())) for number in references()]
    found = get_local_object_locations(refs).values()
    return [about["object_size"] for about in found if about["node_ids"]]


def stored_bytes() -> int:
    """The bytes that objects take in all stores of the cluster, as its nodes last said."""
    cluster: Any = ray
    total, free = cluster.cluster_resources(), cluster.available_resources()
    return int(total["object_store_memory"] - free.get("object_store_memory", 0.0))


def check_nothing_left() -> None:
    """No actor lives, and no store holds an object."""
    wait_for(lambda: not live_actors(), 30)
    wait_for(lambda: not references(), 30)
    wait_for(lambda: not stored_bytes(), 30)
