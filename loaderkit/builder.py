"""From a description to its running parts: connector, source, order, stages, pools, engine."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from loaderkit.config import PipelineConfig, StageConfig
from loaderkit.connectors.file import FileConnector
from loaderkit.errors import ConfigError, LoaderkitError, StageError
from loaderkit.formats.tar_index import default_cache_dir, load_index
from loaderkit.keyed import generator
from loaderkit.order import BlockOrder, GlobalOrder, Order, Schedule, SequentialOrder
from loaderkit.prefetch.accounts import Clock
from loaderkit.prefetch.engine import Engine, PoolPlan
from loaderkit.prefetch.plan import BatchPlan, BatchShape
from loaderkit.prefetch.runner import FailureNamer, StageKeys, each_call, each_sample, replace_failed
from loaderkit.registry import SCHEMES, STAGES
from loaderkit.sources.dataset import DatasetArgs, DatasetSource, open_object
from loaderkit.sources.files import FilesArgs, FilesSource
from loaderkit.sources.tar import TarArgs, TarSource
from loaderkit.stages.batch import BatchArgs, land, specs_of
from loaderkit.stages.call import CallArgs, bind, call_on_batch, call_on_sample
from loaderkit.stages.normalize import NormalizeArgs, normalize, normalize_slots
from loaderkit.stages.read import read_items, read_ranges
from loaderkit.stages.transfer import TransferArgs, resolve_device, transfer
from loaderkit.types import BatchContext, Chunk, Connector, FieldSpec, SampleFailure, Source, Stage

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)


@dataclass(frozen=True)
class Parts:
    """What a loader is made of."""

    config: PipelineConfig
    source: Source
    connector: Connector | None
    schedule: Schedule
    fingerprint: dict[str, str]
    tuning: dict[str, Any]
    make_engine: Callable[[], Engine]


def open_connector(url: str, given: Mapping[str, Connector]) -> Connector:
    """The connector for a URL or path: one of `given` by its scheme, else our own. Raises ConfigError."""
    match = _URL.fullmatch(url)
    scheme, rest = (match[1].lower(), match[2]) if match else ("file", url)
    if scheme in given:
        return given[scheme]
    if scheme == "file":
        return FileConnector(rest)
    if scheme == "memory":
        raise ConfigError(
            f"source.url {url!r}: objects in memory have to be given: "
            'loaderkit.build(..., connectors={"memory": MemoryConnector({...})})'
        )
    raise ConfigError(f"source.url {url!r}: no connector for {scheme}://; expected one of {', '.join(SCHEMES)}")


def open_source(config: PipelineConfig, given: Mapping[str, Connector]) -> tuple[Source, Connector | None]:
    """The samples, listed. Raises SourceError, ConnectorError, FormatError."""
    args = config.source
    if isinstance(args, DatasetArgs):
        return DatasetSource(open_object(args), args), None
    if isinstance(args, FilesArgs):
        connector = open_connector(args.url, given)
        return FilesSource(connector, args), connector
    assert isinstance(args, TarArgs)
    connector = open_connector(args.root, given)
    return TarSource(connector, args, partial(load_index, connector, cache_dir=default_cache_dir())), connector


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
) -> Parts:
    """Open the source and prepare everything; no thread is started. Raises LoaderkitError."""
    rank, world_size = ranks_of(rank, world_size)
    source, connector = open_source(config, connectors)
    batch = config.stage("batch").args
    assert isinstance(batch, BatchArgs)
    schedule = Schedule(len(source), rank, world_size, batch.size, batch.drop_last)
    if schedule.num_batches() == 0:
        raise ConfigError(
            f"an epoch has no batch at all: {len(source)} samples do not fill one batch of {batch.size} on each of "
            f"{world_size} ranks, and stages.batch.drop_last is true"
        )
    compiler = _Compiler(config, source, connector)
    stages = compiler.stages()
    num_workers = num_cpus() if config.prefetch.concurrency == "auto" else config.prefetch.concurrency
    inline = config.prefetch.executor == "inline"
    pools = plan_pools(stages, 1 if inline else num_workers)

    def make_engine() -> Engine:
        plan = BatchPlan(
            source=source,
            order=_order(config, source),
            schedule=schedule,
            shape=BatchShape(batch.size, batch.pad_value, config.errors.on_bad_sample),
            num_epochs=config.order.epochs,
            probe=compiler.run_sample_stages,
            specs_of=compiler.specs_of,
            num_batches=config.prefetch.batches,
            memory_bytes=config.prefetch.memory,
            pinned=compiler.device.type == "cuda",
        )
        compiler.plan = plan
        return Engine(plan, stages, pools, inline=inline, timeout_s=config.prefetch.timeout, clock=clock)

    tuning = {
        "executor": config.prefetch.executor,
        "concurrency": sum(pool.num_workers for pool in pools),
        "batches": config.prefetch.batches,
        "pools": [
            {"stages": [stages[n].name for n in (*pool.sample_stages, *pool.batch_stages)], "workers": pool.num_workers}
            for pool in pools
        ],
    }
    return Parts(config, source, connector, schedule, _fingerprint(config, source), tuning, make_engine)


def _order(config: PipelineConfig, source: Source) -> Order:
    order = config.order
    if order.shuffle == "global":
        return GlobalOrder(len(source), order.seed)
    if order.shuffle == "block":
        bounds = source.blocks(order.block.block)
        return BlockOrder(bounds, order.seed, window=order.block.window, lanes=order.block.lanes)
    return SequentialOrder()


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
            args = stage.args.model_dump(
                mode="python", exclude={"workers", "name", "max_pixels"}, exclude_defaults=True
            )
            found[f"stages.{stage.name}"] = f"{stage.kind} {json.dumps(args, sort_keys=True, default=_name_of)}"
    return found


def _name_of(value: Any) -> str:
    return getattr(value, "__qualname__", None) or type(value).__qualname__


def plan_pools(stages: list[Stage], num_workers: int) -> list[PoolPlan]:
    """Fuse neighbouring stages without workers of their own into pools, and share `num_workers` out among those.

    A fused chunk passes from stage to stage without a hand-off. Stages with `workers: N` get a pool of N.
    """
    groups: list[list[int]] = []
    for number, stage in enumerate(stages):
        if groups and stage.workers is None and stages[groups[-1][-1]].workers is None:
            groups[-1].append(number)
        else:
            groups.append([number])
    last_sample = max(number for number, stage in enumerate(stages) if stage.scope == "sample")
    num_fixed = sum(stage.workers or 0 for stage in stages)
    automatic = [group for group in groups if stages[group[0]].workers is None]
    # Batch stages alone are light (a copy, a call a batch): one worker; the rest is shared by the sample pools.
    heavy = [group for group in automatic if stages[group[0]].scope == "sample"]
    num_left = max(len(heavy), num_workers - num_fixed - (len(automatic) - len(heavy)))
    pools = []
    for group in groups:
        workers = stages[group[0]].workers
        if workers is None:
            place = heavy.index(group) if group in heavy else None
            workers = 1 if place is None else num_left // len(heavy) + (place < num_left % len(heavy))
        pools.append(
            PoolPlan(
                tuple(number for number in group if stages[number].scope == "sample"),
                tuple(number for number in group if stages[number].scope == "batch"),
                workers,
                last_sample in group,
            )
        )
    return pools


def num_cpus() -> int:
    """CPUs this process may use: its affinity and its cgroup's quota (v2 and v1), whichever is less; at least 1."""
    available = len(os.sched_getaffinity(0))
    for quota, period in _cgroup_quotas():
        if quota > 0 and period > 0:
            available = min(available, max(1, round(quota / period)))
    return available


