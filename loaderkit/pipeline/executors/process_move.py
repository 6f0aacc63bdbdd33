"""`executor: auto`: a loader that waits for undeclared user code moves from threads into worker processes, as it runs.

    threads, one item of that code at a time ──lost as much time as a start takes──> processes start beside them
                                                                    ──all are awake──> they go on where the loop is

A batch depends only on its position, so it is the same whichever process has made it. What was read ahead is dropped.
If the loop changes its objects between two epochs, the change is seen, as by the workers of a DataLoader: new processes
start then.
"""

from __future__ import annotations

import copy
import logging
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from loaderkit._internal.compare import differ
from loaderkit._internal.system.cgroups import free_memory, num_cpus_of_rank
from loaderkit._internal.units import say_bytes
from loaderkit.engine.metrics.snapshot import Snapshot
from loaderkit.engine.metrics.stalls import START
from loaderkit.engine.remote.executor import RemoteEngine
from loaderkit.errors import ConfigError, WorkerDiedError
from loaderkit.pipeline.config.model import PipelineConfig
from loaderkit.pipeline.execution_plan import ExecutionPlan
from loaderkit.pipeline.executor_rule import in_processes
from loaderkit.pipeline.executors.engine_factory import describe_tuning
from loaderkit.pipeline.executors.live_settings import LiveSettings, make_tuner
from loaderkit.pipeline.executors.process_setup import make_remote_engine, num_bytes_sent
from loaderkit.pipeline.executors.sendable import sent_objects

_LOOK_S, _WINDOW_S = 0.25, 0.5
# The start of a process takes 1 to 3 s of one CPU: by then as much was lost to threads as is paid for the move.
_PRICE_S = 1.5
_WAITED, _ALWAYS, _GAIN = 0.1, 0.7, 1.2  # shares of the time; times as fast, by the accounts
_MOST_AT_FIRST = 4  # processes; the tuner adds to them
_JOIN_S = 1.0
_MOST_BYTES = 2**30  # that each process is sent
_MOST_STARTS = 3  # of processes that take nothing over, as the objects have changed when they are awake
logger = logging.getLogger("loaderkit")


class Moved(NamedTuple):
    """The plan, settings and executor that a loader has after the move, in place of its own."""

    plan: ExecutionPlan
    settings: LiveSettings
    engine: RemoteEngine
    objects: SentObjects


class SentObjects:
    """The state of the user's objects when processes got them, for an epoch."""

    def __init__(self, config: PipelineConfig, epoch: int) -> None:
        """Raises the errors of pickle."""
        self._config = config
        self._epoch = epoch
        self._packed = sent_objects(config, _MOST_BYTES)

    @property
    def generators(self) -> list[str]:
        """The types of the random generators in them."""
        return [] if self._packed is None else sorted(self._packed.generators)

    def have_changed(self, epoch: int) -> bool:
        """True if the objects have changed, in another epoch."""
        if epoch == self._epoch:
            return False
        self._epoch = epoch
        try:
            return sent_objects(self._config, _MOST_BYTES) != self._packed
        except Exception:  # they cannot be sent any more: processes keep what they have
            return False

    def note(self) -> None:
        """Other processes start, which get them as they are now. Raises the errors of pickle."""
        self._packed = sent_objects(self._config, _MOST_BYTES)


