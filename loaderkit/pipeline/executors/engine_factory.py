"""Makes the executor that the config of an `ExecutionPlan` asks for."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from itertools import chain, count

from loaderkit import native
from loaderkit._internal.system.cgroups import num_cpus
from loaderkit.engine.contracts import Executor
from loaderkit.engine.inline import InlineEngine
from loaderkit.engine.metrics.tuning import PoolTuning, Tuning
from loaderkit.engine.metrics.worker_clock import Clock
from loaderkit.pipeline.config.model import RayArgs
from loaderkit.pipeline.execution_plan import ExecutionPlan
from loaderkit.pipeline.executors.thread_engine import make_batch_plan, make_thread_engine

logger = logging.getLogger("loaderkit")


def make_executor(plan: ExecutionPlan, clock: Clock = time.perf_counter) -> Executor:
    """An executor that is not started. Raises ConfigError."""
    if plan.is_shared:
        return _make_shared_executor(plan, clock)
    if (in_order := plan.source.in_order) is not None:
        num_processes = plan.config.prefetch.first_processes if plan.is_remote else 1
        in_order.check_readers(plan.schedule.world_size, num_processes)
    if plan.is_remote:
        # Late: it takes a tenth of the time to the first batch.
        from loaderkit.pipeline.executors.process_setup import make_remote_engine

        return make_remote_engine(plan)
    if plan.executor == "inline":
        compiled = plan.compiled
        return InlineEngine(
            make_batch_plan(plan), compiled.stages, compiled.pools, clock=clock, counters=compiled.counters
        )
    return make_thread_engine(plan, clock)


def _make_shared_executor(plan: ExecutionPlan, clock: Clock) -> Executor:
    """An executor of which one rank has the workers."""
    # Late: only these need the connections of ranks.
    from loaderkit.pipeline.ranks.share_stages import ShareStages
    from loaderkit.pipeline.ranks.shared_executor import SharedExecutor
    from loaderkit.ranks.channel import PeerChannel

    prefetch, place, later = plan.config.prefetch, plan.place, plan.trainer_stages
    raises = prefetch.on_timeout == "raise"

    def about() -> dict[str, str]:
        return {"seed": str(plan.config.order.seed), "the batch": repr(plan.config.batch), **plan.fingerprint()}

    return SharedExecutor(
        None if place.number else make_executor(plan.for_reader, clock),
        PeerChannel(place.peers, place.number, plan.config.name, timeout_s=prefetch.timeout, raises=raises),
        ShareStages(_name_of_sharing(plan), later, clock),
        schedule=plan.schedule,
        num_epochs=plan.config.order.epochs,
        about=about,
        memory_bytes=prefetch.memory,
        timeout_s=prefetch.timeout,
        raises=raises,
        pinned_for=plan.compiled.device,
        clock=clock,
    )


def _name_of_sharing(plan: ExecutionPlan) -> str:
    """The name, among the stages, of passing batches on."""
    taken = {stage.name for stage in plan.config.all_stages}
    names = chain(("share",), (f"share-{number}" for number in count(2)))
    return next(name for name in names if name not in taken)


def describe_tuning(plan: ExecutionPlan, clock: Clock = time.perf_counter) -> Tuning:
    """The settings with which a plan starts. Raises ConfigError if it cannot run with them."""
    if plan.is_shared:
        return _describe_shared(plan, clock)
    prefetch, compiled = plan.config.prefetch, plan.compiled
    if prefetch.max_processes is not None and prefetch.processes != "auto":
        logger.warning(
            "prefetch.max_processes: %d is of no effect with prefetch.processes: %d; it bounds processes: auto",
            prefetch.max_processes,
            prefetch.processes,
        )
    if plan.is_remote:
        from loaderkit.pipeline.executors.process_setup import check_processes, pools_of_processes  # late, as above

        check_processes(plan, clock)
        pools = pools_of_processes(plan)
    else:
        if prefetch.processes != 1 and prefetch.executor != "auto":
            logger.warning(
                "prefetch.processes: %s is of no effect with prefetch.executor: %s; executor: process and ray have several",
                prefetch.processes,
                prefetch.executor,
            )
        if prefetch.ray != RayArgs():
            logger.warning("prefetch.ray is of no effect with prefetch.executor: %s", prefetch.executor)
        pools = compiled.described_pools(1)
    cropping, whole = compiled.cropping, not native.HAS_JPEG
    return Tuning(
        executor=plan.executor,
        batches=prefetch.first_batches,
        executor_reason=plan.inline_reason or plan.moved_reason,
        executor_with_workers=plan.config.executor_with_workers,
        graph=() if compiled.lowering is None else tuple(compiled.lowering.graph.lines()),
        jpeg=None if cropping is None else "whole" if whole else f"crop of {cropping}",
        processes=prefetch.first_processes if plan.is_remote else None,
        cpus=int(prefetch.first_processes * prefetch.ray.num_cpus) or 1 if plan.executor == "ray" else num_cpus(),
        pools=pools,
    )


def _describe_shared(plan: ExecutionPlan, clock: Clock) -> Tuning:
    """The settings of a rank that reads for others, or for which another reads; the latter has no workers."""
    peers, number = plan.place.peers, plan.place.number
    tuning = Tuning(executor=plan.executor, batches=plan.config.prefetch.first_batches, cpus=num_cpus())
    if not number:
        tuning = describe_tuning(plan.for_reader, clock)
    names = (_name_of_sharing(plan), *(stage.name for stage in plan.trainer_stages))
    others = (*peers[:number], *peers[number + 1 :])
    pools = (*tuning.pools, PoolTuning(names, 1, is_trainers=True))
    return replace(tuning, pools=pools, reader=peers[0], peers=others)
