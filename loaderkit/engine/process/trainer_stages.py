"""Batch stages that must run in the trainer's process, on batches that another process has made: from `transfer` to CUDA on.

A CUDA context belongs to the process that trains, so one thread here receives the batches, runs those stages and hands the
results over. What is read ahead is bounded where the batches come from: they leave the budget when the consumer has them.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from queue import Empty, SimpleQueue

from loaderkit.prefetch import stalls, watch
from loaderkit.prefetch.accounts import Account, Clock, States
from loaderkit.prefetch.receiver import Arrived, Receiver
from loaderkit.prefetch.stats import StageStats, add_accounts
from loaderkit.prefetch.tape import WHOLE, Track, cut, new_tape, tape_length
from loaderkit.types import BatchContext, Stage

_PATIENCE_S = 1.0
logger = logging.getLogger("loaderkit")


class LateStages:
    """The stages, the account of the thread that runs them, and that thread once there is something to follow."""

    def __init__(self, stages: Sequence[Stage], clock: Clock) -> None:
        self._stages = stages
        self._clock = clock
        self._states = States(len(stages))
        self._account: Account | None = None
        self._place = (0, 0)  # epoch and step of the batch that the thread has, or had
        self._is_recorded = False

    def follow(self, receiver: Receiver) -> LateInbox:
        """Start the thread that takes from `receiver`."""
        self._account = Account(self._states, self._clock, first_state=self._states.starved)
        if self._is_recorded:
            self.record()
        return LateInbox(receiver, self, self._account)

    def report(self, thread: threading.Thread) -> watch.Report | None:
        """Which stage `thread` is in, on which batch, and its stack; None if it is in none."""
        account = self._account
        if account is None or account.open_state >= len(self._stages):
            return None
        stage, since_s = self._stages[account.open_state].name, account.since_s
        epoch, step = self._place
        return watch.Report(
            f"awaited: batch {step} of epoch {epoch}, in {stage} for {self._clock() - since_s:.1f} s, in this process\n"
            f"{watch.stack_of(thread)}",
            stage,
        )

    def rows(self, now: float) -> list[StageStats]:
        """The thread's time by stage."""
        rows = [StageStats(stage.name, 1, kind=stage.kind) for stage in self._stages]
        if self._account is not None:
            add_accounts(rows, (rows[0], rows[-1]), [self._account], self._states, now)
        return rows

    def record(self) -> None:
        """Keep what the thread does from now on."""
        self._is_recorded = True
        if self._account is not None:
            self._account.tape = new_tape(tape_length(1), self._clock(), self._account.open_state)

    def recorded(self) -> list[Track]:
        """What was kept; nothing more is."""
        self._is_recorded = False
        account = self._account
        if account is None or account.tape is None:
            return []
        tape, account.tape = account.tape, None
        stages = [stage.name for stage in self._stages]
        names = (*stages, "starved", "blocked", "idle")
        return [cut(tape, os.getpid(), f"{'+'.join(stages)} 0", names, self._clock())]

    def run(self, arrived: Arrived, account: Account) -> Arrived:
        """Run the stages on a batch in place; their time becomes part of its way, and their error its own."""
        batch = arrived.batch
        segments = list(batch.segments)
        since_s, cause, error = batch.done_s, stalls.WAKEUP, batch.error
        account.item = (batch.epoch, batch.end, WHOLE, WHOLE)
        self._place = (batch.epoch, batch.step)
        for number, stage in enumerate(self._stages):
            if error is not None:
                break
            now = account.enter(number)
            segments.append(stalls.Segment(since_s, now, cause))
            since_s, cause = now, stage.name
            context = BatchContext(
                batch.epoch, batch.step, batch.first_position, batch.result["__key__"], arrived.specs
            )
            try:
                stage.run(batch.result, context)
            except Exception as failed:
                error = failed
            account.served(number, len(batch), 0)
        done_s = account.enter(self._states.starved)
        segments.append(stalls.Segment(since_s, done_s, cause))
        return replace(arrived, batch=replace(batch, error=error, done_s=done_s, segments=segments))


class LateInbox:
    """The inbox of a consumer whose batches go through late stages first, in a thread of their own."""

    def __init__(self, receiver: Receiver, stages: LateStages, account: Account) -> None:
        self._receiver = receiver
        self._stages = stages
        self._queue: SimpleQueue[Arrived | BaseException] = SimpleQueue()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(
            target=_work,
            args=(receiver, stages, account, self._queue, self._is_closed),
            name="loaderkit-late",
            daemon=True,
        )
        self._thread.start()

    def take(self, generation: int, timeout_s: float) -> Arrived | None:
        """See `Inbox`."""
        while True:
            try:
                found = self._queue.get(timeout=timeout_s)
            except Empty:
                return None
            if isinstance(found, BaseException):
                self._queue.put(found)
                raise found
            if found.generation == generation:
                return found
            del found  # for a place that nobody wants any more
            self._receiver.taken()

    def taken(self) -> None:
        """See `Inbox`."""
        self._receiver.taken()

    def give_back(self) -> None:
        """See `Inbox`."""
        self._receiver.give_back()

    def report(self) -> watch.Report | None:
        """See `Inbox`. Batches that are done are not waited for, so the thread has the awaited one, or is about to."""
        return self._stages.report(self._thread)

    def close(self, join_s: float) -> None:
        """End the thread and drop what it has made. If it is still inside a stage after `join_s`, it is left to end by itself,
        with a warning."""
        self._is_closed.set()
        if self._thread is not threading.current_thread():
            self._thread.join(join_s)
            if self._thread.is_alive():
                stack = watch.stack_of(self._thread)
                logger.warning("%s did not stop within %g s: a stage hangs\n%s", self._thread.name, join_s, stack)
        while not self._queue.empty():
            self._queue.get()
        self._queue.put(EOFError())


def _work(
    receiver: Receiver,
    stages: LateStages,
    account: Account,
    queue: SimpleQueue[Arrived | BaseException],
    is_closed: threading.Event,
) -> None:
    try:
        while not is_closed.is_set():
            arrived = receiver.take(timeout_s=_PATIENCE_S)
            if arrived is not None:
                queue.put(stages.run(arrived, account))
            del arrived  # or the thread would keep a batch's memory while it waits for the next
    except BaseException as error:
        queue.put(error)
