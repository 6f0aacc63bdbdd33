"""From a recipe (the description and the listed source) to an engine: in this process, or in another one.

A recipe holds data alone, so it can be sent: the process that loads makes its engine from it without listing anything again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from loaderkit._internal.dtypes import Bytes
from loaderkit._internal.units import say_bytes
from loaderkit.connectors.base import Connector, counters_of, traits_of
from loaderkit.connectors.config import StoreArgs
from loaderkit.connectors.file import FileConnector
from loaderkit.connectors.layers.read_ahead import ReadAheadConnector
from loaderkit.connectors.layers.retry import RetryConnector
from loaderkit.engine.base import Engine
from loaderkit.engine.inline import InlineEngine
from loaderkit.engine.metrics.snapshot import StageStats
from loaderkit.engine.metrics.worker_clock import Clock
from loaderkit.engine.pools import plan_pools
from loaderkit.engine.threaded import ThreadEngine
from loaderkit.engine.work import Stage
from loaderkit.errors import SourceError
from loaderkit.pipeline.batch_assembler import BatchAssembler, BatchShape
from loaderkit.pipeline.batch_cursor import BatchCursor
from loaderkit.pipeline.batch_memory import BatchMemory
from loaderkit.pipeline.batch_plan import BatchPlan, specs_of_first
from loaderkit.pipeline.compiler import Compiler
from loaderkit.pipeline.config.model import PipelineConfig, StageConfig
from loaderkit.sampling.schedule import BatchSampler, BlockOrder, GlobalOrder, SamplePermutation, SequentialOrder
from loaderkit.sampling.shard import WHOLE, Shard
from loaderkit.sources.array import ArraySource
from loaderkit.sources.base import Source
from loaderkit.sources.dataset import DatasetArgs, DatasetSource, open_object
from loaderkit.sources.forecast import Forecast
from loaderkit.sources.tar import TarSource
from loaderkit.stages.batch import BatchArgs
from loaderkit.stages.transfer import TransferArgs, TransferStream

if TYPE_CHECKING:
    from loaderkit.stages.slowed import Slowdown

_NUM_AHEAD, _NUM_LEAST = 2048, 64  # samples
_MOST_BATCHES = 64  # that `batches: auto` may come to
# Batches that are made in about 0.2 ms: to wake another thread up, and to pass the GIL to and fro, takes 0.1.
_TINY_BYTES, _FEW_READS = 128 * 1024, 64
_CACHED_SHARE = 0.5  # of the machine's memory: data of that size stays in the page cache


@dataclass(frozen=True)
class Recipe:
    """What an engine is made from."""

    config: PipelineConfig
    source: Source
    connector: Connector | None
    schedule: BatchSampler
    num_workers: int  # threads in all
    stretch: Slowdown | None = None  # a stage that is slowed down, to see what follows
    is_inline: bool = False  # the loop's thread makes the batches


class Assembly:
    """The stages of a recipe, ready to run, and the pools they will run in, for one share of it. Raises ConfigError."""

    def __init__(self, recipe: Recipe, shard: Shard = WHOLE) -> None:
        self._recipe = recipe
        self._shard = shard
        self._ahead = _read_ahead(recipe, shard)
        self._compiler = Compiler(
            recipe.config, recipe.source, self._ahead or recipe.connector, num_workers=recipe.num_workers
        )
        self.stages = self._compiler.stages()
        if recipe.stretch is not None:
            from loaderkit.stages.slowed import stretched  # only the profiler's experiments have one

            self.stages = [stretched(stage, recipe.stretch) for stage in self.stages]
        self.pools = [
            replace(pool, num_workers=shard.num_workers(pool.num_workers))
            for pool in plan_pools(self.stages, recipe.num_workers)
        ]

    @property
    def device(self) -> torch.device | None:
        """Where `transfer` brings batches; None: they stay on the CPU."""
        return self._compiler.device

    @property
    def lane(self) -> TransferStream | None:
        """The stream on which batches are copied, if that is to CUDA."""
        return self._compiler.lane

    @property
    def graph(self) -> list[str]:
        """The operators of the DALI pipeline that stages were compiled to, if they were: one line each."""
        return [] if self._compiler.graph is None else self._compiler.graph.lines()

    @property
    def cropping(self) -> str | None:
        """The stage that says which piece of a JPEG is wanted, if one does."""
        return self._compiler.cropping

    def make_plan(self, allocate: Callable[[int], Bytes] | None = None) -> BatchPlan:
        """The plan of the batches; `allocate` gives memory for slabs."""
        config, source, schedule = self._recipe.config, self._recipe.source, self._recipe.schedule
        shard, compiler, errors = self._shard, self._compiler, config.errors
        batch = config.stage("batch").args
        assert isinstance(batch, BatchArgs)
        shape = BatchShape(
            batch.size,
            batch.pad_value,
            errors.on_bad_sample,
            has_keys=self._names_samples(),
            marks_wrapped=schedule.world_size > 1 and not schedule.drop_last,
        )
        return BatchPlan(
            BatchCursor(
                order_of(config, source),
                schedule,
                num_epochs=config.order.epochs,
                shard=shard,
                on_seek=self._ahead.seek if self._ahead is not None else None,
            ),
            BatchMemory(
                batch.size,
                shard.num_batches(config.prefetch.first_batches),
                shard.num_bytes(config.prefetch.memory),
                shard=shard,
                pinned_for=self.device,
                allocate=allocate,
            ),
            BatchAssembler(source, shape, None if compiler.early_lane is None else compiler.early_lane.run),
            key=source.key,
            find_specs=partial(
                specs_of_first,
                source,
                compiler.run_sample_stages,
                compiler.specs_of,
                num_tries=16 + errors.max_bad_samples,
            ),
            whole_chunks=compiler.graph is not None,
        )

    def _names_samples(self) -> bool:
        """Whether anybody gets to see the keys of a batch: the loop, or a stage that is given whole batches."""
        output = self._recipe.config.output
        return output is None or "__key__" in output or any(stage.scope == "batch" for stage in self.stages)

    def make_engine(self, clock: Clock) -> Engine:
        """An engine that has not begun, of this process."""
        if self._recipe.is_inline:
            return InlineEngine(self.make_plan(), self.stages, self.pools, clock=clock, counters=self._counters())
        return self.make_threads(clock)

    def make_threads(self, clock: Clock, allocate: Callable[[int], Bytes] | None = None) -> ThreadEngine:
        """One of threads; `allocate` gives memory for slabs."""
        prefetch = self._recipe.config.prefetch
        return ThreadEngine(
            self.make_plan(allocate),
            self.stages,
            self.pools,
            timeout_s=prefetch.timeout,
            raises=prefetch.on_timeout == "raise",
            clock=clock,
            counters=self._counters(),
        )

    def _counters(self) -> Callable[[], dict[str, float]] | None:
        """What tells of the store."""
        connector = self._ahead or self._recipe.connector
        return None if connector is None else partial(counters_of, connector)

    def rows(self) -> list[StageStats]:
        """A row of zeros for every stage."""
        workers = {n: pool.num_workers for pool in self.pools for n in pool.stages}
        return [StageStats(stage.name, workers[number], kind=stage.kind) for number, stage in enumerate(self.stages)]

    def described_pools(self) -> list[dict[str, Any]]:
        """Which stages share how many workers, those of all processes together."""
        return [
            {
                "stages": [self.stages[n].name for n in pool.stages],
                "workers": self._shard.of * pool.num_workers,
            }
            for pool in self.pools
        ]


def why_inline(config: PipelineConfig, source: Source, connector: Connector | None) -> str | None:
    """Why batches are made in the loop's thread although `executor: thread` was asked for; None: they are not.

    Only where nobody gave a number of workers, no code but our own runs, and reading is copying from the page cache.
    """
    prefetch = config.prefetch
    is_fixed = prefetch.concurrency != "auto" or any(stage.args.workers != "auto" for stage in config.stages)
    if prefetch.executor != "thread" or is_fixed or prefetch.on_timeout == "raise":
        return None
    store = connector.inner if isinstance(connector, RetryConnector) else connector
    if type(store) is not FileConnector or [stage.kind for stage in config.stages] != ["read", "batch"]:
        return None
    batch = config.stage("batch").args
    assert isinstance(batch, BatchArgs)
    if isinstance(source, ArraySource):
        sample_bytes, data_bytes = source.records.num_bytes, source.file.size
        num_reads = batch.size
    elif isinstance(source, TarSource):
        sample_bytes, data_bytes = source.num_bytes // len(source), source.num_bytes
        num_reads = batch.size * source.num_members // len(source)
    else:
        return None
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if num_reads > _FEW_READS or batch.size * sample_bytes > _TINY_BYTES or data_bytes > _CACHED_SHARE * memory_bytes:
        return None
    return f"a batch of {say_bytes(batch.size * sample_bytes)} takes longer to hand over than to make"


def _read_ahead(recipe: Recipe, shard: Shard) -> ReadAheadConnector | None:
    """What reads a slow store ahead of the stages; None for others, and where no thread may."""
    config, source, connector = recipe.config, recipe.source, recipe.connector
    args = config.source
    if not isinstance(args, StoreArgs) or connector is None or recipe.is_inline:
        return None
    if not traits_of(connector).is_remote:
        return None
    bounds = source.blocks(config.order.block.block) if config.order.shuffle == "block" else None
    num_batches = _MOST_BATCHES if config.prefetch.batches == "auto" else config.prefetch.batches
    forecast = Forecast(
        source, order_of(config, source), recipe.schedule, num_epochs=config.order.epochs, bounds=bounds, shard=shard
    )
    return ReadAheadConnector(
        connector,
        forecast.pieces,
        memory_bytes=shard.num_bytes(args.read_ahead.memory),
        num_requests=shard.num_workers(args.read_ahead.requests),
        # Far enough for the next window of blocks, or for some seconds of small files; never much of the epoch after this.
        num_samples=min(_NUM_AHEAD + 2 * forecast.window, len(source) // recipe.schedule.world_size + _NUM_LEAST),
        slack=256 + 2 * (num_batches + 2) * recipe.schedule.batch_size,
    )


def order_of(config: PipelineConfig, source: Source) -> SamplePermutation:
    """Which sample comes at which position, as described."""
    order = config.order
    if order.shuffle == "global":
        return GlobalOrder(len(source), order.seed)
    if order.shuffle == "block":
        bounds = source.blocks(order.block.block)
        return BlockOrder(bounds, order.seed, window=order.block.window, lanes=order.block.lanes)
    return SequentialOrder()


# ------------------------------------------------------------------------------------------ in another process


def split_recipe(recipe: Recipe, whole: Assembly) -> tuple[Recipe, list[Stage]]:
    """What another process does, and the stages left to this one: those from a `transfer` to CUDA on."""
    config = recipe.config
    if whole.device is None:
        stages = tuple(_on_cpu(stage) for stage in config.stages)
        return replace(recipe, config=replace(config, stages=stages)), []
    described = [stage.kind for stage in config.stages].index("transfer")
    compiled = [stage.kind for stage in whole.stages].index("transfer")  # what DALI does is one stage there
    # `output` may name fields that the late stages make: the loader checks it again on every batch.
    ahead = replace(config, stages=config.stages[:described], output=None)
    return replace(recipe, config=ahead), whole.stages[compiled:]


def _on_cpu(stage: StageConfig) -> StageConfig:
    """The same where no GPU is looked for again."""
    if not isinstance(stage.args, TransferArgs):
        return stage
    return replace(stage, args=stage.args.model_copy(update={"device": "cpu"}))


@dataclass(frozen=True)
class RemoteEngine:
    """Makes the engine in the process that loads; it is pickled, with all it holds.

    A data set that was described by name is made again there, by that name: it may hold open files.
    """

    recipe: Recipe
    num_items: int | None = None  # of a data set to be made again, as it was here

    @classmethod
    def of(cls, recipe: Recipe) -> RemoteEngine:
        args = recipe.config.source
        if isinstance(args, DatasetArgs) and isinstance(args.object, str):
            return cls(replace(recipe, source=None), len(recipe.source))  # type: ignore[arg-type]
        return cls(recipe)

    def __call__(self, allocate: Callable[[int], Bytes], shard: Shard) -> ThreadEngine:
        recipe = self.recipe
        if self.num_items is not None:
            args = recipe.config.source
            assert isinstance(args, DatasetArgs)
            source = DatasetSource(open_object(args), args)
            if len(source) != self.num_items:
                raise SourceError(
                    f"source.object: {args.object!r} gave {self.num_items} items in the trainer's process and {len(source)} "
                    "in the one that loads, so batches would not be those of the epoch: make it give the same every time"
                )
            recipe = replace(recipe, source=source)
        return Assembly(recipe, shard).make_threads(time.perf_counter, allocate)
