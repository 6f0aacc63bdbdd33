"""Decides which stages run once, when shards are written, and which are left for training."""

from __future__ import annotations

from dataclasses import dataclass

from loaderkit.errors import ConfigError
from loaderkit.pipeline.config.model import PipelineConfig
from loaderkit.pipeline.config.registry import STAGES
from loaderkit.stages.base import StageConfig
from loaderkit.stages.call import CallArgs, load, needs_rng


@dataclass(frozen=True)
class Split:
    """The sample stages behind `read`: those that run, those that are left, and why the first of the latter is left."""

    run: tuple[StageConfig, ...]
    left: tuple[StageConfig, ...]
    reason: str = ""  # "": none is left

    @property
    def runs_decode(self) -> bool:
        """True if samples are decoded before they are written."""
        return any(STAGES[stage.kind].decodes for stage in self.run)


def split_stages(config: PipelineConfig, *, keeps_encoded: bool) -> Split:
    """The stages up to the first one that is random or plans the order. With `keeps_encoded`, a `decode` that would be
    the last of them is left for training, too, if fields are bytes until then: the bytes are written as they are.
    Raises ConfigError for a source that cannot be packed."""
    _check_source(config)
    before = config.stages[1 : config.stages.index(config.stage("batch"))]
    num, reason = len(before), ""
    for number, stage in enumerate(before):
        if why := _why_left(stage):
            num, reason = number, f"{stage.name} {why}"
            break
    if keeps_encoded and num and STAGES[before[num - 1].kind].decodes and config.kind.encoded != "none":
        num -= 1
        reason = f"{before[num].name} would only undo the encoding, so the original bytes are kept"
    return Split(before[:num], before[num:], reason)


def _check_source(config: PipelineConfig) -> None:
    if config.members:
        raise ConfigError(
            f"{config.name}: it mixes {len(config.members)} sources, and shards are written of one: pack each by a "
            "pipeline of its own, and mix the shards"
        )
    if not config.kind.has_samples:
        raise ConfigError(
            f"{config.name}: its source is a checkpoint, which has tensors and no samples: `loaderkit.restore` reads it"
        )
    if config.kind.is_stream:
        raise ConfigError(
            f"{config.name}: the items of kind: {config.source_kind} come in their own order only, and shards are planned by "
            "number: give the data set as kind: dataset, with __len__ and __getitem__"
        )


def _why_left(stage: StageConfig) -> str:
    """Why a stage is for training; "": it is not."""
    kind = STAGES[stage.kind]
    if kind.packs:
        return "plans over the order of each epoch"
    if kind.expands:
        return "makes several samples of one, of which each epoch has others"
    if kind.num_draws:
        return "draws random numbers for each epoch"
    if isinstance(stage.args, CallArgs):
        is_random = needs_rng(load(stage.name, stage.args), stage.args)
        return "draws random numbers (`rng`, or `seeded`) for each epoch" if is_random else ""
    return ""
