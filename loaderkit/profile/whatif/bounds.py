"""Throughput and stall from service demands: the asymptotic bounds of operational analysis, and one more for each thing shared.

No center can do more than one second of work a second, so with demands D in s a sample and N workers, in samples/s:

    X <= N / sum of D over the pool's stages      its workers          (bottleneck law, utilisation law)
    X <= CPUs / (CPU demand of workers and loop)  the processor: our share of it, others having theirs
    X <= processes / (demand under the GIL)       the GIL
    X <= 1 / D                                    what one worker uses at a time: a link, a lock of the user's
    X <= samples in work / response time          batches ahead        (Little's law)
    X <= n / (straggler + what is not ahead of it) one in n is slow, and batches come in order
    X <= 1 / compute time                         the loop itself

Denning and Buzen, ACM Computing Surveys 10(3), 1978; Lazowska, Zahorjan, Graham and Sevcik, "Quantitative System Performance",
1984, chapter 5. The least of them is what a machine without chance would do, and an upper bound for a real one. So a change is
predicted as the ratio of two bounds, times what was measured: what the bounds leave out is left out of both.
"""

from __future__ import annotations

from typing import NamedTuple

from loaderkit.profile.whatif.demands import PipelineModel, Stragglers


class Prediction(NamedTuple):
    """samples/s, what limits, and how much of the time the loop waits, in percent."""

    samples_per_s: float
    limit: str
    stall_percent: float


def bounds(model: PipelineModel) -> dict[str, float]:
    """Every upper bound of the throughput in samples/s, by what it comes from."""
    upper: dict[str, float] = {}
    cpu_s = sum(stage.cpu_s for stage in model.stages) + model.loop_cpu_s
    if model.is_inline:
        upper["inline"] = _per(1.0, sum(pool.service_s for pool in model.pools) + model.compute_s)
        return upper
    if model.compute_s > 0:
        upper["training"] = 1.0 / model.compute_s
    for pool in model.pools:
        if pool.service_s > 0:
            slowest = max(pool.stages, key=lambda stage: stage.service_s)
            upper[slowest.name] = pool.workers / pool.service_s
    if cpu_s > 0:
        upper["cpus"] = available_cpus(model) / cpu_s
    if model.gil_s > 0:
        upper["gil"] = model.processes / model.gil_s
    if model.serial_stage is not None and model.serial_s > 0:
        upper[f"{model.serial_stage}, one at a time"] = 1.0 / model.serial_s
    if model.stragglers is not None:
        upper["stragglers"] = _past_stragglers(model, model.stragglers)
    response_s = sum(pool.service_s for pool in model.pools)
    if response_s > 0:
        upper["batches ahead"] = model.samples_ahead / response_s
    return upper


def predict(model: PipelineModel, base: PipelineModel | None = None, measured: float | None = None) -> Prediction:
    """What a model gives, scaled by what the `base` model was measured to give (in samples/s), if there is one."""
    upper = bounds(model)
    limit = min(upper, key=upper.__getitem__)
    rate = upper[limit]
    if base is not None and measured is not None:
        rate *= measured / min(bounds(base).values())
        if model.compute_s > 0:
            rate = min(rate, 1.0 / model.compute_s)
    return Prediction(rate, limit, 100.0 * max(0.0, 1.0 - rate * model.compute_s))


def _past_stragglers(model: PipelineModel, slow: Stragglers) -> float:
    """While one sample keeps its batch waiting, the other workers get as far as batches are read ahead, and no further."""
    pool = model.pools[slow.pool]
    usual_s = max(0.0, pool.service_s - slow.seconds / slow.every)
    behind_s = max(0.0, slow.every - model.samples_ahead) * usual_s / pool.workers
    return slow.every / (slow.seconds + behind_s)


def available_cpus(model: PipelineModel) -> float:
    """All CPUs if they suffice for our threads and other programs; else our fair share of them."""
    threads = sum(pool.workers for pool in model.pools) + model.loop_cpu_s / max(model.compute_s, 1e-12)
    wanted = threads + model.others_cpus
    return model.cpus if wanted <= model.cpus else model.cpus * threads / wanted


def _per(amount: float, seconds: float) -> float:
    return amount / max(seconds, 1e-12)
