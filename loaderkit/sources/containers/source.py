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
_MOST_BYTES = 4 << 30


class ContainerSource(Source):
    """The samples of all stores. Raises SourceError if there is none, FormatError for a store that cannot be read."""

    can_forecast = False

    def __init__(
        self, args: ContainerArgs, connector: Connector, found_bad: BadShards, container: ContainerFormat
    ) -> None:
        self._format, self._fields, self._is_rows = container, dict(args.fields), args.samples == "rows"
        self._is_one, self.memory_bytes = args.is_one, args.memory
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
        self._slab_ends = np.cumsum(-(-counts // self._chunk_rows))
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

    @property
    def slab_bytes(self) -> NDArray[np.int64]:
        """The bytes of each slab, a run of rows that share chunks: int64 [slabs]."""
        return np.repeat(self._chunk_rows * self._row_bytes, np.diff(self._slab_ends, prepend=0))

    def slab_of(self, index: int) -> tuple[int, int] | None:
        """The slab of a sample and its row there; None if no other row shares its chunks, or a slab is more than is held."""
        number = int(np.searchsorted(self._ends, index, "right"))
        num_rows = int(self._chunk_rows[number])
        if num_rows == 1 or num_rows * int(self._row_bytes[number]) > self.memory_bytes:
            return None
        slab, row = divmod(index - (int(self._ends[number - 1]) if number else 0), num_rows)
        return slab + (int(self._slab_ends[number - 1]) if number else 0), row

    def slab(self, number: int) -> tuple[ObjectInfo, slice]:
        """The store of a slab, and its rows there."""
        store = int(np.searchsorted(self._slab_ends, number, "right"))
        first = (number - (int(self._slab_ends[store - 1]) if store else 0)) * int(self._chunk_rows[store])
        return self._stores[store], slice(first, first + int(self._chunk_rows[store]))

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


def kind_of(args: type[ContainerArgs], container: ContainerFormat) -> SourceKind:
    """The kind of source of a format."""
    return SourceKind(args, partial(_open, container), _root, has_shards=True)


def _open(
    container: ContainerFormat, args: ContainerArgs, connector: Connector, found_bad: BadShards
) -> ContainerSource:
    return ContainerSource(args, connector, found_bad, container)


def _root(args: ContainerArgs) -> str:
    return args.root
