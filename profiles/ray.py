"""`executor: ray` against `executor: process` and Ray Data on the same CPUs, and with more nodes.

    python -m profiles.ray [images uint8 tar raw nodes] [--rounds 5] [--seconds 6] [--cpus 2] [--out profiles/results]

Each turn is a program of its own, with a cluster of its own where it needs one; the contestants take turns, in another order in
each round. Printed are medians: of samples a second; of milliseconds on a CPU for a sample, which say what speeds would be if
nothing else ran; of the most memory that all processes of a turn held at once (proportional: a shared page counts once); and of
the ratios in each round. `nodes`: clusters of 1, 2, 4 and 8 nodes, each with one process
whose samples only wait, against as many times what one node gives; and what the loop takes at most where nothing waits.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loaderkit._internal.system.user_cache import default_cache_dir
from profiles.peers.data import Amounts, into_page_cache, make
from profiles.peers.places import Places
from profiles.ray_contestants import CONTESTANTS, SLEEP_BATCH, SLEEP_S, batches_of
from profiles.record import record

STORE_BYTES = 1 << 30
NODES = (1, 2, 4, 8)
LOOK_S = 0.5
ROOT = Path(__file__).parents[1]
DATA = {"images": ("photos",), "uint8": ("photos",), "tar": ("photos", "shards"), "raw": ("small-shards",)}


# ------------------------------------------------------------------------------------------------------- one turn


@dataclass(frozen=True)
class Turn:
    """What one contestant does: `num_workers` CPUs of Ray, or processes, at one node, or one at each of `num_nodes`."""

    work: str
    contestant: str
    num_workers: int
    num_nodes: int = 0


def measure_here(turn: Turn, data: str, seconds: float) -> None:
    """Print samples a second, and `cpu_ms`, milliseconds on a CPU of all processes for a sample, after the first batches. To be
    called in a fresh interpreter."""
    with _cluster(turn):
        batches = batches_of(turn.work, turn.contestant, Places(Path(data)), turn.num_workers)
        for _ in range(_num_warm(turn)):
            next(batches)
        num_samples = num_batches = 0
        begin_s, begin_cpu_s = time.perf_counter(), tree_cpu_s(os.getpid())
        took_s = 0.0
        while took_s < seconds or num_batches % turn.num_workers:  # whole rounds of them
            num_samples += next(batches)
            num_batches += 1
            took_s = time.perf_counter() - begin_s
        cpu_s = tree_cpu_s(os.getpid()) - begin_cpu_s
        found = {"samples_s": num_samples / took_s, "cpu_ms": 1000 * cpu_s / num_samples}
        print("found", json.dumps(found), flush=True)  # before the end, in which Ray Data may crash
        batches.close()


def _num_warm(turn: Turn) -> int:
    """Batches before the clock runs: those read ahead while it started, and until all memory of the object store was touched,
    for which the system finds pages once. Ray Data, which is slower, uses it up with fewer."""
    if turn.work in ("sleep", "free"):
        return 3 * turn.num_workers
    if turn.work == "uint8":
        return 24  # four times as large
    return 12 if turn.contestant.startswith("ray-data") else 64


@contextmanager
def _cluster(turn: Turn) -> Iterator[None]:
    """The Ray that it needs, connected."""
    if turn.contestant == "process":
        yield
        return
    num_nodes = turn.num_nodes
    import ray
    from ray.cluster_utils import Cluster

    common: dict[str, Any] = {"object_store_memory": STORE_BYTES // max(1, num_nodes), "include_dashboard": False}
    cluster: Any = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0 if num_nodes else turn.num_workers, **common}
    )
    try:
        for _ in range(num_nodes):
            cluster.add_node(num_cpus=1, object_store_memory=common["object_store_memory"])
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, log_to_driver=False)
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


def run(turn: Turn, places: Places, seconds: float) -> dict[str, Any]:
    """What `measure_here` finds in an interpreter of its own, with `peak_bytes` of all its processes."""
    folder = tempfile.mkdtemp(prefix="r-")  # short, as sockets lie in it
    Path(folder, "ray").mkdir()
    program = f"import profiles.ray as p; p.measure_here(p.{turn!r}, {str(places.root)!r}, {seconds})"
    own = {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment = {**os.environ, **own}
    child = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    peak, is_over = [0], threading.Event()

    def look() -> None:
        while not is_over.wait(LOOK_S):
            peak[0] = max(peak[0], tree_bytes(child.pid))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        out, errors = child.communicate()
    finally:
        is_over.set()
        watcher.join()
        shutil.rmtree(folder, ignore_errors=True)
    lines = [line for line in out.splitlines() if line.startswith("found ")]
    if not lines:
        raise RuntimeError(f"{turn}: {errors[-3000:]}")
    found: dict[str, Any] = json.loads(lines[0].removeprefix("found "))
    return {**found, "peak_bytes": peak[0]}


def tree(pid: int) -> list[int]:
    """A process and all that it, and these, have started."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with suppress(OSError):
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(path.name))
    found, left = [], [pid]
    while left:
        found.append(left.pop())
        left += children.get(found[-1], [])
    return found


