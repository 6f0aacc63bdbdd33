"""The engine in a process of its own, or in several: what is sent there, and whether it can be."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from loaderkit.engine.contracts import Executor
from loaderkit.engine.metrics.worker_clock import Clock
from loaderkit.engine.process.executor import ProcessEngine
from loaderkit.engine.process.messages import pack
from loaderkit.engine.process.worker_process import WorkerSpec
from loaderkit.errors import ConfigError
from loaderkit.pipeline.engine_factory import Assembly, Recipe, RemoteEngine, split_recipe
from loaderkit.sampling.shard import Shard
from loaderkit.sources.dataset import DatasetArgs
from loaderkit.stages.call import CallArgs


def in_a_process(recipe: Recipe, whole: Assembly, clock: Clock) -> tuple[list[dict[str, Any]], Callable[[], Executor]]:
    """The pools, and what makes the executor, where another process does the work."""
    if clock is not time.perf_counter:
        raise ConfigError(
            "build(clock=...) and prefetch.executor: process: another process cannot read that clock; use executor: thread"
        )
    prefetch = recipe.config.prefetch
    if prefetch.first_batches < prefetch.processes:
        raise ConfigError(
            f"prefetch.batches: {prefetch.batches} cannot be shared out to prefetch.processes: {prefetch.processes}, which "
            f"make a batch each at a time: allow at least {prefetch.processes} batches"
        )
    ahead, late_stages = split_recipe(recipe, whole)
    assembly = Assembly(ahead, Shard(of=prefetch.processes))
    remote = RemoteEngine.of(ahead)
    _check_sendable(remote)
    pools = assembly.described_pools()
    if late_stages:
        late = [stage.name for stage in late_stages]
        pools.append({"stages": late, "workers": prefetch.processes, "process": "trainer"})
    job = WorkerSpec(
        remote,
        preload="loaderkit.pipeline.engine_factory",
        rows=assembly.rows(),
        pools=[pool["stages"] for pool in assembly.described_pools()],
        num_batches=prefetch.first_batches,
        memory_bytes=prefetch.memory,
        late_stages=late_stages,
        pinned_for=whole.device if late_stages else None,
    )

    def make_executor() -> Executor:
        return ProcessEngine(
            job,
            num_processes=prefetch.processes,
            schedule=recipe.schedule,
            timeout_s=prefetch.timeout,
            raises=prefetch.on_timeout == "raise",
        )

    return pools, make_executor


def _check_sendable(remote: RemoteEngine) -> None:
    """Raise ConfigError, naming it, if something the pipeline was given cannot be sent to another process."""
    config = remote.recipe.config
    parts: dict[str, Any] = {}
    for stage in config.stages:
        if isinstance(stage.args, CallArgs):
            parts[f"stages.{stage.name}.function"] = stage.args.function
            parts[f"stages.{stage.name}.args"] = stage.args.args
    if isinstance(config.source, DatasetArgs):
        parts |= {"source.object": config.source.object, "source.args": config.source.args}
    parts["the connector"] = remote.recipe.connector
    for where, value in parts.items():
        try:
            pack(value)
        except Exception as error:
            raise ConfigError(
                f"{where}: {value!r} cannot be sent to the process that loads (prefetch.executor: process): {error}. Define "
                'it at the top level of a module that can be imported, and name it as "package.module:name"; or use '
                "executor: thread"
            ) from error
