"""Where the lists of numbers of one column lie in an Arrow file (`datasets.save_to_disk`, streams and files of IPC), so that a
list is read as a range of bytes, and nothing else of the file.

Arrow finds the buffers itself: it is given memory as large as the file, of which only the metadata of the messages is filled
in. It copies no buffer, so the address of one says where in the file it lies; the pages in between are never touched. What is
found is kept, as for files whose documents end with a token.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from loaderkit._internal.system.user_cache import keep, path_in_cache
from loaderkit.connectors.base import Connector, ObjectInfo
from loaderkit.errors import FormatError, LoaderkitError, MissingExtraError
from loaderkit.sources.sequences.megatron import Documents

_VERSION = 1
_MAGIC = b"ARROW1\x00\x00"  # of files; streams begin with their first message
_CONTINUES = b"\xff\xff\xff\xff"
_MOST_METADATA = 256 << 20  # bytes, of one message: a schema of thousands of columns takes 1 MB
Int64 = NDArray[np.int64]


def load_list_bounds(connector: Connector, info: ObjectInfo, cache_dir: Path | None, *, column: str) -> Documents:
    """The lists of a column, a document each, from the copy in `cache_dir` if size and etag match, else from the file.

    Raises `FormatError` if it is damaged, compressed or has no such column of lists, `MissingExtraError`, and what the
    connector raises.
    """
    name = connector.describe(info.key)
    if cache_dir is None:
        return _found(connector, info, column, name)
    path = path_in_cache(cache_dir, "arrow-lists", f"{name} {column}", ".npz")
    made_of = f"{_VERSION} {info.size} {info.etag} {column}"
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
        return _Mirror(pa, connector, info).lists(column)
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


class _Mirror:
    """Memory as large as the file, in which the same byte has the same place, and which holds what was read of it."""

    def __init__(self, pa: Any, connector: Connector, info: ObjectInfo) -> None:
        self._pa, self._connector, self._info = pa, connector, info
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        self._memory = mmap.mmap(-1, info.size, flags=flags)
        self._view = memoryview(self._memory)
        self._buffer = pa.py_buffer(self._memory)

    def lists(self, column: str) -> Documents:
        """The lists of a column in all record batches. Raises FormatError, and what pyarrow raises."""
        schema, runs = None, list[_Run]()
        begin = self._read(0, min(len(_MAGIC), self._info.size))
        position = len(_MAGIC) if begin == _MAGIC else 0
        while (found := self._message(position)) is not None:
            message, position = found
            if message.type == "schema":
                schema = self._pa.ipc.read_schema(message)
                self._check_column(schema, column)
            elif schema is None:
                raise FormatError("it does not begin with a schema, as Arrow files do")
            elif message.type == "record batch":
                runs.append(self._lists_in(self._pa.ipc.read_record_batch(message, schema).column(column)))
            else:
                raise FormatError(f"it has a message of the kind {message.type!r}, which cannot be read by ranges")
        if schema is None:
            raise FormatError("it has no schema: it is no Arrow file, or truncated")
        if not runs:
            item = schema.field(column).type.value_type
            return Documents(np.dtype(item.to_pandas_dtype()), np.zeros(0, np.int64), np.zeros(0, np.int64))
        starts, lengths = (np.concatenate([getattr(run, part) for run in runs]) for part in ("starts", "lengths"))
        return Documents(runs[0].dtype, starts, lengths)

    def _read(self, start: int, length: int) -> bytes:
        """Bytes of the file, which also get their place in the memory."""
        if length < 0 or start + length > self._info.size:
            raise FormatError(f"it ends at byte {self._info.size}, within its metadata: it is truncated")
        part = self._view[start : start + length]
        self._connector.read_into(self._info.key, start, part, etag=self._info.etag)
        return bytes(part)

    def _message(self, position: int) -> tuple[Any, int] | None:
        """The message that begins there, its body not read, and where the next one begins; None at the end."""
        head = self._read(position, 8)
        num_bytes = int.from_bytes(head[4:], "little", signed=True)
        if head[:4] != _CONTINUES:
            raise FormatError(
                f"no message begins at byte {position}: it is damaged, or written by a version before 0.15"
            )
        if num_bytes == 0:
            return None
        if not 0 < num_bytes <= _MOST_METADATA:
            raise FormatError(f"the message at byte {position} has metadata of {num_bytes} bytes: it is damaged")
        self._read(position + 8, num_bytes)
        reader = self._pa.BufferReader(self._buffer)
        reader.seek(position)
        return self._pa.ipc.read_message(reader), reader.tell()

    def _check_column(self, schema: Any, column: str) -> None:
        types = self._pa.types
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
        if self._pa.types.is_fixed_size_list(kind):
            bounds = np.arange(len(array) + 1, dtype=np.int64) * kind.list_size
        else:
            bounds = self._bounds(array)
        if not len(array):
            return _Run(dtype, bounds[:0], bounds[:0])
        first = self._place_of(values.buffers()[1], int(bounds[-1]) * dtype.itemsize)
        lengths = np.diff(bounds)
        if bounds[0] < 0 or (lengths < 0).any():
            raise FormatError("the offsets of its lists do not ascend: it is damaged")
        return _Run(dtype, first + bounds[:-1] * dtype.itemsize, lengths)

    def _bounds(self, array: Any) -> Int64:
        """The offsets of the lists, which are read now: int64 [lists + 1]."""
        if not len(array):
            return np.zeros(1, np.int64)
        dtype = np.dtype("<i8" if self._pa.types.is_large_list(array.type) else "<i4")
        num_bytes = (len(array) + 1) * dtype.itemsize
        start = self._place_of(array.buffers()[1], num_bytes)
        return np.frombuffer(self._read(start, num_bytes), dtype).astype(np.int64)

    def _place_of(self, buffer: Any, num_bytes: int) -> int:
        """The first byte of a buffer in the file, which has at least `num_bytes`."""
        place = 0 if buffer is None else buffer.address - self._buffer.address
        is_inside = buffer is not None and 0 <= place <= self._info.size - buffer.size
        if not is_inside and num_bytes:
            raise FormatError(
                "its record batches are compressed, so that lists are no ranges of it: write it without that"
            )
        if num_bytes > (0 if buffer is None else buffer.size):
            raise FormatError(
                f"a buffer of its lists has {buffer.size} bytes, and they take {num_bytes}: it is damaged"
            )
        return place
