"""The contracts and records that everything else is written against.

The way of a batch: an `Order` says which samples stand at which positions; a `Destination` (one batch) is split into
`Chunk`s of a few slots each; every chunk goes through the `Stage`s; the last chunk to land delivers the destination.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from loaderkit.errors import StageError

if TYPE_CHECKING:
    import torch

    from loaderkit.slots import Slots

_ALIGNMENT = 64

Sample = dict[str, Any]
"""One sample between two stages: field name -> value (bytes, `Encoded`, `Image`, tensor, number, text, ...)."""


# ---------------------------------------------------------------------------------------------- where bytes are


class ObjectInfo(NamedTuple):
    """One object of a store: its key (relative, POSIX), its size in bytes, and a tag that changes with its content."""

    key: str
    size: int
    etag: str


class ByteRange(NamedTuple):
    """The half-open range [start, start + length) of an object, as it was when its etag was taken."""

    key: str
    start: int
    length: int
    etag: str | None = None


class Ranges(NamedTuple):
    """Many byte ranges, as columns of one length: what `ByteRange` says of one."""

    keys: list[str]
    starts: list[int]
    lengths: list[int]
    etags: list[str | None]


class Member(NamedTuple):
    """One regular file inside an archive: where its bytes lie in the archive."""

    name: str
    start: int
    size: int


class Connector(Protocol):
    """A place with objects. One instance serves any number of threads at once."""

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """All objects whose key starts with `prefix`, ordered by the UTF-8 bytes of the key."""

    def stat(self, key: str) -> ObjectInfo:
        """Size and etag of one object. Raises `ObjectNotFoundError`, `AccessDeniedError`."""

    def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        """Fill `buffer` (writable, contiguous bytes) with the object's bytes from `start` on, or raise.

        Raises `ShortReadError` if the object ends first, `ObjectChangedError` if `etag` is given and no longer fits.
        """

    def describe(self, key: str) -> str:
        """The full name of an object for messages: a path or a URL, without secrets."""

    def close(self) -> None:
        """Release what is held; idempotent."""


class Hashed(NamedTuple):
    """The hashes of blocks that were read one behind another, the last of which may be shorter, and the seconds they took."""

    hashes: list[int]
    took_s: float


class BulkConnector(Connector, Protocol):
    """What a connector may have besides, where many ranges cost less together: any of the methods.

    A subclass that overrides `read_into` overrides these too, or they are not used; see `loaderkit.ranges.bulk_method`.
    `gap_bytes` says from how many unwanted bytes on another range costs less than reading them; without it, 1 MiB, as for
    a store that takes milliseconds to answer, and many ranges are asked for at a time. `spread_bytes`: a read of so many is
    several requests at a time, by the connector's own doing; without it, or 0, a read is one.
    """

    gap_bytes: int
    spread_bytes: int

    def read_many(self, ranges: Ranges, offsets: list[int], buffer: memoryview) -> Mapping[int, Exception]:
        """Read every range to its offset in `buffer`; the errors, as `read_into` raises them, by number of the range."""

    def gather_into(
        self, key: str, starts: NDArray[np.int64], length: int, buffer: memoryview, *, etag: str | None = None
    ) -> None:
        """Fill `buffer` with the ranges [start, start + length) one behind another, or raise as `read_into` does."""

    def read_around(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        """`read_into`, of what is not in the page cache and need not be there behind it."""

    def read_hashed(
        self,
        key: str,
        start: int,
        buffer: memoryview,
        *,
        block_bytes: int,
        address: int,
        around: bool = False,
        etag: str | None = None,
    ) -> Hashed | None:
        """`read_into`, or `read_around`, and the hash of every `block_bytes` from `start` on, made while they lie in the CPU's
        cache. `address` is that of a C function, `uint64_t (const void *, size_t)`. None: nothing is read, as it cannot do
        that here."""


# ------------------------------------------------------------------------------------------- what samples are


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


class Landed(NamedTuple):
    """A field whose value, of `num_bytes`, stands in its slot already: `read` wrote it there, and `batch` need not."""

    num_bytes: int


class Rendered(NamedTuple):
    """An image that is a row of a tensor [n, C, H, W], of its whole chunk if it can be, by a stage that works on chunks."""

    tensor: torch.Tensor
    row: int


class Bundle(NamedTuple):
    """What one field's bytes hold when that is several fields: name -> `Encoded`, `Landed` or value. `decode` opens it."""

    fields: dict[str, Any]


