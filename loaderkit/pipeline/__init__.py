"""From a config to a running loader: plans, executors, batches, and the loader that hands them over."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loaderkit._internal.imports import public_names

if TYPE_CHECKING:
    from loaderkit.pipeline.config.builder import Pipeline
    from loaderkit.pipeline.loader import Loader, build

__all__ = ["Loader", "Pipeline", "build"]
__getattr__ = public_names(
    __name__,
    {
        "Loader": "loaderkit.pipeline.loader",
        "Pipeline": "loaderkit.pipeline.config.builder",
        "build": "loaderkit.pipeline.loader",
    },
)
