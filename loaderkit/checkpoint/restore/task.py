"""One call of `loaderkit.restore` as a task: its progress, and what an error says of the tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from loaderkit.checkpoint.contents import Checkpoint
from loaderkit.checkpoint.transfer.plan import ReadRequest, ReadTotals
from loaderkit.errors import CheckpointError, PeerError

Restored = tuple[dict[str, torch.Tensor], dict[str, Any]]
"""(tensors, plain values), both by name."""


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


@dataclass(frozen=True)
class RestoreTask:
    """The names to restore and the settings, which are the same for one rank and for several.

    `make_requests` is called once, with the checkpoint in which the layouts of the `tensors` are known.
    """

    tensors: list[str]
    values: list[str]
    make_requests: Callable[[Checkpoint], list[ReadRequest]]
    devices: Collection[torch.device]  # of the tensors
    concurrency: int | Literal["auto"] = "auto"
    progress: Callable[[Progress], None] | None = None
    touched: set[str] = field(default_factory=set)  # names of the tensors that have been written to


def name_touched(error: BaseException, names: set[str]) -> None:
    """Add to an error the names of the caller's tensors that were written to before it."""
    touched = tuple(sorted(names.copy()))  # a worker that hangs may still add to the set
    if isinstance(error, (CheckpointError, PeerError)):
        error.touched = touched
    if touched:
        listed = ", ".join(touched[:5]) + (f" and {len(touched) - 5} more" if len(touched) > 5 else "")
        error.add_note(f"written to already, so neither old nor new: {listed}")