class FieldRange(NamedTuple):
    """Where the bytes of one field of a sample lie, and the extension that says what they are."""

    field: str
    extension: str
    range: ByteRange


class Table(NamedTuple):
    """The ranges of several samples with the same fields: sample by sample, the fields in their order."""

    fields: tuple[tuple[str, str], ...]  # (field, extension)
    ranges: Ranges
    constants: Mapping[str, list[Any]] = MappingProxyType({})  # the fields known without reading, one value a sample


class Source(Protocol):
    """A finite set of samples in canonical order, numbered from 0."""

    classes: list[str] | None

    def __len__(self) -> int: ...

    def key(self, index: int) -> str:
        """The sample's key, unique inside its origin."""

    def origin(self, index: int) -> str:
        """The object the sample lies in, for messages."""

    def ranges(self, index: int) -> list[FieldRange]:
        """The byte ranges that make up the sample. Raises `SourceError` if a wanted field is missing."""

    def constants(self, index: int) -> Sample:
        """The fields known without reading (the class from the folder's name); a fresh dict."""

    def blocks(self, block_bytes: int) -> NDArray[np.int64]:
        """Cut the samples into runs of about `block_bytes`, never across an object that holds several samples.

        Returns the first sample of every block and, last, the number of samples: int64 [number of blocks + 1].
        """

    def fingerprint(self) -> str:
        """A short digest of what the samples are: keys and sizes, not where they lie or when they were written."""


class TableSource(Protocol):
    """What a `Source` may have besides, so that nothing is asked sample by sample."""

    def table(self, indices: NDArray[np.int64]) -> Table | None:
        """The ranges of these samples, or None if they have to be asked one by one: fields differ, or are missing."""

    def keys(self, indices: NDArray[np.int64]) -> list[str]:
        """The keys of these samples."""


class ItemSource(Protocol):
    """What a `Source` must have instead of `ranges` when its samples are Python objects, not bytes."""

    dataset: Any
    """Where they are: dataset[index]."""

    def items(self, indices: list[int]) -> list[Any] | None:
        """Several of them in one call; None if that cannot be had, or failed."""

    def sample(self, item: Any) -> Sample:
        """The fields of an item; a fresh dict. Raises ValueError."""

    def columns(self, items: list[Any]) -> dict[str, list[Any]] | None:
        """The same of several items, field by field; None if they have to be looked at one by one."""


class Records(NamedTuple):
    """Samples of one size that lie in one object: the batch's field they are, and what one of them is.

    `dtype` is torch's name; `is_swapped`: the bytes of its numbers are in the other order than this machine's.
    """

    field: str
    dtype: str
    shape: tuple[int, ...]
    is_swapped: bool
    num_bytes: int


class RecordSource(Protocol):
    """What a `Source` has besides when all its samples are `Records`, so that a chunk of them can be read at once."""

    records: Records

    @property
    def file(self) -> ObjectInfo:
        """Where they lie, as it was when they were numbered."""

    def starts(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """The first byte of every sample: int64 [n]."""

    def keys(self, indices: NDArray[np.int64]) -> list[str]:
        """The keys of many samples at once; any source may have this."""


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


class Destination:
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
        "destination",
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
    )

    def __init__(self, destination: Destination, lo: int, hi: int, epoch: int, indices: NDArray[np.int64]) -> None:
        self.destination = destination
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


def image_fields(specs: Mapping[str, FieldSpec]) -> tuple[str, ...]:
    """The fields that are images to be normalised (masks are not)."""
    return tuple(name for name, spec in specs.items() if spec.image)


class BatchContext(NamedTuple):
    """What a batch stage may know about the batch it is given."""

    epoch: int
    step: int
    first_position: int
    keys: list[str]
    specs: Mapping[str, FieldSpec]


Batch = Mapping[str, Any]
