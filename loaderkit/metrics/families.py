"""The metrics of a loader: their names, labels and meanings, and their values in a snapshot.

Names are as in OpenMetrics, without `_total`, which counters get when they are written out. Every metric has the
labels `pipeline` and `rank`, and the labels given here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

from loaderkit.checkpoint.save_log import SaveTotals
from loaderkit.diagnosis.stats import Stats
from loaderkit.engine.metrics.snapshot import StageStats
from loaderkit.engine.metrics.stalls import MEMORY, START, WAKEUP

PREFIX = "loaderkit_"
STORE = "store_"


class Family(NamedTuple):
    """A metric: what it means, its kind and its labels."""

    help: str
    kind: Literal["counter", "gauge"] = "counter"
    labels: tuple[str, ...] = ()


class Point(NamedTuple):
    """The value of a metric, by its name without the prefix, for one combination of the values of its labels."""

    name: str
    labels: tuple[str, ...]
    value: float


FAMILIES = {
    "batches": Family("Batches delivered to the loop"),
    "samples": Family("Samples delivered to the loop"),
    "dropped_samples": Family("Samples of those batches that filter left out"),
    "bad_samples": Family(
        "Samples that failed in a stage, also of batches read ahead, and what errors.on_bad_sample does with them",
        labels=("stage", "action"),
    ),
    "stall_seconds": Family("Time that the loop waited for a batch, by what it waited for", labels=("cause",)),
    "stage_items": Family("Samples that a stage has worked on", labels=("stage",)),
    "stage_bytes": Family("Bytes that a stage has read", labels=("stage",)),
    "stage_worker_seconds": Family(
        "Time of the workers: busy in the stage, starved (no input), blocked (no room) or idle",
        labels=("stage", "state"),
    ),
    "stage_cpu_seconds": Family("Busy time in which a worker was on a CPU", labels=("stage",)),
    "stage_delayed_seconds": Family(
        "Busy time in which a worker was ready to run and no CPU was free", labels=("stage",)
    ),
    "worker_restarts": Family("Processes that load which had died and were started again"),
    "transfer_bytes": Family("Bytes copied to the GPU"),
    "transfer_timed_bytes": Family("Those of them in batches that were timed"),
    "transfer_copy_seconds": Family("Time of the copies that were timed, by the GPU's clock"),
    "transfer_exposed_seconds": Family("Of that time, what the loop waited for"),
    "source_samples": Family("Samples of a mixed source delivered to the loop", labels=("source",)),
    "source_tokens": Family("Tokens of those", labels=("source",)),
    "source_dropped_samples": Family("Samples of the source that filter left out", labels=("source",)),
    "source_skipped_samples": Family("Bad samples of the source that were left out", labels=("source",)),
    "source_replaced_samples": Family(
        "Bad samples of the source in the place of which others stand", labels=("source",)
    ),
    "node_batches": Family("Batches that arrived from a node", labels=("node",)),
    "node_bytes": Family("Bytes of those", labels=("node",)),
    "node_way_seconds": Family("From finished there to arrived at the trainer, summed over batches", labels=("node",)),
    "node_carrying_seconds": Family("Time in which at least one batch was on its way from there", labels=("node",)),
    "node_cpu_seconds": Family("CPU time of the processes that load there", labels=("node",)),
    "node_restarts": Family("Processes that had died there and were started again", labels=("node",)),
    "epoch": Family("Epoch of the last batch", "gauge"),
    "ready_batches": Family("Complete batches that wait for the loop", "gauge"),
    "open_batches": Family("Batches in the memory budget, complete or not", "gauge"),
    "ahead_batches": Family("How many batches may be made or ready ahead of the loop", "gauge"),
    "queued_chunks": Family("Chunks that wait for the workers of a stage", "gauge", ("stage",)),
    "pool_workers": Family("Workers of a pool, by the stages that it runs", "gauge", ("pool",)),
    "processes": Family("Processes that load", "gauge"),
    "memory_budget_bytes": Family("Bound on the memory of open batches", "gauge"),
    "memory_slab_bytes": Family("Memory of one batch's slab", "gauge"),
    "memory_batch_bytes": Family("Memory of one batch, with what lies in no slab", "gauge"),
    "memory_open_bytes": Family("Memory of open batches", "gauge"),
    "memory_live_bytes": Family("Memory of open batches and of those that the program still holds", "gauge"),
    "memory_allocated_bytes": Family("Memory allocated for batches, in use or kept for the next ones", "gauge"),
    "memory_rss_bytes": Family("Resident memory of the processes that load", "gauge"),
    "bad_shards": Family("Shards that are left out of the source as they are damaged or missing", "gauge"),
    "source_passes": Family("Passes over a mixed source's samples, all ranks together", "gauge", ("source",)),
    "node_workers": Family("Processes that load on a node", "gauge", ("node",)),
    "store_held_bytes": Family("Bytes fetched ahead of `read` that are in memory", "gauge"),
}
"""All other metrics of a loader but `store_*`, which connectors count."""

CHECKPOINT_FAMILIES = {
    "checkpoint_saves": Family("Saves of CheckpointManager that are over, by how they ended", labels=("outcome",)),
    "checkpoint_pause_seconds": Family(
        "Time that training stood still for saves: waiting for the one before, and copying the state", labels=("part",)
    ),
    "checkpoint_flush_seconds": Family("Time from the copy until it was committed"),
    "checkpoint_bytes": Family("Bytes written, at rank 0 by all ranks, elsewhere by this one"),
    "checkpoint_last_step": Family("Step of the last checkpoint that was committed", "gauge"),
    "checkpoint_last_time_seconds": Family("When it was committed, in seconds since 1970", "gauge"),
}
"""The metrics of the process, without `pipeline` and `rank`, shown once there was a save."""


def family_of(name: str) -> Family:
    """The family of a name without the prefix."""
    if name in FAMILIES:
        return FAMILIES[name]
    assert name.startswith(STORE), name
    return Family(f"Counted by the connector: {name.removeprefix(STORE)}")


_COPIES = {
    "num_bytes": "transfer_bytes",
    "timed_bytes": "transfer_timed_bytes",
    "copy_s": "transfer_copy_seconds",
    "exposed_s": "transfer_exposed_seconds",
}


def counters(stats: Stats, action: str) -> Iterator[Point]:
    """All counters but `stall_seconds`; `action` is `errors.on_bad_sample`."""
    yield Point("batches", (), stats.num_batches)
    yield Point("samples", (), stats.num_samples)
    yield Point("dropped_samples", (), stats.num_dropped)
    yield Point("worker_restarts", (), stats.num_restarts)
    for row in stats.stages:
        yield from _stage(row, action)
    for key, value in stats.store.items():
        if key != "held_bytes":
            yield Point(store_name(key), (), value)
    for key, name in _COPIES.items():
        if key in stats.copies:
            yield Point(name, (), stats.copies[key])
    for source in stats.source_rows():
        label = (source.name,)
        yield Point("source_samples", label, source.num_samples)
        if source.num_tokens is not None:
            yield Point("source_tokens", label, source.num_tokens)
        yield Point("source_dropped_samples", label, source.num_dropped)
        yield Point("source_skipped_samples", label, source.num_skipped)
        yield Point("source_replaced_samples", label, source.num_replaced)
    for node in stats.nodes.rows:
        label = (node.name,)
        yield Point("node_batches", label, node.num_batches)
        yield Point("node_bytes", label, node.num_bytes)
        yield Point("node_way_seconds", label, node.way_s)
        yield Point("node_carrying_seconds", label, node.carrying_s)
        yield Point("node_cpu_seconds", label, node.cpu_s)
        yield Point("node_restarts", label, node.num_restarts)


def _stage(row: StageStats, action: str) -> Iterator[Point]:
    label = (row.name,)
    yield Point("stage_items", label, row.num_items)
    yield Point("stage_bytes", label, row.num_bytes)
    yield Point("stage_cpu_seconds", label, row.cpu_s)
    yield Point("stage_delayed_seconds", label, row.delayed_s)
    yield Point("bad_samples", (row.name, action), row.num_failed)
    for state in ("busy", "starved", "blocked", "idle"):
        yield Point("stage_worker_seconds", (row.name, state), getattr(row, f"{state}_s"))


def store_name(key: str) -> str:
    """The name of a connector's counter: num_requests gives store_requests, body_s store_body_seconds."""
    name = re.sub(r"\W", "_", key.removeprefix("num_"), flags=re.ASCII)
    return STORE + (f"{name[:-2]}_seconds" if name.endswith("_s") else name.removesuffix("_total"))


