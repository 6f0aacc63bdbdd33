"""Kinds of stages, and the context in which one is compiled: the pipeline, its random numbers, the naming of its failures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from loaderkit._internal.cuda.device import raise_kernel_failure
from loaderkit.connectors.base import Connector
from loaderkit.engine.user_code import FairLock, UserLock
from loaderkit.engine.work import Stage
from loaderkit.errors import USER_ERRORS, ConfigError, LoaderkitError, StageError
from loaderkit.samples.chunk import BatchContext, SampleChunk
from loaderkit.samples.sample import Sample
from loaderkit.samples.values import Encoded
from loaderkit.sampling.order import SampleOrder
from loaderkit.sources.base import Source, WindowRule
from loaderkit.stages.base import AddError, Scope, StageArgs, StageConfig
from loaderkit.stages.image.boxes import ALONE, Annotations, following
from loaderkit.stages.image.ops import MOVES_PIXELS, ImageOps
from loaderkit.stages.media.clips import each_frame
from loaderkit.stages.runner import FailureNamer, StageKeys, each_sample, returned


class Stream(Protocol):
    """A GPU stream that copies batches and runs the stages after `transfer`; see `transfer.TransferStream`."""

    device: torch.device

    def run(self, act: Callable[..., Any], *args: Any) -> Any: ...

    def bound(self, function: Callable[..., Any]) -> Callable[..., Any]: ...

    def move(self, batch: dict[str, Any]) -> None: ...

    def hand_over(self, batch: dict[str, Any], asked_s: float) -> None: ...

    def counters(self) -> dict[str, float]: ...

    def close(self) -> None: ...


# The defaults have names, so that a kind can be pickled by name.
def _no(args: Any) -> bool:
    return False


def _none(args: Any) -> None:
    return None


def _nothing(args: Any) -> Mapping[str, Any]:
    return {}


def _nothing_to_say(stage: StageConfig, batch: StageArgs) -> None:
    return None


@dataclass(frozen=True)
class StageKind:
    """A kind of stage: its arguments, whether it comes before or after `batch`, and how it is compiled.

    `make(args)` returns a function of one sample, its draws and memory to reuse, for `runner.each_sample`. Other kinds have
    `compile`, which returns the stage.
    """

    args: type[StageArgs]
    scope: Scope
    make: Callable[[Any], Callable[..., Any]] | None = None
    compile: Callable[[StageConfig, CompileContext], Stage] | None = None
    check: Callable[[Sequence[StageConfig], int, Mapping[str, StageKind], AddError], None] | None = None
    """(all stages, this one's index, the kinds, `add_error`): reports what does not fit the other stages."""
    num_draws: int = 0  # uniform random numbers per sample
    window: Callable[[Any], WindowRule] | None = None  # what it cuts of arrays, for `read` before it
    ops: Callable[[Any], ImageOps] | None = None  # its effect on an image as `ImageOp`s, for `decode` and boxes
    runs_in_dali: bool = True  # if it has `ops`
    needs_images: bool = False
    is_single: bool = False  # at most one in a pipeline
    packs: bool = False  # samples before it are put into its sequences
    expands: bool = False  # it makes several samples of each
    decodes: bool = False  # fields after it are no longer encoded bytes
    takes_16_bits: bool = False  # images may be uint16
    shrinks: bool = False  # images are cropped or resized, so seldom large after it
    is_pointwise: bool = False  # acts on each pixel alone, so it commutes with a resize
    only_computes: bool = False  # it waits for nothing but a CPU and the GIL
    is_contained: bool = False  # it makes no fields but by its arguments, and keeps no memory of what it is given
    leaves_values: bool = False  # it changes no array or tensor in place
    runs_user_code: bool = False  # one thread at a time runs it, and nothing is known of what it calls
    takes_tensors: bool = False  # it also acts on the tensors of a checkpoint
    args_of_speed: frozenset[str] = frozenset()  # besides `workers`: they change its speed or place, not its result
    args_of_refusal: frozenset[str] = frozenset()  # they say what is refused, and change nothing of what is delivered
    stream: Callable[[Any], Stream | None] | None = None  # its stream, if it copies batches to a GPU
    keeps_values: Callable[[Any], bool] = _no  # it commutes with `normalize`
    slot_dtype: Callable[[Any], str | None] = _none
    """The dtype of the images that it can write into their slots directly after `batch`; None if it cannot."""
    objects: Callable[[Any], Mapping[str, Any]] = _nothing
    """Key -> object that the user gave for it and that is pickled to loading processes."""
    paths: frozenset[str] = (
        frozenset()
    )  # arguments that may name a file or folder: relative to the YAML file, if it is there
    contents: Callable[[Any], Mapping[str, str]] = _nothing
    """Argument -> a digest of what it names, which a saved state and kept lengths hold in its place."""
    look_at_batch: Callable[[StageConfig, StageArgs], object] = _nothing_to_say
    """(stage, arguments of `batch`), once by each `build`: logs a warning if `batch` makes of the stage's fields what is hardly
    meant."""

    def __post_init__(self) -> None:
        if (self.make is None) == (self.compile is None) or (self.make is not None and self.scope != "sample"):
            raise ConfigError(
                f"StageKind({self.args.__name__}, {self.scope!r}): give `make` to a stage of samples, or `compile` to any"
            )


@dataclass
class CompileContext:
    """The pipeline that a stage is compiled for."""

    source: Source
    connector: Connector | None
    order: SampleOrder
    seed: int
    on_bad_sample: Literal["raise", "skip", "replace"]
    stages: tuple[StageConfig, ...]
    kinds: Mapping[str, StageKind]
    stream: Stream | None  # None if batches stay on the CPU
    early_stream: Stream | None  # the same, for stages before `transfer` that have tensors on a GPU
    in_slots: StageConfig | None  # the stage after `batch` that writes slots chunk by chunk
    output: tuple[str, ...] | None = None  # the fields that the loop gets, or None for all
    sample_runs: list[Callable[[SampleChunk], Any]] = field(default_factory=list)  # the stages before `batch`, compiled
    mixed: str | None = None  # the name of the source, if it is one of several: stages get its rows of chunks
    is_seeded: bool = False  # a stage, also one of another source, seeds the global generators
    may_be_kept: bool = False  # a data set, or a source of another package, may keep the values that it gives
    user_code: FairLock = field(
        default_factory=FairLock
    )  # held while undeclared code runs; all, if any of it is seeded

    @property
    def before_batch(self) -> tuple[StageConfig, ...]:
        """The stages before `batch`."""
        return self.stages[: self._batch_index]

    @property
    def _batch_index(self) -> int:
        return [stage.kind for stage in self.stages].index("batch")

    def behind(self, stage: StageConfig) -> tuple[StageConfig, ...]:
        """The stages after this one."""
        return self.stages[[one.name for one in self.stages].index(stage.name) + 1 :]

    def kind_of(self, stage: StageConfig) -> StageKind:
        return self.kinds[stage.kind]

    @property
    def may_reuse(self) -> bool:
        """False if samples before `batch` go through code that may keep the memory it is given."""
        return all(self.kind_of(stage).is_contained for stage in self.before_batch)

    @property
    def annotations(self) -> Annotations:
        """The fields that `decode` names as boxes and keypoints."""
        return annotations_of(self.stages, self.kinds)

    def is_needed(self, name: str) -> bool:
        """True if the loop gets this field of a batch, or a stage that may read it."""
        behind = self.stages[self._batch_index + 1 :]
        return self.output is None or name in self.output or not all(self.kind_of(one).is_contained for one in behind)

    def keys(self, stage: StageConfig) -> StageKeys:
        """The key of its random numbers in each epoch."""
        return StageKeys(self.seed, stage.name, by_position=self.order.repeats)

    def failed(self, stage: StageConfig) -> FailureNamer:
        """The marker of samples that fail in it."""
        return FailureNamer(stage.name, self.source, self._describe)

    def _describe(self, origin: str) -> str:
        described = self.connector.describe(origin) if self.connector is not None else origin
        return described if self.mixed is None else f"{self.mixed}: {described}"

    def run_before_batch(self, chunk: SampleChunk) -> None:
        """Run all stages before `batch`, for samples outside the order: the probe, and replacements."""
        for run in self.sample_runs:
            run(chunk)

    def run_before_pack(self, chunk: SampleChunk) -> None:
        """Run all stages before `pack`, which is the last before `batch`; `read` of several sources is a run for each."""
        for run in self.sample_runs[:-1]:
            run(chunk)

    def compile(self, stage: StageConfig) -> Stage:
        """The stage, ready to run. Raises ConfigError."""
        kind = self.kind_of(stage)
        if kind.compile is None:
            assert kind.make is not None
            keys, failed = self.keys(stage), self.failed(stage)
            function, ops = kind.make(stage.args), None if kind.ops is None else kind.ops(stage.args)
            if kind.needs_images:
                function = each_frame(function, getattr(stage.args, "fields", None))
            if ops is not None and self.annotations and not MOVES_PIXELS.isdisjoint(ops.kinds):
                on_masks = kind.make(_for_masks(stage.args))
                function = following(function, ops, getattr(stage.args, "fields", None), self.annotations, on_masks)
            if not kind.is_contained:
                function = _not_contained(function)
            run = each_sample(function, kind.num_draws, keys, failed, reuse=self.may_reuse)
            compiled = stage.ready("sample", run, owner=function if kind.runs_user_code else None)
        else:
            compiled = kind.compile(stage, self)
        compiled = replace(compiled, waits=not kind.only_computes)
        if compiled.scope == "batch":
            compiled = replace(compiled, run=_naming_batches(stage.name, compiled.run, self.stream))
        runs_user_code = kind.runs_user_code or (stage.kind == "read" and self.source.runs_user_code)
        if compiled.owner is None and not runs_user_code:
            return compiled
        lock = UserLock(self.user_code, compiled.owner)
        if self.is_seeded or compiled.owner is not None:
            return replace(compiled, run=lock.held(compiled.run), lock=lock)
        return replace(compiled, run=lock.first_held(compiled.run))


def annotations_of(stages: Iterable[StageConfig], kinds: Mapping[str, StageKind]) -> Annotations:
    """The annotations that the `decode` among the stages names."""
    decoding = (stage.args for stage in stages if kinds[stage.kind].decodes)
    found: Annotations = getattr(next(decoding, None), "annotations", Annotations({}, ()))
    return found


def _for_masks(args: StageArgs) -> StageArgs:
    """The arguments of a stage that acts on masks of instances, and fills them with 0."""
    changed = {"fields": (ALONE,), "fill": 0}
    return args.model_copy(update={name: changed[name] for name in changed.keys() & type(args).model_fields.keys()})


def _not_contained(function: Callable[..., Any]) -> Callable[..., None]:
    """The function, which gets encoded fields in memory of their own, because the memory they were read to is used
    again for later samples. It returns no jobs, which only our own stages do."""

    def run(sample: Sample, draws: NDArray[np.float64], memory: dict[str, Any] | None) -> None:
        for name, value in sample.items():
            if type(value) is Encoded:
                sample[name] = value._replace(data=memoryview(bytes(value.data)))
        if (value := function(sample, draws, memory)) is not None:
            raise returned(value)

    return run


def _naming_batches(
    name: str, act: Callable[[dict[str, Any], BatchContext], Any], stream: Stream | None
) -> Callable[[dict[str, Any], BatchContext], None]:
    """A batch stage on the stream, whose errors name the batch."""

    def run(batch: dict[str, Any], context: BatchContext) -> None:
        try:
            value = act(batch, context) if stream is None else stream.run(act, batch, context)
            if value is not None:
                raise returned(value, "batch")
        except USER_ERRORS as error:
            raise_kernel_failure(error, f"{name}, with batch {context.step} of epoch {context.epoch},")
            reason = str(error) if isinstance(error, (ValueError, LoaderkitError)) else repr(error)
            raise batch_error(name, context.epoch, context.step, reason, context.keys) from error

    return run


def batch_error(stage: str, epoch: int, step: int, reason: str, keys: list[str] | None = None) -> StageError:
    """The error of a stage that failed for a whole batch."""
    listed = f" (samples {', '.join(map(repr, keys[:3]))}, ...)" if keys else ""
    return StageError(f"{stage} failed for batch {step} of epoch {epoch}{listed}: {reason}", stage=stage, epoch=epoch)
