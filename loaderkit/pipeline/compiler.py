"""Compiles the stage configs of a plan to stages that run: bound to the source, the seed and the policy for bad samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch

from loaderkit.connectors.base import Connector, counters_of, traits_of
from loaderkit.connectors.config import ReadAheadArgs, SourceArgs, StoreArgs
from loaderkit.connectors.layers.read_ahead import ReadAheadConnector
from loaderkit.engine.metrics.snapshot import StageStats
from loaderkit.engine.metrics.tuning import PoolTuning
from loaderkit.engine.pools import PoolPlan, plan_pools
from loaderkit.engine.work import Stage
from loaderkit.errors import ConfigError, StageError
from loaderkit.pipeline.config.model import PipelineConfig
from loaderkit.pipeline.config.registry import SOURCES, STAGES
from loaderkit.pipeline.dali_lowering import DaliLowering, lower
from loaderkit.pipeline.opened import OpenedPipeline
from loaderkit.samples.chunk import FieldSpec, image_names
from loaderkit.sampling.shard import Shard
from loaderkit.sources.base import Source
from loaderkit.sources.forecast import Chosen, Forecast
from loaderkit.sources.mixture import MixtureSource, SourcePart
from loaderkit.stages.base import StageConfig
from loaderkit.stages.context import CompileContext, Stream
from loaderkit.stages.expand import ExpandArgs, cuts_samples, sharing, unless_empty
from loaderkit.stages.image.decode import DecodeArgs, decode_hint
from loaderkit.stages.layout import Examples, specs_of
from loaderkit.stages.parts import for_part
from loaderkit.stages.slowed import slowed

_NUM_AHEAD, _NUM_LEAST, _ALL = 2048, 64, 1 << 62  # samples
_MOST_BATCHES = 64  # the most that `batches: auto` is tuned to


@dataclass
class CompiledStages:
    """The stages of a plan, ready to run, and the pools of workers they run in."""

    config: PipelineConfig
    context: CompileContext
    lowering: DaliLowering | None  # the stages that were compiled to one DALI pipeline
    stages: list[Stage]
    pools: list[PoolPlan]
    on_seek: Callable[[int, int, Shard], None] | None  # called with (epoch, position, shard) on a seek or a new shard
    connectors: list[Connector]  # that stages read from

    @property
    def device(self) -> torch.device | None:
        """The GPU to which `transfer` brings batches, or None if they stay on the CPU."""
        return None if self.context.stream is None else self.context.stream.device

    @property
    def counters(self) -> Callable[[], dict[str, float]] | None:
        """The counters of the connectors, added up."""
        return partial(_counters_of_all, self.connectors) if self.connectors else None

    @property
    def cropping(self) -> str | None:
        """The stage that crops behind `decode`, if only its crop of a JPEG is decoded."""
        for stage in self.context.stages:
            if isinstance(stage.args, DecodeArgs):
                following, hint = decode_hint(stage, self.context)
                if hint is not None and hint.takes_a_piece:
                    return following.name
        return None

    def specs_of(self, examples: Examples) -> Mapping[str, FieldSpec]:
        """The fields of a batch of samples like these. Raises StageError, ConfigError."""
        key, _ = examples[0]
        config, slots = self.config, self.context.in_slots
        dtype = None if slots is None else STAGES[slots.kind].slot_dtype(slots.args)
        try:
            specs = specs_of(
                examples, config.batch.forms, dtype, has_untyped_arrays=self.context.source.has_untyped_arrays
            )
        except (OverflowError, RuntimeError, TypeError, ValueError) as error:
            raise StageError(f"batch cannot hold sample {key!r}: {error}", stage="batch", key=key) from error
        if taken := sorted({*specs, *(f"{name}_sizes" for name in specs)} & {*config.batch.masks}):
            raise ConfigError(
                f"stages.batch.attention_mask: {taken[0]!r} is a field already: give the mask another name"
            )
        ragged = [name for name in image_names(specs) if specs[name].kind in ("pad", "ragged")]
        if slots is not None and ragged:
            raise ConfigError(
                f"stages.{slots.name}: the images {ragged} differ in shape: name all images in its `fields`"
            )
        last = None if self.lowering is None else self.lowering.normalize
        if last is not None and not image_names(specs):
            raise StageError(
                f"{last.name} failed for sample {key!r}: the batch has no image field", stage=last.name, key=key
            )
        if not all(STAGES[stage.kind].is_contained for stage in config.stages[len(self.context.before_batch) :]):
            return specs  # it may make other fields
        known = [*specs, *(f"{name}_sizes" for name, spec in specs.items() if spec.kind == "pad"), "__key__"]
        known += config.batch.masks
        known += ["__source__"] if config.members else []
        for name in config.output or ():
            if name not in known and name != "__wrapped__":
                raise ConfigError(f"output names the field {name!r}, but batches have {', '.join(known)}")
        return specs

    def rows(self) -> list[StageStats]:
        """A row of zeros for every stage."""
        workers = {n: pool.num_workers for pool in self.pools for n in pool.stages}
        return [StageStats.of(stage, workers[number]) for number, stage in enumerate(self.stages)]

    def described_pools(self, num_processes: int) -> tuple[PoolTuning, ...]:
        """The stages of each pool and its workers, of all processes together."""
        return tuple(
            PoolTuning(tuple(self.stages[n].name for n in pool.stages), num_processes * pool.num_workers)
            for pool in self.pools
        )


def compile_stages(plan: OpenedPipeline) -> CompiledStages:
    """The stages of a plan, bound to its source. Raises ConfigError."""
    config, shard = plan.config, plan.shard
    ahead = _read_ahead(plan)
    used = [plain if one is None else one.connector for one, plain in zip(ahead, plan.connectors, strict=True)]
    stream = _open_stream(config)
    lowering = _lower(config, stream, plan.num_workers)
    kinds = [member.kind for member in config.members] or [config.source_kind]
    context = CompileContext(
        source=plan.source,
        connector=None if config.members else used[0],
        order=plan.order,
        seed=config.order.seed,
        on_bad_sample=config.errors.on_bad_sample,
        stages=config.stages,
        kinds=STAGES,
        stream=stream,
        early_stream=stream if lowering is not None and lowering.graph.device is not None else None,
        in_slots=None if lowering is not None else _stage_in_slots(config, stream),
        is_seeded=any(getattr(stage.args, "seeded", False) for stage in config.all_stages),
        output=config.output,
        may_be_kept=plan.source.runs_user_code or not all(map(SOURCES.is_ours, kinds)),
    )
    stages = _compile(context, lowering, partial(_compile_parts, plan, used) if config.members else None)
    if plan.slowdown is not None:
        stages = [slowed(stage, plan.slowdown) for stage in stages]
    pools = plan_pools(stages, plan.num_workers)
    return CompiledStages(
        config,
        context,
        lowering,
        stages,
        [replace(pool, num_workers=shard.num_workers(pool.num_workers)) for pool in pools],
        partial(_seek_all, reading) if (reading := [one for one in ahead if one is not None]) else None,
        [connector for connector in used if connector is not None],
    )


def _counters_of_all(connectors: Sequence[Connector]) -> dict[str, float]:
    counts: dict[str, float] = {}
    for connector in connectors:
        for name, value in counters_of(connector).items():
            counts[name] = counts.get(name, 0) + value
    return counts


class _ReadAhead(NamedTuple):
    """A connector that reads ahead, what it reads, and how much all loading processes together may read ahead."""

    connector: ReadAheadConnector
    forecast: Forecast
    limits: ReadAheadArgs

    def seek(self, epoch: int, position: int, shard: Shard) -> None:
        """Continue at another position, with the batches of `shard` from there on."""
        if shard != self.forecast.shard:
            self.forecast.shard = shard
            self.connector.resize(
                memory_bytes=shard.num_bytes(self.limits.memory), num_requests=shard.num_workers(self.limits.requests)
            )
        self.connector.seek(epoch, position)


def _seek_all(reading: Sequence[_ReadAhead], epoch: int, position: int, shard: Shard) -> None:
    for one in reading:
        one.seek(epoch, position, shard)


def _compile_parts(
    plan: OpenedPipeline, connectors: Sequence[Connector | None], context: CompileContext, read: StageConfig
) -> list[Stage]:
    """The `read` of a mixture: for each source a stage that reads it, followed by the source's own stages."""
    assert isinstance(plan.source, MixtureSource)
    stages = []
    for number, member in enumerate(plan.config.members):
        own = replace(read, name=f"{read.name}.{member.name}")
        part = replace(
            context,
            source=plan.source.parts[number],
            connector=connectors[number],
            stages=(own, *member.stages, *context.stages[1:]),
            sample_runs=[],
            mixed=member.name,
        )
        for config in (own, *member.stages):
            stage = part.compile(config)
            stages.append(for_part(stage, plan.source, number, read.name, reads=config is own))
    # A source's own stages have no `workers`: the workers of `read` are for all of them.
    return [replace(stage, workers=stages[0].workers) for stage in stages]