def _cgroup_quotas() -> list[tuple[int, int]]:
    found = []
    try:
        groups = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in groups:
        _, controllers, group = line.split(":", 2)
        folder = Path("/sys/fs/cgroup" + ("" if not controllers else "/cpu")) / group.lstrip("/")
        for place in (folder, *folder.parents):
            try:
                if not controllers:
                    quota, period = (place / "cpu.max").read_text().split()
                elif "cpu" in controllers.split(","):
                    quota = (place / "cpu.cfs_quota_us").read_text()
                    period = (place / "cpu.cfs_period_us").read_text()
                else:
                    break
                found.append((int(quota), int(period)))
            except (OSError, ValueError):  # no such file at this level, or "max"
                continue
    return found


class _Compiler:
    """Turns stage configs into runnable stages that share the source, the seed and the policy for bad samples."""

    def __init__(self, config: PipelineConfig, source: Source, connector: Connector | None) -> None:
        self._config = config
        self._source = source
        self._connector = connector
        self._seed = config.order.seed
        self._border = [stage.kind for stage in config.stages].index("batch")
        self._sample_runs: list[Callable[[Chunk], Any]] = []
        self.plan: BatchPlan | None = None
        self.device = torch.device("cpu")
        wanted = next((stage.args for stage in config.stages if isinstance(stage.args, TransferArgs)), None)
        if wanted is not None:
            try:
                self.device = resolve_device(wanted.device)
            except RuntimeError as error:
                raise ConfigError(f"stages.transfer.device: {error}") from error
        self._normalized_in_slots = self._find_slot_normalize()

    def _find_slot_normalize(self) -> StageConfig | None:
        """The `normalize` that can work on slots chunk by chunk: float32 on the CPU with nothing but `transfer` before."""
        for stage in self._config.stages[self._border + 1 :]:
            if isinstance(stage.args, NormalizeArgs):
                fits = stage.args.dtype == "float32" and stage.args.fields is None and self.device.type == "cpu"
                return stage if fits else None
            if stage.kind != "transfer":
                return None
        return None

    def stages(self) -> list[Stage]:
        found = []
        late: list[Stage] = []
        for number, config in enumerate(self._config.stages):
            workers = None if config.args.workers == "auto" else config.args.workers
            in_slots = config is self._normalized_in_slots
            if number <= self._border or in_slots:
                run = self._sample_run(config) if not in_slots else self._slot_normalize(config)
                if number < self._border:
                    self._sample_runs.append(run)
                found.append(Stage(config.name, config.kind, "sample", run, workers))
            else:
                late.append(Stage(config.name, config.kind, "batch", self._batch_run(config), workers))
        return found + late

    def run_sample_stages(self, chunk: Chunk) -> None:
        """Everything before `batch`, for samples outside the stream: the probe, and replacements."""
        for run in self._sample_runs:
            run(chunk)

    def specs_of(self, sample: dict[str, Any], key: str) -> Mapping[str, FieldSpec]:
        args = self._config.stages[self._border].args
        assert isinstance(args, BatchArgs)
        dtype = torch.float32 if self._normalized_in_slots is not None else None
        try:
            specs = specs_of(sample, key, args.ragged, dtype)
        except (ValueError, TypeError) as error:
            raise StageError(f"batch cannot hold sample {key!r}: {error}", stage="batch", key=key) from error
        for name in self._config.output or ():
            if name not in specs and name not in ("__key__", "__wrapped__") and not self._has_batch_call():
                raise ConfigError(f"output names the field {name!r}, but batches have {', '.join(specs)} and __key__")
        return specs

    def _has_batch_call(self) -> bool:
        return any(stage.kind == "call" for stage in self._config.stages[self._border :])

    @property
    def _specs(self) -> Mapping[str, FieldSpec]:
        assert self.plan is not None
        assert self.plan.specs is not None
        return self.plan.specs

    def _image_fields(self) -> list[str]:
        return [name for name, spec in self._specs.items() if spec.image]

    def _sample_run(self, config: StageConfig) -> Callable[[Chunk], Any]:
        failed = FailureNamer(config.name, self._source, self._describe)
        keys = StageKeys(self._seed, config.name)
        args, kind = config.args, STAGES[config.kind]
        if config.kind == "read":
            if isinstance(self._source, DatasetSource):
                return read_items(self._source, failed)
            assert self._connector is not None
            return read_ranges(self._source, self._connector, failed)
        if isinstance(args, CallArgs):
            function, wants_rng = self._bind(config.name, args)
            return each_call(partial(call_on_sample, function), keys if wants_rng else None, self._source, failed)
        if isinstance(args, BatchArgs):
            return self._batch(failed)
        assert kind.make is not None
        # A user's function may keep what it is given; without one, nobody sees a stage's pixels after `batch`.
        reuse = not any(stage.kind == "call" for stage in self._config.stages[: self._border])
        return each_sample(kind.make(args), kind.num_draws, keys, failed, reuse=reuse)

    def _bind(self, name: str, args: CallArgs) -> tuple[Callable[..., Any], bool]:
        try:
            return bind(args)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(f"stages.{name}.function: {args.function!r} cannot be imported: {error}") from error

    def _describe(self, origin: str) -> str:
        return self._connector.describe(origin) if self._connector is not None else origin

    def _batch(self, failed: FailureNamer) -> Callable[[Chunk], None]:
        replaces = self._config.errors.on_bad_sample == "replace"

        def fill(chunk: Chunk) -> None:
            self.run_sample_stages(chunk)
            land(chunk, self._specs, failed)

        def run(chunk: Chunk) -> None:
            land(chunk, self._specs, failed)
            if not chunk.failures:
                return
            if replaces:
                found = replace_failed(chunk, fill, len(self._source), self._seed, failed)
            else:
                found = [
                    SampleFailure(chunk.lo + place, int(chunk.indices[place]), error.position, error)
                    for place, error in chunk.failures.items()
                ]
            chunk.destination.failures.extend(found)

        return run

    def _slot_normalize(self, config: StageConfig) -> Callable[[Chunk], None]:
        assert isinstance(config.args, NormalizeArgs)
        run = normalize_slots(config.args, self._image_fields)

        def checked(chunk: Chunk) -> None:
            if not self._image_fields():
                raise _batch_error(config.name, chunk.epoch, chunk.destination.step, "the batch has no image field")
            try:
                run(chunk)
            except (RuntimeError, ValueError) as error:
                raise _batch_error(config.name, chunk.epoch, chunk.destination.step, str(error)) from error

        return checked

    def _batch_run(self, config: StageConfig) -> Callable[[dict[str, Any], BatchContext], None]:
        act = self._batch_action(config)

        def run(batch: dict[str, Any], context: BatchContext) -> None:
            try:
                act(batch, context)
            except Exception as error:
                reason = str(error) if isinstance(error, (ValueError, LoaderkitError)) else repr(error)
                raise _batch_error(config.name, context.epoch, context.step, reason, context.keys) from error

        return run

    def _batch_action(self, config: StageConfig) -> Callable[[dict[str, Any], BatchContext], None]:
        args = config.args
        if isinstance(args, NormalizeArgs):
            scale = normalize(args)

            def normalize_batch(batch: dict[str, Any], _: BatchContext) -> None:
                names = args.fields or self._image_fields()
                if not names:
                    raise ValueError("the batch has no image field")
                scale(batch, names)

            return normalize_batch
        if isinstance(args, TransferArgs):
            if self.device.type == "cpu":
                return lambda batch, context: None
            move = transfer(self.device)
            return lambda batch, context: move(batch)
        assert isinstance(args, CallArgs)
        function, wants_rng = self._bind(config.name, args)
        keys = StageKeys(self._seed, config.name)

        def call_batch(batch: dict[str, Any], context: BatchContext) -> None:
            rng = generator(keys[context.epoch], context.first_position) if wants_rng else None
            result = call_on_batch(function, batch, rng)
            if result is not batch:
                kept: dict[str, Any] = {name: batch[name] for name in ("__key__", "__wrapped__") if name in batch}
                batch.clear()
                batch.update(kept | result)

        return call_batch


def _batch_error(stage: str, epoch: int, step: int, reason: str, keys: list[str] | None = None) -> StageError:
    listed = f" (samples {', '.join(map(repr, keys[:3]))}, ...)" if keys else ""
    return StageError(f"{stage} failed for batch {step} of epoch {epoch}{listed}: {reason}", stage=stage, epoch=epoch)
