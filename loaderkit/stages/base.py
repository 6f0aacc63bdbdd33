"""What every stage takes, and the values that samples hold between two stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, PositiveInt

from loaderkit._internal.settings import Model
from loaderkit.engine.work import Chunk, Stage, WorkItem
from loaderkit.errors import StageError
from loaderkit.sources.base import Sample
from loaderkit.stages.slots import Slots

if TYPE_CHECKING:
    from loaderkit.stages.context import CompileContext, Stream
    from loaderkit.stages.image.ops import ImageOps


class StageArgs(Model):
    """What every stage takes."""

    name: str | None = Field(
        None,
        min_length=1,
        pattern=r"^[A-Za-z_][\w-]*$",
        description="default: its kind; a second one of a kind is kind-2",
    )
    workers: PositiveInt | Literal["auto"] = Field(
        "auto", description="threads of its own, or auto: share the automatic pool with its neighbours"
    )


FieldNames = Annotated[
    Annotated[tuple[str, ...], Field(min_length=1)] | None,
    BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value),
]
"""Which fields a stage acts on; None: every field it fits."""


@dataclass(frozen=True)
class StageConfig:
    """One stage: its kind, its name (unique in the pipeline) and its arguments."""

    kind: str
    name: str
    args: StageArgs

    def ready(
        self,
        scope: Literal["sample", "batch"],
        run: Callable[..., Any],
        *,
        close: Callable[[], None] | None = None,
        interrupt: Callable[[], None] | None = None,
    ) -> Stage:
        """The stage, ready to run."""
        workers = None if self.args.workers == "auto" else self.args.workers
        return Stage(self.name, self.kind, scope, run, workers, close, interrupt)


class AddError(Protocol):
    """Notes what is wrong with the stage at `number`, and with which of its arguments, if it is one."""

    def __call__(self, number: int, message: str, argument: str | None = None) -> None: ...


Scope = Literal["sample", "boundary", "batch", "either"]


@dataclass(frozen=True)
class StageKind:
    """A kind of stage: its arguments, on which side of `batch` it may stand, and how it is compiled.

    `make(args)` gives a function of one sample, its draws and memory to reuse, for `runner.each_sample`. A kind that is none
    has `compile` instead, which gives a stage of the scope in which it runs.
    """

    args: type[StageArgs]
    scope: Scope
    make: Callable[[Any], Callable[..., Any]] | None = None
    compile: Callable[[StageConfig, CompileContext], Stage] | None = None
    check: Callable[[Sequence[StageConfig], int, Mapping[str, StageKind], AddError], None] | None = None
    """(all stages, which of them this is, the kinds, what adds an error): does it fit the others?"""
    num_draws: int = 0  # random numbers for each sample
    ops: Callable[[Any], ImageOps] | None = None  # what it does to an image, as arithmetic; for `decode` before it
    needs_images: bool = False
    is_single: bool = False  # a pipeline has one
    decodes: bool = False  # behind it fields are no bytes any more
    shrinks: bool = False  # images are cut or resized, and behind it seldom large
    is_pointwise: bool = False  # every pixel by itself: a resize may come after it as well as before
    runs_user_code: bool = False  # it may keep what it is given, and make anything of it
    takes_tensors: bool = False  # it acts on the tensors of a checkpoint, too
    stream: Callable[[Any], Stream | None] | None = None  # the stream on which it brings batches to a GPU, if it does
    keeps_values: Callable[[Any], bool] = lambda args: False  # it may as well run after `normalize`
    slot_dtype: Callable[[Any], str | None] = lambda args: None
    """The type of the images that it writes into their slots, chunk by chunk, right behind `batch`; None: it cannot."""
    objects: Callable[[Any], Mapping[str, Any]] = lambda args: {}
    """Key -> what the user gave for it, which loading processes are sent."""


class Encoded(NamedTuple):
    """The bytes of one field before `decode`, and the extension that says what they are ("jpg", "cls", "seg.png")."""

    data: memoryview
    extension: str


class Image(NamedTuple):
    """A decoded image: uint8 [H, W, C], C = 3, or 1 when `mask` (labels: resized by nearest, never normalised).

    With `whole` = (height, width) it was not decoded in full: smaller, if `reduction` is N > 1, so that a pixel stands for
    N x N; and a piece only, whose first pixel is `origin` = (row, column) of the pixels there would be. `box` = (top, left,
    height, width) of the whole is what the piece was made for: the next stage will take that, and no more.
    """

    pixels: NDArray[np.uint8]
    mask: bool = False
    reduction: int = 1
    whole: tuple[int, int] | None = None
    origin: tuple[int, int] = (0, 0)
    box: tuple[int, int, int, int] | None = None

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) of the whole image."""
        return self.whole or (self.pixels.shape[0], self.pixels.shape[1])


