"""`ExecutionPlan`, a pipeline that is ready to run, and `compile_pipeline`, which makes it from a config.

config ──compile_pipeline──> ExecutionPlan ──make_executor──> Executor
                                  └──pickle──> a worker process, which makes its own engine from it
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from hashlib import blake2b
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from loaderkit._internal.system.cgroups import num_cpus
from loaderkit.connectors.base import Connector
from loaderkit.engine.work import Stage
from loaderkit.errors import ConfigError
from loaderkit.pipeline.batches.packing import mixture_lengths, packed_order
from loaderkit.pipeline.batches.token_batches import token_batches
from loaderkit.pipeline.compiler import CompiledStages, compile_stages
from loaderkit.pipeline.config.mixture import MixtureArgs
from loaderkit.pipeline.config.model import ErrorsArgs, PipelineConfig
from loaderkit.pipeline.config.registry import SOURCES, STAGES
from loaderkit.pipeline.executor_rule import with_executor
from loaderkit.pipeline.inline_rule import why_inline
from loaderkit.pipeline.ranks.share_check import check_shared, is_shared
from loaderkit.ranks.place import Place, given_place, ranks_now
from loaderkit.sampling.mix_rules import MixedSource
from loaderkit.sampling.mixture import MixedOrder, Mixture
from loaderkit.sampling.packing import PackedOrder
from loaderkit.sampling.random import key_of
from loaderkit.sampling.schedule import (
    BatchSampler,
    BlockOrder,
    EpochSizes,
    GlobalOrder,
    SamplePermutation,
    SequentialOrder,
)
from loaderkit.sampling.shard import WHOLE, Shard
from loaderkit.sampling.token_batches import TokenBatches
from loaderkit.sampling.token_mixture import TokenMixture
from loaderkit.sources.base import OwnedConnector, Source, shortened
from loaderkit.sources.mixture import MixtureSource, open_mixture
from loaderkit.stages.base import StageConfig
from loaderkit.stages.slowed import Slowdown


@dataclass(frozen=True)
class ExecutionPlan:
    """A pipeline to run: the config, its listed source, and the connector to it.

    It is plain data: a worker process makes its engine from the pickle, without listing the source again.
    """

    config: PipelineConfig
    source: Source
    connector: Connector | None  # None: samples are Python objects
    schedule: BatchSampler
    num_workers: int  # threads of all processes, at the start
    slowdown: Slowdown | None = None
    owns_connector: bool = False  # False: the caller gave the connector
    list_s: float = 0.0  # the time to list the source, without
    index_s: float = 0.0  # the time to read or build the indexes of archives
    inline_reason: str | None = None  # why a rule chose inline, if it did
    moved_reason: str | None = None  # why processes have taken over from threads, if they have
    shard: Shard = WHOLE  # of this worker process
    packing: PackedOrder | None = None  # the sequences that `pack` makes of the samples
    batching: TokenBatches | None = None  # the batches, if `tokens` make their size; these are dealt out then
    has_given_ranks: bool = True  # False: the schedule's rank and world size are a guess, see `Loader`
    mixture: Mixture | TokenMixture | None = None  # the course of an epoch of several sources
    part_connectors: tuple[OwnedConnector, ...] = ()  # those of several sources
    place: Place = field(default_factory=lambda: Place(0, 1))  # with the ranks that need the same batches
    pinned_for: torch.device | None = None  # the GPU to which `transfer` brings batches elsewhere

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}  # without the compiled stages

    @property
    def connectors(self) -> tuple[Connector | None, ...]:
        """The connector of each source."""
        return (self.connector,) if self.mixture is None else tuple(one.connector for one in self.part_connectors)

    @property
    def executor(self) -> Literal["inline", "thread", "process", "ray"]:
        """What makes the batches."""
        if self.inline_reason is not None:
            return "inline"
        executor = self.config.prefetch.executor
        return "thread" if executor == "auto" else executor

    @property
    def is_remote(self) -> bool:
        """True if other processes make the batches, here or on other machines."""
        return self.executor in ("process", "ray")

    @property
    def may_move(self) -> bool:
        """True if worker processes may take over from threads, for user code that is not declared; see `process_move.py`. Of an
        iterable each process would take all."""
        is_auto = self.config.prefetch.executor == "auto" and self.executor == "thread"
        may = is_auto and not self.is_shared and not self.config.kind.is_stream
        return may and any(stage.lock is not None for stage in self.compiled.stages)

    @property
    def is_shared(self) -> bool:
        """True if one rank reads for several: then only it runs the stages before a `transfer` to CUDA."""
        return is_shared(self.config, self.place)

    @property
    def noted_errors(self) -> ErrorsArgs:
        """What to do with bad samples here: of several ranks that share a reader, only that one writes the quarantine file."""
        errors = self.config.errors
        return errors.model_copy(update={"quarantine": None}) if self.is_shared and self.place.number else errors

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
        """The stages that stay in the trainer's process with `executor: process`: those from a `transfer` to CUDA on."""
        stages = self.compiled.stages
        return [] if self.compiled.device is None else stages[[stage.kind for stage in stages].index("transfer") :]

    def positions_before(self, epoch: int, position: int) -> int:
        """The first position of an epoch's samples that what comes before `position` does not depend on; planned by lengths,
        samples are in windows."""
        planned = self.packing if self.batching is None else self.batching.order
        return position if planned is None else planned.positions_before(epoch, position)

    def order(self) -> SamplePermutation:
        """The order of what the schedule deals out: samples, sequences of `pack`, or whole batches; for one thread."""
        is_planned = self.packing is not None or self.batching is not None
        return SequentialOrder() if is_planned else _order_of(self.config, self.source, self.mixture)

    def num_samples(self, epoch: int = 0) -> int:
        """The samples of an epoch, with `pack` its sequences. Raises TypeError if that is not known."""
        self.schedule.check_length()
        return self.schedule.of_epoch(epoch).num_samples if self.batching is None else self.batching.num_samples(epoch)

    def fingerprint(self) -> dict[str, str]:
        """The values that must be equal for a saved state to mean the same samples; not the URL or settings of speed."""
        config, source = self.config, self.source
        named = config.source.model_dump(mode="python", include={"fields", "label"}, exclude_none=True)
        size = f" of {len(source)} samples" if self.schedule.wraps else ""
        values = {
            **(self._fingerprint_of_mixture() if self.mixture is not None else {}),
            **({"data": f"{config.source_kind}{size}, digest {source.fingerprint()}"} if self.mixture is None else {}),
            "order": config.order.shuffle,
            "stages": " > ".join(stage.name for stage in config.stages if stage.kind != "transfer"),
        }
        if config.order.shuffle == "block":
            block = config.order.block
            values["order"] = f"block of {block.block} bytes, window {block.window}, lanes {block.lanes}"
        planned = self.packing if self.batching is None else self.batching.order
        if isinstance(self.mixture, TokenMixture):
            values["lengths"] = self.mixture.digest()
        elif planned is not None:
            values["lengths"] = planned.digest()
        if self.batching is not None:
            args = config.batch
            form = args.ragged.get(args.field, "pad")
            values["batches"] = (
                f"{args.tokens} tokens of {args.field!r}, {form}, window {args.window}, cost {args.cost}"
            )
        if source.classes is not None:
            values["classes"] = shortened(source.classes)
        if named:
            values["fields"] = json.dumps(named, sort_keys=True, default=list)
        for stage in config.stages:
            if stage.kind not in ("read", "batch", "transfer"):
                values[f"stages.{stage.name}"] = _said(stage)
        return values

    def _fingerprint_of_mixture(self) -> dict[str, str]:
        """Short: a state with 20 sources is to stay below 1 KiB."""
        assert self.config.mixture is not None
        assert isinstance(self.source, MixtureSource)
        sources = []
        for member, part in zip(self.config.mixture.members, self.source.parts, strict=True):
            named = member.args.model_dump(mode="python", include={"fields", "label"}, exclude_none=True)
            passes = self.config.mixture.num_passes(member)
            said = (
                member.kind,
                part.fingerprint(),
                part.classes,
                sorted(named.items()),
                passes,
                *map(_said, member.stages),
            )
            digest = blake2b(repr(said).encode("utf-8", "surrogateescape"), digest_size=4).hexdigest()
            sources.append(f"{member.name}:{len(part)}:{digest}")
        assert self.mixture is not None
        return {"sources": " ".join(sources), "mix": self.mixture.fingerprint()}

    def of_rank(self, rank: int, world_size: int) -> ExecutionPlan:
        """This plan for another rank; its stages are compiled anew. Raises ConfigError."""
        schedule = replace(self.schedule, rank=rank, world_size=world_size)
        return replace(self, schedule=_checked_schedule(schedule, self.config))

    def close(self) -> None:
        """Close the connector, unless the caller gave it."""
        for connector, is_owned in (OwnedConnector(self.connector, self.owns_connector), *self.part_connectors):
            if connector is not None and is_owned:
                connector.close()


