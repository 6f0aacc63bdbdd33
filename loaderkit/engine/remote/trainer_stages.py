"""Batch stages that must run in the trainer's process, on batches of a worker process: from a `transfer` to CUDA on.

A CUDA context belongs to the trainer's process, so one thread of it receives the batches, runs those stages and queues the
results. The worker process limits how far ahead it reads: a batch leaves its budget when the consumer has taken it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from queue import Empty, SimpleQueue

from loaderkit.engine import watchdog
from loaderkit.engine.metrics import stalls
from loaderkit.engine.metrics.snapshot import StageStats, add_worker_time, rows_with_past
from loaderkit.engine.metrics.trace import WHOLE, Lane, finished_lane, new_entries, num_entries
from loaderkit.engine.metrics.worker_clock import Clock, WorkerClock, WorkerStates
from loaderkit.engine.remote.contracts import Inbox, ReceivedBatch
from loaderkit.engine.work import Stage

_PATIENCE_S = 1.0
logger = logging.getLogger("loaderkit")


class TrainerStages:
    """The stages and the clock of the thread that runs them; `follow` starts that thread."""

    def __init__(self, stages: Sequence[Stage], clock: Clock) -> None:
        self._stages = stages
        self._clock = clock
        self._states = WorkerStates(len(stages))
        # The clock of the thread, if there is one, and the rows of those before it: one value, for readers in other threads.
        self._account: tuple[WorkerClock | None, list[StageStats]] = (None, [])
        self._name = ""  # of the thread's current or last batch
        self._is_recorded = False

    def follow(self, receiver: Inbox) -> TrainerInbox:
        """Start the thread that takes from `receiver`."""
        worker_clock = WorkerClock(self._states, self._clock, first_state=self._states.starved)
        self._account = (worker_clock, self._account[1])
        if self._is_recorded:
            self.record()
        return TrainerInbox(receiver, self, worker_clock)

    @property
    def _worker_clock(self) -> WorkerClock | None:
        return self._account[0]

    def report(self, thread: threading.Thread) -> watchdog.HangReport | None:
        """The stage and batch that `thread` works on, and its stack; None if it is in no stage."""
        worker_clock = self._worker_clock
        if worker_clock is None or worker_clock.open_state >= len(self._stages):
            return None
        stage, since_s = self._stages[worker_clock.open_state].name, worker_clock.since_s
        return watchdog.HangReport(
            f"awaited: {self._name}, in {stage} for {self._clock() - since_s:.1f} s, in this process\n"
            f"{watchdog.stack_of(thread)}",
            stage,
        )

    def rows(self, now: float) -> list[StageStats]:
        """The thread's time by stage, and the time of earlier threads."""
        rows = [StageStats(stage.name, 1, kind=stage.kind, waits=stage.waits) for stage in self._stages]
        worker_clock, past = self._account
        if worker_clock is not None:
            add_worker_time(rows, (rows[0], rows[-1]), [worker_clock], self._states, now)
        return rows_with_past(rows, past)

    def end(self) -> None:
        """Note that the thread has ended; `follow` may start another one."""
        self._account = (None, self.rows(self._clock()))

    def record(self) -> None:
        """Start a trace of the thread."""
        self._is_recorded = True
        worker_clock = self._worker_clock
        if worker_clock is not None:
            worker_clock.trace = new_entries(num_entries(1), self._clock(), worker_clock.open_state)

    def recorded(self) -> list[Lane]:
        """The trace since `record`; ends it."""
        self._is_recorded = False
        worker_clock = self._worker_clock
        if worker_clock is None or worker_clock.trace is None:
            return []
        entries, worker_clock.trace = worker_clock.trace, None
        stages = [stage.name for stage in self._stages]
        names = (*stages, "starved", "blocked", "idle")
        return [finished_lane(entries, os.getpid(), f"{'+'.join(stages)} 0", names, self._clock())]

    def run(self, arrived: ReceivedBatch, worker_clock: WorkerClock) -> ReceivedBatch:
        """Run the stages on a batch, in place; their time is added to its segments, and an error becomes its error."""
        batch = arrived.batch
        segments = list(batch.segments)
        since_s, cause, error = batch.done_s, stalls.WAKEUP, batch.error
        worker_clock.item = (batch.epoch, batch.end, WHOLE, WHOLE)
        self._name = batch.name
        for number, stage in enumerate(self._stages):
            if error is not None or batch.is_empty:
                break
            now = worker_clock.enter(number)
            segments.append(stalls.WaitSegment(since_s, now, cause))
            since_s, cause = now, stage.name
            try:
                stage.run(batch.result, batch.context)
            except Exception as failed:
                error = failed
            worker_clock.served(number, len(batch), 0)
        done_s = worker_clock.enter(self._states.starved)
        segments.append(stalls.WaitSegment(since_s, done_s, cause))
        return replace(arrived, batch=replace(batch, error=error, done_s=done_s, segments=segments))


class TrainerInbox:
    """The inbox of a consumer whose batches go through the trainer's stages first, in a thread."""

    def __init__(self, receiver: Inbox, stages: TrainerStages, worker_clock: WorkerClock) -> None:
        self._receiver = receiver
        self._stages = stages
        self._queue: SimpleQueue[ReceivedBatch | BaseException] = SimpleQueue()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(
            target=_work,
            args=(receiver, stages, worker_clock, self._queue, self._is_closed),
            name="loaderkit-late",
            daemon=True,
        )
        self._thread.start()

    def take(self, generation: int, timeout_s: float) -> ReceivedBatch | None:
        """See `Inbox`."""
        while True:
            try:
                received = self._queue.get(timeout=timeout_s)
            except Empty:
                return None
            if isinstance(received, BaseException):
                self._queue.put(received)
                raise received
            if received.generation == generation:
                return received
            del received  # made before the last seek
            self._receiver.taken()

    def taken(self) -> None:
        """See `Inbox`."""
        self._receiver.taken()

    def give_back(self) -> None:
        """See `Inbox`."""
        self._receiver.give_back()

    def report(self) -> watchdog.HangReport | None:
        """See `Inbox`. If the thread is in a stage it works on the awaited batch: finished ones are in the queue."""
        return self._stages.report(self._thread) or self._receiver.report()

    def close(self, join_s: float) -> None:
        """End the thread, drop its batches and close the receiver. Inside a stage after `join_s` it is left behind, with a
        warning."""
        self._is_closed.set()
        if self._thread is not threading.current_thread():
            self._thread.join(join_s)
            if self._thread.is_alive():
                stack = watchdog.stack_of(self._thread)
                logger.warning("%s did not stop within %g s: a stage hangs\n%s", self._thread.name, join_s, stack)
        self._receiver.close(join_s)
        while not self._queue.empty():
            self._queue.get()
        self._queue.put(EOFError())


def _work(
    receiver: Inbox,
    stages: TrainerStages,
    worker_clock: WorkerClock,
    queue: SimpleQueue[ReceivedBatch | BaseException],
    is_closed: threading.Event,
) -> None:
    try:
        while not is_closed.is_set():
            arrived = receiver.take(0, _PATIENCE_S)
            if arrived is not None:
                queue.put(stages.run(arrived, worker_clock))
            del arrived  # otherwise the thread would keep a batch's memory while it waits for the next
    except BaseException as error:
        queue.put(error)