class ProcessMove:
    """Decides on the move of one loader, and starts the processes. For the consumer's thread, but for `close`."""

    def __init__(self, plan: ExecutionPlan) -> None:
        self._plan = plan
        kept = {stage.name for stage in plan.trainer_stages}
        self._names = [
            stage.name for stage in plan.compiled.stages if stage.lock is not None and stage.name not in kept
        ]
        self._look_s = 0.0
        self._begin: Snapshot | None = None
        self._lost_s = 0.0
        self.started: Moved | None = None
        self._finalizer: weakref.finalize[..., Any] | None = None  # of what has started
        self._began_at = (0, 0)
        self._made_here: Any = None  # the batch there
        self._num_starts = 0
        self.is_over = False  # nothing will move

    def look(self, settings: LiveSettings, read: Callable[[], Snapshot], position: tuple[int, int]) -> Moved | None:
        """What is to continue at `position`, once it is ready. `read` gives the counters of the threads, with `settings`."""
        if self.started is not None:
            return self._when_awake(self.started, position)
        now_s = time.perf_counter()
        if now_s < self._look_s or self.is_over:
            return None
        self._look_s = now_s + _LOOK_S
        if settings.has_users_workers:  # an order, for threads
            self.is_over = True
        elif self._pays(read()):
            self._start(position)
        return None

    def _pays(self, now: Snapshot) -> bool:
        begin = self._begin
        if begin is None or begin.run != now.run or now.num_batches == 0:
            self._begin = now
            return False
        passed = now.since(begin)
        if passed.wall_s < _WINDOW_S:
            return False
        self._begin = now
        waited_s = sum(seconds for cause, seconds in passed.stall_s.items() if cause != START)
        if waited_s < _WAITED * passed.wall_s or not self._are_the_limit(passed):
            self._lost_s = 0.0
            return False
        self._lost_s += waited_s
        return self._lost_s >= _PRICE_S

    def _are_the_limit(self, passed: Snapshot) -> bool:
        """True if one thread was in user code nearly all the time, and several processes could do plainly more."""
        mine = [row for row in passed.stages if row.name in self._names]
        busy_s = sum(row.busy_s for row in mine)
        # Of other stages what they compute: where user code holds the GIL they are busy waiting for it.
        all_s = busy_s + sum(row.cpu_s for row in passed.stages if row.name not in self._names)
        if busy_s < _ALWAYS * passed.wall_s:
            return False
        return self._num_processes * busy_s >= _GAIN * all_s

    @property
    def _num_processes(self) -> int:
        """To begin with."""
        prefetch = self._plan.config.prefetch
        if "processes" in prefetch.model_fields_set and prefetch.processes != "auto":
            return prefetch.processes
        most = min(num_cpus_of_rank(), prefetch.max_processes or _MOST_AT_FIRST, _MOST_AT_FIRST)
        return (
            most
            if prefetch.batches == "auto" or "batches" not in prefetch.model_fields_set
            else min(most, prefetch.batches)
        )

    def _start(self, position: tuple[int, int]) -> None:
        """Start the processes, or log why that code stays here."""
        names, num = ", ".join(self._names), self._num_processes
        what = (
            f"{names}: user code that is not declared `thread_safe` runs one item at a time, and the loop waits for it"
        )
        try:
            why = "the loop waited for user code that is not declared thread_safe"
            plan = replace(self._plan, config=in_processes(self._plan.config), moved_reason=why)
            # To be pickled is code of theirs, too.
            self.started = self._plan.compiled.context.user_code.run(lambda: self._begun(plan, num, position))
            # A loader may be collected, not closed.
            self._finalizer = weakref.finalize(self, self.started.engine.abandon)
        except (ConfigError, WorkerDiedError) as error:
            self.is_over = True
            logger.warning(
                "%s; it stays in this process: %s Declare `thread_safe: true` where several threads may be in it at once",
                what,
                error,
            )
            return
        logger.info("%s: %d processes start, which will make the batches", what, num)

    def _most_that_fit(self, plan: ExecutionPlan, num: int) -> int:
        """How many processes there is memory for, each with a copy of what it is sent. Raises ConfigError if there is not
        enough for `num`."""
        free_bytes = free_memory()[0] or _MOST_BYTES * 4 * num
        most = min(_MOST_BYTES, free_bytes // (4 * num))
        num_bytes = num_bytes_sent(plan, most)
        if num_bytes is None:
            raise ConfigError(
                f"each of {num} processes would have its own copy, of more than {say_bytes(most)}. Set `prefetch: {{executor: "
                "process}` if there is memory for them, or keep the data in files or arrays, mapped."
            )
        return max(num, free_bytes // (4 * num_bytes))

    def _begun(self, plan: ExecutionPlan, num: int, position: tuple[int, int]) -> Moved:
        most = self._most_that_fit(plan, num)
        objects = SentObjects(self._plan.config, position[0])
        if objects.generators:
            raise ConfigError(
                f"it has a random generator of its own ({', '.join(objects.generators)}), of which each process would have a "
                "copy that draws the same numbers. Take `rng` as second argument in `call`, or set `prefetch: {executor: "
                "process}` if they may."
            )
        tuning = describe_tuning(plan)
        tuner = make_tuner(plan.config, tuning)
        if tuner is not None:
            usual = tuner.most_processes
            tuner.most_processes = lambda now: min(most, usual(now))
        settings = LiveSettings(tuning, tuner)
        engine = make_remote_engine(plan)
        try:
            settings.begin_with(num)
            settings.attach(engine)
            engine.seek(*position)
            engine.start()
            self._began_at = position
        except BaseException:
            engine.close(0.0)
            raise
        return Moved(plan, settings, engine, objects)

    def delivered(self, end: tuple[int, int], result: Any) -> None:
        """Keep a copy of the batch at which the processes begin, to compare theirs with; `end` is where it ends."""
        if self.started is not None and self._made_here is None and end > self._began_at:
            with suppress(Exception):  # it holds a lock, say
                self._made_here = copy.deepcopy(result)

    def _when_awake(self, moved: Moved, position: tuple[int, int]) -> Moved | None:
        engine = moved.engine
        try:
            if position == self._began_at or not engine.has_begun():
                return None
            if moved.objects.have_changed(position[0]):
                self._begin_again()
                return None
            found = self._found_otherwise(engine, position)
        except Exception as error:
            found = f"they failed ({type(error).__name__}: {error})"
        if found:
            self.close()
            logger.warning(
                "worker processes were to run user code that is not declared `thread_safe` (%s), and %s; it stays in this "
                "process, one item at a time. Declare it where several threads may be in it at once, or set "
                "`prefetch.executor`",
                ", ".join(self._names),
                found,
            )
            return None
        self.is_over, self.started = True, None
        self._let_go()
        return moved

    def _begin_again(self) -> None:
        """End processes that do not see what the loop has changed since they started; others may start later."""
        self._num_starts += 1
        self.close()
        self.is_over = self._num_starts >= _MOST_STARTS
        self._made_here, self._begin, self._lost_s = None, None, 0.0
        if self.is_over:
            logger.warning(
                "user code that is not declared `thread_safe` (%s) stays in this process, one item at a time: its objects are "
                "changed between epochs, which are over before worker processes have started. Set `prefetch: {executor: "
                "process}` if these need not see it",
                ", ".join(self._names),
            )

    def _found_otherwise(self, engine: RemoteEngine, position: tuple[int, int]) -> str:
        """What the processes make differently from the threads, though they make it the same twice: they lack what this
        process has changed in its modules. Code that draws at random makes something else each time, and does not
        count."""
        made = []
        for _ in range(2):
            engine.seek(*position)
            engine.seek(*self._began_at)
            batch = engine.try_next()
            if batch.error is not None:
                raise batch.error
            made.append(batch.result)
        here, (there, again) = self._made_here, made
        if here is None or not isinstance(there, dict) or not isinstance(here, dict):
            return ""
        names = [name for name, value in here.items() if differ(value, there.get(name))]
        others = [name for name in names if not differ(there.get(name), again.get(name))]
        return f"their first batch had other values in {', '.join(others)}" if others else ""

    def close(self) -> None:
        """End processes that have started and taken nothing over. From any thread."""
        self.is_over = True
        moved, self.started = self.started, None
        if moved is not None:
            moved.engine.close(_JOIN_S)
            self._let_go()

    def _let_go(self) -> None:
        if self._finalizer is not None:
            self._finalizer.detach()
