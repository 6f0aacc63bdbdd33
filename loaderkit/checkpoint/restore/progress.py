"""The progress of a restore."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from loaderkit.checkpoint.contents import Checkpoint
from loaderkit.checkpoint.transfer.plan import ReadTotals


class Progress(NamedTuple):
    """The progress of a restore. `fetched_bytes` exceed `num_bytes` where gaps between tensors were read, too."""

    num_bytes: int
    total_bytes: int
    fetched_bytes: int
    seconds: float
    slowest_object: str  # the object with the most time in reads

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / self.seconds if self.seconds > 0 else 0.0


def progress_of(checkpoint: Checkpoint, totals: ReadTotals, total_bytes: int, seconds: float) -> Progress:
    """The progress now; any thread may call it."""
    with totals.lock:
        needed, fetched = totals.needed_bytes, totals.fetched_bytes
    return Progress(needed, total_bytes, fetched, seconds, slowest_object(checkpoint, [totals]))


def slowest_object(checkpoint: Checkpoint, reads: Iterable[ReadTotals]) -> str:
    """The full name of the object with the most time in reads; "" before the first read is done."""
    seconds: dict[str, float] = {}
    for totals in reads:
        with totals.lock:
            for key, item in totals.objects.items():
                seconds[key] = seconds.get(key, 0.0) + item.seconds
    return checkpoint.describe(max(seconds, key=seconds.__getitem__)) if seconds else ""