class InPlace(NamedTuple):
    """A field whose value, of `num_bytes`, stands in its slot already: `read` wrote it there, and `batch` need not."""

    num_bytes: int


class GpuDecoded(NamedTuple):
    """An image that is a row of a tensor [n, C, H, W], of its whole chunk if it can be, by a stage that works on chunks."""

    tensor: torch.Tensor
    row: int


class FieldGroup(NamedTuple):
    """What one field's bytes hold when that is several fields: name -> `Encoded`, `InPlace` or value. `decode` opens it."""

    fields: dict[str, Any]


@dataclass(frozen=True)
class FieldSpec:
    """What one field of a batch looks like. `shape` is one sample's, with `pad` and `ragged` the example's; `kind` decides
    how slots are filled.

    slab: fixed shape and dtype, written into memory given in advance. list: any Python values. pad, ragged: tensors
    of differing shapes, padded to the batch's largest or handed over as a list. rendered: rows of tensors that a stage made.
    """

    kind: Literal["slab", "list", "pad", "ragged", "rendered"]
    shape: tuple[int, ...] = ()
    dtype: str | None = None  # torch's name
    image: bool = False
    example_key: str = ""
    num_bytes: int = 0  # of one sample, where it lies in no slab: what the first one took


class SampleFailure(NamedTuple):
    """A bad sample: what the quarantine file and the statistics need to know."""

    slot: int
    sample: int
    position: int
    error: StageError


class BatchContext(NamedTuple):
    """What a batch stage is told of its batch."""

    epoch: int
    step: int
    first_position: int
    keys: list[str]
    images: tuple[str, ...]  # the fields to be normalised


class BatchWork(WorkItem):
    """A batch being filled. Each slot is written by exactly one chunk."""

    __slots__ = ("failures", "fields", "indices", "positions", "specs", "step", "values", "wrapped")
    failures: list[SampleFailure]

    def __init__(
        self,
        *,
        epoch: int,
        step: int,
        positions: NDArray[np.int64],
        indices: NDArray[np.int64],
        wrapped: NDArray[np.bool_] | None = None,
        begin: int = 0,
        end: int = 0,
    ) -> None:
        super().__init__(epoch, begin, end, len(positions))
        self.step = step  # counted from where the epoch was entered
        self.positions = positions  # global positions, one a slot
        self.indices = indices  # sample numbers, replaced samples' included
        self.wrapped = wrapped  # bool [B]: which slots hold a sample read again; None: none
        self.specs: Mapping[str, FieldSpec] = {}  # what its fields look like
        self.fields: dict[str, Slots] = {}  # those that lie in a slab
        self.values: dict[str, list[Any]] = {}  # the other fields, one value a slot
        self.failures = []

    def __str__(self) -> str:
        return f"batch {self.step} of epoch {self.epoch}"

    def let_go(self) -> None:
        self.fields = {}


class SampleChunk(Chunk):
    """The samples of some slots of a batch.

    `samples[i]` belongs to slot lo + i and is None once it has failed. A `read` with only `batch` behind it gives `columns`
    instead, every field's values in one list: no dict a sample.
    """

    __slots__ = ("columns", "draws", "failures", "indices", "samples")
    work_item: BatchWork

    def __init__(self, work_item: BatchWork, lo: int, hi: int, indices: NDArray[np.int64]) -> None:
        super().__init__(work_item, lo, hi)
        self.indices = indices  # int64 [hi - lo]
        self.samples: list[Sample | None] = [None] * (hi - lo)
        self.columns: dict[str, list[Any]] | None = None
        self.failures: dict[int, StageError] = {}  # by place in the chunk
        self.draws: dict[str, NDArray[np.float64]] = {}  # by stage: [hi - lo, num_draws]

    @property
    def num_failed(self) -> int:  # type: ignore[override]
        return len(self.failures)

    def index_of(self, offset: int) -> int:
        return int(self.indices[offset])

    def empty(self) -> dict[str, Any]:
        self.samples = []
        self.columns = None
        return super().empty()


def image_fields(specs: Mapping[str, FieldSpec]) -> tuple[str, ...]:
    """The fields that are images to be normalised (masks are not)."""
    return tuple(name for name, spec in specs.items() if spec.image)
