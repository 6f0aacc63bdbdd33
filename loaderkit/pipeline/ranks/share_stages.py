"""The work of the thread that passes batches on, as stages in the stats: passing on, and the stages behind it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from loaderkit.engine.metrics.snapshot import StageStats, add_worker_time
from loaderkit.engine.metrics.stalls import WAKEUP, WaitSegment
from loaderkit.engine.metrics.trace import WHOLE, Lane, finished_lane, new_entries, num_entries
from loaderkit.engine.metrics.worker_clock import Clock, WorkerClock, WorkerStates
from loaderkit.engine.remote.delivery import Delivered
from loaderkit.engine.work import Stage
from loaderkit.pipeline.ranks.passing import Passed


class ShareStages:
    """The stage `name`, which passes batches on, and `later` ones, with the clock of the one thread that runs them."""

    def __init__(self, name: str, later: Sequence[Stage], clock: Clock) -> None:
        self.name = name
        self.error: BaseException | None = None  # of a later stage
        self._later = later
        self._names = [name, *(stage.name for stage in later)]
        self._clock = clock
        self._states = WorkerStates(len(self._names))
        self._worker_clock: WorkerClock | None = None
        self._is_recorded = False

    def begin(self) -> None:
        """The thread begins."""
        self._worker_clock = WorkerClock(self._states, self._clock, first_state=self._states.starved)
        if self._is_recorded:
            self.record()

    @property
    def _running(self) -> WorkerClock:
        assert self._worker_clock is not None
        return self._worker_clock

    @property
    def current(self) -> str | None:
        """The later stage that the thread is in; for any thread."""
        state = None if self._worker_clock is None else self._worker_clock.open_state
        return self._names[state] if state is not None and 0 < state < len(self._names) else None

    def enter_starved(self) -> None:
        """The thread waits for a batch."""
        self._running.enter(self._states.starved)

    def enter_blocked(self) -> None:
        """The thread waits for the loop."""
        self._running.enter(self._states.blocked)

    def enter(self) -> None:
        """The thread begins to pass a batch on."""
        self._running.enter(0)

    def served(self, passed: Passed) -> float:
        """The batch has been passed on; the time."""
        worker_clock, batch = self._running, passed.batch
        assert batch is not None
        worker_clock.item = (batch.epoch, batch.end, WHOLE, WHOLE)
        now = worker_clock.enter(self._states.starved)
        worker_clock.served(0, len(batch), 0)
        return now

    def run(self, passed: Passed) -> tuple[Delivered, list[WaitSegment]]:
        """Run the later stages on a batch, in place; returns the batch with its own error, or a stage's, and when each
        stage ran."""
        batch, worker_clock = passed.batch, self._running
        assert batch is not None
        error, segments = batch.error, []
        for number, stage in enumerate(self._later, 1):
            if error is not None or batch.is_empty:
                break
            since_s = worker_clock.enter(number)
            try:
                stage.run(batch.result, batch.context)
            except Exception as failed:
                error = self.error = failed
            worker_clock.served(number, len(batch), 0)
            segments.append(WaitSegment(since_s, worker_clock.enter(self._states.starved), stage.name))
        return replace(batch, error=error), segments

    def rows(self, now: float) -> list[StageStats]:
        """The thread's time by stage."""
        rows = [StageStats(self._names[0], 1, kind="share")]
        rows += [StageStats(stage.name, 1, kind=stage.kind, waits=stage.waits) for stage in self._later]
        if self._worker_clock is not None:
            add_worker_time(rows, (rows[0], rows[-1]), [self._worker_clock], self._states, now)
        return rows

    def record(self) -> None:
        """Start a trace of the thread."""
        self._is_recorded = True
        if self._worker_clock is not None:
            self._worker_clock.trace = new_entries(num_entries(1), self._clock(), self._worker_clock.open_state)

    def recorded(self) -> list[Lane]:
        """The trace since `record`; ends it."""
        self._is_recorded = False
        worker_clock = self._worker_clock
        if worker_clock is None or worker_clock.trace is None:
            return []
        entries, worker_clock.trace = worker_clock.trace, None
        names = (*self._names, "starved", "blocked", "idle")
        return [finished_lane(entries, os.getpid(), f"{'+'.join(self._names)} 0", names, self._clock())]

    def interrupt(self) -> None:
        """End the waits of later stages."""
        for stage in self._later:
            if stage.interrupt is not None:
                stage.interrupt()

    def close(self) -> None:
        """Free what later stages hold."""
        for stage in self._later:
            if stage.close is not None:
                stage.close()


def cut_wait(since_s: float, until_s: float, causes: Mapping[str, float]) -> list[WaitSegment]:
    """[since_s, until_s) cut in the proportions of `causes`."""
    total_s, segments = sum(causes.values()), []
    for cause, seconds in causes.items():
        end_s = since_s + (until_s - since_s) * seconds / total_s if total_s else until_s
        segments.append(WaitSegment(since_s, end_s, cause))
        since_s, total_s = end_s, total_s - seconds
    return segments or [WaitSegment(since_s, until_s, WAKEUP)]
