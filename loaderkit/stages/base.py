"""The contract of stages: common arguments, the values samples hold between stages, and the work on batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, PositiveInt

from loaderkit._internal.config.settings import Model, as_tuple
from loaderkit.engine.work import Chunk, SourceCounts, Stage, WorkItem
from loaderkit.errors import StageError
from loaderkit.sources.base import Sample
from loaderkit.stages.slots import Slots, TakeBytes

if TYPE_CHECKING:
    from loaderkit.sources.iterable import Pass, Preview


class StageArgs(Model):
    """The arguments of every stage."""

    name: str | None = Field(
        None,
        min_length=1,
        pattern=r"^[A-Za-z_][\w-]*$",
        description="default: its kind; a second stage of a kind is kind-2",
    )
    workers: PositiveInt | Literal["auto"] = Field(
        "auto", description="dedicated threads, or auto: share the automatic pool with adjacent stages"
    )


FieldNames = Annotated[
    Annotated[tuple[str, ...], Field(min_length=1)] | None,
    BeforeValidator(as_tuple),
]
"""The fields a stage acts on; None: all fields of the right type."""


WAITING = frozenset({"read", "transfer", "call", "filter"})
"""Kinds that may wait for something other than a CPU or the GIL: a store, a device, what a function waits for."""


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
        waits_for: Callable[[int], str | None] = lambda thread_id: None,
        finishes: bool = False,
        in_turn: bool = False,
        owner: Any = None,
    ) -> Stage:
        """The stage, ready to run."""
        workers = None if self.args.workers == "auto" else self.args.workers
        return Stage(
            self.name,
            self.kind,
            scope,
            run,
            workers=workers,
            waits=self.kind in WAITING,
            close=close,
            interrupt=interrupt,
            waits_for=waits_for,
            finishes=finishes,
            in_turn=in_turn,
            owner=owner,
        )


class AddError(Protocol):
    """Reports a problem of the stage at index `number`, or of one of its arguments."""

    def __call__(self, number: int, message: str, argument: str | None = None) -> None: ...


Scope = Literal["sample", "boundary", "batch", "either"]


class Encoded(NamedTuple):
    """The bytes of one field before `decode`, and the extension that names their format ("jpg", "cls", "seg.png")."""

    data: memoryview
    extension: str


class Image(NamedTuple):
    """A decoded image: uint8 [H, W, C], C = 3, or 1 when `mask` (labels: resized by nearest, never normalised); with
    `decode: {depth: 16}` uint16.

    With `whole` = (height, width) it was not decoded in full. With `reduction` = N > 1 a pixel stands for N x N. A partial
    image begins at `origin` = (row, column) of the (reduced) whole, and covers `box` = (top, left, height, width) of the
    whole, which is all that the next stage needs.
    """

    pixels: NDArray[Any]
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
    """A field of `num_bytes` that `read` has written already, into its slot, or as `tensor` into memory that is lent to the
    batch. For the first sample, of which only the layout matters, nothing is written."""

    num_bytes: int
    tensor: torch.Tensor | None = None


class GpuDecoded(NamedTuple):
    """An image that is a row of a tensor [n, C, H, W], usually of its whole chunk."""

    tensor: torch.Tensor
    row: int


class FieldGroup(NamedTuple):
    """Several fields from the bytes of one (an .npz file): name -> `Encoded`, `InPlace` or value. `decode` unpacks it."""

    fields: dict[str, Any]


class Starts(NamedTuple):
    """The field of the begins of the parts of sequences of `length`. A slot has those of its sequence, counted from the batch's
    first number: int32 [parts]. A batch has one tensor of all, and the end of the last: int32 [all parts + 1]."""

    length: int


@dataclass(frozen=True)
class FieldSpec:
    """The layout of one field of a batch. `shape` is one sample's, with `pad` and `ragged` the example's; `kind` decides how
    slots are filled.

    slab: fixed shape and dtype, written into preallocated memory. list: any Python values. pad, ragged: tensors of differing
    shapes, padded to the batch's largest or delivered as a list. rendered: rows of tensors from a stage. starts: `Starts`.
    """

    kind: Literal["slab", "list", "pad", "ragged", "rendered", "starts"]
    shape: tuple[int, ...] = ()
    dtype: str | None = None  # torch's name
    image: bool = False
    example_key: str = ""
    num_bytes: int = 0  # of the first sample, for a field outside the slab
    is_open: bool = False  # a list, as all examples were None or without items
    widens: bool = False  # float64 of untyped data, which takes whole numbers as well


class SampleFailure(NamedTuple):
    """A bad sample, as the quarantine file and the statistics record it; a slot of -1 is whole without it."""

    slot: int
    sample: int
    position: int
    error: StageError


class BatchContext(NamedTuple):
    """What a batch stage knows of its batch."""

    epoch: int
    step: int
    first_position: int
    keys: list[str]
    images: tuple[str, ...]  # the fields to normalize


class BatchWork(WorkItem):
    """A batch being filled. Each slot is written by exactly one chunk."""

    __slots__ = (
        "by_source",
        "dropped",
        "failures",
        "fields",
        "indices",
        "is_empty",
        "is_end",
        "num_skipped",
        "positions",
        "source_state",
        "specs",
        "step",
        "stream",
        "take_bytes",
        "values",
        "wrapped",
    )
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
        self.step = step  # counted from the position where the epoch was entered
        self.positions = positions  # global positions, one per slot
        self.indices = indices  # sample numbers, replaced samples' included
        self.wrapped = wrapped  # bool [B]: the slots with a repeated sample; None: none
        self.specs: Mapping[str, FieldSpec] = {}  # the layout of its fields
        self.fields: dict[str, Slots] = {}  # the fields in the slab
        self.values: dict[str, list[Any]] = {}  # the other fields, one value per slot
        self.take_bytes: TakeBytes | None = None  # for large ones of them
        self.failures = []
        self.dropped: list[int] = []  # the slots of samples that `filter` left out
        self.is_empty = self.is_end = False
        self.num_skipped = 0
        self.by_source: SourceCounts | None = None
        self.stream: Pass | Preview | None = None  # what its items come from, if they come in order only
        self.source_state: Any = None

    @property
    def num_dropped(self) -> int:  # type: ignore[override]
        return len(self.dropped)

    def __str__(self) -> str:
        return f"batch {self.step} of epoch {self.epoch}"

    def cut(self, num_items: int) -> None:
        """Leave only the first items: the source had no more."""
        self.num_items = num_items
        self.positions, self.indices = self.positions[:num_items], self.indices[:num_items]
        self.values = {name: values[:num_items] for name, values in self.values.items()}

    def let_go(self) -> None:
        self.fields, self.values = {}, {}


class SampleChunk(Chunk):
    """The samples of some slots of a batch.

    `samples[row]` belongs to slot lo + row and is None once it has failed or was dropped. A `read` directly before `batch`
    sets `columns` instead, one list of values per field, or one array, which avoids a dict per sample.
    """

    __slots__ = ("columns", "draws", "dropped", "failures", "indices", "parts", "samples")
    work_item: BatchWork
    failures: dict[int, StageError]  # by row

    def __init__(self, work_item: BatchWork, lo: int, hi: int, indices: NDArray[np.int64]) -> None:
        super().__init__(work_item, lo, hi)
        self.indices = indices  # int64 [hi - lo]
        self.samples: list[Sample | None] = [None] * (hi - lo)
        self.columns: dict[str, Any] | None = None
        self.failures = {}
        self.dropped: list[int] = []  # rows
        self.draws: dict[str, NDArray[np.float64]] = {}  # by stage: [hi - lo, num_draws]
        self.parts: dict[int, Any] | None = None  # the samples of each mixed source, see `stages.parts`

    def position_of(self, row: int) -> int:
        """The global position of the sample at `row`."""
        return int(self.work_item.positions[self.slot_of(row)])

    def index_of(self, row: int) -> int:
        return int(self.indices[row])

    def slot_of(self, row: int) -> int:
        """The slot that the sample at `row` is for."""
        return self.lo + row

    @property
    def where(self) -> slice | list[int]:
        """The slots of all rows, to index memory with."""
        return slice(self.lo, self.hi)

    def in_slots(self, values: list[Any]) -> tuple[int, list[Any]]:
        """Of values by row: the first slot, and the values of the slots from it on; None where a slot is another chunk's."""
        return self.lo, values

    def let_go(self) -> None:
        self.samples, self.columns, self.parts = [], None, None


def image_names(specs: Mapping[str, FieldSpec]) -> tuple[str, ...]:
    """The image fields; masks are none."""
    return tuple(name for name, spec in specs.items() if spec.image)
