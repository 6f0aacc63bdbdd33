"""What is measured, and what it means."""

from loaderkit.engine.metrics.bottleneck import Verdict, diagnose
from loaderkit.engine.metrics.stats import Stats

__all__ = ["Stats", "Verdict", "diagnose"]
