"""The workers' side of the scheduler: chunks that no worker has taken yet.

Workers pull: there is no feeder thread. A worker that finds no chunk opens the next work item, if there is room for it.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from loaderkit.engine.autotune.chunk_sizer import trim
from loaderkit.engine.budget import Budget
from loaderkit.engine.contracts import Plan
from loaderkit.engine.metrics import stalls
from loaderkit.engine.metrics.worker_clock import Clock, WorkerClock, WorkerStates
from loaderkit.engine.ready_queue import ReadyQueue
from loaderkit.engine.work import Chunk, WorkItem


class WorkQueue:
    """Chunks of open work items. The budget's lock is never held while a user's code runs."""

    def __init__(self, plan: Plan, budget: Budget, ready: ReadyQueue, states: WorkerStates, clock: Clock) -> None:
        self._plan = plan
        self._lock = budget.lock
        self._budget = budget
        self._ready = ready
        self._states = states
        self._clock = clock
        self._chunks: deque[Chunk] = deque()
        self._scratches: list[dict[str, Any]] = []
        self._is_preparing = False

    def __len__(self) -> int:
        return len(self._chunks)

    def take(self, worker_clock: WorkerClock) -> Chunk | None:
        """The next chunk, after waiting for room in the budget (blocked) or for work (starved). None when closed, or when this
        worker is not wanted."""
        budget = self._budget
        while True:
            with self._lock:
                while not self._ready.is_over and worker_clock.is_wanted:
                    if self._chunks:
                        chunk = self._chunks.popleft()
                        chunk.marks.append((self._clock(), stalls.QUEUED))
                        chunk.scratch = self._scratches.pop() if self._scratches else {}
                        if self._chunks and budget.num_resting:
                            budget.wake_worker()
                        return chunk
                    if not self._plan.is_prepared and not self._is_preparing:
                        self._is_preparing = True
                        break
                    if not self._plan.is_prepared or not self._open_next():
                        self._rest(worker_clock)
                else:
                    if not worker_clock.is_wanted:
                        budget.wake_worker()  # this wake-up may have been meant for another worker
                    return None
            self._prepare()

    def land(self, chunk: Chunk) -> WorkItem | None:
        """Count a chunk as landed; its work item, if that was the last one and it is not cancelled."""
        work_item, size = chunk.work_item, len(chunk)
        took_s = self._clock() - chunk.marks[0][0]
        with self._lock:
            self._budget.chunk_sizer.landed(took_s, size)
            chunk.has_landed = True
            chunk.let_go()
            scratch, chunk.scratch = chunk.scratch, {}
            trim(scratch, size)
            self._scratches.append(scratch)
            work_item.num_pending -= 1
            if work_item.num_pending:
                return None
            work_item.last_chunk = chunk
            if work_item.cancelled:
                self._ready.drop(work_item)
                return None
        return work_item

    def clear(self) -> None:
        """Drop the chunks. Under the lock, or once no worker is left."""
        self._chunks.clear()
        self._scratches.clear()

    def _open_next(self) -> bool:
        work_item, is_last = self._budget.open_next()
        if work_item is None:
            self._ready.is_last = self._ready.is_last or is_last
            return False
        work_item.opened_s = self._clock()
        self._ready.append(work_item)
        self._chunks.extend(work_item.chunks)
        return True

    def _rest(self, worker_clock: WorkerClock) -> None:
        """Let a worker wait for room or work. Under the lock."""
        states, budget = self._states, self._budget
        has_work = budget.num_open and not self._ready.is_last
        worker_clock.enter(states.blocked if has_work else states.starved)
        self._ready.announce()
        budget.num_resting += 1
        budget.changed.wait()
        budget.num_resting -= 1

    def _prepare(self) -> None:
        """Prepare the plan, without the lock: it runs the user's code."""
        error: BaseException | None = None
        begin = self._clock()
        try:
            self._plan.prepare()
            self._budget.chunk_sizer.first(
                self._clock() - begin, self._plan.memory_stats(0)["batch_bytes"] / self._plan.batch_size
            )
        except BaseException as raised:
            error = raised
        with self._lock:
            self._is_preparing = False
            if error is not None:
                self._ready.fail(error)
            self._budget.changed.notify_all()
