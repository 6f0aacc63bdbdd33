"""From a description to its running parts: connector, source, order, stages, pools, engine."""

from __future__ import annotations

import json
import logging
import operator
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from loaderkit import native
from loaderkit._internal.cgroups import num_cpus
from loaderkit.connectors.base import Connector
from loaderkit.connectors.factory import open_connector
from loaderkit.engine.contracts import Executor
from loaderkit.engine.metrics.worker_clock import Clock
from loaderkit.errors import ConfigError
from loaderkit.pipeline.config.checkpoint_source import CheckpointArgs
from loaderkit.pipeline.config.model import PipelineConfig
from loaderkit.pipeline.engine_factory import Assembly, Recipe, why_inline
from loaderkit.sampling.schedule import BatchSampler
from loaderkit.sources.array import ArrayArgs, ArraySource
from loaderkit.sources.base import Source
from loaderkit.sources.dataset import DatasetArgs, DatasetSource, open_object
from loaderkit.sources.files import FilesArgs, FilesSource
from loaderkit.sources.formats.tar_index import TarIndex, default_cache_dir, load_index
from loaderkit.sources.tar import TarArgs, TarSource
from loaderkit.stages.batch import BatchArgs
from loaderkit.stages.transfer import TransferStream

if TYPE_CHECKING:
    from loaderkit.stages.slowed import Slowdown

logger = logging.getLogger("loaderkit")


@dataclass(frozen=True)
class Parts:
    """What a loader is made of."""

    config: PipelineConfig
    source: Source
    connector: Connector | None
    owns_connector: bool  # False: it was given, and others may use it
    schedule: BatchSampler
    fingerprint: dict[str, str]
    tuning: dict[str, Any]
    make_executor: Callable[[], Executor]
    lane: TransferStream | None = None  # None: batches stay on the CPU
    list_s: float = 0.0  # what it took to list the source, but for
    index_s: float = 0.0  # the indexes of archives, which were read or built

    def close(self) -> None:
        """Close the connector, unless it was given."""
        if self.connector is not None and self.owns_connector:
            self.connector.close()


def _open_connector(config: PipelineConfig, given: Mapping[str, Connector]) -> Connector | None:
    """Where the samples are; None if they are Python objects. Raises SourceError, ConnectorError."""
    args = config.source
    if isinstance(args, FilesArgs):
        return open_connector(args.url, given, args)
    if isinstance(args, (ArrayArgs, TarArgs)):
        return open_connector(args.root, given, args)
    return None


def _open_source(config: PipelineConfig, connector: Connector | None, load: Callable[..., TarIndex]) -> Source:
    """The samples, listed; `load` reads an archive's index. Raises SourceError, ConnectorError, FormatError."""
    args = config.source
    if isinstance(args, DatasetArgs):
        return DatasetSource(open_object(args), args)
    assert connector is not None
    if isinstance(args, FilesArgs):
        return FilesSource(connector, args)
    if isinstance(args, ArrayArgs):
        return ArraySource(connector, args)
    assert isinstance(args, TarArgs)
    return TarSource(connector, args, partial(load, connector, cache_dir=default_cache_dir()))


