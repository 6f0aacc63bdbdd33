"""From stage configs to stages that run: functions bound to their arguments, the source, the seed and the policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from loaderkit._internal.cgroups import num_cpus
from loaderkit._internal.device import resolve_device
from loaderkit.connectors.base import Connector
from loaderkit.connectors.layers.read_ahead import ReadAheadConnector
from loaderkit.engine.work import Stage
from loaderkit.errors import USER_ERRORS, ConfigError, LoaderkitError, StageError
from loaderkit.pipeline.config.model import PipelineConfig, StageConfig
from loaderkit.pipeline.config.registry import STAGES
from loaderkit.sampling.random import generator, uniforms
from loaderkit.sources.array import ArraySource
from loaderkit.sources.base import Source
from loaderkit.sources.dataset import DatasetSource
from loaderkit.stages.base import BatchContext, FieldSpec, SampleChunk, SampleFailure, image_fields
from loaderkit.stages.batch import BatchArgs, land, specs_of
from loaderkit.stages.call import CallArgs, bind, call_on_batch, call_on_sample
from loaderkit.stages.image.decode import DecodeArgs, Decoder
from loaderkit.stages.image.normalize import NormalizeArgs, finish_of, normalize, normalize_slots
from loaderkit.stages.image.ops import DecodeHint, foresight
from loaderkit.stages.read import read_items, read_ranges
from loaderkit.stages.read_arrays import DirectRead
from loaderkit.stages.read_records import read_records
from loaderkit.stages.runner import FailureNamer, StageKeys, each_call, each_sample, raise_store_failure, replace_failed
from loaderkit.stages.time_limit import TimeLimit
from loaderkit.stages.transfer import TransferArgs, TransferStream, shape

if TYPE_CHECKING:
    from loaderkit.stages.image.dali import Graph, Renderer


class Compiler:
    """Turns stage configs into runnable stages that share the source, the seed and the policy for bad samples."""

    def __init__(
        self, config: PipelineConfig, source: Source, connector: Connector | None, *, num_workers: int
    ) -> None:
        """`num_workers`: threads in all, of all processes."""
        self._num_workers = num_workers
        self._config = config
        self._source = source
        self._connector = connector
        self._seed = config.order.seed
        self._border = [stage.kind for stage in config.stages].index("batch")
        self._sample_runs: list[Callable[[SampleChunk], Any]] = []
        self._limits: dict[str, TimeLimit] = {}  # by stage
        self.device: torch.device | None = None  # where `transfer` brings batches; None: they stay on the CPU
        wanted = next((stage.args for stage in config.stages if isinstance(stage.args, TransferArgs)), None)
        if wanted is not None and wanted.device != "cpu":
            try:
                found = resolve_device(wanted.device)
            except RuntimeError as error:
                raise ConfigError(f"stages.transfer.device: {error}") from error
            self.device = found if found.type == "cuda" else None
        self.lane = None if self.device is None else TransferStream(self.device)
        self._in_graph: list[StageConfig] = []  # stages that DALI does, `decode` first
        self._lowered = next(
            (s for s in config.stages if isinstance(s.args, DecodeArgs) and s.args.device != "cpu"), None
        )
        self.graph = None if self._lowered is None else self._lower(self._lowered)
        self._normalized_in_slots = self._find_slot_normalize() if self.graph is None else None

    @property
    def early_lane(self) -> TransferStream | None:
        """The stream for what is done before `transfer`, where that has tensors on a GPU."""
        return self.lane if self.graph is not None and self.graph.device is not None else None

    @property
    def cropping(self) -> str | None:
        """The stage that takes a piece of what `decode` gives, so that nothing else of a JPEG need be made into pixels."""
        for stage in self._config.stages:
            if isinstance(stage.args, DecodeArgs):
                following, needs = self._foreseen(stage.name, stage.args)
                if needs is not None and needs.takes_a_piece:
                    return following.name
        return None

    def _find_slot_normalize(self) -> StageConfig | None:
        """The `normalize` that can work on slots chunk by chunk: float32 on the CPU with nothing but `transfer` before."""
        is_there = self.device is None
        for stage in self._config.stages[self._border + 1 :]:
            if isinstance(stage.args, NormalizeArgs):
                return stage if stage.args.dtype == "float32" and stage.args.fields is None else None
            if not (_keeps_values(stage) and is_there):
                return None
        return None

    def _lower(self, decoding: StageConfig) -> Graph:
        """What DALI is to do: all from `decode` to `batch`, and `normalize`, if only `transfer` stands before it.

        What stands behind a `transfer` to CUDA is done there, when DALI runs in another process.
        """
        from loaderkit.stages.image.dali import Graph  # only where it is asked for

        assert isinstance(decoding.args, DecodeArgs)
        stages = self._config.stages
        first = stages.index(decoding)
        if decoding.args.device == "gpu":
            self._check_gpu()
        self._in_graph = [decoding, *stages[first + 1 : self._border]]
        described = []
        for stage in self._in_graph[1:]:
            kind = STAGES[stage.kind]
            assert kind.steps is not None
            described.append((stage.name, kind.steps(stage.args)))
        behind = next((s for s in stages[self._border + 1 :] if not self._may_pass(s)), None)
        finish = None
        if behind is not None and isinstance(behind.args, NormalizeArgs) and behind.args.fields is None:
            self._in_graph.append(behind)
            try:
                finish = finish_of(behind.args)
            except ValueError as error:
                raise ConfigError(f"stages.{behind.name}: {error}") from error
        batch = stages[self._border].args
        assert isinstance(batch, BatchArgs)
        device = self.device.index if decoding.args.device == "gpu" and self.device is not None else None
        return Graph(tuple(described), finish, batch.size, device, self._num_dali_threads(decoding))

    def _num_dali_threads(self, decoding: StageConfig) -> int:
        """How many threads of its own a DALI pipeline gets: a chunk is a batch, so no more work at once than there are batches
        open, and the other CPUs would do nothing."""
        num_threads = min(self._num_workers, num_cpus())
        workers = num_threads if decoding.args.workers == "auto" else decoding.args.workers
        num_at_once = min(workers, self._config.prefetch.first_batches)
        return max(1, num_threads // num_at_once)

    def _may_pass(self, stage: StageConfig) -> bool:
        """Whether DALI may do what stands behind a stage before that stage."""
        is_elsewhere = self.device is not None and self._config.prefetch.executor == "process"
        return _keeps_values(stage) and not is_elsewhere

    def _check_gpu(self) -> None:
        prefix = "stages.decode.device: gpu"
        if not torch.cuda.is_available():
            built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
            raise ConfigError(
                f"{prefix}: torch {torch.__version__}, {built}, sees no CUDA device: use `cpu`, or `dali-cpu`, which runs the "
                "same operators on the CPU"
            )
        if self.device is None:
            raise ConfigError(f"{prefix}: batches stay on the CPU: put `transfer: {{device: auto}}` behind `batch`")
        if self._config.prefetch.executor == "process":
            raise ConfigError(
                f"{prefix}: another process cannot hand over tensors on a GPU: use prefetch.executor: thread"
            )

    def _renderer(self, decoding: StageConfig) -> Renderer:
        from loaderkit.stages.image.dali import Renderer

        assert isinstance(decoding.args, DecodeArgs)
        assert self.graph is not None
        keys = {stage.name: StageKeys(self._seed, stage.name) for stage in self._in_graph}
        counts = {stage.name: STAGES[stage.kind].num_draws for stage in self._in_graph}
        on_cpu = replace(decoding, args=decoding.args.model_copy(update={"device": "cpu"}))
        plain = [self._sample_run(stage) for stage in self._in_graph[1:] if stage.kind != "normalize"]
        last = self._in_graph[-1].args
        scale = normalize(last) if isinstance(last, NormalizeArgs) else None

        device = "cpu" if self.graph.device is None else self.device

        def finish(images: torch.Tensor) -> torch.Tensor:
            if scale is None:
                return images.clone().to(device)  # they lie in memory that the next chunk uses again
            batch = {"image": images}
            scale(batch, ["image"])
            return batch["image"].to(device)

        def run_plain(chunk: SampleChunk) -> None:
            for run in plain:
                run(chunk)

        return Renderer(
            self.graph,
            name=decoding.name,
            fields=decoding.args.fields,
            takes_jpegs="jpeg" in decoding.args.formats,
            max_pixels=decoding.args.max_pixels,
            draws=lambda name, chunk: uniforms(keys[name][chunk.epoch], chunk.indices, counts[name]),
            decode=self._sample_run(on_cpu),
            plain=run_plain,
            finish=finish,
        )

    def stages(self) -> list[Stage]:
        found = []
        late: list[Stage] = []
        for number, config in enumerate(self._config.stages):
            if self._lowered is not None and config in self._in_graph:
                if config is self._lowered:
                    renderer = self._renderer(config)
                    render = renderer if self.early_lane is None else partial(self.early_lane.run, renderer)
                    self._sample_runs.append(render)
                    workers = None if config.args.workers == "auto" else config.args.workers
                    found.append(Stage(config.name, config.kind, "sample", render, workers, renderer.close))
                continue
            workers = None if config.args.workers == "auto" else config.args.workers
            in_slots = config is self._normalized_in_slots
            if number <= self._border or in_slots:
                run = self._sample_run(config) if not in_slots else self._slot_normalize(config)
                if number < self._border:
                    self._sample_runs.append(run)
                ahead = self._connector if config.kind == "read" else None
                stop = ahead.stop if isinstance(ahead, ReadAheadConnector) else None  # its readers wait for its threads
                found.append(Stage(config.name, config.kind, "sample", run, workers, self._close_of(config), stop))
            else:
                act = self._batch_run(config)
                late.append(Stage(config.name, config.kind, "batch", act, workers, self._close_of(config)))
        return found + late

    def _close_of(self, config: StageConfig) -> Callable[[], None] | None:
        limit = self._limits.get(config.name)
        return None if limit is None else limit.close

    def run_sample_stages(self, chunk: SampleChunk) -> None:
        """Everything before `batch`, for samples outside the stream: the probe, and replacements."""
        for run in self._sample_runs:
            run(chunk)

    def specs_of(self, sample: dict[str, Any], key: str) -> Mapping[str, FieldSpec]:
        args = self._config.stages[self._border].args
        assert isinstance(args, BatchArgs)
        dtype = "float32" if self._normalized_in_slots is not None else None
        try:
            specs = specs_of(sample, key, args.ragged, dtype)
        except (OverflowError, RuntimeError, TypeError, ValueError) as error:
            raise StageError(f"batch cannot hold sample {key!r}: {error}", stage="batch", key=key) from error
        if self.graph is not None and self.graph.finish is not None and not image_fields(specs):
            normalizing = self._in_graph[-1].name
            raise StageError(
                f"{normalizing} failed for sample {key!r}: the batch has no image field", stage=normalizing, key=key
            )
        known = [*specs, *(f"{name}_sizes" for name, spec in specs.items() if spec.kind == "pad"), "__key__"]
        for name in self._config.output or ():
            if name not in known and name != "__wrapped__" and not self._has_batch_call():
                raise ConfigError(f"output names the field {name!r}, but batches have {', '.join(known)}")
        return specs

    def _has_batch_call(self) -> bool:
        return any(stage.kind == "call" for stage in self._config.stages[self._border :])

    def _sample_run(self, config: StageConfig) -> Callable[[SampleChunk], Any]:
        failed = FailureNamer(config.name, self._source, self._describe)
        keys = StageKeys(self._seed, config.name)
        args, kind = config.args, STAGES[config.kind]
        if config.kind == "read":
            return self._read(failed)
        if isinstance(args, CallArgs):
            function, wants_rng = self._bind(config.name, args, None)
            return each_call(partial(call_on_sample, function), keys if wants_rng else None, self._source, failed)
        if isinstance(args, BatchArgs):
            gather = self._batch(failed)
            return gather if self.early_lane is None else partial(self.early_lane.run, gather)
        assert kind.make is not None
        following, needs = self._foreseen(config.name, args) if isinstance(args, DecodeArgs) else (config, None)
        if needs is None:
            return each_sample(kind.make(args), kind.num_draws, keys, failed, reuse=self._may_reuse)
        assert isinstance(args, DecodeArgs)
        decoder = Decoder(args, needs.of, getattr(following.args, "fields", None))
        # With the numbers that the stage it decodes for will draw.
        kind, keys = STAGES[following.kind], StageKeys(self._seed, following.name)
        return each_sample(decoder.begin, kind.num_draws, keys, failed, reuse=self._may_reuse, finish=decoder.finish)

    def _foreseen(self, name: str, args: DecodeArgs) -> tuple[StageConfig, DecodeHint | None]:
        """The stage that a `decode` decodes for, and what that needs of a JPEG, if it is not everything."""
        stages = self._config.stages
        behind = stages[[stage.name for stage in stages].index(name) + 1 :]
        following = next(stage for stage in behind if not (args.scaled and stage.kind == "color_jitter"))
        steps = STAGES[following.kind].steps
        fields = getattr(following.args, "fields", None)
        is_apart = args.fields is not None and fields is not None and not {*args.fields} & {*fields}
        if steps is None or args.device != "cpu" or args.exif_orientation or is_apart:
            return following, None
        return following, foresight(steps(following.args), is_next=following is behind[0], scaled=args.scaled)

    def _read(self, failed: FailureNamer) -> Callable[[SampleChunk], Any]:
        if isinstance(self._source, DatasetSource):
            return read_items(self._source, failed, is_last=self._border == 1)
        assert self._connector is not None
        if isinstance(self._source, ArraySource):
            is_last = self._border == 1
            return read_records(self._source, self._connector, failed, is_last=is_last, reuse=self._may_reuse)
        straight = self._straight(self._connector)
        fetch = straight.fetch if straight is not None else None
        return read_ranges(self._source, self._connector, failed, fetch=fetch, as_bytes=self._border == 1)

    def _straight(self, connector: Connector) -> DirectRead | None:
        """How arrays may go into their slots: if there is `decode`, and every other stage before `batch` says on which fields
        it acts."""
        between = self._config.stages[1 : self._border]
        decoding = next((stage.args for stage in between if isinstance(stage.args, DecodeArgs)), None)
        others = [stage for stage in between if stage.kind != "decode"]
        named = [getattr(stage.args, "fields", None) for stage in others]
        if decoding is None or any(stage.kind == "call" for stage in others) or None in named:
            return None
        decoded = None if decoding.fields is None else frozenset(decoding.fields)
        return DirectRead(connector, decoded, frozenset(name for names in named for name in names or ()))

    @property
    def _may_reuse(self) -> bool:
        """A user's function may keep what it is given; without one, nobody sees a stage's memory after `batch`."""
        return not any(stage.kind == "call" for stage in self._config.stages[: self._border])

    def _bind(self, name: str, args: CallArgs, lane: TransferStream | None) -> tuple[Callable[..., Any], bool]:
        """The function, with its limit, and whether it wants random numbers. `lane`: the stream it is called on."""
        try:
            function, wants_rng = bind(args)
        except USER_ERRORS as error:
            reason = str(error) if isinstance(error, (ImportError, ValueError)) else f"{type(error).__name__}: {error}"
            raise ConfigError(f"stages.{name}.function: {args.function!r} cannot be imported: {reason}") from error
        if args.timeout is None:
            return function, wants_rng
        limit = self._limits[name] = TimeLimit(name, args.timeout)
        return partial(limit, function if lane is None else lane.bound(function)), wants_rng

    def _describe(self, origin: str) -> str:
        return self._connector.describe(origin) if self._connector is not None else origin

    def _batch(self, failed: FailureNamer) -> Callable[[SampleChunk], None]:
        replaces = self._config.errors.on_bad_sample == "replace"
        tolerates = self._config.errors.on_bad_sample != "raise"

        def fill(chunk: SampleChunk) -> None:
            self.run_sample_stages(chunk)
            land(chunk, chunk.work_item.specs, failed)

        def run(chunk: SampleChunk) -> None:
            land(chunk, chunk.work_item.specs, failed)
            if not chunk.failures:
                return
            if tolerates:
                raise_store_failure(chunk)
            if replaces:
                found = replace_failed(chunk, fill, len(self._source), self._seed, failed)
            else:
                found = [
                    SampleFailure(chunk.lo + place, int(chunk.indices[place]), error.position, error)
                    for place, error in chunk.failures.items()
                ]
            chunk.work_item.failures.extend(found)

        return run

    def _slot_normalize(self, config: StageConfig) -> Callable[[SampleChunk], None]:
        assert isinstance(config.args, NormalizeArgs)
        run = normalize_slots(config.args)

        def checked(chunk: SampleChunk) -> None:
            if not image_fields(chunk.work_item.specs):
                raise _batch_error(config.name, chunk.epoch, chunk.work_item.step, "the batch has no image field")
            try:
                run(chunk)
            except (RuntimeError, ValueError) as error:
                raise _batch_error(config.name, chunk.epoch, chunk.work_item.step, str(error)) from error

        return checked

    def _batch_run(self, config: StageConfig) -> Callable[[dict[str, Any], BatchContext], None]:
        act = self._batch_action(config)
        if self.lane is not None:
            act = partial(self.lane.run, act)

        def run(batch: dict[str, Any], context: BatchContext) -> None:
            try:
                act(batch, context)
            except USER_ERRORS as error:
                reason = str(error) if isinstance(error, (ValueError, LoaderkitError)) else repr(error)
                raise _batch_error(config.name, context.epoch, context.step, reason, context.keys) from error

        return run

    def _transfer_action(self, args: TransferArgs) -> Callable[[dict[str, Any], BatchContext], None]:
        lane, change = self.lane, shape(args)

        def run(batch: dict[str, Any], context: BatchContext) -> None:
            if lane is not None:
                lane.move(batch)
            if change is not None:
                batch.update({name: change(value) for name, value in batch.items()})

        return run

    def _batch_action(self, config: StageConfig) -> Callable[[dict[str, Any], BatchContext], None]:
        args = config.args
        if isinstance(args, NormalizeArgs):
            scale = normalize(args)

            def normalize_batch(batch: dict[str, Any], context: BatchContext) -> None:
                names = args.fields or context.images
                if not names:
                    raise ValueError("the batch has no image field")
                scale(batch, names)

            return normalize_batch
        if isinstance(args, TransferArgs):
            return self._transfer_action(args)
        assert isinstance(args, CallArgs)
        function, wants_rng = self._bind(config.name, args, self.lane)
        keys = StageKeys(self._seed, config.name)

        def call_batch(batch: dict[str, Any], context: BatchContext) -> None:
            rng = generator(keys[context.epoch], context.first_position) if wants_rng else None
            kept: dict[str, Any] = {name: batch[name] for name in ("__key__", "__wrapped__") if name in batch}
            result = kept | call_on_batch(function, batch, rng)  # which may have dropped them
            batch.clear()
            batch.update(result)

        return call_batch


def _keeps_values(stage: StageConfig) -> bool:
    """Whether a stage may as well run after `normalize`."""
    return isinstance(stage.args, TransferArgs) and stage.args.dtype is None


def _batch_error(stage: str, epoch: int, step: int, reason: str, keys: list[str] | None = None) -> StageError:
    listed = f" (samples {', '.join(map(repr, keys[:3]))}, ...)" if keys else ""
    return StageError(f"{stage} failed for batch {step} of epoch {epoch}{listed}: {reason}", stage=stage, epoch=epoch)
