"""The stages, which act on samples and batches: one module for each stage, with its arguments and its kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loaderkit._internal.imports import public_names

if TYPE_CHECKING:
    from loaderkit.stages.base import StageArgs, StageConfig
    from loaderkit.stages.context import CompileContext, StageKind

__all__ = ["CompileContext", "StageArgs", "StageConfig", "StageKind"]
__getattr__ = public_names(
    __name__,
    {
        "CompileContext": "loaderkit.stages.context",
        "StageArgs": "loaderkit.stages.base",
        "StageConfig": "loaderkit.stages.base",
        "StageKind": "loaderkit.stages.context",
    },
)