def _compile(
    context: CompileContext,
    lowering: DaliLowering | None,
    compile_parts: Callable[[CompileContext, StageConfig], list[Stage]] | None,
) -> list[Stage]:
    """All stages: those that work on chunks, then those that work on batches. `compile_parts` gives the stages in the
    `read` of a mixture."""
    before = context.before_batch
    stages: list[Stage] = []
    for config in context.stages:
        if compile_parts is not None and config.kind == "read":
            parts = compile_parts(context, config)
            stages += parts
            context.sample_runs.extend(part.run for part in parts)
            continue
        if isinstance(config.args, ExpandArgs) and cuts_samples(context.stages):
            stages = [replace(stage, run=unless_empty(stage.run)) for stage in stages]
            stages.append(sharing(config))
            context.sample_runs.append(stages[-1].run)
        if lowering is None or config not in lowering.stages:
            stage = context.compile(config)
        elif config is lowering.decode:
            stage = lowering.compile(context)
        else:
            continue
        stages.append(stage)
        if config in before:
            context.sample_runs.append(stage.run)
    return sorted(stages, key=lambda stage: stage.scope == "batch")


def _open_stream(config: PipelineConfig) -> Stream | None:
    """The stream of the first stage that copies batches to a GPU. Raises ConfigError."""
    for stage in config.stages:
        open_stream = STAGES[stage.kind].stream
        if open_stream is not None:
            return open_stream(stage.args)
    return None


