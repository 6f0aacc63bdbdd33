"""The record batches of an Arrow file: where they are is found by their metadata, once, and kept; each is mapped or read, and
decoded from its own bytes alone.

What a record batch says of itself is compared with its bytes, as it may be damaged: Arrow would follow any offset.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from loaderkit._internal.system.forks import ending_forks
from loaderkit._internal.system.user_cache import keep, path_in_cache
from loaderkit.connectors.base import ByteRange, Connector, ObjectInfo, bulk_of, version_of
from loaderkit.errors import FormatError, LoaderkitError, ObjectChangedError
from loaderkit.sources.arrow.columns import join
from loaderkit.sources.arrow.convert import column_of
from loaderkit.sources.arrow.messages import ArrowMessages
from loaderkit.sources.arrow.row_groups import Column, RowGroup
from loaderkit.sources.arrow.types import ColumnType, arrow_errors, column_type, import_pyarrow

_VERSION = 1
_MOST_ROWS_A_BYTE = 8  # of booleans
MAPPED_BYTES = 24  # about what a row takes of a column that is mapped: bounds, and what is there
Int64 = NDArray[np.int64]


class BatchTable(NamedTuple):
    """The message with the schema, and for every record batch its first byte, its number of bytes and of rows: int64
    [batches]."""

    schema: bytes
    starts: Int64
    lengths: Int64
    num_rows: Int64


def load_batches(connector: Connector, info: ObjectInfo, cache_dir: Path | None) -> BatchTable:
    """The record batches of a file, from the copy in `cache_dir` if it is of this version, else from the file. Raises
    FormatError that names it, MissingExtraError, and what the connector raises."""
    if cache_dir is None:
        return _found(connector, info)
    path = path_in_cache(cache_dir, "arrow-batches", connector.describe(info.key), ".npz")
    made_of = f"{_VERSION} {info.size} {version_of(connector, info)}"
    table = _load_copy(path, made_of, info.size)
    if table is None:
        table = _found(connector, info)
        schema = np.frombuffer(table.schema, np.uint8)
        parts: dict[str, Any] = {**table._asdict(), "schema": schema, "made_of": np.array(made_of)}
        keep(path, lambda file: np.savez(file, **parts))
    return table


def _load_copy(path: Path, made_of: str, size: int) -> BatchTable | None:
    """The copy on this machine; None if it is missing, damaged, or of another version of the file."""
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as parts:
            if str(parts["made_of"]) != made_of:
                return None
            schema = parts["schema"].astype(np.uint8, casting="safe").tobytes()
            columns = [parts[name].astype(np.int64, casting="safe") for name in BatchTable._fields[1:]]
    except Exception:  # a damaged zip raises one of a dozen exceptions
        return None
    starts, lengths, num_rows = columns
    is_inside = starts.shape == lengths.shape == num_rows.shape == (len(starts),) and bool(
        np.all((starts >= 0) & (lengths > 0) & (starts + lengths <= size) & (num_rows >= 0))
    )
    return BatchTable(schema, starts, lengths, num_rows) if is_inside else None


def _found(connector: Connector, info: ObjectInfo) -> BatchTable:
    pa = import_pyarrow("huggingface")
    name = connector.describe(info.key)
    schema, parsed = b"", None
    rows: list[tuple[int, int, int]] = []
    try:
        messages = ArrowMessages(pa, connector, info)
        for message, start, end in messages.messages():
            if message.type == "schema":
                schema, parsed = messages.read(start, end - start), pa.ipc.read_schema(message)
                continue
            batch = pa.ipc.read_record_batch(message, parsed)
            batch.validate()
            if not all(map(messages.holds, batch.columns)):
                raise FormatError(
                    "its record batches are compressed, so that they cannot be mapped: write it without that"
                )
            if not batch.num_rows <= _MOST_ROWS_A_BYTE * (end - start):
                raise FormatError(f"{batch.num_rows} rows in {end - start} bytes: it is damaged")
            rows.append((start, end - start, batch.num_rows))
    except LoaderkitError as error:
        raise (FormatError(f"{name}: {error}") if type(error) is FormatError else error) from None
    except arrow_errors() as error:
        hint = " (compressed files cannot be mapped: write it without)" * ("ecompress" in str(error))
        raise FormatError(f"{name}: it is no Arrow file that can be read, or damaged: {error}{hint}") from error
    if not schema:
        raise FormatError(f"{name}: it has no schema: it is no Arrow file, or truncated")
    table = np.array([row for row in rows if row[2]], np.int64).reshape(-1, 3)
    return BatchTable(schema, table[:, 0].copy(), table[:, 1].copy(), table[:, 2].copy())


def columns_of(schema: bytes, where: str) -> dict[str, ColumnType]:
    """The columns of a file by name. Raises FormatError."""
    pa = import_pyarrow("huggingface")
    columns: dict[str, ColumnType] = {}
    try:
        for number, field in enumerate(_schema(pa, schema)):
            reason = _refused(pa, field.type) or ("a second column of this name" if field.name in columns else "")
            columns[field.name] = column_type(pa, field.type, (number,))
            if reason:
                columns[field.name] = ColumnType("", (number,), reason=reason)
    except arrow_errors() as error:
        raise FormatError(f"{where}: its schema is damaged: {error}") from error
    return columns


def _schema(pa: Any, schema: bytes) -> Any:
    return pa.ipc.read_schema(pa.ipc.read_message(pa.py_buffer(schema)))


def _refused(pa: Any, kind: Any) -> str:
    """Why a type is not read from bytes that may be damaged; "" if it is read."""
    kind = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
    name = str(kind)
    if pa.types.is_dictionary(kind) or "view" in name.partition("<")[0] or pa.types.is_run_end_encoded(kind):
        return f"{name}, which is not read from Arrow files"
    return next(filter(None, (_refused(pa, kind.field(number).type) for number in range(kind.num_fields))), "")


class RecordBatches(Protocol):
    """What the reader asks of its source."""

    @property
    def fields(self) -> Mapping[str, str]:
        """Field -> its column."""

    @property
    def types(self) -> Mapping[str, ColumnType]:
        """Column -> its type, of those that are fields."""

    def group_ranges(self, group: int) -> list[ByteRange]:
        """The bytes of the record batches of a group."""

    def batches_of(self, group: int) -> tuple[ObjectInfo, bytes, list[int]]:
        """The file of a group, the message with its schema, and the rows of each of its record batches."""


class BatchReader:
    """Reads and decodes the record batches of a source through a connector, which maps files where it can."""

    def __init__(self, source: RecordBatches, connector: Connector) -> None:
        self._source, self._connector = source, connector
        self._read_into = ending_forks(connector.read_into)
        self._map = bulk_of(connector).map_object
        self._mapped: dict[str, tuple[memoryview, Callable[[], None]]] = {}
        self._lock = Lock()

    def read(self, group: int) -> RowGroup:
        """The record batches of a group, as one. Raises FormatError, and what the connector raises."""
        info, schema, nums = self._source.batches_of(group)
        ranges = self._source.group_ranges(group)
        fields = self._source.fields
        types = [self._source.types[column] for column in fields.values()]
        parts = [
            decode_batch(schema, self._bytes_of(info, one), types, num, f"{self._named(info)} at byte {one.start}")
            for one, num in zip(ranges, nums, strict=True)
        ]
        columns = [join(of_all) for of_all in zip(*parts, strict=True)]
        made = dict(zip(fields, columns, strict=True))
        if self._map is None:
            return RowGroup(made, sum(column.num_bytes for column in columns), sum(one.length for one in ranges))
        return RowGroup(made, MAPPED_BYTES * sum(nums) * len(columns), 0, self._mapping(info)[1])

    def _named(self, info: ObjectInfo) -> str:
        return f"{self._connector.describe(info.key)}: the record batch"

    def _bytes_of(self, info: ObjectInfo, one: ByteRange) -> memoryview:
        if self._map is not None:
            return self._mapping(info)[0][one.start : one.start + one.length]
        data = np.empty(one.length, np.uint8).data
        self._read_into(info.key, one.start, data, etag=info.etag)
        return data

    def _mapping(self, info: ObjectInfo) -> tuple[memoryview, Callable[[], None]]:
        """The mapped bytes of a file, and a function that raises if the file has changed; the same for all of its
        record batches."""
        assert self._map is not None
        with self._lock:
            if info.key not in self._mapped:
                self._mapped[info.key] = self._map(info.key, etag=info.etag), partial(self._check, info)
            return self._mapped[info.key]

    def _check(self, info: ObjectInfo) -> None:
        """Raise unless a mapped file is as it was: bytes that were cut off would end the process."""
        now = self._connector.stat(info.key)
        if now.etag != info.etag:
            raise ObjectChangedError(
                f"{self._connector.describe(info.key)} was changed since it was listed (then {info.etag}, now {now.etag}); "
                "start again, so that it is listed again"
            )


def decode_batch(schema: bytes, data: memoryview, types: list[ColumnType], num_rows: int, where: str) -> list[Column]:
    """Some columns of a record batch, over its bytes. Raises FormatError."""
    pa = import_pyarrow("huggingface")
    try:
        batch = pa.ipc.read_record_batch(pa.ipc.read_message(pa.py_buffer(data)), _schema(pa, schema))
        batch.validate()
        if batch.num_rows != num_rows:
            raise ValueError(f"{batch.num_rows} rows, and there were {num_rows}")
        columns = []
        for kind in types:
            array = batch.column(kind.leaves[0])
            if kind.content == "nested":
                array.validate(full=True)
            columns.append(column_of(pa, kind, array))
    except arrow_errors() as error:
        raise FormatError(f"{where} cannot be decoded: {error}") from error
    return columns


def load_indices(connector: Connector, infos: list[ObjectInfo], load: Callable[[ObjectInfo], BatchTable]) -> Int64:
    """The rows that a mapping of indices names, in its order: int64 [samples]. Raises FormatError, and what the connector
    raises."""
    parts = [np.zeros(0, np.int64)]
    for info in infos:
        table, where = load(info), connector.describe(info.key)
        kind = columns_of(table.schema, where).get("indices")
        if kind is None or kind.content != "number" or kind.shape or np.dtype(kind.dtype).kind not in "iu":
            raise FormatError(f"{where} has no column `indices` of whole numbers: it maps no rows")
        for start, length, num in zip(
            table.starts.tolist(), table.lengths.tolist(), table.num_rows.tolist(), strict=True
        ):
            data = np.empty(length, np.uint8).data
            connector.read_into(info.key, start, data, etag=info.etag)
            (column,) = decode_batch(table.schema, data, [kind], num, where)
            values, bad = column.take(np.arange(num, dtype=np.int64))
            if bad:
                raise FormatError(f"{where} has nulls: it maps no rows")
            parts.append(np.asarray(values).astype(np.int64))
    return np.concatenate(parts)
