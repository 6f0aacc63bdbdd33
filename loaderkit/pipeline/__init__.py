"""From a config to what a loader runs: plans, executors and batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loaderkit._internal.imports import public_names

if TYPE_CHECKING:
    from loaderkit.pipeline.config.builder import Pipeline

__all__ = ["Pipeline"]
__getattr__ = public_names(__name__, {"Pipeline": "loaderkit.pipeline.config.builder"})