def tree_bytes(pid: int) -> int:
    """Proportional memory of them."""
    total = 0
    for one in tree(pid):
        with suppress(OSError):
            for line in Path(f"/proc/{one}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total


def tree_cpu_s(pid: int) -> float:
    """Seconds on a CPU of them, and of the children that they have waited for."""
    ticks = 0
    for one in tree(pid):
        with suppress(OSError):
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(int(value) for value in fields[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


# ------------------------------------------------------------------------------------------------------- rounds


def measure(works: list[str], places: Places, rounds: int, seconds: float, num_workers: int) -> dict[str, Any]:
    """By work and contestant: `samples_s`, `cpu_ms` and `peak_bytes` of each round, and medians of ratios."""
    found: dict[str, Any] = {}
    for work in works:
        if work == "nodes":
            found[work] = _measure_nodes(places, rounds, seconds)
            continue
        turns = in_turns({name: Turn(work, name, num_workers) for name in CONTESTANTS[work]}, places, rounds, seconds)
        ray = turns["ray"]
        found[work] = {
            name: {
                **one,
                "ray_over_it": _ratio(ray["samples_s"], one["samples_s"]),
                "cpu_over_ray": _ratio(one["cpu_ms"], ray["cpu_ms"]),
                "memory_over_ray": _ratio(one["peak_bytes"], ray["peak_bytes"]),
            }
            for name, one in turns.items()
        }
    return found


def _measure_nodes(places: Places, rounds: int, seconds: float) -> dict[str, Any]:
    """By number of nodes: samples a second, over as many times those of one node, and over what the waits alone allow; and
    `limit_batches_s`, which the loop takes at most."""
    asked = {str(num): Turn("sleep", "ray", num, num) for num in NODES} | {"limit": Turn("free", "ray", 2, 2)}
    turns = {name: one["samples_s"] for name, one in in_turns(asked, places, rounds, seconds).items()}
    by_nodes = {
        str(num): {
            "samples_s": turns[str(num)],
            "over_linear": _ratio(turns[str(num)], [num * value for value in turns["1"]]),
            "over_waits": statistics.median(turns[str(num)]) * SLEEP_S / num,
        }
        for num in NODES
    }
    return {**by_nodes, "limit_batches_s": statistics.median(turns["limit"]) / SLEEP_BATCH}


def in_turns(
    asked: Mapping[str, Turn], places: Places, rounds: int, seconds: float
) -> dict[str, dict[str, list[float]]]:
    """`samples_s`, `cpu_ms` and `peak_bytes` of each in each round."""
    found: dict[str, dict[str, list[float]]] = {
        name: {"samples_s": [], "cpu_ms": [], "peak_bytes": []} for name in asked
    }
    for number in range(rounds):
        for name in random.Random(number).sample(list(asked), len(asked)):
            one = run(asked[name], places, seconds)
            speed, peak = f"{one['samples_s']:.0f} samples/s, {one['cpu_ms']:.2f} ms", one["peak_bytes"] / 1e9
            print(f"{asked[name].work}, {name}: {speed}, {peak:.2f} GB", flush=True)
            for key, values in found[name].items():
                values.append(one[key])
    return found


def _ratio(above: list[float], below: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(above, below, strict=True))


def table(found: dict[str, Any]) -> str:
    """In Markdown."""
    lines = [
        "| work | contestant | samples/s | `ray` over it | CPU ms | over `ray` | GB | over `ray` |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for work, by_name in found.items():
        if work == "nodes":
            continue
        for name, one in by_name.items():
            speed, cpu_ms, peak = (statistics.median(one[key]) for key in ("samples_s", "cpu_ms", "peak_bytes"))
            lines.append(
                f"| {work} | {name} | {speed:.0f} | {one['ray_over_it']:.2f} | {cpu_ms:.2f} | {one['cpu_over_ray']:.2f} | "
                f"{peak / 1e9:.2f} | {one['memory_over_ray']:.2f} |"
            )
    if "nodes" in found:
        lines += ["", "| nodes | samples/s | over linear | over the waits alone |", "|---|---|---|---|"]
        for num in map(str, NODES):
            one = found["nodes"][num]
            speed = statistics.median(one["samples_s"])
            lines.append(f"| {num} | {speed:.0f} | {one['over_linear']:.3f} | {one['over_waits']:.3f} |")
        lines += ["", f"The loop takes {found['nodes']['limit_batches_s']:.0f} batches/s of {SLEEP_BATCH} at most."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("works", nargs="*", help="images, uint8, tar, raw, nodes; default all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6.0, help="that a turn is measured for")
    parser.add_argument("--cpus", type=int, default=2, help="for all processes of a contestant")
    parser.add_argument("--data", type=Path, default=default_cache_dir() / "peers")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    works = options.works or [*CONTESTANTS, "nodes"]
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cpus])  # for what it starts, too
    places = Places(options.data)
    parts = [part for work in works for part in DATA.get(work, ())]
    make(parts, places, Amounts(), default_cache_dir() / "demo")
    into_page_cache(places.root / part for part in {*parts})
    found = measure(works, places, options.rounds, options.seconds, options.cpus)
    print(table(found))
    record(options.out, "ray", seconds=options.seconds, store_bytes=STORE_BYTES, works=found)


if __name__ == "__main__":
    main()
