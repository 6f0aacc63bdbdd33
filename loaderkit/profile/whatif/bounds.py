"""Throughput and stall from service demands: the asymptotic bounds of operational analysis, and one more for each thing shared.

No center can do more than one second of work a second, so with demands D in s a sample and N workers, in samples/s:

    X <= N / sum of D over the pool's stages      its workers          (bottleneck law, utilisation law)
    X <= CPUs / (CPU demand of workers and loop)  the processor: our share of it, others having theirs
    X <= processes / (demand under the GIL)       the GIL
    X <= 1 / D                                    what one worker, or a few, use at a time: a link, a lock, a server
    X <= samples in work / response time          batches ahead        (Little's law)
    X <= 1 / network time                         the way from other nodes
    X <= 1 / (compute time + taking batches)      the loop itself

Denning and Buzen, ACM Computing Surveys 10(3), 1978; Lazowska, Zahorjan, Graham and Sevcik, "Quantitative System Performance",
1984, chapter 5. The least of them is what a machine without chance would do, and an upper bound for a real one: it
names the limit.
"""

from __future__ import annotations

from loaderkit.profile.whatif.demands import PipelineModel


def bounds(model: PipelineModel) -> dict[str, float]:
    """Every upper bound of the throughput in samples/s, by what it comes from."""
    upper: dict[str, float] = {}
    cpu_s = sum(stage.cpu_s for stage in model.stages) + model.loop_cpu_s
    if model.is_inline:
        upper["inline"] = _per(1.0, sum(pool.service_s for pool in model.pools) + model.compute_s + model.release_s)
        return upper
    if model.compute_s > 0:
        loop = "training" if model.compute_s >= model.handover_s else "taking batches"
        upper[loop] = 1.0 / (model.compute_s + model.release_s + model.handover_s)
    if model.network_s > 0:
        upper["network"] = 1.0 / model.network_s
    for pool in model.pools:
        if pool.service_s > 0:
            slowest = max(pool.stages, key=lambda stage: stage.service_s)
            upper[slowest.name] = pool.workers / pool.service_s
    if cpu_s > 0:
        upper["cpus"] = available_cpus(model) / cpu_s
    if model.gil_s > 0:
        upper["gil"] = model.processes / model.gil_s
    if model.serial_stage is not None and model.serial_s > 0:
        upper[f"{model.serial_stage}, shared"] = 1.0 / model.serial_s
    response_s = sum(pool.service_s for pool in model.pools)
    if response_s > 0:
        upper["batches ahead"] = model.samples_ahead / response_s
    return upper


def available_cpus(model: PipelineModel) -> float:
    """All CPUs if they suffice for our threads and other programs; else our fair share of them."""
    threads = sum(pool.workers for pool in model.pools) + model.loop_cpu_s / max(model.compute_s, 1e-12)
    wanted = threads + model.others_cpus
    return model.cpus if wanted <= model.cpus else model.cpus * threads / wanted


def _per(amount: float, seconds: float) -> float:
    return amount / max(seconds, 1e-12)
