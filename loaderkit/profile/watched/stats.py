"""What `watch(...).stats()` gives: the stats of a loader, and what is known of a DataLoader besides."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Self

from loaderkit.engine.metrics import Stats, Verdict
from loaderkit.engine.metrics.snapshot import Snapshot, StageStats
from loaderkit.profile.watched.counters import WatchedCounters
from loaderkit.profile.watched.dataloader import LoaderArguments
from loaderkit.profile.watched.rules import diagnose_watched


@dataclass
class WatchedStats(Stats):
    """A snapshot of a watched loop, with a verdict: see `Snapshot` for the counters. Its stages are what can be told apart from
    outside."""

    arguments: LoaderArguments | None = None  # of the DataLoader; None: it is none, or has not begun
    watched: WatchedCounters = field(default_factory=WatchedCounters)
    programs: tuple[tuple[str, float], ...] = ()  # other programs, and the CPU seconds that they used
    shared_free_share: float | None = None  # of /dev/shm, at this moment
    kind: str = ""  # the class of what is watched, with its package

    def since(self, earlier: Snapshot) -> Self:
        """The rise of the counters between `earlier` and this moment."""
        if not isinstance(earlier, WatchedStats):
            raise TypeError("`since` is stats of another kind of loader")
        before = {row.name: row for row in earlier.stages}
        # Before the first batch it is not known what there is to see.
        rows = [before.get(row.name, StageStats(row.name, row.workers)) for row in self.stages]
        earlier = replace(earlier, stages=rows)
        if earlier.arguments is None and self.arguments is not None and self.arguments.num_workers:
            # The counters of the processes that load: there were none.
            earlier = replace(earlier, host=replace(earlier.host, cpu_s=0.0, read_bytes=0, disk_bytes=0))
        passed = super().since(earlier)
        return replace(
            passed,
            watched=self.watched.minus(earlier.watched),
            paused_s=self.paused_s - earlier.paused_s,
            started_s=self.started_s - earlier.started_s,
        )

    def verdict(self) -> Verdict:
        """What limits the loop, as far as it can be seen from outside, how sure that is, and what to change."""
        return diagnose_watched(self)[0]

    def to_dict(self) -> dict[str, Any]:
        """JSON values; the layout is described in docs/reference.md."""
        watched = {"num_epochs": self.watched.num_epochs, "every_nth": self.watched.every_nth}
        return {**super().to_dict(), "watched": watched}
