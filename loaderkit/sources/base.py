"""The contract of sources: the calls every source has, and the records they return."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from loaderkit.connectors.base import ByteRange, Connector, ObjectInfo
from loaderkit.connectors.config import SourceArgs, StoreArgs
from loaderkit.connectors.factory import open_connector
from loaderkit.samples.sample import FieldRange, Sample, Table

_MAX_CLASSES_NAMED = 10


def shortened(classes: list[str]) -> str:
    """The names of classes for messages and fingerprints: all if they are few, else the first and a digest of all."""
    if len(classes) <= _MAX_CLASSES_NAMED:
        return ", ".join(classes)
    digest = blake2b("\0".join(classes).encode("utf-8", "surrogateescape"), digest_size=4).hexdigest()
    return f"{', '.join(classes[:_MAX_CLASSES_NAMED])}, ... {len(classes)} in all, digest {digest}"


class PackedSize(NamedTuple):
    """Of all samples together: the reads that they take, their bytes, and the bytes of the objects in which they lie."""

    num_reads: int
    num_bytes: int
    stored_bytes: int


class Source(ABC):
    """A finite set of samples in canonical order, numbered from 0. What is not abstract is a hook that has a default."""

    classes: list[str] | None = None
    is_typed = True  # False: a field may have another type in every sample, as in JSON
    index_s: float = 0.0  # of the time that opening took: for the indexes of archives

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def key(self, index: int) -> str:
        """The sample's key, unique inside its origin."""

    def keys(self, indices: NDArray[np.int64]) -> list[str]:
        """The keys of several samples."""
        return list(map(self.key, indices.tolist()))

    @abstractmethod
    def origin(self, index: int) -> str:
        """The object the sample lies in, for messages."""

    @abstractmethod
    def ranges(self, index: int) -> list[FieldRange]:
        """The byte ranges that make up the sample. Raises `SourceError` if a wanted field is missing."""

    def table(self, indices: NDArray[np.int64]) -> Table | None:
        """The ranges of several samples; None if their fields differ: `ranges` and `constants` are called for each then."""
        return None

    @abstractmethod
    def constants(self, index: int) -> Sample:
        """The fields known without reading (the class from the folder's name); a fresh dict."""

    @abstractmethod
    def blocks(self, block_bytes: int) -> NDArray[np.int64]:
        """Cut the samples into runs of about `block_bytes`, never across an object that holds several samples.

        Returns the first sample of every block and, last, the number of samples: int64 [number of blocks + 1].
        """

    def packed(self) -> PackedSize | None:
        """The size of samples that lie side by side in a few objects; None for others."""
        return None

    def others(self, index: int, draws: NDArray[np.float64]) -> NDArray[np.int64]:
        """The samples that may take the place of a bad one, by numbers drawn from [0, 1): int64 [n]."""
        return (draws * len(self)).astype(np.int64)

    def number(self, index: int) -> int:
        """The sample's place in the canonical order: `index`, unless that also says in which pass over the samples it comes."""
        return index

    def source_name(self, index: int) -> str | None:
        """The name of the mixed source that the sample is of; None: there is only this one."""
        return None

    @abstractmethod
    def fingerprint(self) -> str:
        """A short digest of what the samples are: keys and sizes, not where they lie or when they were written."""


class ItemSource(Source):
    """A source of Python objects, which has no ranges."""

    is_typed = False
    dataset: Any
    """The object with the items: dataset[index]."""
    owner: Any = None
    """The same, if one thread at a time may take items of it; else None."""

    @abstractmethod
    def items(self, indices: list[int]) -> list[Any] | None:
        """Several items in one call; None if the object has no such call, or it failed."""

    @abstractmethod
    def sample(self, item: Any) -> Sample:
        """The fields of an item; a fresh dict. Raises ValueError."""

    @abstractmethod
    def columns(self, items: list[Any]) -> dict[str, list[Any]] | None:
        """The fields of several items, column by column; None if they need to be taken one by one."""


class Records(NamedTuple):
    """Samples of one size in one object: the field they become, and the type and shape of one of them.

    `dtype` is torch's name; `is_swapped` is True if its byte order is not this machine's.
    """

    field: str
    dtype: str
    shape: tuple[int, ...]
    is_swapped: bool
    num_bytes: int


