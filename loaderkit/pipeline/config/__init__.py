"""The description of a pipeline: its model, its YAML, its checks and their messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loaderkit._internal.imports import public_names

if TYPE_CHECKING:
    from loaderkit.pipeline.config.model import PipelineConfig
    from loaderkit.pipeline.config.parsing import load_yaml

__all__ = ["PipelineConfig", "load_yaml"]
__getattr__ = public_names(
    __name__, {"PipelineConfig": "loaderkit.pipeline.config.model", "load_yaml": "loaderkit.pipeline.config.parsing"}
)
