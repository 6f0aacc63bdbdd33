"""The contract of sources: what a source says of its samples, the reader that reads them, and the source's kind.

SourceKind.open(args, connector) ──> Source ──reader(ReadContext)──> Reader ──read(chunk)──> the samples of a chunk
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from loaderkit.connectors.base import ByteRange, Connector, Ranges
from loaderkit.connectors.config import SourceArgs, StoreArgs
from loaderkit.connectors.factory import open_connector
from loaderkit.errors import SourceError
from loaderkit.samples.chunk import SampleChunk
from loaderkit.samples.sample import FieldRange, Sample, Table
from loaderkit.sampling.schedule import BatchSampler
from loaderkit.sampling.shard import Shard
from loaderkit.sources.bad_shards import BadShard, BadShards, OnBadShard

_MAX_CLASSES_NAMED = 10


def shortened(classes: list[str]) -> str:
    """The names of classes for messages and fingerprints: all if they are few, else the first and a digest of all."""
    if len(classes) <= _MAX_CLASSES_NAMED:
        return ", ".join(classes)
    digest = blake2b("\0".join(classes).encode("utf-8", "surrogateescape"), digest_size=4).hexdigest()
    return f"{', '.join(classes[:_MAX_CLASSES_NAMED])}, ... {len(classes)} in all, digest {digest}"


class PackedSize(NamedTuple):
    """The size of all samples together: the reads that they take, their bytes, and the bytes of the objects in which
    they lie."""

    num_reads: int
    num_bytes: int
    stored_bytes: int


# ---------------------------------------------------------------------------------------------------------- reading


class InPlaceFields(NamedTuple):
    """The fields whose arrays may be read straight into their slots: fields that `decode` turns into arrays (`decoded`;
    None means all), without fields that other stages change before `batch` (`touched`)."""

    decoded: frozenset[str] | None
    touched: frozenset[str]


class WindowRule(NamedTuple):
    """A stage that cuts one window out of `fields` along their last `num_dims` dimensions. `place(lengths, draws,
    load)` gives the window's slices from the lengths of these dimensions and the stage's draws; `load` gives the array
    of the field `foreground`, if the window depends on it. None if the whole arrays are needed."""

    fields: tuple[str, ...]
    num_dims: int
    foreground: str | None
    place: Callable[[tuple[int, ...], NDArray[np.float64], Callable[[], NDArray[Any]]], tuple[slice, ...] | None]


class Windows(NamedTuple):
    """The windows that the next stage cuts: its rule, and its draws for a chunk, float64 [samples, n]."""

    rule: WindowRule
    draws: Callable[[SampleChunk], NDArray[np.float64]]


@dataclass(frozen=True)
class ReadContext:
    """What a reader is told of the pipeline that it reads for. All but the first two only permit what is faster: a reader may
    ignore them, and fill `chunk.samples` with values of their own memory."""

    connector: Connector | None  # to read through, which may read ahead; None without a `root`
    failed: Callable[[SampleChunk, int, BaseException], None]
    """(chunk, row, error): marks the sample at that row as bad. The pipeline's `errors` say what follows."""
    is_last: bool = False
    """Only `batch` follows: fields of bytes may be bytes, values may go straight into the slots, and `chunk.columns` may be set
    in place of `chunk.samples` once the layout is known (`chunk.work_item.specs`)."""
    may_reuse: bool = False  # what is read may lie in memory of the chunk that the next one overwrites
    in_place: InPlaceFields | None = None
    windows: Windows | None = None
    """The next stage cuts windows: the reader may read these alone, if it gives all of the rule's fields as `CutWindow`."""
    packed_length: int | None = None
    """`pack` follows, and makes sequences of that many tokens: chunks are `PackedChunk`s, whose `tokens` may be set."""

    @property
    def store(self) -> Connector:
        """The connector of a source that has one."""
        assert self.connector is not None
        return self.connector


class Reader(ABC):
    """Reads the samples of one source. Any number of threads call `read` at once, unless it is `in_turn` or has an `owner`."""

    in_turn = False  # True: one thread at a time, in the order of the chunks
    owner: Any = None  # the user's object that it runs code of, if one thread at a time may

    @abstractmethod
    def read(self, chunk: SampleChunk) -> int:
        """Read the samples with the numbers `chunk.source_indices` into `chunk.samples`, row by row; returns the bytes read.

        A sample that cannot be read is marked by `ReadContext.failed`. `chunk.current` is the row at work, or None, for reports
        of what hangs. Raises only errors that concern all samples.
        """

    def close(self) -> None:  # noqa: B027 - a hook, as the two below
        """Drop what is held. It may read again after that."""

    def interrupt(self) -> None:  # noqa: B027
        """End the waits of `read`: its threads are to stop."""

    def waits_for(self, thread_id: int) -> str | None:
        """What that thread waits for in code that nothing can end, for messages; None if there is no such wait."""
        return None


