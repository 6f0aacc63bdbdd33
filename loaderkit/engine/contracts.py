"""The contracts between a loader, the executor that makes its batches, and the plan that chooses them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from loaderkit.engine.metrics.consumer_account import ConsumerAccount
from loaderkit.engine.metrics.snapshot import Snapshot
from loaderkit.engine.metrics.trace import Trace
from loaderkit.engine.metrics.tuning import Tuning
from loaderkit.engine.work import Chunk, Delivery, WorkItem
from loaderkit.sampling.shard import Shard


class Plan(Protocol):
    """The work items to fill, in their order: batches, or tensors."""

    is_prepared: bool
    """False until `prepare` has run."""

    @property
    def memory_bytes(self) -> int:
        """The bound on the memory of open work items."""

    @property
    def batch_size(self) -> int:
        """The number of slots of a work item, into which it can be split."""

    @property
    def next_position(self) -> tuple[int, int]:
        """(epoch, position) of the work item that would be opened next."""

    @property
    def room(self) -> tuple[int, bool]:
        """(how many work items may be open at once, whether memory and not depth limits that)."""

    def prepare(self) -> None:
        """Determine the fields of a work item. May run the user's code; called without the lock."""

    def preparing(self) -> tuple[str, Chunk] | None:
        """The stage that `prepare` is in, and the chunk that it acts on, for reports; from any thread."""

    def open(self, chunk_size: int) -> WorkItem | None:
        """The next work item with its memory and its chunks, or None after the last."""

    def finish(self, work_item: WorkItem) -> Any:
        """The result of a full work item, for the consumer; called without the lock."""

    def context(self, work_item: WorkItem) -> Any:
        """The second argument of stages that act on its result; called without the lock."""

    def release(self, work_item: WorkItem) -> None:
        """Note that a work item has left the budget: it was delivered or dropped."""

    def close(self) -> None:
        """Free the memory that is not in use; no worker is left."""

    def seek(self, epoch: int, position: int, shard: Shard | None = None) -> None:
        """Continue at another position, with the work items of `shard` where several plans share them; None keeps the
        shard."""

    def begins_at(self, epoch: int, position: int, shard: Shard | None = None) -> tuple[int, int] | None:
        """The `next_position` after such a `seek`; None if the open work items differ from those that it would open."""

    def redeal(self, border: tuple[int, int], shard: Shard | None) -> None:
        """Open the work items of another shard from (epoch, position) `border` on, or no more of them if `shard` is
        None. No item behind that position has been opened yet."""

    def share(self, shard: Shard) -> None:
        """Note how many plans share the machine's memory from now on."""

    def set_depth(self, num_batches: int | None, memory_bytes: int | None) -> None:
        """Set how far to read ahead; None leaves a value unchanged."""

    def key(self, index: int) -> str:
        """The name of the item at `index`, for messages."""

    def memory_stats(self, num_open: int) -> dict[str, int]:
        """The bytes of slabs and batches for `Snapshot.memory`, with `num_open` open work items; for any thread."""


class Executor(Protocol):
    """Makes batches in order, from the position of the last `seek`. One thread calls all but `stats`, `close`, `abandon`."""

    account: ConsumerAccount
    """Of what `next` gave."""

    def start(self) -> None:
        """Start to read ahead. Idempotent."""

    def seek(self, epoch: int, position: int) -> None:
        """Continue at another position, unless the next batch begins there."""

    def next(self) -> Delivery:
        """The next batch, or its error. Raises the error that stopped the executor."""

    def resize(self, stage: str, num_workers: int) -> None:
        """Set the number of workers of the pool that runs a stage. Raises ConfigError."""

    def set_depth(self, num_batches: int | None, memory_bytes: int | None) -> None:
        """Set how many batches are read ahead, and in how many bytes; None leaves a value unchanged. Raises ConfigError."""

    def set_processes(self, num: int, refused: Callable[[str], None]) -> None:
        """Let another number of processes make the batches, as soon as the new ones are ready; nothing is dropped.
        `refused` is called with the reason if that turns out to be impossible later. Raises ConfigError, WorkerDiedError."""

    def stats(self, tuning: Tuning, run: int) -> Snapshot:
        """The counters up to now."""

    def record(self) -> None:
        """Start a trace of workers and loop."""

    def recorded(self) -> Trace:
        """The trace since `record`; ends it."""

    def close(self, join_s: float = 10.0) -> None:
        """Stop all workers; those that do not stop within `join_s` are left behind or killed. Idempotent."""

    def abandon(self) -> None:
        """Close from any thread in which the garbage collector runs."""


class LoopLog(Protocol):
    """What a loader reports of the loop that takes its batches, while it is profiled; called in the loop's thread."""

    def reset(self) -> None:
        """The executor's counters begin again, after an error."""

    def on_epoch(self) -> None:
        """The loop begins another pass over the data."""

    def on_request(self) -> None:
        """The loop requests a batch."""

    def on_batch(self, batch: Iterable[Any] = ()) -> None:
        """The batch is handed over."""

    def on_end(self) -> None:
        """No batch comes: the epoch is over, or an error was raised."""
