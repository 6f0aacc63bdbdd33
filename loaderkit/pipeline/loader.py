"""The loader a training loop iterates over, and `build`, which makes it."""

from __future__ import annotations

import _thread
import operator
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, cast

from loaderkit.connectors.base import Connector
from loaderkit.engine.contracts import Executor
from loaderkit.engine.metrics import Stats
from loaderkit.engine.metrics.trace import Trace
from loaderkit.engine.metrics.worker_clock import Clock
from loaderkit.engine.monitor import Monitor, Series
from loaderkit.errors import ClosedError, ConfigError, StallTimeout, WorkerDiedError
from loaderkit.pipeline.bad_samples import BadSamples
from loaderkit.pipeline.config.builder import Pipeline, to_config
from loaderkit.pipeline.config.checkpoint_source import CheckpointArgs
from loaderkit.pipeline.config.model import PipelineConfig
from loaderkit.pipeline.engine_factory import describe_tuning, make_executor
from loaderkit.pipeline.execution_plan import ExecutionPlan, compile_pipeline
from loaderkit.pipeline.live_settings import LiveSettings, make_tuner
from loaderkit.sampling.state import State

if TYPE_CHECKING:
    from loaderkit.profile.recording import Profile, ProfiledLoader
    from loaderkit.profile.step_log import StepLog


