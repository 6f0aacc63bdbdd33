"""Sends the batches of a worker process's engine to the trainer, in order and within the budget.

A finished batch is sent at once and stays in the budget until the trainer has taken it, so no more is read ahead than in one
process. Its memory is reused when the trainer has no reference to it any more.
"""

from __future__ import annotations

import io
import logging
import pickle
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import starmap
from typing import Any

import torch

from loaderkit.engine.metrics import stalls, trace
from loaderkit.engine.metrics.stats import Stats
from loaderkit.engine.metrics.tuning import Tuning
from loaderkit.engine.process import messages
from loaderkit.engine.process.shared_memory import Allocator, Block, SharedArena
from loaderkit.engine.remote.delivery import Delivered
from loaderkit.engine.remote.packing import pack
from loaderkit.engine.threaded import ThreadEngine
from loaderkit.engine.watchdog import HangReport
from loaderkit.engine.work import WorkItem
from loaderkit.errors import ClosedError, ConfigError, StageError
from loaderkit.sampling.shard import Shard

_REPORT_CHARACTERS = 100_000
logger = logging.getLogger("loaderkit")
MakeEngine = Callable[[Allocator, Shard], ThreadEngine]


class BatchSender:
    """Sends batches from the thread that calls `run`; every other public method is called by the control thread.

    `spec` holds (a function that makes the engine from an allocator and a shard, the shard, the trainer's number of
    torch threads). The arena is free from `begin` on; batches start at (`epoch`, `position`), after `generation` seeks.
    """

    def __init__(
        self,
        outbox: socket.socket,
        descriptor: int,
        spec: messages.PackedValue,
        *,
        begin: int,
        keep_pages: bool,
        epoch: int,
        position: int,
        generation: int,
    ) -> None:
        self._outbox = outbox
        self._arena = SharedArena(io.FileIO(descriptor, "r+"))
        self._allocator = Allocator(self._arena, begin=begin, keep_pages=keep_pages)
        make_engine, self._shard, num_torch_threads = _open_spec(spec, self._arena)
        torch.set_num_threads(num_torch_threads)
        self._engine = make_engine(self._allocator, self._shard)
        self._lock = threading.Lock()
        self._generation = generation  # the number of seeks so far
        self._held: dict[int, tuple[Any, list[Block]]] = {}  # the memory of batches that the trainer has not released
        self._number = 0
        self._num_underway = 0  # sent, and not taken yet
        self._sent_s: float | None = None  # when the previous batch was sent; None after a seek
        self._pages: list[trace.Lane] = []  # of the trace that the trainer is fetching
        self._engine.seek(epoch, position)

    # -------------------------------------------------------------------------------------------------- sending

    def run(self) -> None:
        """Send every batch when it is complete, until the engine is closed. Raises the error that stopped the workers."""
        self._engine.start()
        scheduler = self._engine.scheduler
        while True:
            scheduler.ready.wait_until_ready()
            with self._lock:  # a batch taken before a seek must not be sent with the next generation
                try:
                    work_item = scheduler.ready.first(keep=True)
                except ClosedError:
                    return
                if work_item is None:
                    continue
                generation = self._generation
                number = self._number = self._number + 1
                self._num_underway += 1
            self._send(generation, number, work_item)
            del work_item

    def _send(self, generation: int, number: int, work_item: WorkItem) -> None:
        record = self._record(work_item)
        work_item.last_chunk = None
        work_item.chunks = []  # chunks refer to the item: a cycle, whose memory would wait for the garbage collector
        try:
            packed, borrowed = messages.post(record.sealed(), self._arena, self._allocator)
        except Exception as error:
            record = _without_result(record, _unsendable(work_item, error))
            packed, borrowed = messages.post(record.sealed(), self._arena, self._allocator)
        self._held[number] = (record.result, borrowed)
        self._outbox.send(pickle.dumps(messages.BatchMessage(generation, number, packed), 5))

    def _record(self, work_item: WorkItem) -> Delivered:
        assert work_item.last_chunk is not None
        path = stalls.ChunkPath(work_item.opened_s, work_item.last_chunk.marks, work_item.done_s)
        # The trainer's wait for this batch began after the previous one at the earliest.
        since_s = path.opened_s if self._sent_s is None else self._sent_s
        self._sent_s = self._engine.clock()
        return Delivered(
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

    # ------------------------------------------------------------------------------------------- commands of the trainer

    def taken(self, released: list[int]) -> None:
        """Take a batch that the trainer has taken, or dropped after a seek, out of the budget, and free the memory of the
        batches `released`."""
        self.released(released)
        with self._lock:
            self._num_underway -= 1
        self._engine.scheduler.leave(1)

    def released(self, numbers: list[int]) -> None:
        """Free the memory of batches that the trainer no longer references."""
        for number in numbers:
            _, borrowed = self._held.pop(number)
            for block in borrowed:
                self._allocator.spare(block)

    def seek(self, generation: int, epoch: int, position: int, shard: Shard) -> None:
        """Continue at another position, with the batches of `shard` from there on. Batches already sent stay in the budget
        until the trainer has dropped them."""
        with self._lock:
            self._engine.seek(epoch, position, shard)
            self._generation = generation
            self._sent_s = None

    def hold(self) -> None:
        """Make no batch until `seat`."""
        self._engine.scheduler.hold()

    def seat(self, generation: int, epoch: int, position: int, shard: Shard) -> None:
        """Begin after `hold`, with the batches of `shard` from a position on."""
        with self._lock:
            self._engine.scheduler.release(epoch, position, shard)
            self._generation = generation
            self._sent_s = None

    def redeal(self, epoch: int, position: int, shard: Shard | None) -> None:
        """Make the batches of another shard from a position on that is ahead of all that were begun; None: no more."""
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

    def stats(self, waiting_since_s: float | None, at_s: float | None) -> Stats:
        """The engine's counters up to `at_s`; `waits_s` is the trainer's open wait, if any."""
        self._engine.waits.begin(waiting_since_s)
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


def _open_spec(spec: messages.PackedValue, arena: SharedArena) -> tuple[MakeEngine, Shard, int]:
    try:
        opened: tuple[MakeEngine, Shard, int] = spec.open(arena.memory)
    except Exception as error:
        raise ConfigError(
            f"prefetch.executor: process: what the pipeline was given cannot be made again in the process that loads "
            f"({type(error).__name__}: {error}): put functions and classes into a module that can be imported, or use "
            "executor: thread"
        ) from error
    if isinstance(spec.body, Block):
        # Memory beside it may hold a data set's tensors.
        arena.discard(spec.body.start, spec.body.start + spec.body.size)
    return opened


def _unsendable(work_item: WorkItem, error: Exception) -> StageError:
    """The error for a batch that cannot be packed; it names the field."""
    name = next((name for name, value in work_item.result.items() if not _can_pack(value)), None)
    what = "it" if name is None else f"its field {name!r}, a {type(work_item.result[name]).__name__},"
    failed = StageError(
        f"{work_item} cannot leave the process that made it: {what} cannot be "
        f"sent ({type(error).__name__}: {error}); let batches hold plain data, or use prefetch.executor: thread",
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


def _without_result(record: Delivered, error: BaseException) -> Delivered:
    return Delivered(**{**record.__dict__, "result": None, "error": error})