class RecordSource(Source):
    """A source whose samples are `Records` of one object, so that a chunk of them is read at once."""

    records: Records

    @property
    @abstractmethod
    def file(self) -> ObjectInfo:
        """The object that holds them, as it was when the source was opened."""

    @abstractmethod
    def starts(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """The first byte of every sample: int64 [n]."""


class Sequences(NamedTuple):
    """Samples of numbers of one type in one object: the field they become, and the type (torch's name) of a number.

    `is_swapped` is True if its byte order is not this machine's.
    """

    field: str
    dtype: str
    is_swapped: bool
    item_bytes: int


class SequenceSource(Source):
    """A source whose samples are `Sequences` of one object: each one range, and as long as it is."""

    sequences: Sequences

    @property
    @abstractmethod
    def file(self) -> ObjectInfo:
        """The object that holds them, as it was when the source was opened."""

    @property
    @abstractmethod
    def starts(self) -> NDArray[np.int64]:
        """The first byte of every sample: int64 [samples]."""

    @property
    @abstractmethod
    def lengths(self) -> NDArray[np.int64]:
        """The numbers in every sample: int64 [samples]."""


class StoredBytes(NamedTuple):
    """The bytes of one field of a row, a view of its row group's memory, and the extension of the file they come from; "": not
    known."""

    data: memoryview
    extension: str


class Taken(NamedTuple):
    """One field of some rows: an array [rows, ...], or a list. `bad` says, by index among these rows, what is wrong with a row:
    its place in `values` means nothing then."""

    values: NDArray[Any] | list[Any]
    bad: dict[int, str]


class Column(Protocol):
    """One field of a row group."""

    @property
    def num_bytes(self) -> int:
        """The memory that it takes."""

    def take(self, rows: NDArray[np.int64]) -> Taken:
        """The values of these rows, int64 [n]: in memory of their own, except for `StoredBytes`."""


class RowGroup(NamedTuple):
    """A decoded row group: its fields, the memory it takes, and the bytes that were read for it."""

    columns: Mapping[str, Column]
    memory_bytes: int
    read_bytes: int


class RowSource(Source):
    """A source whose samples are rows of tables, which are read and decoded row group by row group.

    `ranges` of a sample are those of its whole row group.
    """

    group_bytes: NDArray[np.int64]
    """About the memory that every decoded row group takes: int64 [row groups]."""
    memory_bytes: int
    """The memory that decoded row groups may take in one process."""

    @abstractmethod
    def locate(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The row group of every sample, and its row there: int64 [n] each."""

    @abstractmethod
    def group_ranges(self, group: int) -> list[ByteRange]:
        """The bytes that a row group is decoded from."""

    @abstractmethod
    def column_of(self, field: str) -> str:
        """The name of the column that a field is made of, for messages."""

    @abstractmethod
    def reader(self, connector: Connector) -> Callable[[int], RowGroup]:
        """A function that reads a row group through `connector` and decodes it, from any thread. It raises FormatError naming
        the file, and what the connector raises."""


class SerialSource(Source):
    """A source whose samples lie one behind another in large objects: each is one range, of which `parse` makes the fields."""

    is_typed = False

    @abstractmethod
    def parse(self, index: int, data: memoryview) -> Sample:
        """The fields in the bytes of a sample, none of which refers to `data`. Raises `FormatError`."""


def _none(*args: Any) -> None:
    return None


def _nothing(args: Any) -> Mapping[str, Any]:
    return {}


class OwnedConnector(NamedTuple):
    """A source's connector, if it has one, and whether it is closed with the source; else the caller gave it."""

    connector: Connector | None
    is_owned: bool


@dataclass(frozen=True)
class SourceKind:
    """A kind of source: its arguments, how it is opened, and what its arguments alone tell of the samples.

    `gives` tells what the stage `read` does: read the byte ranges of fields, read `Records` or `Sequences`, take rows of
    `RowGroup`s, read and parse samples (`SerialSource`), or take items (Python objects). A checkpoint gives tensors instead of
    samples and has no `open`; a mixture is opened source by source.
    """

    args: type[SourceArgs]
    gives: Literal["ranges", "records", "sequences", "rows", "serial", "items", "tensors", "mixed"]
    open: Callable[[Any, Connector | None], Source] | None = None  # (args, connector) -> the samples, listed
    root: Callable[[Any], str] | None = None  # the URL at which the connector starts; None: there is no connector
    fields: Callable[[Any], Mapping[str, str] | None] = _none  # field -> image, text, ...; None: only the data tells
    reopen: Callable[[Any, int], Callable[[], Source] | None] = _none
    """(args, number of samples) -> how a loading process opens it; None: the source is pickled."""
    is_stream: bool = False  # items come in their own order only, and their number shows at their end
    objects: Callable[[Any], Mapping[str, Any]] = _nothing
    """Key -> object that the user gave for it and that is pickled to loading processes."""

    def open_with(
        self, args: SourceArgs, given: Mapping[str, Connector], opened: ExitStack
    ) -> tuple[Source, OwnedConnector]:
        """A source, listed, and its connector: one of `given` by its scheme, else one that `opened` closes."""
        assert self.open is not None
        store = args if isinstance(args, StoreArgs) else None
        connector = None if self.root is None else open_connector(self.root(args), given, store)
        is_owned = connector is not None and connector not in given.values()
        if connector is not None and is_owned:
            opened.callback(connector.close)
        return self.open(args, connector), OwnedConnector(connector, is_owned)

    def is_elsewhere(self, args: SourceArgs) -> bool:
        """True if the samples lie in another place than the file system."""
        scheme, separator, _ = ("" if self.root is None else self.root(args)).partition("://")
        return bool(separator) and scheme != "file"
