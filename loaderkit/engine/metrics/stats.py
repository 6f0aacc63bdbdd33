"""The result of `loader.stats()`: a snapshot of the counters, with a verdict on what limits the loop."""

from __future__ import annotations

from typing import Any

from loaderkit.engine.metrics.bottleneck import Verdict, diagnose
from loaderkit.engine.metrics.snapshot import Snapshot


class Stats(Snapshot):
    """A snapshot with a verdict: see `Snapshot` for the counters."""

    def verdict(self) -> Verdict:
        """The bottleneck, the confidence, the evidence and what to change; see `bottleneck.py`."""
        return diagnose(self)

    def to_dict(self) -> dict[str, Any]:
        """JSON values; the layout is described in docs/reference.md."""
        return {**super().to_dict(), "verdict": self.verdict()._asdict()}
