"""What saving costs in this run, as measured, and what of a state can be saved in the time that is left.

save ─> staged: training waits ─> written ─> committed, in `local` if there is one ─> uploaded to `to`
        staging_s                 writing_s   commit_s                                upload_s
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any, Literal, NamedTuple

_NUM_REMEMBERED = 5


@dataclass(frozen=True)
class SaveCost:
    """What a save of the whole state takes, in seconds: `staging_s` to copy it to host memory, `writing_s` until all is
    written and `commit_s` until that is committed. `upload_s`: from `local` to `to`; None: there was no upload. All but
    `commit_s` grow with the bytes."""

    staging_s: float
    writing_s: float
    commit_s: float
    upload_s: float | None = None

    @property
    def flush_s(self) -> float:
        """From the end of the pause until it is committed."""
        return self.writing_s + self.commit_s

    def saving_s(self, share: float = 1.0) -> float:
        """From the call of `save` until `share` of the bytes is committed."""
        return share * (self.staging_s + self.writing_s) + self.commit_s

    def saved(self) -> dict[str, float]:
        """As plain values, for the next run."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def restored(cls, saved: Mapping[str, Any]) -> SaveCost | None:
        """What `saved` gave; None for anything else."""
        try:
            cost = cls(**{name: float(value) for name, value in saved.items()})
        except (TypeError, ValueError):
            return None
        return cost if all(isfinite(value) and value >= 0 for value in cost.saved().values()) else None


class CostLog:
    """The costs of the last saves of the whole state. `before`: what an earlier run has measured, for as long as there are
    none."""

    def __init__(self) -> None:
        self.before: SaveCost | None = None
        self._costs: tuple[SaveCost, ...] = ()  # replaced, since the thread of a save adds while training asks

    def add(self, stats: Mapping[str, Any]) -> None:
        """`Saving.stats` of a save that is committed."""
        commit_s = float(stats.get("commit_s") or 0.0)
        writing_s = max(0.0, float(stats["flush_s"]) - commit_s)
        cost = SaveCost(float(stats["staging_s"]), writing_s, commit_s)
        self._costs = (*self._costs, cost)[-_NUM_REMEMBERED:]

    def typical(self, upload_s: float | None = None) -> SaveCost | None:
        """The medians, and the time of an upload as given; None: nothing is known."""
        return self._of(statistics.median, upload_s)

    def slowest(self, upload_s: float | None = None) -> SaveCost | None:
        """The longest times, and the time of an upload as given; None: nothing is known."""
        return self._of(max, upload_s)

    def _of(self, chosen: Callable[[Iterable[float]], float], upload_s: float | None) -> SaveCost | None:
        costs = self._costs
        if not costs:
            return self.before
        return SaveCost(
            chosen(cost.staging_s for cost in costs),
            chosen(cost.writing_s for cost in costs),
            chosen(cost.commit_s for cost in costs),
            self.before.upload_s if upload_s is None and self.before is not None else upload_s,
        )


class Extent(NamedTuple):
    """How much of a state is saved, and where: `whole`, or without the state of optimizers; in `to`, or in `local` alone, from
    where the next run uploads it. `seconds` until it is there; None: nothing was measured."""

    whole: bool
    place: Literal["to", "local"]
    seconds: float | None

    def __str__(self) -> str:
        return f"{'the whole state' if self.whole else 'the state without that of optimizers'} to `{self.place}`"


def extents(
    cost: SaveCost | None, *, weights_share: float | None, has_local: bool, busy_s: float = 0.0
) -> list[Extent]:
    """What can be saved, the most first. `weights_share`: the bytes without the state of optimizers, as a share of all; None:
    there are none in the state. `busy_s`: how long an upload that is running takes yet."""
    found = []
    for share in (1.0, weights_share):
        if share is None:
            continue
        near_s = None if cost is None else cost.saving_s(share)
        if not has_local:
            found.append(Extent(share == 1.0, "to", near_s))
            continue
        far_s = None
        if cost is not None and cost.upload_s is not None:
            far_s = cost.saving_s(share) + busy_s + share * cost.upload_s
        found += [Extent(share == 1.0, "to", far_s), Extent(share == 1.0, "local", near_s)]
    return found


def most_within(choices: Sequence[Extent], left_s: float) -> Extent:
    """The first, that is the largest, of `extents` that takes at most `left_s`. Where none does, or nothing was measured, the
    one that is there soonest: a save that is cut off leaves what was there before."""
    fitting = (choice for choice in choices if choice.seconds is not None and choice.seconds <= left_s)
    if (found := next(fitting, None)) is not None:
        return found
    measured = [choice for choice in choices if choice.seconds is not None]
    if measured:
        return min(measured, key=lambda choice: (choice.seconds or 0.0, not choice.whole))
    return next((choice for choice in choices if choice.place == "local"), choices[0])
