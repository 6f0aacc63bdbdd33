"""Gives what a loader counts to other programs: Prometheus reads it over HTTP, `log` writes it to TensorBoard, W&B and
others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loaderkit._internal.imports import public_names

if TYPE_CHECKING:
    from loaderkit.metrics.writers import log

__all__ = ["log"]
__getattr__ = public_names(__name__, {"log": "loaderkit.metrics.writers"})
