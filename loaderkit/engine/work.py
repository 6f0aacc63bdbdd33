"""The contracts and records that everything else is written against.

The way of a batch: an `Order` says which samples stand at which positions; a `WorkItem` (one batch) is split into
`Chunk`s of a few slots each; every chunk goes through the `Stage`s; the last chunk to land delivers the destination.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from loaderkit.errors import StageError
from loaderkit.sources.base import Sample

if TYPE_CHECKING:
    from loaderkit.engine.slots import Slots


Bytes = np.ndarray[Any, np.dtype[np.uint8]]


_ALIGNMENT = 64


# ---------------------------------------------------------------------------------------------- where bytes are


# ------------------------------------------------------------------------------------------- what samples are


# --------------------------------------------------------------------------------- what the engine moves around


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


class WorkItem:
    """A piece of memory being filled by chunks: here, one batch.

    `num_pending` counts the chunks that have not landed (guarded by the engine's lock). The rest is written once
    by the engine when the destination is opened or finished, or by exactly one chunk (the slots it owns).
    """

    __slots__ = (
        "begin",
        "cancelled",
        "chunks",
        "done_s",
        "end",
        "epoch",
        "error",
        "failures",
        "fields",
        "indices",
        "is_done",
        "last_chunk",
        "num_pending",
        "opened_s",
        "positions",
        "result",
        "specs",
        "step",
        "values",
        "wrapped",
    )

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
        self.epoch = epoch
        self.step = step  # counted from where the epoch was entered
        self.begin = begin  # global position before this batch, and after it
        self.end = end
        self.positions = positions  # global positions, one a slot
        self.indices = indices  # sample numbers, replaced samples' included
        self.wrapped = wrapped  # bool [B]: which slots hold a sample read again; None: none
        self.chunks: list[Chunk] = []
        self.num_pending = 0
        self.specs: Mapping[str, FieldSpec] = {}  # what its fields look like
        self.fields: dict[str, Slots] = {}  # those that lie in a slab
        self.values: dict[str, list[Any]] = {}  # the other fields, one value a slot
        self.failures: list[SampleFailure] = []
        self.result: Any = None
        self.error: BaseException | None = None
        self.cancelled = False
        self.is_done = False
        self.opened_s = 0.0
        self.done_s = 0.0
        self.last_chunk: Chunk | None = None

    def __len__(self) -> int:
        return len(self.positions)

    def let_go(self) -> None:
        """Nothing is to be written any more: the memory is for whoever has the batch, if anybody has."""
        self.fields = {}


class Chunk:
    """The unit of work: slots [lo, hi) of a destination on their way through the stages.

    `samples[i]` belongs to slot lo + i and is None once it has failed. A `read` with only `batch` behind it gives `columns`
    instead, every field's values in one list: no dict a sample. `marks` are (time in s, account state), one for
    every change of what is being done with the chunk. `scratch` is memory stages may reuse from chunk to chunk.
    `slowest` is (seconds, place) of the sample that took longest in a stage that works sample by sample, until it is noted.
    """

    __slots__ = (
        "columns",
        "epoch",
        "failures",
        "hi",
        "indices",
        "lo",
        "marks",
        "place",
        "samples",
        "scratch",
        "slowest",
        "work_item",
    )

    def __init__(self, work_item: WorkItem, lo: int, hi: int, epoch: int, indices: NDArray[np.int64]) -> None:
        self.work_item = work_item
        self.lo = lo
        self.hi = hi
        self.epoch = epoch
        self.indices = indices  # int64 [hi - lo]
        self.samples: list[Sample | None] = [None] * (hi - lo)
        self.columns: dict[str, list[Any]] | None = None
        self.failures: dict[int, StageError] = {}  # by place in the chunk
        self.marks: list[tuple[float, int]] = []
        self.scratch: dict[str, Any] = {}
        self.slowest: tuple[float, int] | None = None
        # The sample a stage is at, for reports of what hangs, or the list it comes into next; None: all at once.
        self.place: int | list[Any] | None = None

    def __len__(self) -> int:
        return self.hi - self.lo

    def empty(self) -> dict[str, Any]:
        """It has landed: let go of its samples. Its scratch, for another chunk."""
        scratch, self.scratch = self.scratch, {}
        self.samples = []
        self.columns = None
        return scratch

    def memory(self, name: str, size: int) -> memoryview:
        """`size` bytes to write to, aligned to 64, which the next chunk with this scratch will write over.

        Fresh memory for every file costs 16 % of its read (page faults).
        """
        buffer = self.scratch.get(name)
        if buffer is None or len(buffer) < size:
            whole = np.empty(size + size // 4 + _ALIGNMENT, np.uint8)
            buffer = self.scratch[name] = whole[-whole.ctypes.data % _ALIGNMENT :].data
        found: memoryview = buffer[:size]
        return found


class SampleFailure(NamedTuple):
    """A sample that was bad: what the quarantine file and the statistics need to know."""

    slot: int
    sample: int
    position: int
    error: StageError


class Delivery(Protocol):
    """A finished batch, or the error that came in its place, as an executor hands it to the loader."""

    @property
    def epoch(self) -> int: ...

    @property
    def end(self) -> int:
        """The global position behind it."""

    @property
    def failures(self) -> list[SampleFailure]: ...

    @property
    def error(self) -> BaseException | None: ...

    @property
    def result(self) -> Any: ...


@dataclass(frozen=True)
class Stage:
    """A stage ready to run. `run` acts on a chunk in place (scope "sample") or on a finished batch (scope "batch")."""

    name: str
    kind: str
    scope: Literal["sample", "batch"]
    run: Callable[..., Any]
    workers: int | None = None  # None: shares the automatic pool
    close: Callable[[], None] | None = None  # let go of what it holds; it may run again after that
    interrupt: Callable[[], None] | None = None  # end its waits, before its workers are joined


class BatchContext(NamedTuple):
    """What a batch stage may know about the batch it is given."""

    epoch: int
    step: int
    first_position: int
    keys: list[str]
    specs: Mapping[str, FieldSpec]


Batch = Mapping[str, Any]
