"""Sources of named arrays: each file or store is a sample, or each row of its arrays.

args, connector ──> the stores, listed ──> rows: how many each has ──> ContainerSource ──> reader.py
                        `Format`: which keys are stores, and how one is opened (hdf5.py, zarr.py)
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import blake2b
from math import prod

import numpy as np
from numpy.typing import NDArray

from loaderkit.connectors.base import Connector, ObjectInfo
from loaderkit.errors import FormatError, LoaderkitError, SourceError
from loaderkit.sources.bad_shards import BadShards
from loaderkit.sources.base import ReadContext, Reader, Source, SourceKind
from loaderkit.sources.containers.formats import ContainerArgs, ContainerFormat, StoredArray
from loaderkit.sources.containers.reader import ContainerReader
from loaderkit.sources.listing import StringTable

_NUM_THREADS = 16
_KINDS = "biufc"
_MOST_BYTES, _MOST_ARRAY_BYTES, _MOST_ROWS = 4 << 30, 1 << 60, 1 << 40
_MOST_SLABS, _MOST_BLOCKS = 1 << 26, 1 << 24  # of one store


class ContainerSource(Source):
    """The samples of all stores. Raises SourceError if there is none, FormatError for a store that cannot be read."""

    can_forecast = False

    def __init__(
        self, args: ContainerArgs, connector: Connector, found_bad: BadShards, container: ContainerFormat
    ) -> None:
        self._format, self._is_rows = container, args.samples == "rows"
        self.fields: Mapping[str, str] = dict(args.fields)
        self.memory_bytes = args.memory
        stores = container.find(connector, args)
        if not stores:
            raise SourceError(f"there is no {container.noun} below {args.url!r}: check `url`")
        self._is_one, self._name = args.is_one or not stores[0].key, args.key
        counts = np.ones(len(stores), np.int64)
        shapes: list[str] = []
        self._chunk_rows = np.ones((len(self.fields), len(stores)), np.int64)
        self._row_bytes = np.zeros((len(self.fields), len(stores)), np.int64)
        self._has_whole_rows = np.ones((len(self.fields), len(stores)), np.bool_)
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
                for field, array in enumerate(arrays.values()):
                    rows = array.chunks[0] if array.chunks else 1
                    self._chunk_rows[field, number] = max(1, min(rows, counts[number]))
                    self._row_bytes[field, number] = array.dtype.itemsize * prod(array.shape[1:])
                    self._has_whole_rows[field, number] = all(
                        chunk >= length
                        for chunk, length in zip((array.chunks or ())[1:], array.shape[1:], strict=False)
                    )
                shapes.append(repr([(array.shape, array.dtype.str) for array in arrays.values()]))
            if not counts.sum():
                found_bad.refuse_empty()
                raise SourceError(f"the arrays {', '.join(args.fields.values())} of {args.url!r} have no rows")
        self._keys = StringTable(store.key for store in stores)
        self._stores = stores
        self._ends = np.cumsum(counts)
        slabs = np.where(self._chunk_rows > 1, -(-counts // self._chunk_rows), 0)
        self._slab_ends = np.cumsum(slabs).reshape(slabs.shape)
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
            return store.key or self._name
        return str(row) if self._is_one else f"{store.key}/{row}"

    def origin(self, index: int) -> str:
        """The key of the store."""
        return self.locate(index)[0].key or self._name

    @property
    def slab_bytes(self) -> NDArray[np.int64]:
        """The bytes of each slab, a run of rows of one field that share chunks: int64 [slabs], field by field."""
        return np.repeat((self._chunk_rows * self._row_bytes).ravel(), np.diff(self._slab_ends.ravel(), prepend=0))

    def slabs_of(self, index: int, *, cuts: bool) -> dict[str, tuple[int, int]]:
        """Field -> slab of a sample and its row there; without fields of which no other row shares its chunks, or a slab is
        more than is held, or, if a window `cuts`, rows are several chunks, of which it may be in few."""
        store = int(np.searchsorted(self._ends, index, "right"))
        place = index - (int(self._ends[store - 1]) if store else 0)
        found = {}
        for number, field in enumerate(self.fields if self._is_rows else ()):
            num_rows = int(self._chunk_rows[number, store])
            is_held = num_rows > 1 and num_rows * int(self._row_bytes[number, store]) <= self.memory_bytes
            if is_held and (not cuts or self._has_whole_rows[number, store]):
                slab, row = divmod(place, num_rows)
                found[field] = self._first_slab(number, store) + slab, row
        return found

    def slab(self, number: int) -> tuple[ObjectInfo, str, slice]:
        """The store of a slab, its field, and its rows there."""
        field, store = divmod(int(np.searchsorted(self._slab_ends.ravel(), number, "right")), len(self._stores))
        num_rows = int(self._chunk_rows[field, store])
        first = (number - self._first_slab(field, store)) * num_rows
        return self._stores[store], [*self.fields][field], slice(first, first + num_rows)

    def _first_slab(self, field: int, store: int) -> int:
        before = field * len(self._stores) + store - 1
        return int(self._slab_ends.flat[before]) if before >= 0 else 0

    def blocks(self, block_bytes: int) -> NDArray[np.int64]:
        """Runs of whole chunks of rows, those of the field with the largest rows, of about `block_bytes`; a store that is a
        sample is a block: int64 [runs + 1]."""
        if not self._is_rows:
            return np.arange(self._num + 1, dtype=np.int64)
        bounds, first = [], 0
        largest = self._row_bytes.argmax(0), np.arange(len(self._stores))
        for end, rows, row_bytes in zip(
            self._ends.tolist(), self._chunk_rows[largest].tolist(), self._row_bytes.sum(0).tolist(), strict=True
        ):
            step = rows * max(
                1, round(block_bytes / max(1, rows * row_bytes)), -(-(end - first) // (rows * _MOST_BLOCKS))
            )
            bounds.append(np.arange(first, end, step, dtype=np.int64))
            first = end
        cuts = np.concatenate(bounds)
        return np.append(cuts[cuts < self._num], self._num)

    def fingerprint(self) -> str:
        """16 hexadecimal digits from keys, fields, and the shapes and types of arrays of rows."""
        digest = blake2b(self._keys.digest(), digest_size=8)
        digest.update(repr((sorted(self.fields.items()), self._is_rows, self._shapes, self._num)).encode())
        return digest.hexdigest()

    def reader(self, context: ReadContext) -> Reader:
        """A reader that keeps a few stores open."""
        return ContainerReader(self, context)

    def arrays_of(self, connector: Connector, store: ObjectInfo) -> Mapping[str, StoredArray]:
        """The arrays of a store, by field. Raises FormatError and what the connector raises."""
        try:
            arrays = self._format.open(connector, store, self.fields)
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
            raise FormatError(f"its array {self.fields[field]!r} is {array.dtype}, and only numbers are read")
        if self._is_rows and not array.shape:
            raise FormatError(f"its array {self.fields[field]!r} is a single number, which has no rows")
        path, num_bytes = self.fields[field], array.dtype.itemsize * prod(array.chunks or ())
        if num_bytes > _MOST_BYTES:
            raise FormatError(f"its array {path!r} has chunks of {num_bytes} bytes; at most 4 GiB are read")
        if array.dtype.itemsize * prod(length or 1 for length in array.shape) > _MOST_ARRAY_BYTES:
            raise FormatError(f"its array {path!r} is {array.dtype} {list(array.shape)!r:.200}, which no store holds")
        num_rows = array.shape[0] if self._is_rows else 0
        chunk_rows = array.chunks[0] if self._is_rows and array.chunks else 1
        if num_rows > _MOST_ROWS or (chunk_rows > 1 and num_rows // chunk_rows > _MOST_SLABS):
            raise FormatError(
                f"its array {path!r} has {num_rows} rows in chunks of {chunk_rows}; at most {_MOST_ROWS} rows, in "
                f"{_MOST_SLABS} chunks, are read of one: write it in larger ones"
            )


def kind_of(args: type[ContainerArgs], container: ContainerFormat) -> SourceKind:
    """The kind of source of a format."""
    return SourceKind(args, partial(_open, container), _root, has_shards=True)


def _open(
    container: ContainerFormat, args: ContainerArgs, connector: Connector, found_bad: BadShards
) -> ContainerSource:
    return ContainerSource(args, connector, found_bad, container)


def _root(args: ContainerArgs) -> str:
    return args.root
