"""The engine of `executor: inline`: the consumer's thread makes each batch when it asks for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from loaderkit._internal import torch_threads
from loaderkit._internal.config import keys
from loaderkit.engine.autotune.chunk_sizer import ChunkSizer, trim
from loaderkit.engine.base import Engine
from loaderkit.engine.contracts import Plan
from loaderkit.engine.metrics.worker_clock import Clock, WorkerClock
from loaderkit.engine.pools import PoolPlan
from loaderkit.engine.work import Chunk, Stage, WorkItem
from loaderkit.errors import ClosedError, ConfigError


class InlineEngine(Engine):
    """Makes a batch inside `next()`, in the consumer's thread: one worker clock serves all pools."""

    def __init__(
        self,
        plan: Plan,
        stages: Sequence[Stage],
        pools: Sequence[PoolPlan],
        *,
        clock: Clock = time.perf_counter,
        counters: Callable[[], dict[str, float]] | None = None,
    ) -> None:
        super().__init__(plan, stages, pools, clock=clock, counters=counters)
        self.turns = [None for _ in stages]  # it is always the loop's
        self._chunk_sizer = ChunkSizer()
        self._open: WorkItem | None = None  # the batch that is being made
        self._planning = threading.Lock()  # another thread may change the plan's depth
        self._is_lost = False  # the item that was being made was interrupted
        self.scratch: dict[str, Any] = {}
        self._failure: BaseException | None = None

    def start(self) -> None:
        self.lifetime.check_usable()
        if not self.pools[0].worker_clocks:
            self.pools[0].worker_clocks.append(self._new_worker_clock(self.states.blocked))

    def resize(self, stage: str, num_workers: int) -> NoReturn:
        self.lifetime.check_usable()
        raise ConfigError(f"stage {stage!r} has no workers to resize: {keys.EXECUTOR} is inline; use thread or process")

    def set_depth(self, num_batches: int | None, memory_bytes: int | None) -> None:
        self.lifetime.check_usable()
        with self._planning:
            self.plan.set_depth(num_batches, memory_bytes)

    def seek(self, epoch: int, position: int) -> None:
        self.lifetime.check_usable()
        self._is_lost = False
        if self.plan.next_position != self.plan.begins_at(epoch, position):
            self.plan.seek(epoch, position)

    # -------------------------------------------------------------------------------------------- making a batch

    def _wait(self) -> WorkItem:
        self.start()
        if self._failure is not None:
            raise self._failure
        if self._is_lost:
            raise ClosedError("the batch that was being made was interrupted: build another loader")
        self._is_lost = True  # until the batch is made: one that was begun must not be skipped silently
        try:
            work_item = self._make()
            self._is_lost = False
            return work_item
        finally:
            self._open = None

    def _make(self) -> WorkItem:
        """Open the next work item and run its chunks through all stages."""
        plan, worker_clock = self.plan, self.pools[0].worker_clocks[0]
        if not plan.is_prepared:
            begin_s = self.clock()
            plan.prepare()
            self._chunk_sizer.first(self.clock() - begin_s, plan.memory_stats(0)["batch_bytes"] / plan.batch_size)
        with self._planning:
            work_item = plan.open(self._chunk_sizer.next_chunk_size(plan.batch_size, 1, 1))
        assert work_item is not None, "the loader asks for no batch past the last"
        work_item.opened_s = self.clock()
        self._open = work_item
        for chunk in work_item.chunks:
            if not self.lifetime.is_closed:  # another thread or a stage may close the loader
                chunk.scratch = self.scratch
                self._carry(chunk, worker_clock)
        self.lifetime.check_awaited()
        plan.release(work_item)
        work_item.done_s = worker_clock.enter(self.states.blocked)
        return work_item

    def _carry(self, chunk: Chunk, worker_clock: WorkerClock) -> Chunk | WorkItem | None:
        """Take a chunk through every pool; returns its work item, if that is complete."""
        item: Chunk | WorkItem | None = chunk
        num_torch_threads = torch_threads.get_num_threads()
        try:
            if num_torch_threads > 1:
                torch_threads.set_num_threads(1)  # as in worker threads: on small tensors a second thread only spins
            for pool in self.pools:
                if item is not None:
                    item = self._run(pool, worker_clock, item)
        finally:
            if num_torch_threads > 1:
                torch_threads.set_num_threads(num_torch_threads)
        return item

    def _land(self, chunk: Chunk) -> WorkItem | None:
        work_item = chunk.work_item
        if work_item.cancelled:
            return None
        self._chunk_sizer.landed(self.clock() - chunk.marks[0][0], len(chunk))
        chunk.has_landed = True
        chunk.let_go()
        trim(chunk.scratch, len(chunk))
        work_item.num_pending -= 1
        if work_item.num_pending:
            return None
        work_item.last_chunk = chunk
        return work_item

    # -------------------------------------------------------------------------------------------- for other threads

    def head(self) -> WorkItem | None:
        return self._open

    @property
    def is_short_of_memory(self) -> bool:
        return False

    @property
    def num_queued(self) -> int:
        work_item = self._open
        return 0 if work_item is None else sum(not chunk.marks for chunk in work_item.chunks)

    @property
    def num_open(self) -> int:
        return int(self._open is not None)

    @property
    def num_ready(self) -> int:
        return 0

    def fail(self, error: BaseException) -> None:
        self._failure = self._failure or error

    def _stop(self, join_s: float) -> None:
        self.lifetime.is_closed = True
        work_item = self._open
        if work_item is not None:  # the consumer makes it, in another thread
            work_item.cancelled = True
