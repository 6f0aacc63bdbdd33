"""Sources of named arrays: each file or store is a sample, or each row of its arrays.

args, connector ──> the stores, listed ──> rows: how many each has ──> ContainerSource ──> reader.py
                        `Format`: which keys are stores, and how one is opened (hdf5.py, zarr.py)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from math import prod
from typing import Annotated, Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from loaderkit.connectors.base import Connector, ObjectInfo
from loaderkit.connectors.config import StoreArgs
from loaderkit.errors import FormatError, LoaderkitError, SourceError
from loaderkit.sources.bad_shards import BadShards
from loaderkit.sources.base import ReadContext, Reader, Source, SourceKind
from loaderkit.sources.containers.reader import ContainerReader
from loaderkit.sources.fields import Include
from loaderkit.sources.listing import StringTable

USUAL = (".h5", ".hdf5")
_NUM_THREADS = 16
_KINDS = "biufc"
_MOST_BYTES = 4 << 30


class StoredArray(Protocol):
    """What arrays of h5py and of zarr have in common."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...

    @property
    def chunks(self) -> Sequence[int] | None: ...

    def __getitem__(self, selection: Any) -> Any: ...


class Format(NamedTuple):
    """A format of containers: `find(connector, args)` gives its stores, `open(connector, store, paths)` the arrays at these
    paths of one, field by field; it raises FormatError, MissingExtraError and what the connector raises."""

    name: str
    noun: str
    find: Callable[[Connector, ContainerArgs], list[ObjectInfo]]
    open: Callable[[Connector, ObjectInfo, Mapping[str, str]], Mapping[str, StoredArray]]


class ContainerArgs(StoreArgs):
    """Named arrays in files or stores."""

    url: Annotated[str, Field(min_length=1, description="the file or store; or a folder, of which all below are read")]
    samples: Literal["rows", "whole"] = Field(
        description="rows: each index of the arrays' first dimension is a sample; whole: each file or store is one"
    )
    fields: Mapping[str, str] = Field(
        min_length=1, description="field -> path of its array, as in {image: images, label: meta/labels}"
    )

    @field_validator("fields")
    @classmethod
    def _names_are_free(cls, fields: Mapping[str, str]) -> Mapping[str, str]:
        for name, path in fields.items():
            if name.startswith("__") or not path.strip("/") or ".." in path.split("/"):
                raise ValueError(f"field -> path of an array, not {name!r}: {path!r}; names do not begin with __")
        return {name: path.strip("/") for name, path in fields.items()}

    @property
    def is_one(self) -> bool:
        """True if `url` names a file or store by its extension, and no folder of them."""
        raise NotImplementedError

    @property
    def root(self) -> str:
        """The connector's root: the folder, or that of the one file or store."""
        url = self.url.rstrip("/")
        return (url[: url.rfind("/") + 1] or ".") if self.is_one else self.url

    @property
    def key(self) -> str:
        """The key of the one file or store below `root`."""
        return self.url.rstrip("/").rpartition("/")[2]


class HDF5Args(ContainerArgs):
    """Data sets in HDF5 files (.h5, .hdf5)."""

    kind: Literal["hdf5"] = "hdf5"
    include: Include | None = Field(
        None,
        description="which files of a folder, relative to url: globs with **, and braces; default: all that end in .h5 or .hdf5",
    )

    @property
    def is_one(self) -> bool:
        """True if `url` ends with the extension of a file."""
        return self.url.lower().endswith((*USUAL, ".he5", ".nc"))


class ZarrArgs(ContainerArgs):
    """Arrays in Zarr stores, of version 3 or 2."""

    kind: Literal["zarr"] = "zarr"

    @property
    def is_one(self) -> bool:
        """True if `url` ends with `.zarr`."""
        return self.url.rstrip("/").lower().endswith(".zarr")