# ---------------------------------------------------------------------------------------------------------- sources


class RowGroups(Protocol):
    """What a source has that reads and decodes its samples in groups, and holds these in memory."""

    @property
    def group_bytes(self) -> NDArray[np.int64]:
        """About the memory that every decoded group takes: int64 [groups]."""

    @property
    def memory_bytes(self) -> int:
        """The memory that decoded groups may take in one process."""

    def locate(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The group of every sample, and its row there: int64 [n] each."""

    def group_ranges(self, group: int) -> list[ByteRange]:
        """The bytes that a group is decoded from."""


class ItemsInOrder(Protocol):
    """What a source has whose items come in their own order only."""

    saved: Any  # its own state behind the last batch that was delivered

    @property
    def has_state(self) -> bool:
        """True if it can save and load a state of its own."""

    def check_readers(self, world_size: int, num_processes: int) -> None:
        """Raise ConfigError if it is known that several ranks, or processes of one, would not iterate over the same items."""

    def begin_pass(self, epoch: int, position: int, first_step: int, *, schedule: BatchSampler, shard: Shard) -> Any:
        """One reading of the items from a position of an epoch on."""

    def state_at(self, epoch: int, position: int) -> tuple[Any, ...]:
        """Its own state there, in a tuple, which is empty without one."""

    def resume(self, epoch: int, position: int, own_state: tuple[Any, ...] | None) -> None:
        """Begin the next pass there, by its own state if `own_state` holds one."""


class Source(ABC):
    """A finite set of samples in canonical order, numbered from 0. Methods that are not abstract are hooks with a default."""

    classes: list[str] | None = None
    labels: NDArray[Any] | None = None  # of every sample, where they are known without reading: int or float [samples]
    index_s: float = 0.0  # of the time that opening took: for the indexes of archives
    is_typed = True  # False: a field may have another type in every sample, as in JSON
    has_untyped_arrays = False  # True: a list of numbers is an array whose type only the numbers tell
    can_forecast = True  # False: which bytes a sample needs shows only while it is read
    has_ranges = False  # True: `ranges` are the bytes of a sample and of no other
    runs_user_code = False  # True: reading runs code of the user's, which may not be safe in several threads
    owner: Any = None  # the user's object that reading runs code of, if one thread at a time may
    length_field: str | None = None  # the field whose `lengths` it knows without reading
    lengths: NDArray[np.int64] | None = None  # the length of that field in every sample: int64 [samples]
    row_groups: RowGroups | None = None  # in which samples are decoded; None if each is read by itself
    in_order: ItemsInOrder | None = None  # for items that come in their own order only, else None
    bad_shards: Sequence[BadShard] = ()  # shards that were left out of it

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def key(self, index: int) -> str:
        """The sample's key, unique inside its origin."""

    @abstractmethod
    def origin(self, index: int) -> str:
        """The object the sample lies in, for messages."""

    @abstractmethod
    def reader(self, context: ReadContext) -> Reader:
        """What reads its samples in a pipeline."""

    @abstractmethod
    def fingerprint(self) -> str:
        """A short digest of what the samples are: keys and sizes, not where they lie or when they were written."""

    def keys(self, indices: NDArray[np.int64]) -> list[str]:
        """The keys of several samples."""
        return list(map(self.key, indices.tolist()))

    def ranges(self, index: int) -> list[FieldRange]:
        """The byte ranges that it is read from, by default those of its `table`. Raises `SourceError` if there are none, or a
        wanted field is missing."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        table = self.table(np.array([index], np.int64))
        if table is None:
            raise SourceError("the samples of this source have no byte ranges")
        places = zip(*table.ranges, strict=True)
        return [FieldRange(*named, ByteRange(*place)) for named, place in zip(table.fields, places, strict=True)]

    def table(self, indices: NDArray[np.int64]) -> Table | None:
        """The ranges of several samples; None if their fields differ: `ranges` and `constants` are called for each then."""
        return None

    def constants(self, index: int) -> Sample:
        """The fields known without reading (the class from the folder's name); a fresh dict."""
        return {}

    def blocks(self, block_bytes: int) -> NDArray[np.int64]:
        """Cut the samples into runs of about `block_bytes`, never across an object that holds several samples.

        Returns the first sample of every block and, last, the number of samples: int64 [number of blocks + 1]. Raises
        `SourceError` if there are no blocks.
        """
        raise SourceError(NO_BLOCKS)

    def packed(self) -> PackedSize | None:
        """The size of samples that lie side by side in a few objects; None for others."""
        return None

    def piece_ranges(
        self, samples: NDArray[np.int64], firsts: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> Ranges | None:
        """The bytes of pieces of samples: `lengths[i]` items of sample `samples[i]`, from item `firsts[i]` on. None if
        they are read whole."""
        return None

    def others(self, index: int, draws: NDArray[np.float64]) -> NDArray[np.int64]:
        """The samples that may take the place of a bad one, by numbers drawn from [0, 1): int64 [n]."""
        return (draws * len(self)).astype(np.int64)

    def number(self, index: int) -> int:
        """The sample's place in the canonical order: `index`, unless the index also says in which pass over the samples
        it comes."""
        return index

    def source_name(self, index: int) -> str | None:
        """The name of the mixed source that the sample belongs to; None if this is the only source."""
        return None

    def oddities(self) -> list[str]:
        """What looks wrong in what was listed, a sentence each, for `loaderkit check`."""
        return []

    def lacking(self) -> Mapping[str, NDArray[np.int64]]:
        """Field -> the samples that lack it, as far as that is known without reading, for `loaderkit check`: int64 [n] each."""
        return {}


NO_BLOCKS = "order.shuffle: block needs a source that knows where its bytes lie: use global or none with this one"


# ------------------------------------------------------------------------------------------------------------ kinds


# The defaults have names, so that a kind can be pickled by name.
def _none(*args: Any) -> None:
    return None


def _nothing(*args: Any) -> dict[str, Any]:
    return {}


class OwnedConnector(NamedTuple):
    """A source's connector, if it has one, and whether it is closed with the source; if not, the caller gave it."""

    connector: Connector | None
    is_owned: bool


@dataclass(frozen=True)
class SourceKind:
    """A kind of source: its arguments, how it is opened, and what can be known of the samples from its arguments alone.

    A checkpoint has tensors in place of samples, and no `open`; a mixture is opened source by source.
    """

    args: type[SourceArgs]
    open: Callable[..., Source] | None = None
    """(args, the connector at `root`, if there is one) -> the samples, listed."""
    root: Callable[[Any], str] | None = None  # the URL at which the connector starts, if any
    fields: Callable[[Any], Mapping[str, str] | None] = _none  # field -> image, text, ..., if known
    reopen: Callable[[Any, int], Callable[[], Source] | None] = _none
    """(args, number of samples) -> how a loading process opens it, or None if the source is pickled."""
    encoded: Literal["all", "some", "none"] = "none"
    """Which fields are the bytes of files up to `decode`, so that `loaderkit pack` may write them as they are."""
    has_blocks: bool = True  # False: `order.shuffle: block` is refused
    has_samples: bool = True  # False: it has tensors, to be restored
    has_shards: bool = False
    """True: `open` gets the source's `BadShards` as well, and tells it of shards that are damaged or missing."""
    is_stream: bool = False  # items come in their own order only, and their number shows at their end
    objects: Callable[[Any], Mapping[str, Any]] = _nothing
    """Key -> object that the user gave for it and that is pickled to loading processes."""
    check_items: Callable[[Any, Any], dict[str, Any]] = _nothing
    """(args, the opened source) -> what `loaderkit check` finds out about items of the user's code, by the keys of its JSON."""

    def open_with(
        self, args: SourceArgs, given: Mapping[str, Connector], opened: ExitStack, on_bad_shard: OnBadShard = "raise"
    ) -> tuple[Source, OwnedConnector]:
        """A source, listed, and its connector: one of `given` by its scheme, else one that `opened` closes."""
        assert self.open is not None
        store = args if isinstance(args, StoreArgs) else None
        connector = None if self.root is None else open_connector(self.root(args), given, store)
        is_owned = connector is not None and connector not in given.values()
        if connector is not None and is_owned:
            opened.callback(connector.close)
        if not self.has_shards:
            return self.open(args, connector), OwnedConnector(connector, is_owned)
        bad_shards = BadShards(on_bad_shard)
        source = self.open(args, connector, bad_shards)
        source.bad_shards = bad_shards.found
        return source, OwnedConnector(connector, is_owned)

    def is_elsewhere(self, args: SourceArgs) -> bool:
        """True if the samples lie elsewhere than in the file system."""
        scheme, separator, _ = ("" if self.root is None else self.root(args)).partition("://")
        return bool(separator) and scheme != "file"
