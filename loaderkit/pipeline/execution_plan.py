"""`ExecutionPlan`, a pipeline that is ready to run, and `compile_pipeline`, which makes it from a config.

config ──compile_pipeline──> ExecutionPlan ──make_executor──> Executor
                                  └──pickle──> a worker process, which makes its own engine from it
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from loaderkit._internal.system.cgroups import num_cpus
from loaderkit.connectors.base import Connector
from loaderkit.engine.work import Stage
from loaderkit.errors import ConfigError, printable
from loaderkit.pipeline.compiler import CompiledStages, compile_stages
from loaderkit.pipeline.config.model import PipelineConfig
from loaderkit.pipeline.config.registry import SOURCES, STAGES
from loaderkit.pipeline.executor_rule import with_executor
from loaderkit.pipeline.inline_rule import why_inline
from loaderkit.pipeline.opened import OpenedPipeline
from loaderkit.pipeline.orders import order_of
from loaderkit.pipeline.ranks.share_check import check_shared, is_shared
from loaderkit.ranks.place import Place, given_place, ranks_now
from loaderkit.sampling.schedule import BatchSampler
from loaderkit.sampling.shard import Shard
from loaderkit.sources.bad_shards import check_number
from loaderkit.sources.base import OwnedConnector, Source
from loaderkit.sources.mixture import open_mixture
from loaderkit.stages.base import StageConfig
from loaderkit.stages.slowed import Slowdown

logger = logging.getLogger("loaderkit")


@dataclass(frozen=True)
class ExecutionPlan(OpenedPipeline):
    """A pipeline to run: an opened one, with its stages.

    It is plain data: a worker process makes its engine from the pickle, without listing the source again.
    """

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}  # without the compiled stages

    @property
    def may_move(self) -> bool:
        """True if worker processes may take over from threads, for user code that is not declared; see
        `executors/process_move.py`. An iterable may not move, as each process would take all of it."""
        is_auto = self.config.prefetch.executor == "auto" and self.executor == "thread"
        may = is_auto and not self.is_shared and not self.config.kind.is_stream
        return may and any(stage.lock is not None for stage in self.compiled.stages)

    @cached_property
    def compiled(self) -> CompiledStages:
        """The stages, ready to run in this process. Raises ConfigError."""
        return compile_stages(self)

    @cached_property
    def for_workers(self) -> ExecutionPlan:
        """The part that worker processes run: all of it, or the stages before a `transfer` to CUDA."""
        config = self.config
        if self.compiled.device is None:
            config = replace(config, stages=tuple(map(_on_cpu, config.stages)))
        else:
            config = self._before_transfer()
        return replace(self, config=config, shard=Shard(of=config.prefetch.first_processes))

    @cached_property
    def for_reader(self) -> ExecutionPlan:
        """The part that the rank that reads for others runs before it passes batches on."""
        place = Place(self.place.rank, self.place.world_size)
        if (device := self.compiled.device) is None:
            return replace(self, place=place)
        return replace(self, config=self._before_transfer(), place=place, pinned_for=device)

    def _before_transfer(self) -> PipelineConfig:
        border = [stage.kind for stage in self.config.stages].index("transfer")
        # `output` may name fields of later stages; the loader checks it on every batch.
        return replace(self.config, stages=self.config.stages[:border], output=None)

    @property
    def trainer_stages(self) -> list[Stage]:
        """The stages that stay in the trainer's process with `executor: process`: the stages from a `transfer` to CUDA on."""
        stages = self.compiled.stages
        return [] if self.compiled.device is None else stages[[stage.kind for stage in stages].index("transfer") :]

    def of_rank(self, rank: int, world_size: int) -> ExecutionPlan:
        """This plan for another rank; its stages are compiled anew. Raises ConfigError."""
        schedule = replace(self.schedule, rank=rank, world_size=world_size)
        return replace(self, schedule=_checked_schedule(schedule, self.config))