def build(
    pipeline: str | Path | Mapping[str, Any] | Pipeline,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    connectors: Mapping[str, Connector] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Loader:
    """A loader for a pipeline: the path of a YAML file, a dict of the same layout, or a `Pipeline`.

    `rank` and `world_size` default to torch.distributed's, then to the environment's RANK and WORLD_SIZE, then to 0 and 1.
    `overrides` replaces single values by dotted key ("stages.batch.size"); paths among them are relative to the working
    directory. `connectors` gives a connector for a URL scheme, such as {"memory": MemoryConnector(...)}.

    With `source.kind: checkpoint` it yields (name, tensor) instead of batches, has `values` and `stats`, and no epochs: see
    `loaderkit.pipeline.tensor_loader.TensorLoader`.

    The source is listed here, so that `len()` and `classes` are known; no thread runs before `start()` or the first
    `next()`. Raises ConfigError, SourceError, ConnectorError, FormatError.
    """
    config = to_config(pipeline, overrides)
    if isinstance(config.source, CheckpointArgs):
        from loaderkit.pipeline.tensor_loader import TensorLoader  # the one case that has no batches

        return cast(Loader, TensorLoader(config, connectors or {}, clock))
    plan = compile_pipeline(config, rank=rank, world_size=world_size, connectors=connectors)
    try:
        return Loader(plan, clock)
    except BaseException:
        plan.close()
        raise


class Loader:
    """Batches of one rank, epoch after epoch. One consumer thread; `stats` may be called from any."""

    def __init__(self, plan: ExecutionPlan, clock: Clock = time.perf_counter) -> None:
        """Closes the plan's connector when it is closed itself. Raises ConfigError."""
        self._plan = plan
        self._clock = clock
        self._fingerprint = plan.fingerprint()
        self._stream = plan.compiled.context.stream
        self._engine: Executor | None = None
        self._last_stats: Stats | None = None
        self._finalizer: weakref.finalize[..., Any] | None = None
        self._closed = False
        self._epoch = 0  # of what was delivered last, or will be first
        self._position = 0  # delivered in that epoch, over all ranks
        self._next = (0, 0)  # (epoch, position) where the next iteration begins
        self._stands: tuple[int, int] | None = None  # the place of the batch that the engine gives next
        self._iteration = 0
        self._run = 0
        self._bad = BadSamples(plan.config.errors)
        tuning = describe_tuning(plan, clock)
        self._sizes = LiveSettings(tuning, make_tuner(plan.config, tuning))
        self._series = Series()
        self._monitor: Monitor | None = None
        self._stopping = threading.Lock()
        self._steps: StepLog | None = None  # of the profile that is under way
        self._recordings: list[Trace] | None = None  # of engines that have ended; None: nothing is recorded

    # ---------------------------------------------------------------------------------------------------- iterating

    def __iter__(self) -> Iterator[Any]:
        """One epoch: what is left of the one that was resumed, else the next one. Ends an earlier iteration."""
        self._check_open()
        if self._steps is not None:
            self._steps.on_epoch()
        epoch, position = self._next
        self._iteration += 1
        self._next = (epoch + 1, 0)
        last = self._plan.config.order.epochs
        if last is not None and epoch >= last:
            return iter(())
        self._epoch, self._position = epoch, position
        return _Epoch(self, self._iteration, self._plan.schedule.num_batches(position))

    def __len__(self) -> int:
        """Batches of a whole epoch on this rank."""
        return self._plan.schedule.num_batches()

    def start(self) -> None:
        """Begin to prefetch, before the first `next()`. Idempotent."""
        self._check_open()
        if not self._is_over(self._next[0]):
            self._running_engine(*self._next).start()

    def _is_over(self, epoch: int) -> bool:
        last = self._plan.config.order.epochs
        return last is not None and epoch >= last

    def _running_engine(self, epoch: int, position: int) -> Executor:
        """The engine, standing at (epoch, position); made when there is none, or after an error ended the last one."""
        if self._engine is None:
            self._check_open()
            self._engine = engine = make_executor(self._plan, self._clock)
            self._stands = None
            self._sizes.attach(engine)
            if self._recordings is not None:
                engine.record()
            if self._steps is not None and self._last_stats is not None:
                self._steps.reset()
            self._monitor = self._make_monitor(engine)
            self._finalizer = weakref.finalize(self, _abandon, engine, self._monitor)
            if self._monitor is not None:
                self._monitor.start()
        if self._stands != (epoch, position):
            self._engine.seek(epoch, position)
            self._stands = (epoch, position)
        return self._engine

    def _make_monitor(self, engine: Executor) -> Monitor | None:
        """What looks at an engine while it runs. It must not know this loader, or that would never be garbage."""
        if self._plan.executor == "inline":
            return None
        sizes, run = self._sizes, self._run
        return Monitor(lambda: engine.stats(sizes.tuning, run), self._series, sizes.tune)

    def _deliver(self) -> Any:
        """The next batch of the current epoch. After an error nothing is left running."""
        engine = self._running_engine(self._epoch, self._position)
        try:
            work_item = engine.next()
            self._bad.note(work_item)
            if work_item.error is not None:
                raise work_item.error
            if self._stream is not None:
                self._stream.hand_over(work_item.result)
            batch = self._output(work_item.result)
        except Exception as error:
            self._stop_engine(join_s=0.5 if isinstance(error, (StallTimeout, WorkerDiedError)) else 10.0)
            raise
        except BaseException:  # Ctrl-C: end at once, do not wait for a stage that hangs
            self._stop_engine(join_s=1.0)
            raise
        self._position = work_item.end
        self._stands = (self._epoch, self._position)
        return batch

    def _output(self, batch: dict[str, Any]) -> Any:
        """The batch as it was asked for: a dict, or a tuple of the fields of `output`."""
        output = self._plan.config.output
        if output is None:
            return batch
        if missing := [name for name in output if name not in batch]:
            raise ConfigError(f"output names the field {missing[0]!r}, but this batch has {', '.join(batch)}")
        return tuple(batch[name] for name in output)

    def _stop_engine(self, join_s: float = 10.0) -> None:
        engine, monitor = self._engine, self._monitor  # another thread's `close` may come in between
        if engine is not None:
            self._last_stats = self.stats()
            if self._recordings is not None:
                self._recordings.append(engine.recorded())
            if monitor is not None:
                monitor.stop()
            self._sizes.detach()
            engine.close(join_s)
            if monitor is not None:
                monitor.join()
            with self._stopping:
                if self._engine is engine:
                    self._engine = self._monitor = None
                    self._run += 1
        finalizer = self._finalizer
        if finalizer is not None:
            finalizer.detach()
            self._finalizer = None

    # -------------------------------------------------------------------------------------------------- where it is

    @property
    def epoch(self) -> int:
        """The epoch of the last batch, or before any batch the one that comes first."""
        return self._epoch

    @property
    def classes(self) -> list[str] | None:
        """The names of the classes, by number, if the source knows them."""
        return self._plan.source.classes

    @property
    def num_samples(self) -> int:
        """Samples of the data set, over all ranks."""
        return len(self._plan.source)

    @property
    def config(self) -> PipelineConfig:
        """The description this loader was built from."""
        return self._plan.config

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration that of `epoch`. The epoch that comes anyway keeps its place and what was prefetched."""
        self._check_open()
        if isinstance(epoch, bool):
            raise TypeError("an epoch is a whole number, not a truth value")
        epoch = operator.index(epoch)
        if epoch < 0:
            raise ValueError(f"epochs count from 0, not {epoch}")
        if epoch != self._next[0]:
            self._next = (epoch, 0)
        if self._iteration == 0:
            self._epoch, self._position = self._next

    def state_dict(self) -> dict[str, Any]:
        """Where the loop stands: JSON values, after any batch, in microseconds. What was read ahead does not count."""
        return State(self._epoch, self._position, self._plan.config.order.seed, self._fingerprint).to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly behind the batch after which `state` was taken, also with other numbers of ranks or workers.

        A state taken after the last batch of an epoch yields nothing once, then goes on. Raises StateError if it belongs
        to another data set or pipeline.
        """
        self._check_open()
        restored = State.from_dict(dict(state) if isinstance(state, Mapping) else state)
        restored.check(
            seed=self._plan.config.order.seed, fingerprint=self._fingerprint, num_samples=len(self._plan.source)
        )
        self._iteration += 1
        self._epoch, self._position = self._next = (restored.epoch, restored.position)

    def resize(
        self,
        stage: str | None = None,
        *,
        workers: int | None = None,
        batches: int | None = None,
        memory: int | str | None = None,
    ) -> None:
        """Change, while it runs, how many workers run `stage` (and what shares its pool), how many `batches` are read ahead,
        or in how much `memory` (bytes, or "2GiB"). From any thread.

        Nothing is dropped: workers that are too many rest after their chunk, batches that are too many are delivered first.
        Raises ConfigError for a stage there is not, for memory that holds not even one batch, and where the system has no
        more threads; it goes on as before then.
        """
        self._check_open()
        self._sizes.set(stage, workers, batches, memory)

    # ----------------------------------------------------------------------------------------------------- watching

    def stats(self, since: Stats | None = None) -> Stats:
        """The accounts up to now, intervals still open included; with `since`, only what happened after that moment."""
        engine, monitor = self._engine, self._monitor
        if engine is not None:
            now = engine.stats(self._sizes.tuning, self._run)
        else:
            now = self._last_stats or make_executor(self._plan, self._clock).stats(self._sizes.tuning, self._run)
        if monitor is not None:
            now = replace(now, lateness=monitor.lateness.copy())
        if self._stream is not None:
            now = replace(now, copies=self._stream.counters())
        return now if since is None else now.since(since)

    def series(self) -> list[dict[str, Any]]:
        """How the accounts developed since loading began, in at most 512 steps: JSON values, described in docs/reference.md.
        It begins anew with every run, as the counters do: after an error, say. Empty with `executor: inline`."""
        return self._series.to_list()

    def profile(self, *, import_s: float | None = None, trace: bool = False) -> Profile:
        """A report on whatever loop runs in its `with` block: why it waits, what to change. See docs/guide.md.

        with loader.profile() as report:
            for batch in loader:
                ...
        print(report)

        `import_s`: how long the program took until it had imported what it needs, to be shown with the first batch.
        `trace`: record what every worker did with every chunk, for `report.save_trace(path)`.
        """
        from loaderkit.profile.recording import Profile

        return Profile(self.as_subject(), import_s, trace=trace)

    def as_subject(self) -> ProfiledLoader:
        """This loader as a report sees it."""
        from loaderkit.profile.recording import ProfiledLoader

        plan = self._plan
        return ProfiledLoader(
            config=plan.config,
            config_now=lambda: self._sizes.written_to(plan.config),
            stats=self.stats,
            series=self.series,
            watch=self._watch,
            record=self._record,
            recorded=self._recorded,
            source=plan.source,
            schedule=plan.schedule,
            list_s=plan.list_s,
            index_s=plan.index_s,
        )

    def _watch(self, steps: StepLog | None) -> None:
        if steps is not None and self._steps is not None:
            raise RuntimeError("this loader is being profiled already: end that block first")
        self._steps = steps

    def _record(self) -> None:
        self._recordings = []
        if self._engine is not None:
            self._engine.record()

    def _recorded(self) -> list[Trace]:
        found, self._recordings = self._recordings or [], None
        return found if self._engine is None else [*found, self._engine.recorded()]

    def to_yaml(self) -> str:
        """The description as it runs now, with the sizes that the tuner or `resize` has arrived at."""
        return Pipeline.of(self._sizes.written_to(self._plan.config)).to_yaml()

    def __repr__(self) -> str:
        schedule = self._plan.schedule
        return (
            f"<Loader {self._plan.config.name!r}: {len(self._plan.source)} samples, {len(self)} batches of "
            f"{schedule.batch_size} on rank {schedule.rank} of {schedule.world_size}, epoch {self._epoch}>"
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Loader cannot be pickled or copied, as its threads and memory belong to one process: send the Pipeline, or "
            "the path of its YAML file, build there, and go on with load_state_dict(loader.state_dict())"
        )

    # ------------------------------------------------------------------------------------------------------ closing

    def close(self) -> None:
        """Stop everything and give back threads, memory and descriptors. Idempotent; batches delivered stay valid."""
        if self._closed and self._engine is None:  # else Ctrl-C has interrupted it
            return
        self._closed = True
        try:
            self._stop_engine()
        finally:  # Ctrl-C may come here, too
            self._bad.close()
            self._plan.close()

    def __enter__(self) -> Loader:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the loader is closed: build another one")


def _abandon(engine: Executor, monitor: Monitor | None) -> None:
    """The loader is garbage: end what it had running. The collector may run in any thread, whatever locks it holds."""
    if monitor is not None:
        monitor.stop()
    if monitor is not None and monitor.is_this_thread():
        _thread.start_new_thread(engine.close, ())
    else:
        engine.abandon()


class _Epoch(Iterator[Any]):
    """One pass over (the rest of) an epoch."""

    def __init__(self, loader: Loader, iteration: int, num_left: int) -> None:
        self._loader = loader
        self._iteration = iteration
        self._num_left = num_left

    def __next__(self) -> Any:
        loader = self._loader
        loader._check_open()
        steps = loader._steps
        if steps is not None:
            steps.on_request()
        try:
            if self._num_left == 0:
                raise StopIteration
            if self._iteration != loader._iteration:
                raise ClosedError("this iterator was ended by a newer one, or by load_state_dict")
            batch = loader._deliver()
        except BaseException:
            self._num_left = 0
            if steps is not None:
                steps.on_end()
            raise
        self._num_left -= 1
        if steps is not None:
            steps.on_batch()
        return batch
