"""What saving will cost a job, before it runs: sizes by part, times, the interval at which the least is lost, and what each
lever brings (`loaderkit checkpoints --advise`)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from loaderkit.checkpoint.timing.interval import LOST_MACHINES, Interruptions

BYTES_PER_PARAM = {"weights (bfloat16)": 2, "master weights (float32)": 4, "exp_avg": 4, "exp_avg_sq": 4}
"""Of mixed precision with Adam; 14 bytes a parameter."""
_COMMIT_S = 0.5  # small files and requests, whatever the size


@dataclass(frozen=True)
class PlannedJob:
    """A job as it is planned. Speeds in bytes per second: `store` and `local` of the whole job, `host` of one rank's copy to
    host memory. `num_bytes` of a checkpoint. `start_s`: from an interruption until a restore begins."""

    num_bytes: float
    ranks: int
    store: float
    mtbf_s: float
    local: float | None = None
    host: float = 10e9
    ranks_per_machine: int = 8
    start_s: float = 120.0
    lost_machines: float = LOST_MACHINES

    def interruptions(self, *, is_behind: bool = True) -> Interruptions:
        """What it saves and loses; without `is_behind` training waits until a checkpoint is written."""
        upload_s = self.num_bytes / self.store + _COMMIT_S
        flush_s = upload_s if self.local is None else self.num_bytes / self.local + _COMMIT_S
        pause_s = self.num_bytes / self.ranks / self.host
        restore_s = self.num_bytes / self.store
        if self.local is not None:
            restore_s += (1 - self.lost_machines) * (self.num_bytes / self.local - restore_s)
        return Interruptions(
            pause_s=pause_s if is_behind else pause_s + flush_s,
            flush_s=flush_s if is_behind else 0.0,
            upload_s=None if self.local is None else upload_s,
            mtbf_s=self.mtbf_s,
            restart_s=self.start_s + restore_s,
            lost_machines=self.lost_machines,
        )

    @property
    def host_bytes(self) -> float:
        """Host memory on each machine: a copy of what its ranks hold, and a second one while the first is being written."""
        return 2 * self.num_bytes / self.ranks * min(self.ranks_per_machine, self.ranks)


def sizes(params: float) -> dict[str, float]:
    """The bytes of each part of a checkpoint of so many parameters."""
    return {name: params * num_bytes for name, num_bytes in BYTES_PER_PARAM.items()}


def advice(job: PlannedJob) -> dict[str, Any]:
    """What is told of a job: times in seconds, and by lever the interval and the share of training that is lost."""
    found = job.interruptions()
    interval_s = found.best_interval_s()
    lost = found.lost_share(interval_s)
    return {
        "job": asdict(job),
        "pause_s": found.pause_s,
        "flush_s": found.flush_s,
        "upload_s": found.upload_s,
        "restart_s": found.restart_s,
        "interval_s": interval_s,
        "lost_share": lost,
        "lost_rank_hours_per_day": 24 * job.ranks * min(lost, 1.0),
        "host_bytes": job.host_bytes,
        "levers": [
            {
                "lever": name,
                "interval_s": (best := other.best_interval_s()),
                "lost_share": other.lost_share(best),
                "is_gain": other.lost_share(best) < lost,
            }
            for name, other in _levers(job)
        ],
    }


def _levers(job: PlannedJob) -> Iterator[tuple[str, Interruptions]]:
    yield "training waits for each save", job.interruptions(is_behind=False)
    if job.local is None:
        machines = math.ceil(job.ranks / job.ranks_per_machine)
        yield "`local` first, 2 GB/s a machine", replace(job, local=2e9 * machines).interruptions()
    yield "a store twice as fast", replace(job, store=2 * job.store).interruptions()
    yield "half as many interruptions", replace(job, mtbf_s=2 * job.mtbf_s).interruptions()
    yield "a start twice as fast", replace(job, start_s=job.start_s / 2).interruptions()
