"""Which stages share a pool of workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loaderkit.types import Stage


@dataclass(frozen=True)
class PoolPlan:
    """A pool to be: which stages it runs, by number (sample stages, then batch stages), with how many workers."""

    sample_stages: tuple[int, ...]
    batch_stages: tuple[int, ...]
    num_workers: int
    lands: bool  # its last sample stage is the last of all: what leaves it has landed

    @property
    def stages(self) -> tuple[int, ...]:
        """All of them, in order."""
        return (*self.sample_stages, *self.batch_stages)


def plan_pools(stages: Sequence[Stage], num_workers: int) -> list[PoolPlan]:
    """Fuse neighbouring stages without workers of their own into pools, and share `num_workers` out among those.

    A fused chunk passes from stage to stage without a hand-off. Stages with `workers: N` get a pool of N.
    """
    groups: list[list[int]] = []
    for number, stage in enumerate(stages):
        if groups and stage.workers is None and stages[groups[-1][-1]].workers is None:
            groups[-1].append(number)
        else:
            groups.append([number])
    last_sample = max(number for number, stage in enumerate(stages) if stage.scope == "sample")
    num_fixed = sum(stage.workers or 0 for stage in stages)
    automatic = [group for group in groups if stages[group[0]].workers is None]
    # Batch stages alone are light (a copy, a call a batch): one worker; the rest is shared by the sample pools.
    heavy = [group for group in automatic if stages[group[0]].scope == "sample"]
    num_left = max(len(heavy), num_workers - num_fixed - (len(automatic) - len(heavy)))
    pools = []
    for group in groups:
        workers = stages[group[0]].workers
        if workers is None:
            place = heavy.index(group) if group in heavy else None
            workers = 1 if place is None else num_left // len(heavy) + (place < num_left % len(heavy))
        pools.append(
            PoolPlan(
                tuple(number for number in group if stages[number].scope == "sample"),
                tuple(number for number in group if stages[number].scope == "batch"),
                workers,
                last_sample in group,
            )
        )
    return pools
