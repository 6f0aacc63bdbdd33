"""The engine of `executor: inline`: whoever asks for a batch makes it, one at a time, so nothing has to be locked or woken."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from loaderkit.errors import ClosedError, ConfigError
from loaderkit.prefetch.accounts import Clock
from loaderkit.prefetch.engine import Engine
from loaderkit.prefetch.pace import Pace, trim
from loaderkit.prefetch.plan import Plan
from loaderkit.prefetch.pools import PoolPlan
from loaderkit.types import Chunk, Destination, Stage


class InlineEngine(Engine):
    """Works when it is asked, in the consumer's thread: one account, which serves all pools."""

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
        self._pace = Pace()
        self._open: Destination | None = None  # what is being made
        self._planning = threading.Lock()  # another thread may change the plan's depth
        self._is_lost = False  # what was being made, when it was torn out of it
        self._scratch: dict[str, Any] = {}
        self._failure: BaseException | None = None

    def start(self) -> None:
        self._check_usable()
        if not self.pools[0].accounts:
            self.pools[0].accounts.append(self._new_account(self.states.blocked))

    def resize(self, stage: str, num_workers: int) -> NoReturn:
        self._check_usable()
        raise ConfigError(
            f"stage {stage!r} has no workers to resize: prefetch.executor is inline; use thread or process"
        )

    def set_depth(self, num_batches: int | None, memory_bytes: int | None) -> None:
        self._check_usable()
        with self._planning:
            self.plan.set_depth(num_batches, memory_bytes)

    def seek(self, epoch: int, position: int) -> None:
        self._check_usable()
        self._is_lost = False
        if self.plan.place != self.plan.begins_at(epoch, position):
            self.plan.seek(epoch, position)

    # -------------------------------------------------------------------------------------------- making a batch

    def _wait(self, begin_s: float) -> Destination:
        if self._failure is not None:
            raise self._failure
        if self._is_lost:
            raise ClosedError("the batch that was being made was interrupted: build another loader")
        self._is_lost = True  # until it is made: a batch that was begun must not be passed over in silence
        try:
            destination = self._make()
            self._is_lost = False
            return destination
        finally:
            self._open = None

    def _make(self) -> Destination:
        """The next destination: open it, and carry its chunks through all the stages."""
        plan, account = self.plan, self.pools[0].accounts[0]
        if plan.specs is None:
            begin_s = self.clock()
            plan.prepare()
            self._pace.sample_s = self.clock() - begin_s
        with self._planning:
            destination = plan.open(self._pace.next_chunk_size(plan.batch_size, 1))
        assert destination is not None, "the loader asks for no batch past the last"
        destination.opened_s = self.clock()
        self._open = destination
        for chunk in destination.chunks:
            if not self._is_closed:  # by another thread, or by a stage
                chunk.scratch = self._scratch
                self._carry(chunk, account)
        if self._is_closed:
            raise ClosedError("the loader was closed while a batch was awaited")
        plan.release(destination)
        destination.done_s = account.enter(self.states.blocked)
        return destination

    def _chunk_size(self) -> int:
        return self._pace.chunk_size(self.plan.batch_size, 1)

    def _land(self, chunk: Chunk) -> Destination | None:
        destination = chunk.destination
        if destination.cancelled:
            return None
        self._pace.landed(self.clock() - chunk.marks[0][0], len(chunk))
        trim(chunk.empty(), self._chunk_size)
        destination.num_pending -= 1
        if destination.num_pending:
            return None
        destination.last_chunk = chunk
        return destination

    # -------------------------------------------------------------------------------------------- for other threads

    def head(self) -> Destination | None:
        return self._open

    @property
    def is_short_of_memory(self) -> bool:
        return False

    @property
    def num_queued(self) -> int:
        destination = self._open
        return 0 if destination is None else sum(not chunk.marks for chunk in destination.chunks)

    @property
    def num_open(self) -> int:
        return int(self._open is not None)

    @property
    def num_ready(self) -> int:
        return 0

    def fail(self, error: BaseException) -> None:
        self._failure = self._failure or error

    def _stop(self, join_s: float) -> None:
        self._is_closed = True
        destination = self._open
        if destination is not None:  # the consumer is at it, in another thread
            destination.cancelled = True