def ranks_of(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """(rank, world size): as given, else torch.distributed's, else RANK and WORLD_SIZE, else (0, 1)."""
    if rank is None and world_size is None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        try:
            rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        except ValueError:
            raise ConfigError(
                f"the environment's RANK={os.environ.get('RANK')!r}, WORLD_SIZE={os.environ.get('WORLD_SIZE')!r} "
                "are not whole numbers: correct them, or give rank and world_size to build()"
            ) from None
    if rank is None or world_size is None:
        raise ConfigError("give both rank and world_size, or neither")
    try:
        rank, world_size = operator.index(rank), operator.index(world_size)
    except TypeError:
        raise ConfigError(f"rank {rank!r} and world_size {world_size!r} must be whole numbers") from None
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank {rank} is not in [0, world_size = {world_size})")
    return rank, world_size


def make_parts(
    config: PipelineConfig,
    *,
    rank: int | None,
    world_size: int | None,
    connectors: Mapping[str, Connector],
    clock: Clock,
    stretch: Slowdown | None = None,
) -> Parts:
    """Open the source and prepare everything; no thread is started. `stretch` slows one stage down. Raises LoaderkitError."""
    if isinstance(config.source, CheckpointArgs):
        raise ConfigError(
            f"{config.name}: its source is a checkpoint, which has tensors and no samples: iterate over loaderkit.build(), or "
            "use loaderkit run, check, explain or restore"
        )
    rank, world_size = ranks_of(rank, world_size)
    with ExitStack() as opened:  # closed again if anything is wrong
        connector = _open_connector(config, connectors)
        owns_connector = connector is not None and connector not in connectors.values()
        if connector is not None and owns_connector:
            opened.callback(connector.close)
        indexes = _Timed(load_index)
        begin_s = time.perf_counter()
        source = _open_source(config, connector, indexes)
        list_s = time.perf_counter() - begin_s
        batch = config.stage("batch").args
        assert isinstance(batch, BatchArgs)
        schedule = BatchSampler(len(source), rank, world_size, batch.size, batch.drop_last)
        if schedule.num_batches() == 0:
            raise ConfigError(
                f"an epoch has no batch at all: {len(source)} samples do not fill one batch of {batch.size} on each of "
                f"{world_size} ranks, and stages.batch.drop_last is true"
            )
        tuning, lane, make_executor = _prepare(config, source, connector, schedule, clock=clock, stretch=stretch)
        parts = Parts(
            config,
            source,
            connector,
            owns_connector,
            schedule,
            _fingerprint(config, source),
            tuning,
            make_executor,
            lane,
            list_s=list_s - indexes.seconds,
            index_s=indexes.seconds,
        )
        opened.pop_all()
    return parts


def _prepare(
    config: PipelineConfig,
    source: Source,
    connector: Connector | None,
    schedule: BatchSampler,
    *,
    clock: Clock,
    stretch: Slowdown | None,
) -> tuple[dict[str, Any], TransferStream | None, Callable[[], Executor]]:
    """What statistics say of how it runs, where batches go on a GPU, and what makes the executor."""
    reason = why_inline(config, source, connector)
    is_inline = config.prefetch.executor == "inline" or reason is not None
    num_workers = 1 if is_inline else _num_workers(config)
    recipe = Recipe(config, source, connector, schedule, num_workers, stretch, is_inline)
    assembly = Assembly(recipe)
    executor = "inline" if is_inline else config.prefetch.executor
    tuning: dict[str, Any] = {"executor": executor, "batches": config.prefetch.first_batches}
    if reason is not None:
        tuning["executor_reason"] = reason
    if assembly.graph:
        tuning["graph"] = assembly.graph
    if assembly.cropping is not None:
        tuning["jpeg"] = f"crop of {assembly.cropping}" if native.HAS_JPEG else "whole"
    if config.prefetch.executor == "process":
        tuning["processes"] = config.prefetch.processes
        from loaderkit.pipeline.process_setup import (
            in_a_process,  # a tenth of what it takes to begin, and only wanted here
        )

        pools, make_executor = in_a_process(recipe, assembly, clock)
    else:
        if config.prefetch.processes > 1:
            logger.warning(
                "prefetch.processes: %d is of no effect with prefetch.executor: %s; executor: process has several",
                config.prefetch.processes,
                config.prefetch.executor,
            )
        pools, make_executor = assembly.described_pools(), partial(assembly.make_engine, clock)
    tuning |= {"cpus": num_cpus(), "concurrency": sum(pool["workers"] for pool in pools), "pools": pools}
    return tuning, assembly.lane, make_executor


def _num_workers(config: PipelineConfig) -> int:
    """Threads in all, to begin with."""
    concurrency = config.prefetch.concurrency
    return num_cpus() if concurrency == "auto" else concurrency


class _Timed:
    """A function, and for how long at least one call of it was under way, in s; several threads may call it at once."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._lock = threading.Lock()
        self._num_under_way = 0
        self._since_s = 0.0
        self.seconds = 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            if self._num_under_way == 0:
                self._since_s = time.perf_counter()
            self._num_under_way += 1
        try:
            return self._function(*args, **kwargs)
        finally:
            with self._lock:
                self._num_under_way -= 1
                if self._num_under_way == 0:
                    self.seconds += time.perf_counter() - self._since_s


def _fingerprint(config: PipelineConfig, source: Source) -> dict[str, str]:
    """What must be equal for a state to mean the same samples: not where the data lies, nor how fast it is read."""
    fields = config.source.model_dump(mode="python", include={"fields", "label"}, exclude_none=True)
    found = {
        "data": f"{config.source_kind} of {len(source)} samples, digest {source.fingerprint()}",
        "order": config.order.shuffle,
        "stages": " > ".join(stage.name for stage in config.stages if stage.kind != "transfer"),
    }
    if config.order.shuffle == "block":
        block = config.order.block
        found["order"] = f"block of {block.block} bytes, window {block.window}, lanes {block.lanes}"
    if fields:
        found["fields"] = json.dumps(fields, sort_keys=True, default=list)
    for stage in config.stages:
        if stage.kind not in ("read", "batch", "transfer"):
            args = {
                name: value
                for name, value in stage.args
                if name not in ("workers", "name", "timeout", "max_pixels", "formats", "device")
                and value != type(stage.args).model_fields[name].default
            }
            found[f"stages.{stage.name}"] = f"{stage.kind} {json.dumps(args, sort_keys=True, default=_name_of)}"
    return found


def _name_of(value: Any) -> str:
    return getattr(value, "__qualname__", None) or type(value).__qualname__
