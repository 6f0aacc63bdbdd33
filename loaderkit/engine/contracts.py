"""The contracts between a loader, the executor that makes its batches, and the plan that says which."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from loaderkit.engine.metrics.stats import Stats
from loaderkit.engine.metrics.trace import Trace
from loaderkit.engine.metrics.tuning import Tuning
from loaderkit.engine.work import WorkItem


class Plan(Protocol):
    """The work items to fill, in their order: batches, or tensors."""

    is_prepared: bool
    """False until `prepare` has run."""

    @property
    def memory_bytes(self) -> int:
        """The bound on the memory of what is open."""

    @property
    def batch_size(self) -> int:
        """Into how many places a work item can be split, if chunks are to be chosen in size."""

    @property
    def next_position(self) -> tuple[int, int]:
        """(epoch, position) of the work item that would be opened next."""

    @property
    def room(self) -> tuple[int, bool]:
        """(how many work items may be open at once, whether memory and not depth limits that)."""

    def prepare(self) -> None:
        """Find out what work items look like. It may run a user's code, and is called without the lock."""

    def open(self, chunk_size: int) -> WorkItem | None:
        """The next work item with its memory and its chunks, or None after the last."""

    def finish(self, work_item: WorkItem) -> Any:
        """What the consumer gets of a full work item; called without the lock."""

    def context(self, work_item: WorkItem) -> Any:
        """What stages that work on its result are told of it; called without the lock."""

    def release(self, work_item: WorkItem) -> None:
        """A work item has left the budget: it was handed over, or dropped."""

    def seek(self, epoch: int, position: int) -> None:
        """Continue at another place."""

    def begins_at(self, epoch: int, position: int) -> tuple[int, int]:
        """The `place` to which `seek` would bring it."""

    def set_depth(self, num_batches: int | None, memory_bytes: int | None) -> None:
        """Change how far is read ahead; None: as it is."""

    def key(self, index: int) -> str:
        """What a chunk's index stands for, for messages."""

    def memory_stats(self, num_open: int) -> dict[str, int]:
        """What `Stats.memory` says of slabs and batches, while `num_open` work items are open; for any thread."""


class Delivery(Protocol):
    """A finished work item, or the error that came in its place, as an executor hands it to the loader."""

    @property
    def epoch(self) -> int: ...

    @property
    def end(self) -> int:
        """The position in the epoch behind it."""

    @property
    def failures(self) -> Sequence[Any]:
        """The plan's notes on items that failed and were tolerated."""

    @property
    def error(self) -> BaseException | None: ...

    @property
    def result(self) -> Any: ...


class Executor(Protocol):
    """Makes batches in order, from where `seek` put it. All but `stats`, `close` and `abandon` belong to one thread."""

    def start(self) -> None:
        """Begin to work ahead. Idempotent."""

    def seek(self, epoch: int, position: int) -> None:
        """Continue at another place, unless the next batch is the one there."""

    def next(self) -> Delivery:
        """The next batch, or the error in its place. Raises what made all work stop."""

    def resize(self, stage: str, num_workers: int) -> None:
        """Let `num_workers` run a stage, and what shares its pool, from now on. Raises ConfigError."""

    def set_depth(self, num_batches: int | None, memory_bytes: int | None) -> None:
        """Change how many batches are read ahead, and in how many bytes; None: as it is. Raises ConfigError."""

    def stats(self, tuning: Tuning, run: int) -> Stats:
        """The accounts up to now."""

    def record(self) -> None:
        """Keep what workers and loop do from now on."""

    def recorded(self) -> Trace:
        """What was kept since `record`; nothing more is."""

    def close(self, join_s: float = 10.0) -> None:
        """Stop everything; what does not stop within `join_s` is left or ended by force. Idempotent."""

    def abandon(self) -> None:
        """Close from wherever the garbage collector happens to run."""
