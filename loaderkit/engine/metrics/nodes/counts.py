"""The counters of nodes, and of the network from them to the trainer's node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class NodeStats:
    """What the workers on one node did. Counters since the run began, or their rise between two moments."""

    name: str
    is_trainers: bool  # the training loop runs on it: its batches pass no network
    num_workers: int  # worker processes at this moment
    cpus: float | None = None  # that it has for workers; None if not known
    cpu_s: float = 0.0  # CPU time of its worker processes
    num_batches: int = 0  # that arrived from there
    num_bytes: int = 0  # of those
    way_s: float = 0.0  # from finished there to arrived at the trainer, summed over batches
    carrying_s: float = 0.0  # of the time, that in which at least one of its batches was on the way
    latency_s: float | None = None  # the least round trip of a small message to it; None if none was timed
    num_restarts: int = 0  # of worker processes that had died there

    def minus(self, earlier: NodeStats) -> NodeStats:
        """The rise since `earlier`."""
        risen = {name: getattr(self, name) - getattr(earlier, name) for name in _COUNTERS}
        # A worker that has moved takes its CPU time with it.
        return replace(self, **{**risen, "cpu_s": max(0.0, self.cpu_s - earlier.cpu_s)})


_FULL = 0.85  # share of the time in which at least one batch is on the way
_ROUND_TRIPS = (
    10  # what takes fewer of them is messages, not bytes: Ray asks where an object lies, and for each part of it
)
_COUNTERS = ("cpu_s", "num_batches", "num_bytes", "way_s", "carrying_s", "num_restarts")


@dataclass(frozen=True)
class Nodes:
    """The nodes that workers are or were on, and the network from the others to the trainer's node. Empty for executors
    that have one node only."""

    rows: tuple[NodeStats, ...] = ()
    carrying_s: float = 0.0  # of the time, that in which at least one batch from any other node was on the way

    def minus(self, earlier: Nodes) -> Nodes:
        """The rise since `earlier`; a node that has come since then counts whole."""
        before = {row.name: row for row in earlier.rows}
        rows = tuple(row.minus(before[row.name]) if row.name in before else row for row in self.rows)
        return Nodes(rows, self.carrying_s - earlier.carrying_s)

    @property
    def others(self) -> tuple[NodeStats, ...]:
        """The nodes whose batches pass the network."""
        return tuple(row for row in self.rows if not row.is_trainers)

    @property
    def num_carried(self) -> int:
        """Batches that came from other nodes."""
        return sum(row.num_batches for row in self.others)

    @property
    def carried_bytes(self) -> int:
        """Their bytes."""
        return sum(row.num_bytes for row in self.others)

    @property
    def way_s(self) -> float:
        """Seconds from the end of such a batch there to its arrival here, in the mean; 0 if none came."""
        return sum(row.way_s for row in self.others) / max(1, self.num_carried)

    @property
    def latency_s(self) -> float:
        """The round trip of a small message to these nodes in the mean, weighted by their batches; 0 where none was timed."""
        timed = [row for row in self.others if row.latency_s is not None]
        total = sum(row.num_batches for row in timed)
        return sum((row.latency_s or 0.0) * row.num_batches for row in timed) / total if total else 0.0

    @property
    def bytes_per_s(self) -> float:
        """What the network carried while batches were on it, which is at least what it can carry. 0 if none came."""
        return self.carried_bytes / self.carrying_s if self.carrying_s > 0 else 0.0

    @property
    def is_of_bytes(self) -> bool:
        """True if a batch takes longer on its way than messages do, so that its bytes take the time."""
        return self.num_carried > 0 and self.way_s > _ROUND_TRIPS * self.latency_s

    def is_full(self, seconds: float) -> bool:
        """True if the network carried batches for nearly all of `seconds`, and their bytes took the time."""
        return self.is_of_bytes and self.carrying_s >= _FULL * seconds

    def to_dicts(self, wall_s: float) -> list[Mapping[str, Any]]:
        """A row for every node as JSON values, with speeds over `wall_s`; empty unless there are several."""
        if len(self.rows) < 2:
            return []
        wall_s = max(wall_s, 1e-12)
        return [
            {
                **asdict(row),
                "cpus_used": row.cpu_s / wall_s,
                "carrying_share": min(1.0, row.carrying_s / wall_s),
                "network_bytes_per_s": 0.0 if row.is_trainers else row.num_bytes / wall_s,
            }
            for row in self.rows
        ]
