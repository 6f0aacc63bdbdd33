"""Checks whether one rank reads for several, and whether the stages of a pipeline allow it."""

from __future__ import annotations

from loaderkit.errors import ConfigError
from loaderkit.pipeline.config.model import PipelineConfig
from loaderkit.ranks.place import Place


def is_shared(config: PipelineConfig, place: Place) -> bool:
    """True if one rank reads for several."""
    return config.ranks.share == "broadcast" and len(place.peers) > 1


def check_shared(config: PipelineConfig, place: Place) -> None:
    """Raise ConfigError where one rank is to read for several, and the stages cannot."""
    if not is_shared(config, place):
        return
    if config.prefetch.executor == "inline":
        raise ConfigError(
            "ranks.share: broadcast passes batches on by a thread, and prefetch.executor: inline has none: use thread or "
            "process, or share: read"
        )
    for stage in config.all_stages:
        if stage.kind == "decode" and getattr(stage.args, "device", None) == "gpu":
            raise ConfigError(
                f"stages.{stage.name}.device: tensors on a GPU are not passed on to other ranks: use `device: cpu`, or "
                "ranks: {share: read}"
            )
