"""The result of `watch(...).stats()`: a loader's stats, and what is known of a DataLoader besides."""

from __future__ import annotations

from typing import Any

from loaderkit.diagnosis.stats import Stats
from loaderkit.diagnosis.verdict import Verdict
from loaderkit.diagnosis.watched.counters import WatchedSnapshot
from loaderkit.diagnosis.watched.rules import diagnose_watched


class WatchedStats(WatchedSnapshot, Stats):
    """A snapshot of a watched loop, with a verdict: see `Snapshot` for the counters."""

    def verdict(self) -> Verdict:
        """What limits the loop, as far as it can be seen from outside, how sure that is, and what to change."""
        return diagnose_watched(self)

    def to_dict(self) -> dict[str, Any]:
        """JSON values; the layout is described in docs/reference.md."""
        watched = {"num_epochs": self.watched.num_epochs, "every_nth": self.watched.every_nth}
        return {**super().to_dict(), "watched": watched}