class ContainerSource(Source):
    """The samples of all stores. Raises SourceError if there is none, FormatError for a store that cannot be read."""

    can_forecast = False

    def __init__(self, args: ContainerArgs, connector: Connector, found_bad: BadShards, container: Format) -> None:
        self._format, self._fields, self._is_rows = container, dict(args.fields), args.samples == "rows"
        self._is_one = args.is_one
        stores = container.find(connector, args)
        if not stores:
            raise SourceError(f"there is no {container.noun} below {args.url!r}: check `url`")
        counts = np.ones(len(stores), np.int64)
        shapes: list[str] = []
        self._chunk_rows = np.ones(len(stores), np.int64)
        self._row_bytes = np.zeros(len(stores), np.int64)
        if self._is_rows:
            with ThreadPoolExecutor(_NUM_THREADS) as pool:
                tried = [*pool.map(BadShards.tried(lambda store: self.arrays_of(connector, store)), stores)]
            for number, (store, arrays) in enumerate(zip(stores, tried, strict=True)):
                if isinstance(arrays, LoaderkitError):
                    origin = connector.describe(store.key)
                    found_bad.leave_out(store.key, origin, type(arrays)(f"{origin}: {arrays}"))
                    counts[number] = 0
                    continue
                counts[number] = next(iter(arrays.values())).shape[0]
                chunks = [array.chunks[0] if array.chunks else 1 for array in arrays.values()]
                self._chunk_rows[number] = max(chunks)
                sizes = (array.dtype.itemsize * prod(array.shape[1:]) for array in arrays.values())
                self._row_bytes[number] = sum(sizes)
                shapes.append(repr([(array.shape, array.dtype.str) for array in arrays.values()]))
            if not counts.sum():
                found_bad.refuse_empty()
                raise SourceError(f"the arrays {', '.join(args.fields.values())} of {args.url!r} have no rows")
        self._keys = StringTable(store.key for store in stores)
        self._stores = stores
        self._ends = np.cumsum(counts)
        self._num = int(self._ends[-1]) if args.limit is None else min(int(self._ends[-1]), args.limit)
        self._shapes = blake2b("\0".join(shapes).encode(), digest_size=8).hexdigest()

    def __len__(self) -> int:
        return self._num

    def locate(self, index: int) -> tuple[ObjectInfo, int | None]:
        """The store of a sample, and its row there; None: all of it."""
        if not 0 <= index < self._num:
            raise IndexError(f"sample {index} of {self._num}")
        number = int(np.searchsorted(self._ends, index, "right"))
        before = int(self._ends[number - 1]) if number else 0
        return self._stores[number], index - before if self._is_rows else None

    def key(self, index: int) -> str:
        """The key of the store and the row; of one store alone the row."""
        store, row = self.locate(index)
        if row is None:
            return store.key
        return str(row) if self._is_one else f"{store.key}/{row}"

    def origin(self, index: int) -> str:
        """The key of the store."""
        return self.locate(index)[0].key

    def chunk_rows(self, index: int) -> int:
        """How many rows of the sample's store are read together."""
        return int(self._chunk_rows[np.searchsorted(self._ends, index, "right")])

    def blocks(self, block_bytes: int) -> NDArray[np.int64]:
        """Runs of whole chunks of rows of about `block_bytes`; a store that is a sample is a block: int64 [runs + 1]."""
        if not self._is_rows:
            return np.arange(self._num + 1, dtype=np.int64)
        bounds, first = [], 0
        for end, rows, row_bytes in zip(
            self._ends.tolist(), self._chunk_rows.tolist(), self._row_bytes.tolist(), strict=True
        ):
            step = rows * max(1, round(block_bytes / max(1, rows * row_bytes)))
            bounds.append(np.arange(first, end, step, dtype=np.int64))
            first = end
        cuts = np.concatenate(bounds)
        return np.append(cuts[cuts < self._num], self._num)

    def fingerprint(self) -> str:
        """16 hexadecimal digits from keys, fields, and the shapes and types of arrays of rows."""
        digest = blake2b(self._keys.digest(), digest_size=8)
        digest.update(repr((sorted(self._fields.items()), self._is_rows, self._shapes, self._num)).encode())
        return digest.hexdigest()

    def reader(self, context: ReadContext) -> Reader:
        """A reader that keeps a few stores open."""
        return ContainerReader(self, context)

    def arrays_of(self, connector: Connector, store: ObjectInfo) -> Mapping[str, StoredArray]:
        """The arrays of a store, by field. Raises FormatError and what the connector raises."""
        try:
            arrays = self._format.open(connector, store, self._fields)
            for field, array in arrays.items():
                self._check(field, array)
        except LoaderkitError:
            raise
        except Exception as error:
            raise FormatError(f"it cannot be read as {self._format.name}: {error}") from error
        lengths = {field: array.shape[0] for field, array in arrays.items()} if self._is_rows else {}
        if len({*lengths.values()}) > 1:
            said = ", ".join(f"{field} {length}" for field, length in lengths.items())
            raise FormatError(f"its arrays differ in how many rows they have ({said}), and each row is a sample")
        return arrays

    def _check(self, field: str, array: StoredArray) -> None:
        if array.dtype.kind not in _KINDS or array.dtype.names:
            raise FormatError(f"its array {self._fields[field]!r} is {array.dtype}, and only numbers are read")
        if self._is_rows and not array.shape:
            raise FormatError(f"its array {self._fields[field]!r} is a single number, which has no rows")
        num_bytes = array.dtype.itemsize * prod(array.chunks or ())
        if num_bytes > _MOST_BYTES:
            raise FormatError(
                f"its array {self._fields[field]!r} has chunks of {num_bytes} bytes; at most 4 GiB are read"
            )


def kind_of(args: type[ContainerArgs], container: Format) -> SourceKind:
    """The kind of source of a format."""
    return SourceKind(args, _Open(container), _root, has_shards=True)


class _Open(NamedTuple):
    """Can be pickled, as a lambda cannot."""

    container: Format

    def __call__(self, args: ContainerArgs, connector: Connector, found_bad: BadShards) -> ContainerSource:
        return ContainerSource(args, connector, found_bad, self.container)


def _root(args: ContainerArgs) -> str:
    return args.root
