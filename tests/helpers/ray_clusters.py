"""A Ray cluster of a test's own: found by its address alone, in a folder of its own, and gone with the test."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

OBJECT_STORE_BYTES = 200_000_000
# No process is begun before it is asked for, and none waits for a busy machine's others, as with a niceness of 15, Ray's own.
SYSTEM = {"enable_worker_prestart": False, "worker_niceness": 0}
RAY: dict[str, Any] = {"prefetch.executor": "ray", "prefetch.processes": 2, "prefetch.ray": {"num_cpus": 0.5}}


@contextmanager
def ray_folder() -> Iterator[None]:
    """What Ray keeps lies in a new folder, and goes with it. Else `ray.init()` of others would find the cluster, and the file
    that says where it is needs a folder that only an earlier cluster on this machine has made."""
    folder = Path(tempfile.mkdtemp(prefix="r-", dir="/tmp"))  # short, as sockets lie in it
    (folder / "ray").mkdir()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_TMPDIR", str(folder))
            patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
            yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def ray_cluster(num_cpus: int = 4, *, nodes: int = 0) -> Iterator[Any]:
    """A `ray.cluster_utils.Cluster` with `num_cpus` at the head, or with that on each of `nodes` and none at the head. CPUs are
    places for tasks here: there may be more than the machine has."""
    from ray.cluster_utils import Cluster

    with ray_folder():
        common: dict[str, Any] = {"object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
        head = {"num_cpus": 0 if nodes else num_cpus, "_system_config": SYSTEM, **common}
        cluster: Any = Cluster(initialize_head=True, head_node_args=head)
        try:
            for _ in range(nodes):
                cluster.add_node(num_cpus=num_cpus, object_store_memory=OBJECT_STORE_BYTES)
            yield cluster
        finally:
            cluster.shutdown()


@contextmanager
def started_node(address: str, num_cpus: int) -> Iterator[int]:
    """The process of `ray start --block`, which is a node more of the cluster. Upon SIGTERM it drains the node and ends."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--address={address}"]
    sizes = [f"--num-cpus={num_cpus}", f"--object-store-memory={OBJECT_STORE_BYTES}"]
    ports = ["--min-worker-port=0", "--max-worker-port=0"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    node = subprocess.Popen(
        [*command, *sizes, *ports], stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    assert node.stdout is not None
    try:
        assert any("Ray runtime started" in line for line in node.stdout), "the node did not start"
        yield node.pid
    finally:
        node.send_signal(signal.SIGTERM)
        node.communicate()