def compile_pipeline(
    config: PipelineConfig,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    place: Place | None = None,
    connectors: Mapping[str, Connector] | None = None,
    slowdown: Slowdown | None = None,
) -> ExecutionPlan:
    """Open and list the source, and compile the stages; no thread is started. `slowdown` slows one stage down. Without
    `rank` and `world_size`, or a `place`, the plan is for the present rank and world size, as a guess. Raises
    LoaderkitError."""
    kind = config.kind
    if not kind.has_samples:
        raise ConfigError(
            f"{config.name}: its source is a checkpoint, which has tensors and no samples: iterate over loaderkit.build(), or "
            "use loaderkit run, check, explain or restore"
        )
    place = place or given_place(rank, world_size)
    has_given_ranks = place is not None
    if place is None:
        try:
            place = Place(*ranks_now())
        except ConfigError:  # a process group may be initialised before they are needed
            place = Place(0, 1)
    config = with_executor(config)
    check_shared(config, place)
    given, errors = connectors or {}, config.errors
    with ExitStack() as opened:  # closed if anything below raises
        begin_s = time.perf_counter()
        parts: tuple[OwnedConnector, ...] = ()
        connector, owns_connector = None, False
        source: Source
        if not (members := config.members):
            source, (connector, owns_connector) = kind.open_with(config.source, given, opened, errors.on_bad_shard)
        else:
            source, parts = open_mixture(
                [(member.name, SOURCES[member.kind], member.args) for member in members],
                given,
                opened,
                share_labels=all(STAGES[stage.kind].is_contained for one in members for stage in one.stages),
                on_bad_shard=errors.on_bad_shard,
            )
        check_number(source.bad_shards, errors.max_bad_shards)
        for shard in source.bad_shards:
            logger.warning("bad shard (skip): %s", printable(str(shard)))
        list_s = time.perf_counter() - begin_s
        order = order_of(config, source)
        sampler = BatchSampler(
            order.num_positions(0),
            place.rank,
            place.world_size,
            config.batch_size or 1,
            config.batch.drop_last,
            wraps=not kind.is_stream,
            sizes=order if order.epochs_differ else None,
            keeps_neighbours=order.keeps_neighbours,
        )
        schedule = _checked_schedule(sampler, config)
        inline_reason = None if is_shared(config, place) else why_inline(config, source, connector)
        plan = ExecutionPlan(
            config,
            source,
            connector,
            order,
            schedule,
            1 if inline_reason is not None else _num_workers(config),
            slowdown,
            owns_connector,
            list_s=list_s - source.index_s,
            index_s=source.index_s,
            inline_reason=inline_reason,
            has_given_ranks=has_given_ranks,
            part_connectors=parts,
            place=place,
        )
        _ = plan.compiled  # raises here if a stage is wrong
        for stage in config.all_stages:
            STAGES[stage.kind].look_at_batch(stage, config.batch)
        opened.pop_all()
    return plan


def _checked_schedule(schedule: BatchSampler, config: PipelineConfig) -> BatchSampler:
    """The schedule, if an epoch of it has a batch, and as many on every rank. Raises ConfigError."""
    if schedule.num_batches() == 0:
        lack = f"do not fill one batch of {schedule.batch_size} on" if schedule.drop_last else "are not one for"
        noun = "samples"
        if config.batch_size is None:
            noun, lack = f"batches of {config.batch.tokens} tokens", "are not one for"
        raise ConfigError(
            f"an epoch has no batch at all: {schedule.num_samples} {noun} {lack} each of {schedule.world_size} ranks"
            + (", and stages.batch.drop_last is true" if schedule.drop_last else "")
        )
    if schedule.world_size > 1 and config.skips_empty_batches:
        raise ConfigError(
            f"{config.filters}: `on_empty_batch: skip` is for one rank, and there are {schedule.world_size}: a rank that skips "
            "a batch makes fewer steps than the others, which would wait for it for ever. Leave it out: an empty batch is then "
            "an error"
        )
    return schedule


def _num_workers(config: PipelineConfig) -> int:
    """The number of threads at the start."""
    prefetch = config.prefetch
    if prefetch.executor == "inline":
        return 1
    if prefetch.concurrency != "auto":
        return prefetch.concurrency
    return prefetch.first_processes * max(1, int(prefetch.ray.num_cpus)) if prefetch.executor == "ray" else num_cpus()


def _on_cpu(stage: StageConfig) -> StageConfig:
    """The same stage, with `device: cpu`, so that a worker process looks for no GPU."""
    if STAGES[stage.kind].stream is None:
        return stage
    return replace(stage, args=stage.args.model_copy(update={"device": "cpu"}))