def _order_of(config: PipelineConfig, source: Source, mixture: Mixture | TokenMixture | None) -> SamplePermutation:
    """The order of a source's samples; for one thread."""
    if mixture is None:
        return _order_of_one(config, source, config.order.seed)
    assert isinstance(source, MixtureSource)
    return mixture if isinstance(mixture, TokenMixture) else MixedOrder(copy(mixture), _orders_of(config, source))


def _orders_of(config: PipelineConfig, source: MixtureSource) -> list[SamplePermutation]:
    return [_order_of_one(config, part, key_of("source", config.order.seed, part.name)) for part in source.parts]


def _order_of_one(config: PipelineConfig, source: Source, seed: int) -> SamplePermutation:
    order = config.order
    if order.shuffle == "global":
        return GlobalOrder(len(source), seed)
    if order.shuffle == "block":
        bounds = source.blocks(order.block.block)
        return BlockOrder(bounds, seed, window=order.block.window, lanes=order.block.lanes)
    return SequentialOrder()


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
    `rank` and `world_size`, or a `place`, the plan is for those of now, as a guess. Raises LoaderkitError."""
    kind = config.kind
    if kind.gives == "tensors":
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
    given = connectors or {}
    with ExitStack() as opened:  # closed if anything below raises
        begin_s = time.perf_counter()
        mixture: Mixture | TokenMixture | None = None
        parts: tuple[OwnedConnector, ...] = ()
        connector, owns_connector = None, False
        lengths: NDArray[np.int64] | None = None
        sizes: EpochSizes | None = None
        if config.mixture is None:
            source, (connector, owns_connector) = kind.open_with(config.source, given, opened)
            num_samples = len(source)
        else:
            members = config.mixture.members
            source, parts = open_mixture(
                [(member.name, SOURCES[member.kind], member.args) for member in members],
                given,
                opened,
                share_labels=not any(STAGES[stage.kind].runs_user_code for one in members for stage in one.stages),
            )
            if config.mixture.mix.by == "tokens":
                lengths = mixture_lengths(config, source)
            mixture = _mixture_of(config, config.mixture, source, lengths)
            sizes = mixture if isinstance(mixture, TokenMixture) else None
            num_samples = mixture.num_samples if isinstance(mixture, Mixture) else mixture.num_samples(0)
        list_s = time.perf_counter() - begin_s
        order = _order_of(config, source, mixture)
        packing = packed_order(config, source, order, num_samples, lengths=lengths, sizes=sizes)
        batching = token_batches(config, source, order, num_samples, lengths=lengths, sizes=sizes)
        planned = packing if batching is None else batching.order
        num_samples = num_samples if planned is None else planned.num_samples(0)
        sampler = BatchSampler(
            num_samples,
            place.rank,
            place.world_size,
            config.batch_size or 1,
            config.batch.drop_last,
            wraps=not kind.is_stream,
            sizes=planned or sizes,
        )
        schedule = _checked_schedule(sampler, config)
        inline_reason = None if is_shared(config, place) else why_inline(config, source, connector)
        plan = ExecutionPlan(
            config,
            source,
            connector,
            schedule,
            1 if inline_reason is not None else _num_workers(config),
            slowdown,
            owns_connector,
            list_s=list_s - source.index_s,
            index_s=source.index_s,
            inline_reason=inline_reason,
            packing=packing,
            batching=batching,
            has_given_ranks=has_given_ranks,
            mixture=mixture,
            part_connectors=parts,
            place=place,
        )
        _ = plan.compiled  # raises here if a stage is wrong
        opened.pop_all()
    return plan


def _mixture_of(
    config: PipelineConfig, args: MixtureArgs, source: MixtureSource, lengths: NDArray[np.int64] | None
) -> Mixture | TokenMixture:
    """The course of an epoch; `lengths` are those of all samples, if weights are shares of tokens. Raises ConfigError."""
    sources = [
        MixedSource(member.name, len(part), args.num_passes(member))
        for member, part in zip(args.members, source.parts, strict=True)
    ]
    if lengths is None:
        return Mixture(sources, args.changes, args.mix.stop)
    return TokenMixture(sources, args.changes, args.mix.stop, orders=_orders_of(config, source), lengths=lengths)


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


def _said(stage: StageConfig) -> str:
    """What of a stage changes bytes."""
    args = {
        name: value
        for name, value in stage.args
        if name
        not in (
            "workers",
            "name",
            "timeout",
            "thread_safe",
            "max_pixels",
            "formats",
            "device",
            "regions",
            "on_gpu_error",
            "on_empty_batch",
        )
        and value != type(stage.args).model_fields[name].default
    }
    return f"{stage.kind} {json.dumps(args, sort_keys=True, default=_name_of)}"


def _on_cpu(stage: StageConfig) -> StageConfig:
    """The same stage, with `device: cpu`, so that a worker process looks for no GPU."""
    if STAGES[stage.kind].stream is None:
        return stage
    return replace(stage, args=stage.args.model_copy(update={"device": "cpu"}))


def _name_of(value: Any) -> str:
    return getattr(value, "__qualname__", None) or type(value).__qualname__
