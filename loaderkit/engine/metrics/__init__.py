"""Measurements of a running pipeline, and the verdict that is read from them."""

from loaderkit.engine.metrics.bottleneck import Verdict, diagnose
from loaderkit.engine.metrics.stats import Stats

__all__ = ["Stats", "Verdict", "diagnose"]