def _lower(config: PipelineConfig, stream: Stream | None, num_workers: int) -> DaliLowering | None:
    for stage in config.stages:
        if isinstance(stage.args, DecodeArgs) and stage.args.device != "cpu":
            return lower(config, stage, None if stream is None else stream.device, num_workers)
    return None


def _stage_in_slots(config: PipelineConfig, stream: Stream | None) -> StageConfig | None:
    """The stage behind `batch` that can write images into their slots, if the stages between keep values on the CPU."""
    fields = config.kind.fields(config.source)
    if any(fields is None or fields.get(name) in ("image", "video") for name in config.batch.forms):
        return None  # these images have no slots
    if any(getattr(stage.args, "depth", 8) == 16 for stage in config.stages):
        return None  # their slots are uint16
    for stage in config.stages[[stage.kind for stage in config.stages].index("batch") + 1 :]:
        kind = STAGES[stage.kind]
        if kind.slot_dtype(stage.args) is not None:
            return stage
        if stream is not None or not kind.keeps_values(stage.args):
            return None
    return None


def _read_ahead(plan: OpenedPipeline) -> list[_ReadAhead | None]:
    """How each source is read ahead from a remote store; None for local stores and inline."""
    config = plan.config
    if not config.members:
        return [_ahead_of(plan, config.source, plan.source, plan.connector)]
    assert isinstance(plan.source, MixtureSource)
    members = zip(config.members, plan.source.parts, plan.connectors, strict=True)
    return [
        _ahead_of(plan, member.args, part.inner, connector, _choice(plan, part)) for member, part, connector in members
    ]


def _ahead_of(
    plan: OpenedPipeline,
    args: SourceArgs,
    source: Source,
    connector: Connector | None,
    chosen: Chosen | None = None,
) -> _ReadAhead | None:
    config, shard = plan.config, plan.shard
    if not isinstance(args, StoreArgs) or connector is None or plan.executor == "inline":
        return None
    if not traits_of(connector).is_remote or not source.can_forecast:
        return None
    num_batches = _MOST_BATCHES if config.prefetch.batches == "auto" else config.prefetch.batches
    mean_samples, _ = plan.order.slots_of(plan.schedule.batch_size)
    forecast = Forecast(
        source,
        plan.order,
        plan.schedule,
        num_epochs=config.order.epochs,
        shard=shard,
        chosen=chosen,
    )
    reading = ReadAheadConnector(
        connector,
        forecast.slices,
        memory_bytes=shard.num_bytes(args.read_ahead.memory),
        num_requests=shard.num_workers(args.read_ahead.requests),
        # Enough for the next window of blocks, or for seconds of small files; little of the next epoch.
        # Row groups are so large that memory alone says how many.
        num_samples=_ALL
        if source.row_groups is not None
        else min(_NUM_AHEAD + 2 * forecast.window, plan.order.num_samples(0) // plan.schedule.world_size + _NUM_LEAST),
        slack=256 + 2 * (num_batches + 2) * mean_samples,
    )
    return _ReadAhead(reading, forecast, args.read_ahead)


def _choice(plan: OpenedPipeline, part: SourcePart) -> Chosen:
    """The part of the mixture that a forecast of one source covers."""
    return Chosen(partial(plan.order.spans, part.name), part.is_own, part.own_of)