def outlives_runs(name: str, stats: Stats) -> bool:
    """True for counters that the loader's own connectors and GPU stream keep, when an executor ends and another one begins."""
    return name.startswith("transfer_") or (name.startswith(STORE) and not stats.tuning.is_remote)


def causes(stats: Stats) -> list[str]:
    """The causes for which a loop may always wait; more are possible."""
    return [*(row.name for row in stats.stages), START, MEMORY, WAKEUP]


def gauges(stats: Stats, epoch: int) -> Iterator[Point]:
    """The values of this moment."""
    yield Point("epoch", (), epoch)
    yield Point("ready_batches", (), stats.num_ready)
    yield Point("open_batches", (), stats.num_open)
    if stats.tuning.batches is not None:
        yield Point("ahead_batches", (), stats.tuning.batches)
    if stats.tuning.processes is not None:
        yield Point("processes", (), stats.tuning.processes)
    for pool in stats.tuning.pools:
        yield Point("pool_workers", ("+".join(pool.stages),), pool.workers)
    for row in stats.stages:
        yield Point("queued_chunks", (row.name,), row.num_queued)
    for name in ("budget", "slab", "batch", "open", "live", "allocated"):
        yield Point(f"memory_{name}_bytes", (), stats.memory[f"{name}_bytes"])
    yield Point("memory_rss_bytes", (), stats.host.rss_bytes)
    yield Point("bad_shards", (), len(stats.bad_shards))
    for source in stats.sources:
        yield Point("source_passes", (source.name,), source.num_passes)
    for node in stats.nodes.rows:
        yield Point("node_workers", (node.name,), node.num_workers)
    if "held_bytes" in stats.store:
        yield Point("store_held_bytes", (), stats.store["held_bytes"])


def checkpoint_points(saves: SaveTotals) -> Iterator[Point]:
    """What saving took in this process; nothing before the first save is over."""
    if not saves.num_committed + saves.num_failed:
        return
    yield Point("checkpoint_saves", ("committed",), saves.num_committed)
    yield Point("checkpoint_saves", ("failed",), saves.num_failed)
    yield Point("checkpoint_pause_seconds", ("waiting",), saves.waiting_s)
    yield Point("checkpoint_pause_seconds", ("staging",), saves.staging_s)
    yield Point("checkpoint_flush_seconds", (), saves.flush_s)
    yield Point("checkpoint_bytes", (), saves.num_bytes)
    if saves.last_step is not None:
        yield Point("checkpoint_last_step", (), saves.last_step)
        yield Point("checkpoint_last_time_seconds", (), saves.last_unix_s)
