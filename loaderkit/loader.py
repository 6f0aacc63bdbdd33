"""The loader a training loop iterates over, and `build`, which makes it."""

from __future__ import annotations

import operator
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

from loaderkit.connectors.base import Connector
from loaderkit.diagnosis.stats import Stats
from loaderkit.engine.metrics.worker_clock import Clock
from loaderkit.engine.work import Delivery
from loaderkit.errors import ClosedError, ConfigError, MissingExtraError, StallTimeout, WorkerDiedError
from loaderkit.integrations.iterable_dataset import BatchesDataset
from loaderkit.pipeline.config.builder import Pipeline, to_config
from loaderkit.pipeline.config.checkpoint_source import CheckpointArgs
from loaderkit.pipeline.config.model import PipelineConfig
from loaderkit.pipeline.delivery.bad_samples import BadSamples
from loaderkit.pipeline.delivery.batch_numbers import DataLoaderParts, EpochIterator, NextCall
from loaderkit.pipeline.delivery.empty_batches import EmptyBatches
from loaderkit.pipeline.delivery.source_accounts import SourceAccounts
from loaderkit.pipeline.execution_plan import ExecutionPlan, compile_pipeline
from loaderkit.pipeline.executors.executor_lifecycle import ExecutorLifecycle, open_metrics
from loaderkit.pipeline.ranks.same_shards import check_same_shards
from loaderkit.ranks.place import given_place, other_ranks, ranks_now
from loaderkit.sampling.mix_rules import with_later_changes
from loaderkit.sampling.state import State
from loaderkit.stages.context import Stream

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from loaderkit.integrations.torchdata import LoaderNode
    from loaderkit.profile.recording import Profile, ProfiledLoader


