"""The engine of a process that makes batches for another one: hands them out in order and obeys the trainer's commands.

A finished batch stays in the budget until the trainer has taken it, so no more is read ahead than in one process.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import starmap
from typing import Any

from loaderkit._internal.config import keys
from loaderkit._internal.packing import pack
from loaderkit.engine.metrics import stalls, trace
from loaderkit.engine.metrics.snapshot import Snapshot
from loaderkit.engine.metrics.tuning import Tuning
from loaderkit.engine.remote.delivery import Delivered
from loaderkit.engine.threaded import ThreadEngine
from loaderkit.engine.watchdog import HangReport
from loaderkit.engine.work import WorkItem
from loaderkit.errors import ClosedError, ConfigError, StageError
from loaderkit.sampling.shard import Shard

_REPORT_CHARACTERS = 100_000
logger = logging.getLogger("loaderkit")


class BatchServer:
    """Gives finished batches to the thread that calls `finished`; every other public method is called by the control thread.
    How batches travel is decided by a subclass."""

    def __init__(self, engine: ThreadEngine, shard: Shard, *, generation: int) -> None:
        """`generation` is the number of seeks so far."""
        self._engine = engine
        self._shard = shard
        self._lock = threading.Lock()
        self._generation = generation
        self._num_underway = 0  # handed out, and not taken yet
        self._sent_s: float | None = None  # when the previous batch was handed out; None after a seek
        self._pages: list[trace.Lane] = []  # of the trace that the trainer is fetching

    # -------------------------------------------------------------------------------------------------- batches

    def start(self) -> None:
        """Start the workers."""
        self._engine.start()

    def finished(self, wanted: int | None = None) -> tuple[int, WorkItem] | None:
        """Wait for the next finished batch: (number of seeks before it, the batch). None once the engine is closed, or once
        there were more than `wanted` seeks. Raises the error that stopped the workers."""
        scheduler = self._engine.scheduler
        while True:
            scheduler.ready.wait_until_ready()
            with self._lock:  # a batch taken before a seek must not be sent with the next generation
                if wanted is not None and wanted < self._generation:
                    return None
                try:
                    work_item = scheduler.ready.first(keep=True)
                except ClosedError:
                    return None
                if work_item is not None:
                    self._num_underway += 1
                    return self._generation, work_item

    def delivered(self, work_item: WorkItem) -> Delivered:
        """What the trainer gets of a batch, of which only the result is needed from then on."""
        assert work_item.last_chunk is not None
        path = stalls.ChunkPath(work_item.opened_s, work_item.last_chunk.marks, work_item.done_s)
        # The trainer's wait for this batch began after the previous one at the earliest.
        since_s = path.opened_s if self._sent_s is None else self._sent_s
        self._sent_s = self._engine.clock()
        delivered = Delivered(
            epoch=work_item.epoch,
            end=work_item.end,
            num_items=len(work_item),
            name=str(work_item),
            result=work_item.result if work_item.error is None else None,
            context=self._engine.plan.context(work_item) if work_item.error is None else None,
            failures=work_item.failures,
            num_dropped=work_item.num_dropped,
            num_skipped=work_item.num_skipped,
            by_source=work_item.by_source,
            is_empty=work_item.is_empty,
            is_end=work_item.is_end,
            source_state=work_item.source_state,
            error=work_item.error,
            done_s=path.done_s,
            segments=self._engine.trace(since_s, path.done_s, path),
        )
        work_item.last_chunk = None
        work_item.chunks = []  # chunks refer to the item: a cycle, whose memory would wait for the garbage collector
        return delivered

    # ------------------------------------------------------------------------------------------- commands of the trainer

    def leave(self, count: int = 1, *, generation: int | None = None) -> None:
        """Take batches that the trainer has taken, or dropped after a seek, out of the budget; with `generation` only if
        there were not more seeks."""
        with self._lock:
            if generation is not None and generation != self._generation:
                return
            self._num_underway -= count
        self._engine.scheduler.leave(count)

    def seek(self, generation: int, epoch: int, position: int, shard: Shard) -> int:
        """Continue at another position, with the batches of `shard` from there on. Returns how many batches are underway to the
        trainer; they stay in the budget until it has dropped them."""
        with self._lock:
            self._engine.seek(epoch, position, shard)
            self._generation = generation
            self._sent_s = None
            return self._num_underway

    @property
    def generation(self) -> int:
        """The number of seeks so far."""
        return self._generation

    def hold(self) -> None:
        """Make no batch until `begin` is called."""
        self._engine.scheduler.hold()

    def begin(self, generation: int, epoch: int, position: int, shard: Shard) -> int:
        """Begin after `hold`, with the batches of `shard` from a position on. Returns what `seek` does."""
        with self._lock:
            self._engine.scheduler.release(epoch, position, shard)
            self._generation = generation
            self._sent_s = None
            return self._num_underway

    def redeal(self, epoch: int, position: int, shard: Shard | None) -> None:
        """Make the batches of another shard, or none if it is None, from a position on that is ahead of all batches
        that were begun."""
        with self._lock:
            self._engine.scheduler.redeal((epoch, position), shard)

    def share(self, shard: Shard, num_batches: int, memory_bytes: int, workers: Mapping[str, int]) -> None:
        """Set this process's share in what all of them have: batches, memory, and by stage the workers. What cannot be set is
        warned of."""
        self._shard = shard
        self._engine.scheduler.share(shard)
        refused = [self.set_depth(num_batches, memory_bytes), *starmap(self.resize, workers.items())]
        for error in filter(None, refused):
            logger.warning("one of now %d processes that load keeps the size it had: %s", shard.of, error)

    def resize(self, stage: str, num_workers: int) -> ConfigError | None:
        """Set the workers of a stage, of all processes together; returns the error, if they cannot be started."""
        return _refusal(lambda: self._engine.resize(stage, self._shard.num_workers(num_workers)))

    def set_depth(self, num_batches: int | None, memory_bytes: int | None) -> ConfigError | None:
        """Set how far all processes together read ahead; returns the error, if the memory does not allow it."""
        batches = None if num_batches is None else self._shard.num_batches(num_batches)
        num_bytes = None if memory_bytes is None else self._shard.num_bytes(memory_bytes)
        return _refusal(lambda: self._engine.set_depth(batches, num_bytes))

    def stats(self, waiting_since_s: float | None, at_s: float | None) -> Snapshot:
        """The engine's counters up to `at_s`; `waits_s` is the trainer's open wait, if any."""
        self._engine.account.begin(waiting_since_s)
        stats = self._engine.stats(Tuning(), 0, at_s)
        return replace(stats, num_ready=stats.num_ready + self._num_underway)

    def record(self) -> None:
        """Start a trace of the workers."""
        self._engine.record()

    def recorded(self, number: int) -> tuple[int, trace.Lane | None]:
        """(number of pages of the trace, page `number` of it). The first call ends the trace."""
        if number == 0:
            self._pages = trace.pages_of(self._engine.recorded().lanes)
        return len(self._pages), self._pages[number] if number < len(self._pages) else None

    def report(self) -> HangReport:
        """The stages of the awaited batch's chunks, and the threads' stacks."""
        report = self._engine.describe_wait()
        return report._replace(text=report.text[:_REPORT_CHARACTERS])

    def close(self, join_s: float) -> None:
        """Stop the workers."""
        self._engine.close(join_s)


def _refusal(change: Callable[[], None]) -> ConfigError | None:
    try:
        change()
    except ConfigError as error:
        return error.with_traceback(None)
    return None


def unsendable(work_item: WorkItem, error: Exception) -> StageError:
    """The error for a batch that cannot be packed; it names the field."""
    name = next((name for name, value in work_item.result.items() if not _can_pack(value)), None)
    what = "it" if name is None else f"its field {name!r}, a {type(work_item.result[name]).__name__},"
    failed = StageError(
        f"{work_item} cannot leave the process that made it: {what} cannot be "
        f"sent ({type(error).__name__}: {error}); let batches hold plain data, or use {keys.EXECUTOR}: thread",
        stage="batch",
        epoch=work_item.epoch,
    )
    failed.__cause__ = error
    return failed


def _can_pack(value: Any) -> bool:
    try:
        pack(value)
    except Exception:
        return False
    return True


def without_result(record: Delivered, error: BaseException) -> Delivered:
    """The batch with an error in place of its result."""
    return replace(record, result=None, error=error)
