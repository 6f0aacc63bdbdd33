"""The work on batches: a `BatchWork` is filled by chunks of samples, which stages act on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from loaderkit.engine.work import Chunk, SourceCounts, WorkItem
from loaderkit.errors import StageError
from loaderkit.samples.sample import Sample
from loaderkit.samples.slots import Slots, TakeBytes
from loaderkit.sampling.packing import Pieces


class ItemStream(Protocol):
    """Where the items of a batch come from, if they come in their own order only."""

    def take(self, indices: list[int], up_to: int) -> tuple[list[Any], Any]:
        """The items with these numbers, fewer at the end, and the source's state behind item `up_to`."""


class Starts(NamedTuple):
    """The field with the starts of the parts of sequences of `length` tokens. A slot has the starts of its sequence,
    counted from the batch's first token: int32 [parts]. A batch has one tensor of all starts, and the end of the last
    part: int32 [all parts + 1]."""

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
    """A bad sample, as the quarantine file and the statistics record it. With the slot -1 no slot of the batch lacks it."""

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
        self.wrapped = wrapped  # bool [B]: the slots with a repeated sample; None if there are none
        self.specs: Mapping[str, FieldSpec] = {}  # the layout of its fields
        self.fields: dict[str, Slots] = {}  # the fields in the slab
        self.values: dict[str, list[Any]] = {}  # the other fields, one value per slot
        self.take_bytes: TakeBytes | None = None  # for large ones of them
        self.failures = []
        self.dropped: list[int] = []  # the slots of samples that `filter` left out
        self.is_empty = self.is_end = False
        self.num_skipped = 0
        self.by_source: SourceCounts | None = None
        self.stream: ItemStream | None = None  # what its items come from, if they come in order only
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

    __slots__ = ("columns", "draws", "dropped", "failures", "indices", "parts", "samples", "source_indices")
    work_item: BatchWork
    failures: dict[int, StageError]  # by row

    def __init__(self, work_item: BatchWork, lo: int, hi: int, indices: NDArray[np.int64]) -> None:
        super().__init__(work_item, lo, hi)
        self.indices = indices  # int64 [hi - lo]
        self.source_indices = indices  # in the source that they are read from, which may be one of several
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
        """The index in the source of the sample at `row`; `indices` may instead be the indices of what is made of it,
        for random numbers."""
        return int(self.indices[row])

    def slot_of(self, row: int) -> int:
        """The slot that the sample at `row` is for."""
        return self.lo + row

    def replacement(self, row: int, index: int) -> SampleChunk:
        """The work on another sample, for the slot of the bad one at `row`."""
        slot = self.slot_of(row)
        return SampleChunk(self.work_item, slot, slot + 1, np.array([index], np.int64))

    @property
    def where(self) -> slice | list[int]:
        """The slots of all rows, to index memory with."""
        return slice(self.lo, self.hi)

    def in_slots(self, values: list[Any]) -> tuple[int, list[Any]]:
        """From values by row: the first slot, and the values of the slots from it on, None for a slot of another chunk."""
        return self.lo, values

    def let_go(self) -> None:
        self.samples, self.columns, self.parts = [], None, None


class PackedChunk(SampleChunk):
    """Slots [lo, hi) of a batch of sequences. Up to `pack` its rows are the pieces: row i is of the sample
    `samples[i]`, with index `indices[i]`. After it the rows are the slots.

    `tokens` are the tokens of all slots, [hi - lo, length], if `read` has written them to their final places.
    """

    __slots__ = ("pieces", "sequences", "tokens")

    def __init__(self, work_item: BatchWork, lo: int, hi: int, sequences: NDArray[np.int64], pieces: Pieces) -> None:
        super().__init__(work_item, lo, hi, pieces.samples)
        self.samples = [None] * len(pieces.samples)
        self.sequences = sequences
        self.pieces = pieces
        self.tokens: NDArray[Any] | None = None

    def slot_of(self, row: int) -> int:
        return self.lo + int(np.searchsorted(self.pieces.bounds, row, side="right")) - 1

    def position_of(self, row: int) -> int:
        return int(self.work_item.positions[self.slot_of(row)])

    def end_pieces(self) -> None:
        """From now on the rows are the slots, which are written."""
        self.indices, self.samples = self.sequences, [None] * len(self)
        self.failures, self.dropped, self.draws = {}, [], {}


def image_names(specs: Mapping[str, FieldSpec]) -> tuple[str, ...]:
    """The image fields; masks are none."""
    return tuple(name for name, spec in specs.items() if spec.image)
