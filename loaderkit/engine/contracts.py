"""What a loader needs of whatever makes its batches: an `Engine` in its own process, or other processes."""

from __future__ import annotations

from typing import Any, Protocol

from loaderkit.prefetch.stats import Stats
from loaderkit.prefetch.tape import Recording
from loaderkit.types import Delivery


class Executor(Protocol):
    """Makes batches in order, from where `seek` put it. All but `stats`, `close` and `abandon` belong to one thread."""

    def start(self) -> None:
        """Begin to work ahead. Idempotent."""

    def seek(self, epoch: int, position: int) -> None:
        """Go on from another place, unless the next batch is the one there."""

    def next(self) -> Delivery:
        """The next batch, or the error in its place. Raises what made all work stop."""

    def resize(self, stage: str, num_workers: int) -> None:
        """Let so many workers run a stage, and what shares its pool, from now on. Raises ConfigError."""

    def set_depth(self, num_batches: int | None, memory_bytes: int | None) -> None:
        """Change how many batches are read ahead, and in how many bytes; None: as it is. Raises ConfigError."""

    def stats(self, tuning: dict[str, Any], run: int) -> Stats:
        """The accounts up to now."""

    def record(self) -> None:
        """Keep what workers and loop do from now on."""

    def recorded(self) -> Recording:
        """What was kept since `record`; nothing more is."""

    def close(self, join_s: float = 10.0) -> None:
        """Stop everything; what does not stop within `join_s` is left or ended by force. Idempotent."""

    def abandon(self) -> None:
        """Close from wherever the garbage collector happens to run."""
