"""A Ray cluster of a test's own: found by its address alone, in a folder of its own, and gone with the test."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

OBJECT_STORE_BYTES = 200_000_000


@contextmanager
def ray_cluster(num_cpus: int = 4, *, nodes: int = 0) -> Iterator[Any]:
    """A `ray.cluster_utils.Cluster` with `num_cpus` at the head, or with that on each of `nodes` and none at the head. CPUs are
    places for tasks here: there may be more than the machine has."""
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="r-")  # short, as sockets lie in it
    Path(folder, "ray").mkdir()
    # Else `ray.init()` of others would find it, and it would report its use.
    set_here = {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"}
    before = {name: os.environ.get(name) for name in set_here}
    os.environ |= set_here
    common: dict[str, Any] = {"object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
    cluster: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 0 if nodes else num_cpus, **common})
    try:
        for _ in range(nodes):
            cluster.add_node(num_cpus=num_cpus, object_store_memory=OBJECT_STORE_BYTES)
        yield cluster
    finally:
        cluster.shutdown()
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
        shutil.rmtree(folder, ignore_errors=True)
