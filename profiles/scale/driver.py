"""What the trainer's process spends on a batch: CPU time of the loop and of the whole process, by executor and size."""

from __future__ import annotations

import itertools
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

import loaderkit
from loaderkit import Pipeline

RECORD_BYTES = 1 << 16
BATCHES = (1, 16, 256)  # records: 64 KiB, 1 MiB, 16 MiB
EXECUTORS: dict[str, dict[str, Any]] = {
    "thread": {"executor": "thread", "concurrency": 1},
    "process": {"executor": "process", "processes": 1, "concurrency": 1},
    "process, 4": {"executor": "process", "processes": 4, "concurrency": 4},
}
RAY: dict[str, Any] = {"executor": "ray", "processes": 2, "concurrency": 2, "batches": 4, "ray": {"num_cpus": 1}}
_STORE_BYTES = 300 << 20
_NUM_RECORDS = 4096
_MOST_BYTES = 3 << 30  # passed on in a window
_WINDOWS = 5


def measure() -> list[dict[str, Any]]:
    """A row for every executor and size of a batch; `ray`, where it is installed, with actors on two nodes that are none of
    the trainer's."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records.bin"
        np.zeros(_NUM_RECORDS * RECORD_BYTES, np.uint8).tofile(path)
        rows = [one(path, name, overrides, size) for name, overrides in EXECUTORS.items() for size in BATCHES]
        if find_spec("ray") is not None:
            with _cluster(Path(folder)) as raylet:
                rows += [one(path, "ray", RAY, size, raylet) for size in BATCHES]
        return rows


@contextmanager
def _cluster(folder: Path) -> Iterator[Callable[[], float]]:
    """A cluster of two nodes and a head without CPUs, to which this process is connected. Gives the CPU time so far of the
    head's raylet, which brings the objects of other nodes."""
    import ray
    from ray.cluster_utils import Cluster

    common: dict[str, Any] = {"object_store_memory": _STORE_BYTES}
    head = {**common, "num_cpus": 0, "include_dashboard": False, "temp_dir": str(folder / "r")}
    cluster: Any = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=2, **common)
        ray.init(address=cluster.address, log_to_driver=False)
        (started,) = cluster.head_node.all_processes["raylet"]
        yield partial(_cpu_s, started.process.pid)
    finally:
        ray.shutdown()
        cluster.shutdown()


def one(
    path: Path, name: str, overrides: dict[str, Any], size: int, raylet: Callable[[], float] = lambda: 0.0
) -> dict[str, Any]:
    """The medians over windows of batches, in seconds a batch, once as many have come as are kept anywhere. `raylet` is the
    CPU time of a process that works for this one."""
    pipeline = Pipeline.array(path, dtype="uint8", shape=[RECORD_BYTES]).read().batch(size, drop_last=True)
    settings = {f"prefetch.{key}": value for key, value in overrides.items()}
    num = max(20, min(2000, _MOST_BYTES // _WINDOWS // (size * RECORD_BYTES)))
    loop_s, own_s, touch_s, raylet_s = [], [], [], []
    with loaderkit.build(pipeline, overrides={"prefetch.batches": 8, **settings}) as loader:
        batches = itertools.chain.from_iterable(itertools.repeat(loader))
        for _ in range(64):
            next(batches)
        for _ in range(_WINDOWS):
            before = (time.thread_time(), process_s(), raylet())
            for _ in range(num):
                batch = next(batches)
            loop_s.append((time.thread_time() - before[0]) / num)
            own_s.append((process_s() - before[1]) / num)
            raylet_s.append((raylet() - before[2]) / num)
            begin_s = time.thread_time()
            for _ in range(8):  # one byte of each page: what it costs the loop that memory is another process's
                batch = next(batches)
                values = next(value for key, value in batch.items() if not key.startswith("__"))
                values.view(-1)[::4096].sum()
            touch_s.append(max(0.0, (time.thread_time() - begin_s) / 8 - loop_s[-1]))
            del batch, values
    return {
        "executor": name,
        "batch_bytes": size * RECORD_BYTES,
        "loop_s": statistics.median(loop_s),
        "process_s": statistics.median(own_s),
        "touch_s": statistics.median(touch_s),
        "raylet_s": statistics.median(raylet_s),
        "num_batches": num * _WINDOWS,
    }


def _cpu_s(pid: int) -> float:
    """CPU time so far of another process."""
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def process_s() -> float:
    """CPU time of this process so far; of all its threads, those of C included."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
