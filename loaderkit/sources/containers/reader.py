"""Reads samples from the arrays of containers: only the window that the next stage cuts; and rows that share chunks once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from loaderkit.connectors.base import Connector, ObjectInfo
from loaderkit.errors import FormatError, LoaderkitError
from loaderkit.samples.chunk import SampleChunk
from loaderkit.samples.sample import Sample
from loaderkit.samples.values import CutWindow
from loaderkit.sources.base import ReadContext, Reader
from loaderkit.sources.containers.formats import StoredArray
from loaderkit.sources.held_groups import HeldGroups

_NUM_OPEN = 32
_MOST_BYTES, _MOST_CHUNKS = 4 << 30, 1 << 15


class StoredSamples(Protocol):
    """Where samples lie; see `ContainerSource`."""

    fields: Mapping[str, str]
    memory_bytes: int

    @property
    def slab_bytes(self) -> NDArray[np.int64]: ...

    def locate(self, index: int) -> tuple[ObjectInfo, int | None]: ...

    def slabs_of(self, index: int, *, cuts: bool) -> Mapping[str, tuple[int, int]]: ...

    def slab(self, number: int) -> tuple[ObjectInfo, str, slice]: ...

    def arrays_of(self, connector: Connector, store: ObjectInfo) -> Mapping[str, StoredArray]: ...


class RowSlab(NamedTuple):
    """Rows of a field that share chunks [rows, ...]."""

    values: NDArray[Any]
    memory_bytes: int
    read_bytes: int


class ContainerReader(Reader):
    """Any number of threads; a store is opened once and stays open among the last ones used."""

    def __init__(self, source: StoredSamples, context: ReadContext) -> None:
        self._source, self._connector, self._failed = source, context.store, context.failed
        self._windows = context.windows
        self._lock = threading.Lock()
        self._open: OrderedDict[str, Mapping[str, StoredArray]] = OrderedDict()
        self._slabs = HeldGroups(self._slab, source.slab_bytes, source.memory_bytes)

    def read(self, chunk: SampleChunk) -> int:
        """See `Reader`."""
        draws = None if self._windows is None else self._windows.draws(chunk)
        indices = chunk.source_indices.tolist()
        held, num_bytes = self._read_slabs(chunk, indices, cuts=draws is not None)
        for row, index in enumerate(indices):
            if chunk.samples[row] is not None:
                continue
            chunk.current = row
            try:
                sample = self._sample(index, None if draws is None else draws[row], held.get(row, {}))
            except LoaderkitError as error:
                self._failed(chunk, row, error)
                continue
            chunk.samples[row] = sample
            num_bytes += sum(_array(value).nbytes for name, value in sample.items() if name not in held.get(row, ()))
        return num_bytes

    def close(self) -> None:
        """Drop what is held and the stores that are open; files close with their last array."""
        self._slabs.clear()
        with self._lock:
            self._open.clear()

    def _read_slabs(self, chunk: SampleChunk, indices: list[int], *, cuts: bool) -> tuple[dict[int, Sample], int]:
        """Place -> the fields of which rows share chunks with others, from slabs that are held, and the bytes that were read.
        What fails is left to be read one by one."""
        groups: dict[tuple[int, str], list[tuple[int, int]]] = {}
        for place, index in enumerate(indices):
            for field, (number, row) in self._source.slabs_of(index, cuts=cuts).items():
                groups.setdefault((number, field), []).append((place, row))
        held: dict[int, Sample] = {}
        num_bytes = 0
        chunk.current = None
        for (number, field), places in groups.items():
            try:
                slab, num_read = self._slabs.get(number)
            except Exception:  # noqa: S112 - each row is tried again, and its error named
                continue
            num_bytes += num_read
            for place, row in places:
                held.setdefault(place, {})[field] = slab.values[row, ...].copy()
        return held, num_bytes

    def _slab(self, number: int) -> RowSlab:
        store, field, rows = self._source.slab(number)
        try:
            array = self._arrays(store)[field]
            _check_size(field, array, array.shape[1:])
            values = _native(array[rows])
        except LoaderkitError:
            raise
        except Exception as error:
            raise FormatError(f"its arrays cannot be read: {error}") from error
        return RowSlab(values, values.nbytes, values.nbytes)

    def _sample(self, index: int, draws: Any, held: Sample) -> Sample:
        if draws is None and len(held) == len(self._source.fields):
            return held
        store, row = self._source.locate(index)
        arrays = self._arrays(store)
        try:
            return self._read_windows(arrays, row, draws, dict(held)) or {
                field: held[field] if field in held else self._whole(field, array, row)
                for field, array in arrays.items()
            }
        except LoaderkitError:
            raise
        except Exception as error:
            raise FormatError(f"its arrays cannot be read: {error}") from error

    def _read_windows(
        self, arrays: Mapping[str, StoredArray], row: int | None, draws: Any, held: Sample
    ) -> Sample | None:
        """The sample with windows of its arrays, of which some are `held` whole; None: the next stage needs them whole, or
        refuses them."""
        rule = None if self._windows is None else self._windows.rule
        if rule is None or not {*rule.fields} <= arrays.keys():
            return None
        shapes = {field: arrays[field].shape[row is not None :] for field in rule.fields}
        lengths = {shape[-rule.num_dims :] for shape in shapes.values()}
        if len(lengths) > 1 or len(next(iter(lengths))) < rule.num_dims:
            return None

        def load() -> Any:
            assert rule is not None
            assert rule.foreground is not None
            if rule.foreground not in held:
                held[rule.foreground] = self._whole(rule.foreground, arrays[rule.foreground], row)
            return held[rule.foreground]

        window = rule.place(next(iter(lengths)), draws, load)
        if window is None:
            return None
        sample: Sample = {}
        for field, array in arrays.items():
            if field not in rule.fields:
                sample[field] = held[field] if field in held else self._whole(field, array, row)
            elif field in held:
                sample[field] = CutWindow(held[field][(..., *window)])
            else:
                inside = (slice(None),) * (len(shapes[field]) - rule.num_dims) + window
                sizes = [
                    length if part.start is None else part.stop - part.start
                    for length, part in zip(shapes[field], inside, strict=True)
                ]
                _check_size(field, array, sizes)
                sample[field] = CutWindow(_native(np.asarray(array[inside if row is None else (row, *inside)])))
        return sample

    def _whole(self, field: str, array: StoredArray, row: int | None) -> Any:
        _check_size(field, array, array.shape[row is not None :])
        return _native(np.asarray(array[... if row is None else row]))

    def _arrays(self, store: ObjectInfo) -> Mapping[str, StoredArray]:
        with self._lock:
            arrays = self._open.get(store.key)
            if arrays is not None:
                self._open.move_to_end(store.key)
                return arrays
        arrays = self._source.arrays_of(self._connector, store)
        with self._lock:
            self._open[store.key] = arrays
            while len(self._open) > _NUM_OPEN:
                self._open.popitem(last=False)
        return arrays


def _check_size(field: str, array: StoredArray, shape: Any) -> None:
    """Raise FormatError for values of a shape, of an array's last dimensions, that are too many, or in too many chunks."""
    num_bytes = array.dtype.itemsize * prod(shape)
    if num_bytes > _MOST_BYTES:
        raise FormatError(
            f"its field {field!r} is {array.dtype} {list(shape)}, {num_bytes} bytes; at most 4 GiB are read of a sample"
        )
    chunks = (array.chunks or array.shape)[len(array.shape) - len(shape) :]
    num_chunks = prod(-(-length // max(1, chunk)) for length, chunk in zip(shape, chunks, strict=True))
    if num_chunks > _MOST_CHUNKS:
        raise FormatError(
            f"its field {field!r}, {array.dtype} {list(shape)}, lies in {num_chunks} chunks of {list(chunks)}; at most "
            f"{_MOST_CHUNKS} are read of a sample: write it in larger ones"
        )


def _native(array: Any) -> Any:
    """The array in the machine's byte order."""
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _array(value: Any) -> Any:
    return value.array if type(value) is CutWindow else value
