"""Makes the spec that other processes get, for `executor: process` and `ray`, and checks that it can be pickled."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from loaderkit._internal import packing
from loaderkit._internal.dtypes import Bytes
from loaderkit.engine.metrics.nodes.ledger import NodeLedger
from loaderkit.engine.metrics.tuning import PoolTuning
from loaderkit.engine.metrics.worker_clock import Clock
from loaderkit.engine.process.worker_process import WorkerProcess
from loaderkit.engine.remote.contracts import MakeProcess, WorkerSpec
from loaderkit.engine.remote.executor import RemoteEngine
from loaderkit.engine.restarts import Restarts
from loaderkit.engine.threaded import ThreadEngine
from loaderkit.errors import ConfigError, MissingExtraError
from loaderkit.pipeline.batches.cursor import BatchCursor
from loaderkit.pipeline.config.extensions import kinds_for_workers
from loaderkit.pipeline.config.model import PrefetchArgs, RayArgs
from loaderkit.pipeline.execution_plan import ExecutionPlan
from loaderkit.pipeline.executors.live_settings import is_tuned
from loaderkit.pipeline.executors.sendable import check_sendable, named_in_main
from loaderkit.pipeline.executors.thread_engine import make_worker_engine, with_kinds, with_main
from loaderkit.sampling.shard import Shard
from loaderkit.stages.image.formats import pillow_limits


def make_remote_engine(plan: ExecutionPlan) -> RemoteEngine:
    """An executor with worker processes, here or in a Ray cluster, which are not started yet. Raises MissingExtraError."""
    prefetch, ahead, trainer_stages = plan.config.prefetch, plan.for_workers, plan.trainer_stages
    make, free = _actor_maker(prefetch.ray) if prefetch.executor == "ray" else (WorkerProcess, None)
    make_engine = worker_engine(ahead)
    spec = WorkerSpec(
        # Those that start later, or again, get what the first ones got, whatever the loop does to its objects.
        make_engine if plan.moved_reason is None else packing.PackedOnce(make_engine),
        preload=make_worker_engine.__module__,
        rows=ahead.compiled.rows(),
        pools=[pool.stages for pool in ahead.compiled.described_pools(1)],
        num_batches=prefetch.first_batches,
        memory_bytes=prefetch.memory,
        scaled_stages=_scaled_stages(plan),
        trainer_stages=trainer_stages,
        pinned_for=plan.compiled.device if trainer_stages else None,
        ledger=NodeLedger() if prefetch.executor == "ray" else None,
        free=free,
    )
    return RemoteEngine(
        spec,
        make,
        num_processes=prefetch.first_processes,
        schedule=plan.schedule,
        timeout_s=prefetch.timeout,
        raises=prefetch.on_timeout == "raise",
        restarts=restarts_of(plan),
    )


def _scaled_stages(plan: ExecutionPlan) -> frozenset[str]:
    """The stages for which each process has the same number of workers, however many processes there are, because each
    brings the CPUs for them."""
    if plan.config.prefetch.executor != "ray":
        return frozenset()
    pools = plan.for_workers.compiled.described_pools(1)
    return frozenset(name for pool in pools if is_tuned(plan.config, pool) for name in pool.stages)


def _actor_maker(settings: RayArgs) -> tuple[MakeProcess, Callable[[], None]]:
    """A function that makes an actor that is not started, and a function that frees the memory that all actors share."""
    try:
        # Late: only here it is asked for, and it takes 0.3 s.
        from loaderkit.engine.ray.actor_process import ActorProcess
        from loaderkit.engine.ray.cluster import RaySettings
        from loaderkit.engine.ray.connection import Connection
        from loaderkit.engine.ray.shared_engine import SharedEngine
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        raise MissingExtraError(
            f"prefetch.executor: ray needs the package ray ({error}): pip install 'loaderkit[ray]'"
        ) from error
    of_actors = RaySettings(**dict(settings))
    connection = Connection(of_actors.address)
    engine = SharedEngine(connection)
    return partial(ActorProcess, of_actors, connection, engine), engine.free


def restarts_of(plan: ExecutionPlan) -> Restarts:
    """How often workers of this plan that died may be started again."""
    impossible = ""
    if plan.config.kind.is_stream:
        impossible = "prefetch.restarts does not apply: an iterable gives its items once, so no batch can be made again"
    return Restarts(plan.config.prefetch.restarts, keys_at=partial(keys_at, plan), impossible=impossible)


def keys_at(plan: ExecutionPlan, epoch: int, position: int) -> list[str]:
    """The `__key__` of the batch that begins at `position`, as far as bad samples have not changed it."""
    cursor = BatchCursor(plan.order, plan.schedule)
    cursor.seek(epoch, position)
    work_item = cursor.next()
    if work_item is None:
        return []
    return plan.order.keys(work_item.epoch, work_item.indices, plan.source.keys)


def worker_engine(ahead: ExecutionPlan) -> Callable[[Callable[[int], Bytes], Shard], ThreadEngine]:
    """A function that makes the engine of a worker process; it is pickled with its arguments."""
    config = ahead.config
    reopen = config.kind.reopen(config.source, len(ahead.source))
    if reopen is not None:
        ahead = replace(ahead, source=None)  # type: ignore[arg-type]
    make = partial(make_worker_engine, ahead, reopen, pillow_limits())
    of_main, kinds = named_in_main(config), kinds_for_workers(config)
    make = make if kinds is None else partial(with_kinds, kinds, make)
    return partial(with_main, of_main, make) if of_main else make


def pools_of_processes(plan: ExecutionPlan) -> tuple[PoolTuning, ...]:
    """The pools of all worker processes together, and of the trainer's stages."""
    num_processes = plan.config.prefetch.first_processes
    pools = plan.for_workers.compiled.described_pools(num_processes)
    if not plan.trainer_stages:
        return pools
    names = tuple(stage.name for stage in plan.trainer_stages)
    return (*pools, PoolTuning(names, num_processes, is_trainers=True))


def check_processes(plan: ExecutionPlan, clock: Clock) -> None:
    """Raise ConfigError if worker processes cannot run the plan."""
    prefetch = plan.config.prefetch
    if clock is not time.perf_counter:
        raise ConfigError(
            f"build(clock=...) and prefetch.executor: {prefetch.executor}: another process cannot read that clock; use "
            "executor: thread"
        )
    check_depth(prefetch)
    check_sendable(plan.for_workers.config, plan.connectors)
    if prefetch.executor == "ray":
        _actor_maker(prefetch.ray)


def check_depth(prefetch: PrefetchArgs) -> None:
    """Raise ConfigError if there are fewer batches than processes."""
    key, processes = "processes", prefetch.first_processes
    may_grow = prefetch.processes == "auto" and prefetch.batches != "auto"  # batches that are auto grow with them
    if may_grow and prefetch.max_processes is not None:
        key, processes = "max_processes", prefetch.max_processes
    if prefetch.first_batches < processes:
        raise ConfigError(
            f"prefetch.batches: {prefetch.batches} cannot be shared out to prefetch.{key}: {processes}, which "
            f"make a batch each at a time: allow at least {processes} batches"
        )


def num_bytes_sent(plan: ExecutionPlan, most: int) -> int | None:
    """The bytes that each process is sent; None if there are more than `most`. Raises ConfigError if they cannot be
    pickled."""
    try:
        sent = packing.measured(worker_engine(plan.for_workers), most)
        return None if sent is None else sent.num_bytes
    except Exception:
        check_sendable(plan.for_workers.config, plan.connectors)  # names what cannot
        raise
