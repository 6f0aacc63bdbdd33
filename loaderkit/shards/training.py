"""Makes the pipeline that trains from shards: their source instead of the original one, and the stages that are left."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

import numpy as np

from loaderkit.errors import ConfigError
from loaderkit.pipeline.config.model import PipelineConfig
from loaderkit.pipeline.config.registry import SOURCES, STAGES
from loaderkit.shards.layout import Extensions, SampleLayout
from loaderkit.shards.planning import ShardPlan
from loaderkit.shards.split import Split
from loaderkit.stages.base import StageConfig
from loaderkit.stages.image.decode import DecodeArgs


def training_pipeline(plan: ShardPlan, extensions: Mapping[str, Sequence[str]]) -> PipelineConfig:
    """The pipeline that reads the shards. `extensions` are the extensions of every field's members in a tar."""
    config, split, job = plan.config, plan.split, plan.job
    args = job.destination.args
    if job.format == "tar":
        fields = {name: ";".join(extensions[name]) for name in job.layout.fields if name in extensions}
        where = {"url": job.destination.url, "fields": fields}
    else:
        (name,) = job.layout.fields
        where = {"url": f"{job.destination.url.rstrip('/')}/{array_name(name)}", "field": name}
    source = SOURCES[job.format].args.model_validate({**where, "s3": args.s3, "retry": args.retry})
    batch = config.stages.index(config.stage("batch"))
    left = tuple(_named(stage) for stage in (*split.left, *config.stages[batch:]))
    left_before = left[: len(split.left)]
    stages = (config.stages[0], *_with_decode(config, plan, left_before), *left[len(left_before) :])
    return replace(config, source=source, stages=stages)


def array_name(field: str) -> str:
    """The key of the array of a field."""
    return Extensions([field]).of(field, "npy").removesuffix(".npy") + ".npy"


def check_left(config: PipelineConfig, split: Split, layout: SampleLayout) -> None:
    """Raise ConfigError if a user's function that is left would see bytes where it sees values now, or if a stage that is left
    needs images and an array has none."""
    values = layout.values
    if layout.dtype and (layout.dtype != "|u1" or len(layout.shape) not in (2, 3)):
        for stage in (*split.left, *config.stages[config.stages.index(config.stage("batch")) :]):
            if STAGES[stage.kind].needs_images:
                raise ConfigError(
                    f"{config.name}: {stage.name} is left for training and needs images, and the array has "
                    f"{np.dtype(layout.dtype)} {list(layout.shape)} of {values[0]!r}: name images in `output`, leave the stage "
                    "out, or write --format tar"
                )
    for stage in split.left:
        if STAGES[stage.kind].decodes:
            return
        has_decode = any(STAGES[one.kind].decodes for one in split.left)
        if has_decode and not STAGES[stage.kind].is_contained and values:
            raise ConfigError(
                f"{config.name}: {stage.name} is left for training and comes before `decode`, so it would get "
                f"{', '.join(map(repr, values))} as bytes of the shards: put `decode` before it"
            )


def _with_decode(config: PipelineConfig, plan: ShardPlan, left: Sequence[StageConfig]) -> tuple[StageConfig, ...]:
    """The sample stages that are left, with a `decode` that turns the shards' bytes into the values that were written."""
    split, layout = plan.split, plan.job.layout
    for number, stage in enumerate(left):
        if isinstance(stage.args, DecodeArgs):
            return (*left[:number], _decoding(stage, stage.args, plan), *left[number + 1 :])
    ran = [stage for stage in split.run if isinstance(stage.args, DecodeArgs)]
    if ran:
        assert isinstance(ran[0].args, DecodeArgs)
        return (_decoding(_named(ran[0]), ran[0].args, plan), *left)
    if plan.job.format == "array" or not layout.values:
        return tuple(left)
    named = None if len(layout.values) == len(layout.fields) else tuple(layout.values)
    return (StageConfig("decode", "decode", DecodeArgs(fields=named)), *left)


def _decoding(stage: StageConfig, args: DecodeArgs, plan: ShardPlan) -> StageConfig:
    """The stage with arguments for the fields of the shards."""
    layout, has_run = plan.job.layout, plan.split.runs_decode
    there = layout.fields.keys()
    changes: dict[str, object] = {
        "masks": _those(args.masks, there),
        "keypoints": _those(args.keypoints, there),
        "boxes": {name: form for name, form in args.boxes.items() if name in there},
    }
    if args.fields is not None:
        others = [name for name in layout.values if name not in args.fields]
        changes["fields"] = _those((*args.fields, *others), there)
    if has_run:
        changes["scaled"] = False  # the stage that it was meant for has run
    if plan.job.format == "array" and args.fields is not None:
        changes["fields"] = tuple(there)
    return replace(stage, args=args.model_copy(update=changes))


def _those(names: Sequence[str] | None, there: Container[str]) -> tuple[str, ...] | None:
    kept = tuple(name for name in names or () if name in there)
    return kept or None


def _named(stage: StageConfig) -> StageConfig:
    """The stage with its name spelled out if it would get another one in a shorter list: its random numbers follow from it."""
    if stage.args.name is not None or stage.name == stage.kind:
        return stage
    return replace(stage, args=stage.args.model_copy(update={"name": stage.name}))
