"""Finds where the lists of numbers of one column lie in an Arrow file (`datasets.save_to_disk`, streams and files of
IPC), so that a list can be read as a range of bytes, and nothing else of the file.

What is found is kept, as for files whose documents end with a token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from loaderkit._internal.system.user_cache import keep, path_in_cache
from loaderkit.connectors.base import Connector, ObjectInfo, version_of
from loaderkit.errors import FormatError, LoaderkitError, MissingExtraError
from loaderkit.sources.arrow.messages import ArrowMessages
from loaderkit.sources.sequences.megatron import Documents

_VERSION = 1
Int64 = NDArray[np.int64]


def load_list_bounds(connector: Connector, info: ObjectInfo, cache_dir: Path | None, *, column: str) -> Documents:
    """The lists of a column, a document each, from the copy in `cache_dir` if it is of this version, else from the file.

    Raises `FormatError` if it is damaged, compressed or has no such column of lists, `MissingExtraError`, and what the
    connector raises.
    """
    name = connector.describe(info.key)
    if cache_dir is None:
        return _found(connector, info, column, name)
    path = path_in_cache(cache_dir, "arrow-lists", f"{name} {column}", ".npz")
    made_of = f"{_VERSION} {info.size} {version_of(connector, info)} {column}"
    found = _load_copy(path, made_of, info.size)
    if found is None:
        found = _found(connector, info, column, name)
        parts: dict[str, Any] = {"made_of": np.array(made_of), "dtype": np.array(found.dtype.str)}
        parts |= {"starts": found.starts, "lengths": found.lengths}
        keep(path, lambda file: np.savez(file, **parts))
    return found


def _load_copy(path: Path, made_of: str, size: int) -> Documents | None:
    """The copy on this machine; None if it is missing, damaged, or of another version of the file."""
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as parts:
            if str(parts["made_of"]) != made_of:
                return None
            starts, lengths = (parts[name].astype(np.int64, casting="safe") for name in ("starts", "lengths"))
            dtype = np.dtype(str(parts["dtype"]))
    except Exception:  # a damaged zip raises one of a dozen exceptions
        return None
    is_whole = starts.shape == lengths.shape == (len(starts),) and dtype.kind in "iu"
    is_inside = is_whole and bool(np.all((starts >= 0) & (lengths >= 0) & (starts + lengths * dtype.itemsize <= size)))
    return Documents(dtype, starts, lengths) if is_inside else None


def _found(connector: Connector, info: ObjectInfo, column: str, name: str) -> Documents:
    try:
        import pyarrow as pa
    except ImportError as error:
        raise MissingExtraError(
            "kind: tokens needs pyarrow for Arrow and Parquet files, which is not installed: pip install 'loaderkit[parquet]'"
        ) from error
    try:
        return _Lists(pa, connector, info).lists(column)
    except LoaderkitError as error:
        raise (FormatError(f"{name}: {error}") if type(error) is FormatError else error) from None
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError, IndexError, OverflowError) as error:
        hint = " (compressed files cannot be read by ranges: write it without)" * ("ecompress" in str(error))
        raise FormatError(f"{name}: it is no Arrow file that can be read, or damaged: {error}{hint}") from error


class _Run(NamedTuple):
    """Lists of one record batch: their type, first bytes and lengths."""

    dtype: np.dtype[Any]
    starts: Int64
    lengths: Int64


class _Lists(ArrowMessages):
    """The lists of a file, by its messages."""

    def lists(self, column: str) -> Documents:
        """The lists of a column in all record batches. Raises FormatError, and what pyarrow raises."""
        schema, runs = None, list[_Run]()
        for message, _, _ in self.messages():
            if message.type == "schema":
                schema = self.pa.ipc.read_schema(message)
                self._check_column(schema, column)
            else:
                runs.append(self._lists_in(self.pa.ipc.read_record_batch(message, schema).column(column)))
        if schema is None:
            raise FormatError("it has no schema: it is no Arrow file, or truncated")
        if not runs:
            item = schema.field(column).type.value_type
            return Documents(np.dtype(item.to_pandas_dtype()), np.zeros(0, np.int64), np.zeros(0, np.int64))
        starts, lengths = (np.concatenate([getattr(run, part) for run in runs]) for part in ("starts", "lengths"))
        return Documents(runs[0].dtype, starts, lengths)

    def _check_column(self, schema: Any, column: str) -> None:
        types = self.pa.types
        if column not in schema.names:
            raise FormatError(
                f"it has no column {column!r}, but {', '.join(schema.names)}: name the tokens' in `column`"
            )
        if schema.names.count(column) > 1:
            raise FormatError(f"it has two columns {column!r}")
        kind = schema.field(column).type
        is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
        if not is_list or not types.is_integer(kind.value_type):
            raise FormatError(f"its column {column!r} is {kind}, and documents of tokens are lists of whole numbers")
        if any(types.is_dictionary(field.type) for field in schema):
            raise FormatError(
                "it has columns packed by dictionaries, which cannot be read by ranges: write it without them"
            )

    def _lists_in(self, array: Any) -> _Run:
        if array.null_count or array.values.null_count:
            raise FormatError("its column of tokens has nulls: leave these rows out when you write it")
        kind, values = array.type, array.values
        dtype = np.dtype(values.type.to_pandas_dtype())
        if self.pa.types.is_fixed_size_list(kind):
            bounds = np.arange(len(array) + 1, dtype=np.int64) * kind.list_size
        else:
            bounds = self._bounds(array)
        if not len(array):
            return _Run(dtype, bounds[:0], bounds[:0])
        first = self.place_of(values.buffers()[1], int(bounds[-1]) * dtype.itemsize)
        lengths = np.diff(bounds)
        if bounds[0] < 0 or (lengths < 0).any():
            raise FormatError("the offsets of its lists do not ascend: it is damaged")
        return _Run(dtype, first + bounds[:-1] * dtype.itemsize, lengths)

    def _bounds(self, array: Any) -> Int64:
        """The offsets of the lists, which are read now: int64 [lists + 1]."""
        if not len(array):
            return np.zeros(1, np.int64)
        dtype = np.dtype("<i8" if self.pa.types.is_large_list(array.type) else "<i4")
        num_bytes = (len(array) + 1) * dtype.itemsize
        start = self.place_of(array.buffers()[1], num_bytes)
        return np.frombuffer(self.read(start, num_bytes), dtype).astype(np.int64)
