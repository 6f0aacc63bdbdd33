"""Predicts what a model's pipeline gives: by simulation, in proportion to what was measured of the pipeline as it is."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from loaderkit.profile.report import Report
from loaderkit.profile.whatif.bounds import bounds
from loaderkit.profile.whatif.demands import PipelineModel
from loaderkit.profile.whatif.simulate import Simulation

_NEAR = 0.9
_NOTICED = 0.05


class Prediction(NamedTuple):
    """The prediction: samples/s, what limits, and how much of the time the loop waits, in percent."""

    samples_per_s: float
    limit: str
    stall_percent: float


def rate_of(model: PipelineModel) -> float:
    """samples/s; where nothing is read ahead, work and steps just add up. The network between nodes, and the taking of
    batches from there, are not simulated: they bound the simulated rate."""
    upper = bounds(model)
    if model.is_inline:
        return upper["inline"]
    most = min(upper.get("network", math.inf), upper.get("taking batches", math.inf))
    return min(most, _simulated_rate(model))


def _simulated_rate(model: PipelineModel) -> float:
    rate, solo = Simulation(model).run(), max(pool.solo for pool in model.pools)
    if solo < _NOTICED:
        return rate
    alone = tuple(replace(pool, workers=1) if pool.solo else pool for pool in model.pools)
    return (1 - solo) * rate + solo * Simulation(replace(model, pools=alone)).run()


def predict(model: PipelineModel, scale: float = 1.0) -> Prediction:
    """The rate of a model, times `scale`: the measured rate of the pipeline as it is, divided by the rate of its model.
    So what the model leaves out counts in both alike."""
    upper, rate = bounds(model), rate_of(model)
    limit = min(upper, key=upper.__getitem__)
    if rate < _NEAR * upper[limit]:
        limit = "batches ahead"  # all else would allow for more
    rate *= scale
    if model.compute_s > 0:
        rate = min(rate, 1.0 / model.compute_s)
    return Prediction(rate, limit, 100.0 * max(0.0, 1.0 - rate * model.compute_s))


def steady_rate(report: Report) -> float:
    """samples/s of the loop without its start: the steps alone."""
    steps = report.steps
    batch = report.num_samples / max(report.num_batches, 1)
    later_s = steps.compute_s + steps.stall_s + steps.overhead_s - _start_s(report)
    return steps.num_steps * batch / max(later_s, 1e-9)


def _start_s(report: Report) -> float:
    first = report.first_batch
    return 0.0 if first is None else first.workers_s + sum(first.by_stage.values())
