"""The settings of a loader at one moment: its executor, pools of workers and depth, and the tuner's decisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PoolTuning:
    """Stages that share workers, and how many workers these are in all processes together."""

    stages: tuple[str, ...]
    workers: int
    is_trainers: bool = False  # its thread belongs to the trainer's process, while others load

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        pool: dict[str, Any] = {"stages": list(self.stages), "workers": self.workers}
        return pool | {"process": "trainer"} if self.is_trainers else pool


@dataclass(frozen=True)
class Tuning:
    """The settings of a loader at one moment. No field is set for an engine that no loader runs."""

    executor: str | None = None
    batches: int | None = None  # read ahead
    executor_reason: str | None = None  # why a rule chose inline or process, if it did
    executor_with_workers: str = "thread"  # what a loop without workers may have instead
    graph: tuple[str, ...] = ()  # the operators of a DALI pipeline
    jpeg: str | None = None  # how much of one is decoded: "whole", or "crop of" a stage
    processes: int | None = None  # that load
    cpus: int | None = None  # that this process may use
    pools: tuple[PoolTuning, ...] = ()
    auto: tuple[str, ...] | None = None  # the settings that are tuned; None without a tuner
    settled: bool = False
    decisions: Sequence[Mapping[str, Any]] = ()
    pids: tuple[int, ...] | None = None
    nodes: tuple[str, ...] | None = None  # of a cluster: the node of each process, if known
    reader: int | None = None  # of ranks that share one, the rank that reads
    peers: tuple[int, ...] = ()  # the other ranks of those

    @property
    def is_remote(self) -> bool:
        """True if other processes make the batches, here or on other machines."""
        return self.executor in ("process", "ray")

    @property
    def concurrency(self) -> int:
        """Workers of all pools."""
        return sum(pool.workers for pool in self.pools)

    def pool_of(self, stage: str) -> PoolTuning | None:
        """The pool that runs a stage; in a mixture, `read` means `read.web` and all others."""
        return next(
            (pool for pool in self.pools for name in pool.stages if stage in (name, name.partition(".")[0])), None
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON values; the layout is described in docs/reference.md."""
        values: dict[str, Any] = {
            "executor": self.executor,
            "batches": self.batches,
            "executor_reason": self.executor_reason,
            "graph": [*self.graph] or None,
            "jpeg": self.jpeg,
            "processes": self.processes,
            "cpus": self.cpus,
        }
        if self.pools:
            values |= {"concurrency": self.concurrency, "pools": [pool.to_dict() for pool in self.pools]}
        if self.auto is not None:
            values |= {"auto": [*self.auto], "settled": self.settled, "decisions": [*map(dict, self.decisions)]}
        if self.reader is not None:
            values |= {"reader": self.reader, "peers": [*self.peers]}
        values["pids"] = None if self.pids is None else [*self.pids]
        values["nodes"] = None if self.nodes is None else [*self.nodes]
        return {key: value for key, value in values.items() if value is not None}