def build(
    pipeline: str | Path | Mapping[str, Any] | Pipeline,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    mesh: DeviceMesh | None = None,
    data_dims: str | Sequence[str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    connectors: Mapping[str, Connector] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Loader:
    """A loader for a pipeline: the path of a YAML file, a dict of the same layout, or a `Pipeline`.

    `rank` and `world_size` default to torch.distributed's, then to the environment's RANK and WORLD_SIZE, then to 0 and 1,
    taken when the loader first iterates or gives its length: the process group may be initialised after `build`. With a
    `mesh` they come from its dimensions `data_dims`, default ("dp_replicate", "dp_shard"), in row-major order; ranks
    that differ in other dimensions alone get the same batches. `overrides` replaces single values by dotted key
    ("stages.batch.size"); paths among them are relative to the working directory. `connectors` gives a connector for a
    URL scheme, such as {"memory": MemoryConnector(...)}.

    With `source.kind: checkpoint` it is a `TensorLoader`, which yields (name, tensor). The source is listed here, so that
    `num_samples` and `classes` are known; no thread runs before `start()` or the first `next()`. Raises ConfigError,
    SourceError, ConnectorError, FormatError.
    """
    config, place = to_config(pipeline, overrides), given_place(rank, world_size, mesh, data_dims)
    if isinstance(config.source, CheckpointArgs):
        from loaderkit.pipeline.tensor_loader import TensorLoader  # the one case that has no batches

        return cast(Loader, TensorLoader(config, connectors or {}, clock))
    plan = compile_pipeline(config, place=place, connectors=connectors)
    try:
        return Loader(plan, clock, has_metrics=True)
    except BaseException:
        plan.close()
        raise


class Loader(DataLoaderParts):
    """Batches of one rank, epoch after epoch. One thread at a time iterates; `stats` may be called from any."""

    def __init__(self, plan: ExecutionPlan, clock: Clock = time.perf_counter, *, has_metrics: bool = False) -> None:
        """The loader closes the plan's connector. `has_metrics`: it is shown where `metrics` says. Raises ConfigError."""
        self._config = plan.config
        self._fingerprint = plan.fingerprint()
        self._has_ranks = plan.has_given_ranks
        self._in_order = plan.source.in_order
        # (epoch, samples of it that were delivered, over all ranks); before any batch, where the first one begins.
        self._here = (0, 0)
        self._next = (0, 0)  # where the next iteration begins
        self._asked: int | None = None  # its epoch, if `set_epoch` has said it
        self._iteration = 0
        self._next_call = NextCall()
        self._has_noted_shards = False
        self._bad_samples = BadSamples(plan.noted_errors, plan.source)
        self._sources = SourceAccounts(plan, self._bad_samples)
        self._empty_batches = EmptyBatches(plan.config, plan.schedule)
        self._executors = ExecutorLifecycle(plan, clock)
        self._metrics = open_metrics(plan, self._executors.settings.tuning) if has_metrics else None
        if self._metrics is not None:
            self._executors.metrics = self._metrics
            self._metrics.attach(self)

    # ---------------------------------------------------------------------------------------------------- iterating

    def __iter__(self) -> EpochIterator:
        """One epoch: the rest of a resumed one, else the next one; its `len` is what is left. Ends an earlier iteration.

        The first `next()` takes the epoch: an iterator that is never used takes none.
        """
        self._executors.lifetime.check_open()
        self._take_ranks()
        if self._executors.steps is not None:
            self._executors.steps.on_epoch()
        self._iteration += 1
        self._next = self._or_next_epoch(*self._next)  # of what is left there may be no batch for each rank
        next_of = partial(self._next_of, self._iteration)
        return EpochIterator(self._next_call, next_of, self._num_to_come, self._empty_batches.check_length)

    def __len__(self) -> int:
        """The number of batches of a whole epoch on this rank, also in a resumed one; if batches are planned by
        lengths, of the current epoch. Raises TypeError where it is not known before the end: for an iterable without
        `length`, and with `filter: {on_empty_batch: skip}`."""
        self._take_ranks()
        self._empty_batches.check_length()
        return self._plan.schedule.of_epoch(self._epoch_to_come()).num_batches()

    def start(self) -> None:
        """Start to prefetch before the first `next()`. Idempotent."""
        self._executors.lifetime.check_open()
        self._take_ranks()
        if not self._is_over(self._next[0]):
            self._executors.at(self._next).start()

    @property
    def _plan(self) -> ExecutionPlan:
        return self._executors.plan  # another one, once worker processes have taken over

    @property
    def _stream(self) -> Stream | None:
        return self._executors.plan.compiled.context.stream

    def _take_ranks(self) -> None:
        """Take rank and world size, unless they were given; later check that they are the same, and that no rank leaves out
        other shards. Raises ConfigError, SourceError."""
        self._take_ranks_now()
        if not self._has_noted_shards:
            self._has_noted_shards = True
            check_same_shards(self._plan)
            if self._plan.schedule.rank == 0:  # all ranks have found them
                self._bad_samples.note_shards()

    def _take_ranks_now(self) -> None:
        if self._plan.has_given_ranks:
            return
        now, mine = ranks_now(), (self._plan.schedule.rank, self._plan.schedule.world_size)
        if now != mine:
            if self._has_ranks:
                raise other_ranks(mine, now)
            self._executors.plan = self._plan.of_rank(*now)
            if self._metrics is not None:
                self._metrics.loader.rank = now[0]
        self._has_ranks = True

    def _is_over(self, epoch: int) -> bool:
        last = self._plan.config.order.epochs
        return last is not None and epoch >= last

    def _num_to_come(self) -> int:
        """The number of batches of the epoch that comes next."""
        epoch, position = self._next
        return 0 if self._is_over(epoch) else self._plan.schedule.num_to_come(epoch, position)

    def _next_of(self, iteration: int, num_left: int | None) -> tuple[Any, int]:
        """The next batch for iterator number `iteration`, which has `num_left` batches left (None if it has not begun),
        and how many are left then."""
        self._executors.lifetime.check_open()
        steps = self._executors.steps
        if steps is not None:
            steps.on_request()
        try:
            if num_left != 0 and iteration != self._iteration:
                raise ClosedError("this iterator was ended by a newer one, or by load_state_dict")
            if num_left is None:
                num_left = self._num_to_come()
                if num_left:
                    self._here = self._next
                    self._next, self._asked = (self.epoch + 1, 0), None
            if num_left == 0:
                raise StopIteration
            batch, num_left = self._next_that_has_samples(num_left)
        except BaseException:
            if steps is not None:
                steps.on_end()
            raise
        if steps is not None:  # a GPU's memory may be short, and costs nothing to drop
            steps.on_batch(batch if self._stream is None else ())
        return batch, num_left

    def _next_that_has_samples(self, num_left: int) -> tuple[Any, int]:
        """The next of the epoch's `num_left` batches that is not empty, and how many are left then. Raises
        StopIteration if the epoch has no other."""
        (epoch, begin), num_empty = self._here, 0
        while num_empty < num_left:
            delivery, batch = self._deliver()
            if delivery.is_end:
                break
            if not delivery.is_empty:
                return batch, num_left - num_empty - 1
            num_empty += 1
        if begin == 0:
            self._empty_batches.fail(epoch, num_empty)
        raise StopIteration

    def _deliver(self) -> tuple[Delivery, Any]:
        """The executor's next delivery, and its batch as the loop gets it, if it is not empty. An error stops the
        executor."""
        executors, (epoch, position) = self._executors, self._here
        executor, stream = executors.at(self._here, is_awaited=True), self._stream
        try:
            asked_s = time.perf_counter()
            delivery, batch = executor.next(), None
            self._bad_samples.note(delivery, executors.run)
            if delivery.error is not None:
                raise delivery.error
            if not delivery.is_empty:
                if stream is not None:
                    stream.hand_over(delivery.result, asked_s)
                batch = self._output(delivery.result)
            elif not delivery.is_end:
                self._empty_batches.warn(epoch, position)
        except BaseException as error:  # after Ctrl-C, too, a stage that hangs is not waited for
            hangs = not isinstance(error, Exception) or isinstance(error, (StallTimeout, WorkerDiedError))
            executors.stop(join_s=1.0 if hangs else 10.0)
            raise
        if delivery.is_end:
            self._here = epoch, self._plan.schedule.of_epoch(epoch).num_samples
            return delivery, batch
        self._sources.passed(executors.run, epoch, position, delivery.end)
        self._here = epoch, delivery.end
        if self._in_order is not None:
            self._in_order.saved = delivery.source_state
        executors.delivered(self._here, batch)
        return delivery, batch

    def _output(self, batch: dict[str, Any]) -> Any:
        """The batch as a dict, or as a tuple of the fields of `output`."""
        output = self._executors.plan.config.output
        if output is None:
            return batch
        if missing := [name for name in output if name not in batch]:
            raise ConfigError(f"output names the field {missing[0]!r}, but this batch has {', '.join(batch)}")
        return tuple(batch[name] for name in output)

    # -------------------------------------------------------------------------------------------------- where the loop is

    @property
    def epoch(self) -> int:
        """The epoch of the last batch, or, before any batch, of the first one."""
        return self._here[0]

    @property
    def classes(self) -> list[str] | None:
        """The names of the classes, by number, if the source knows them."""
        return self._plan.source.classes

    @property
    def sources(self) -> list[str] | None:
        """The names of mixed sources, by the numbers in a batch's `__source__`; None for a single source."""
        return self._plan.config.source_names

    @property
    def num_samples(self) -> int:
        """The number of samples of an epoch, over all ranks; with `pack`, of sequences. With `pack`, or mixed by
        tokens, it is the current epoch's."""
        return self._plan.num_samples(self._epoch_to_come())

    def _epoch_to_come(self) -> int:
        """The epoch that `set_epoch` has asked for, or else the epoch of the next batch."""
        return self._or_next_epoch(*self._here)[0] if self._asked is None else self._asked

    @property
    def config(self) -> PipelineConfig:
        """The description this loader was built from."""
        return self._config

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration epoch `epoch`. If it would be that epoch anyway, its position and prefetched batches
        are kept."""
        self._executors.lifetime.check_open()
        if isinstance(epoch, bool):
            raise TypeError("an epoch is a whole number, not a truth value")
        epoch = operator.index(epoch)
        if epoch < 0:
            raise ValueError(f"epochs count from 0, not {epoch}")
        if epoch != self._next[0]:
            self._next = (epoch, 0)
        self._asked = epoch
        if self._iteration == 0:
            self._here = self._next

    def state_dict(self) -> dict[str, Any]:
        """The position of the loop as JSON values; takes microseconds, after any batch. Batches read ahead do not count.
        After an epoch's last batch it is the beginning of the next epoch. An iterable's own state is in `source`, as it is."""
        here = self._or_next_epoch(*self._here)
        if here[1]:
            self._empty_batches.note_state(sys._getframe(1))
        own = None if self._in_order is None else self._in_order.state_at(*here)
        return State(*here, self._plan.config.order.seed, self._fingerprint, own).to_dict()

    def load_state_dict(self, state: Mapping[str, Any], *, accept: Collection[str] = ()) -> None:
        """Continue exactly behind the batch after which `state` was taken, also with another number of ranks or workers; after
        the last one of an epoch that is the next epoch. Raises StateError if it belongs to another data set or pipeline.

        `accept`: what may differ, by the names in that error ("seed", "mix", "stages", ...). The loader then continues
        at that position of its own order, with a warning: some samples of the epoch may come twice or not at all."""
        self._executors.lifetime.check_open()
        given = State.from_dict(dict(state) if isinstance(state, Mapping) else state)
        restored = with_later_changes(given, self._fingerprint, self._plan.order.positions_before)
        seed, schedule = self._plan.config.order.seed, self._plan.schedule
        restored.check(seed=seed, fingerprint=self._fingerprint, num_samples=schedule.samples_in, accept=accept)
        self._iteration, self._asked = self._iteration + 1, None
        self._here = self._next = here = self._or_next_epoch(restored.epoch, restored.position)
        if self._in_order is not None:
            self._executors.stop()  # the next one begins with the state
            self._in_order.resume(*here, restored.source)

    def _or_next_epoch(self, epoch: int, position: int) -> tuple[int, int]:
        """(epoch, position), or the beginning of the next epoch if no batch comes behind it."""
        is_over = position and not self._plan.schedule.of_epoch(epoch).num_batches(position)
        return (epoch + 1, 0) if is_over else (epoch, position)

    def resize(
        self,
        stage: str | None = None,
        *,
        workers: int | None = None,
        batches: int | None = None,
        memory: int | str | None = None,
    ) -> None:
        """Set the number of workers of the pool that runs `stage`, the number of `batches` read ahead, or their `memory`
        (bytes, or "2GiB"), while the loader runs. From any thread.

        Nothing is dropped: surplus workers become idle after their chunk, and surplus batches are delivered first. Raises
        ConfigError for an unknown stage, for memory that holds not even one batch, and where the system has no more threads;
        nothing is changed then.
        """
        self._executors.lifetime.check_open()
        self._executors.settings.set(stage, workers, batches, memory)

    def _rest_from(self, number: int) -> Iterator[Any]:
        """The next epoch without the first `number` batches, which are not read."""
        self._empty_batches.check_number(number)
        self._take_ranks()
        epoch = self._next[0]
        self._next = (epoch, self._plan.schedule.of_epoch(epoch).position_after(0, number))
        return iter(self)

    def as_iterable_dataset(self) -> BatchesDataset:
        """A torch IterableDataset of these batches, for `DataLoader(dataset, batch_size=None, num_workers=0)`."""
        return BatchesDataset(self)

    def as_node(self) -> LoaderNode:
        """A node of torchdata. `torchdata.nodes.Loader(node)` resumes exactly from its state. Raises MissingExtraError."""
        try:
            from loaderkit.integrations.torchdata import LoaderNode  # an extra
        except ModuleNotFoundError as error:
            raise MissingExtraError(f"as_node needs the package torchdata ({error}): pip install torchdata") from error
        return LoaderNode(self)

    # ----------------------------------------------------------------------------------------------------- watching

    def stats(self, since: Stats | None = None) -> Stats:
        """The counters up to now, with open intervals; with `since`, their rise after that moment."""
        now = Stats.of(self._sources.added_to(self._executors.stats(), *self._here))
        now.bad_shards = tuple(map(str, self._plan.source.bad_shards))
        return now if since is None else now.since(since)

    def series(self) -> list[dict[str, Any]]:
        """The counters over time since loading started, in at most 512 points: JSON values, described in docs/reference.md.
        A run after an error starts a new series, as it starts new counters. Empty with `executor: inline`."""
        return self._executors.series()

    def profile(self, *, import_s: float | None = None, trace: bool = False) -> Profile:
        """A report on the loop that runs in its `with` block: why it waits, and what to change. See docs/guide/profiling.md.

        with loader.profile() as report:
            for batch in loader:
                ...
        print(report)

        `import_s`: seconds that the program took for its imports, shown with the first batch.
        `trace`: record what every worker did with every chunk, for `report.save_trace(path)`.
        """
        from loaderkit.profile.recording import Profile  # 0.07 s

        return Profile(self.as_subject(), import_s, trace=trace)

    def as_subject(self) -> ProfiledLoader:
        """The parts of this loader that a report reads. Raises ConfigError, as the rank is one of them."""
        from loaderkit.profile.build import pipeline_subject  # as above
        from loaderkit.profile.recording import ProfiledLoader

        self._take_ranks()
        plan, executors = self._plan, self._executors
        return ProfiledLoader(
            subject=lambda: pipeline_subject(plan, executors.settings.written_to(plan.config)),
            stats=self.stats,
            series=self.series,
            watch=executors.watch,
            record=executors.record,
            recorded=executors.recorded,
        )

    def to_yaml(self) -> str:
        """The config with the current settings of the tuner and `resize`."""
        return Pipeline.of(self._executors.settings.written_to(self._plan.config)).to_yaml()

    def __repr__(self) -> str:
        schedule = self._plan.schedule.of_epoch(self.epoch)
        ranks = f"on rank {schedule.rank} of {schedule.world_size}" if self._has_ranks else "rank not taken yet"
        num_batches = self._empty_batches.say(schedule) if self._has_ranks else ""
        samples = f"{self._plan.num_samples(self.epoch) if schedule.knows_length else 'any number of'} samples"
        batches = f"{num_batches}batches of {self.batch_size or f'up to {self._plan.config.batch.tokens} tokens'}"
        return f"<Loader {self._plan.config.name!r}: {samples}, {batches}, {ranks}, epoch {self.epoch}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Loader cannot be pickled or copied, as its threads and memory belong to one process: send the Pipeline, or "
            "the path of its YAML file, build there, and continue with load_state_dict(loader.state_dict())"
        )

    # ------------------------------------------------------------------------------------------------------ closing

    def close(self) -> None:
        """Stop all threads and free memory and descriptors. Idempotent; delivered batches stay valid."""
        # Otherwise Ctrl-C has interrupted an earlier close.
        if self._executors.lifetime.is_closed and self._executors.executor is None and self._metrics is None:
            return
        self._executors.lifetime.is_closed = True
        try:
            self._executors.stop()
        finally:  # also after Ctrl-C
            self._bad_samples.close()
            self._plan.close()
            if self._stream is not None:
                self._stream.close()
            if self._metrics is not None:
                self._metrics.close()
                self._metrics = None

    def __enter__(self) -> Loader:
        self._executors.lifetime.check_open()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
