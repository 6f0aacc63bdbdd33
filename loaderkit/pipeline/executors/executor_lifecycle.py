"""Makes a loader's executor when it is needed, monitors it, and ends it after an error or at the close."""

from __future__ import annotations

import _thread
import logging
import threading
import time
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from loaderkit._internal.imports import check_not_importing
from loaderkit.diagnosis.stats import Stats
from loaderkit.engine.contracts import Executor, LoopLog
from loaderkit.engine.lifetime import Lifetime
from loaderkit.engine.metrics.snapshot import Snapshot, StageStats
from loaderkit.engine.metrics.trace import Trace
from loaderkit.engine.metrics.tuning import Tuning
from loaderkit.engine.metrics.worker_clock import Clock
from loaderkit.engine.monitor import Monitor, Series
from loaderkit.pipeline.execution_plan import ExecutionPlan
from loaderkit.pipeline.executors.engine_factory import describe_tuning, make_executor
from loaderkit.pipeline.executors.live_settings import LiveSettings, make_tuner

if TYPE_CHECKING:
    from loaderkit.metrics.endpoint import Export
    from loaderkit.pipeline.executors.process_move import ProcessMove, SentObjects

logger = logging.getLogger("loaderkit")


class ExecutorLifecycle:
    """Has at most one executor at a time. All but `stats`, `series` and `stop` belong to the consumer's thread."""

    def __init__(self, plan: ExecutionPlan, clock: Clock) -> None:
        """Raises ConfigError."""
        self.plan = plan
        self._clock = clock
        tuning = describe_tuning(plan, clock)
        self.settings = LiveSettings(tuning, make_tuner(plan.config, tuning))
        self.lifetime = Lifetime()  # once it is closed, no other executor is made
        self.executor: Executor | None = None
        self.monitor: Monitor | None = None
        self.steps: LoopLog | None = None  # of the running profile
        self.metrics: Export | None = None  # of the loader
        self._series = Series()
        self.run = 0  # executors that have ended
        self._last_stats: Snapshot | None = None
        self._finalizer: weakref.finalize[..., Any] | None = None
        self._stopping = threading.Lock()
        self._has_to_end = False  # the executor: `stop` was called, and has not returned if Ctrl-C came then
        self._move: ProcessMove | None = None  # from threads, if that may come
        self._has_decided = False  # whether it may, and where to
        self._sent: SentObjects | None = None  # to processes that the loop was moved to
        self._recordings: list[Trace] | None = None  # of executors that have ended; None if nothing is recorded

    def at(self, here: tuple[int, int], *, is_awaited: bool = False) -> Executor:
        """The executor, with the batch at `here`, an (epoch, position), next; a new one at first and after an error.
        `is_awaited`: the loop waits for that batch."""
        if self._has_to_end and not self.lifetime.is_closed:
            self.stop(join_s=1.0)
        executor = self.executor  # `close` in another thread may take it away meanwhile
        if executor is not None and self._move is not None:
            executor = self._moved(executor, self._move, here, is_awaited)
        if executor is not None and self._sent is not None and self._sent.have_changed(here[0]):
            logger.info("what the worker processes were sent has changed since the last epoch: others start with it")
            self.stop(join_s=1.0)
            executor = None
        if executor is None:
            self.lifetime.check_open()
            check_not_importing()
            executor = make_executor(self.plan, self._clock)
            if self._sent is not None:
                self._sent.note()
            if self._move is None and not self._has_decided:
                self._move = self._make_move()
            self.settings.attach(executor)
            self._begin(executor)
        account = executor.account
        if account.next_position != here:
            account.next_position = None
            try:
                executor.seek(*here)
            except BaseException:
                # After Ctrl-C only half of its processes may have been told to seek, and the executor may believe it is
                # there.
                self.stop(join_s=1.0)
                raise
            account.next_position = here
        return executor

    def _make_move(self) -> ProcessMove | None:
        if not self.plan.may_move or self._clock is not time.perf_counter:  # which other processes read, too
            return None
        # Late: most loaders have no user code, and it takes a twentieth of the time to the first batch.
        from loaderkit.pipeline.executors.process_move import ProcessMove

        return ProcessMove(self.plan)

    def _begin(self, executor: Executor) -> None:
        """Monitor an executor, which begins."""
        if self.metrics is not None:
            self.metrics.before_run()
        self.executor = executor
        if self.metrics is not None:
            self.metrics.loader.has_run = True
        if self._recordings is not None:
            executor.record()
        if self.steps is not None and self._last_stats is not None:
            self.steps.reset()
        self.monitor = self._make_monitor(executor)
        self._finalizer = weakref.finalize(self, abandon, executor, self.monitor)
        if self.monitor is not None:
            self.monitor.start()

    def _moved(self, executor: Executor, move: ProcessMove, position: tuple[int, int], is_awaited: bool) -> Executor:
        """What continues at `position`: worker processes in place of the threads, once they are ready."""
        asked_s = self._clock()
        moved = move.look(self.settings, lambda: executor.stats(self.settings.tuning, self.run), position)
        if move.is_over:
            self._move, self._has_decided = None, True
        if moved is None:
            return executor
        try:
            self.stop()
            self.lifetime.check_open()  # `close` in another thread may have come meanwhile
            self.plan, self.settings, self._sent = moved.plan, moved.settings, moved.objects
            if is_awaited:
                moved.engine.account.wait_since(asked_s)
            self._begin(moved.engine)
        except BaseException:  # Ctrl-C as well: nothing else would end the processes
            moved.engine.close(1.0)
            raise
        return moved.engine

    def delivered(self, here: tuple[int, int], batch: Any) -> None:
        """Note that the loop has everything before `here`, `batch` last."""
        if self._move is not None:
            self._move.delivered(here, batch)

    def _make_monitor(self, executor: Executor) -> Monitor | None:
        """A monitor of a running executor. It must not refer to this object, which would never be collected then."""
        if self.plan.executor == "inline":
            return None
        settings, run = self.settings, self.run
        return Monitor(lambda: executor.stats(settings.tuning, run), self._series, settings.tune)

    def stop(self, join_s: float = 10.0) -> None:
        """End the executor and all its threads."""
        if self.lifetime.is_closed and (move := self._move) is not None:
            move.close()
        executor, monitor = self.executor, self.monitor  # another thread's `close` may set them to None
        if executor is not None:
            self._has_to_end = True
            self._last_stats = self.stats()
            if self._recordings is not None:
                self._recordings.append(executor.recorded())
            if monitor is not None:
                monitor.stop()
            self.settings.detach()
            executor.close(join_s)
            if monitor is not None:
                monitor.join()
            with self._stopping:
                if self.executor is executor:
                    self.executor = self.monitor = None
                    self.run += 1
            self._has_to_end = False
        finalizer = self._finalizer
        if finalizer is not None:
            finalizer.detach()
            self._finalizer = None

    def stats(self) -> Snapshot:
        """The counters up to now, of the running executor or of the last one."""
        executor, monitor = self.executor, self.monitor
        tuning, stream = self.settings.tuning, self.plan.compiled.context.stream
        if executor is not None:
            now = executor.stats(tuning, self.run)
        else:
            now = self._last_stats or make_executor(self.plan, self._clock).stats(tuning, self.run)
        if monitor is not None:
            now = replace(now, lateness=monitor.lateness.copy())
        return now if stream is None else replace(now, copies=stream.counters())

    def series(self) -> list[dict[str, Any]]:
        """The time series of the counters."""
        return self._series.to_list()

    def watch(self, steps: LoopLog | None) -> None:
        """Log the loop's steps to `steps`, or stop logging with None."""
        if steps is not None and self.steps is not None:
            raise RuntimeError("this loader is being profiled already: end that block first")
        self.steps = steps

    def record(self) -> None:
        """Start a trace of the workers."""
        self._recordings = []
        if self.executor is not None:
            self.executor.record()

    def recorded(self) -> list[Trace]:
        """The traces since `record`, one an executor; ends the trace."""
        kept, self._recordings = self._recordings or [], None
        return kept if self.executor is None else [*kept, self.executor.recorded()]


def open_metrics(plan: ExecutionPlan, tuning: Tuning) -> Export | None:
    """The loader's place at the endpoint that `metrics` names; None if it names none. Raises ConfigError,
    MissingExtraError."""
    config = plan.config
    if config.metrics.prometheus is None:
        return None
    from loaderkit.metrics.endpoint import Export  # http.server: only when asked

    rows = [StageStats(name, pool.workers) for pool in tuning.pools for name in pool.stages]
    return Export(
        config.metrics.prometheus,
        name=config.name,
        rank=plan.schedule.rank,
        action=config.errors.on_bad_sample,
        first=replace(Stats.empty(rows, config.prefetch.memory), tuning=tuning),
    )


def abandon(executor: Executor, monitor: Monitor | None) -> None:
    """End the executor and monitor of a collected loader. The collector may run in any thread, which may hold any lock."""
    if monitor is not None:
        monitor.stop()
    if monitor is not None and monitor.is_this_thread():
        _thread.start_new_thread(executor.close, ())
    else:
        executor.abandon()
