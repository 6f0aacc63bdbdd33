"""Engines of other processes with a stage in this one, as `transfer` to CUDA is; without needing CUDA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from numbers_dataset import numbers

from loaderkit import Pipeline
from loaderkit.engine.process.worker_process import WorkerProcess
from loaderkit.engine.remote.contracts import MakeProcess, WorkerSpec
from loaderkit.engine.remote.executor import RemoteEngine
from loaderkit.engine.work import Stage
from loaderkit.pipeline.execution_plan import compile_pipeline
from loaderkit.pipeline.executors.process_setup import worker_engine
from loaderkit.samples.chunk import BatchContext
from loaderkit.sampling.shard import Shard


def engine_with(
    late: Callable[[dict[str, Any], BatchContext], None],
    num_processes: int = 1,
    *,
    pipeline: Pipeline | None = None,
    pinned_for: torch.device | None = None,
    make: MakeProcess = WorkerProcess,
    free: Callable[[], None] | None = None,
    **patience: Any,
) -> RemoteEngine:
    """An engine whose stage `late` runs in this process, on batches of `pipeline`, read once. `make` and `free` are for
    other processes than those of this machine."""
    made = (pipeline or numbers()).epochs(1).prefetch(concurrency=2)
    plan = compile_pipeline(made.config, rank=0, world_size=1)
    spec = WorkerSpec(
        worker_engine(plan),
        preload="loaderkit.pipeline.executors.thread_engine",
        rows=replace(plan, shard=Shard(of=num_processes)).compiled.rows(),
        pools=[["read", "batch"]],
        num_batches=4,
        memory_bytes=2**20,
        trainer_stages=[Stage("late", "call", "batch", late)],
        pinned_for=pinned_for,
        free=free,
    )
    return RemoteEngine(
        spec, make, num_processes=num_processes, schedule=plan.schedule, **{"timeout_s": 60, **patience}
    )


def scale(batch: dict[str, Any]) -> None:
    batch["scaled"] = batch["filling"] * 2.0
