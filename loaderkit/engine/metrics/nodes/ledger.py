"""Counts what comes from each node, for an executor whose workers are on several nodes."""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

from loaderkit.engine.metrics.nodes.counts import Nodes, NodeStats

_NUM_APART = 64  # spans that are kept to be joined with what arrives later


class Cover:
    """How long at least one of several spans of time lasted. Spans come in any order, but not far behind later ones."""

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []  # sorted, without overlap
        self._sealed_s = 0.0

    @property
    def total_s(self) -> float:
        """Seconds that at least one span covers."""
        return self._sealed_s + sum(end - begin for begin, end in self._spans)

    def add(self, begin: float, end: float) -> None:
        """Add a span; none if it ends before it begins."""
        if end <= begin:
            return
        first = bisect_left(self._spans, begin, key=lambda span: span[1])
        last = first
        while last < len(self._spans) and self._spans[last][0] <= end:
            begin, end = min(begin, self._spans[last][0]), max(end, self._spans[last][1])
            last += 1
        del self._spans[first:last]
        insort(self._spans, (begin, end))
        if len(self._spans) > _NUM_APART:
            sealed_begin, sealed_end = self._spans.pop(0)
            self._sealed_s += sealed_end - sealed_begin


@dataclass
class _Counts:
    """The counts of one node."""

    cpus: float | None
    cover: Cover
    num_batches: int = 0
    num_bytes: int = 0
    way_s: float = 0.0
    latency_s: float | None = None
    num_restarts: int = 0
    past_cpu_s: float = 0.0  # of workers that have ended


class NodeLedger:
    """The counters of an executor with workers on several nodes. `here` is the trainer's node, which may have no
    worker; None until it is known. For any thread."""

    def __init__(self, here: str | None = None) -> None:
        self._here: str | None = None
        self._lock = threading.Lock()
        self._nodes: dict[str, _Counts] = {}
        self._cover = Cover()  # of batches from all other nodes
        if here is not None:
            self.stands_on(here)

    def stands_on(self, node: str) -> None:
        """The trainer runs on `node`."""
        with self._lock:
            self._here = node
            self._of(node)

    def is_away(self, node: str | None) -> bool:
        """True if batches from `node` pass a network."""
        return node is not None and node != self._here

    def placed(self, node: str, cpus: float | None = None) -> None:
        """A worker runs on `node`, which has `cpus` for workers."""
        with self._lock:
            counts = self._of(node)
            counts.cpus = counts.cpus if cpus is None else cpus

    def arrived(self, node: str, num_bytes: int, done_s: float, arrived_s: float) -> None:
        """A batch that was finished on `node` at `done_s` has arrived here. Both by the trainer's clock."""
        with self._lock:
            counts = self._of(node)
            counts.num_batches += 1
            counts.num_bytes += num_bytes
            if node != self._here:
                counts.way_s += max(0.0, arrived_s - done_s)
                counts.cover.add(done_s, arrived_s)
                self._cover.add(done_s, arrived_s)

    def restarted(self, node: str) -> None:
        """A worker on `node` died, and another one takes its place, there or elsewhere."""
        with self._lock:
            self._of(node).num_restarts += 1

    def left(self, node: str, cpu_s: float) -> None:
        """A worker on `node` has ended; its process has used `cpu_s` of CPU time."""
        with self._lock:
            self._of(node).past_cpu_s += cpu_s

    def round_trip(self, node: str, seconds: float) -> None:
        """A small message to `node` was answered after `seconds`."""
        with self._lock:
            counts = self._of(node)
            counts.latency_s = seconds if counts.latency_s is None else min(counts.latency_s, seconds)

    def stats(self, workers: Iterable[tuple[str, float]]) -> Nodes:
        """The counters now; `workers` are all workers: the node of each, and the CPU time of its process so far."""
        with self._lock:
            cpu_s: dict[str, list[float]] = {}
            for node, seconds in workers:
                self._of(node)
                cpu_s.setdefault(node, []).append(seconds)
            rows = [
                NodeStats(
                    name=name,
                    is_trainers=name == self._here,
                    num_workers=len(cpu_s.get(name, ())),
                    cpus=counts.cpus,
                    cpu_s=counts.past_cpu_s + sum(cpu_s.get(name, ())),
                    num_batches=counts.num_batches,
                    num_bytes=counts.num_bytes,
                    way_s=counts.way_s,
                    carrying_s=counts.cover.total_s,
                    latency_s=counts.latency_s,
                    num_restarts=counts.num_restarts,
                )
                for name, counts in self._nodes.items()
            ]
            return Nodes(tuple(sorted(rows, key=lambda row: (not row.is_trainers, row.name))), self._cover.total_s)

    def _of(self, node: str) -> _Counts:
        return self._nodes.setdefault(node, _Counts(None, Cover()))
