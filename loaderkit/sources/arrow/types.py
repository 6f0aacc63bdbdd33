"""Decides which field a column of Arrow's becomes, by its type."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import numpy as np

from loaderkit.errors import MissingExtraError

_BYTES = ("binary", "large_binary", "fixed_size_binary", "binary_view")
_TEXTS = ("string", "large_string", "string_view")
_LISTS = ("list", "large_list", "fixed_size_list")
_TIMES = ("timestamp", "date", "time", "duration")
_UNITS = {"date32[day]": "day", "date64[ms]": "ms"}
_FILES = ({"bytes": "bytes", "path": "text"}, {"bytes": "bytes", "path": "null"})  # null: no row has a path
_USABLE = frozenset({"number", "text", "bytes", "file", "nested", "null"})
_MOST_NESTED = 32  # a type can be as deep as its file is long


class ColumnType(NamedTuple):
    """What a column holds, and which of the file's leaves it is made of.

    `content`: number, text, bytes, file, nested, or null; "" with `reason` if it can be no field. Numbers have NumPy's `dtype`
    and a `shape`, where None stands for any length; of times and decimals `stored` says what they are numbers of, of what is
    nested its whole type, which `arrow` is to pyarrow. `json` says which texts in it are JSON, see `with_json`.
    """

    content: str
    leaves: tuple[int, ...]
    dtype: str = ""
    shape: tuple[int | None, ...] = ()
    reason: str = ""
    stored: str = ""
    arrow: Any = None
    json: Any = None

    def __str__(self) -> str:
        shape = ", ".join("any" if length is None else str(length) for length in self.shape)
        number = f"{self.dtype} [{shape}]" + (f" of {self.stored}" if self.stored else "")
        return self.reason or {"number": number, "nested": self.stored}.get(self.content, self.content)

    @property
    def row_bytes(self) -> int:
        """The least memory that a row takes when it is decoded; runs of equal values take less in the file."""
        if self.content != "number":
            return 8  # its bounds
        return np.dtype(self.dtype).itemsize * prod(1 if length is None else length for length in self.shape)

    @property
    def layout(self) -> tuple[Any, ...]:
        """What has to be equal in all files."""
        return self.content, self.dtype, self.shape, self.stored


def import_pyarrow(kind: str) -> Any:
    """The module. Raises MissingExtraError, which names the kind of source."""
    try:
        import pyarrow as pa  # late, as all that is heavy and not always needed
    except ImportError as error:
        raise MissingExtraError(
            f"kind: {kind} needs pyarrow, which is not installed: pip install 'loaderkit[parquet]'"
        ) from error
    return pa


def arrow_errors() -> tuple[type[Exception], ...]:
    """The errors that damaged bytes make pyarrow raise, or the code around it."""
    import pyarrow as pa

    return (pa.ArrowException, OSError, ValueError, TypeError, KeyError, IndexError, OverflowError, MemoryError)


def column_type(pa: Any, kind: Any, leaves: tuple[int, ...] = (), depth: int = 0) -> ColumnType:
    """The field that a column of an Arrow type becomes."""
    types, plain = pa.types, stored_type(pa, kind)
    plain = plain.value_type if types.is_dictionary(plain) else plain
    found: ColumnType | None = None
    if depth > _MOST_NESTED:
        found = ColumnType("", leaves, reason="lists or structs nested too deep")
    elif (number := _number_type(pa, plain)) is not None:
        found = ColumnType("number", leaves, *number)
    elif _is(pa, plain, _BYTES + _TEXTS):
        found = ColumnType("bytes" if _is(pa, plain, _BYTES) else "text", leaves)
    elif _is(pa, plain, _LISTS):
        found = _list_type(pa, kind, plain, leaves, depth)
    elif types.is_null(plain):
        found = ColumnType("null", leaves)
    elif types.is_struct(plain):
        found = _struct_type(pa, plain, leaves, depth)
    return ColumnType("", leaves, reason=str(kind)) if found is None else found


def _number_type(pa: Any, plain: Any) -> tuple[str, tuple[()], str, str] | None:
    """(dtype, shape, reason, stored) of numbers, times and decimals."""
    types = pa.types
    if types.is_boolean(plain):
        return "bool", (), "", ""
    if types.is_integer(plain) or types.is_floating(plain):
        return np.dtype(plain.to_pandas_dtype()).name, (), "", ""
    if _is(pa, plain, _TIMES):
        zone = ", UTC" if getattr(plain, "tz", None) else ""
        name = str(plain).partition("[")[0]
        unit = _UNITS.get(str(plain)) or plain.unit
        return "int64", (), "", f"{name.rstrip('0123456789')} [{unit}{zone}]"
    if types.is_decimal(plain):
        return ("float64" if plain.scale > 0 else "int64"), (), "", "decimals"
    return None


def _list_type(pa: Any, kind: Any, plain: Any, leaves: tuple[int, ...], depth: int) -> ColumnType | None:
    items = column_type(pa, plain.value_type, leaves, depth + 1)
    if isinstance(kind, pa.FixedShapeTensorType):
        permutation = list(kind.permutation or ())
        is_array = items.content == "number" and permutation == sorted(permutation)
        return items._replace(shape=tuple(kind.shape)) if is_array else None
    if items.content == "number":
        length = plain.list_size if pa.types.is_fixed_size_list(plain) else None
        return items._replace(shape=(length, *items.shape))
    return ColumnType("nested", leaves, stored=str(plain), arrow=plain) if items.content in _USABLE else None


def _struct_type(pa: Any, plain: Any, leaves: tuple[int, ...], depth: int) -> ColumnType | None:
    contents = [column_type(pa, one.type, (), depth + 1).content for one in plain]
    names = [one.name for one in plain]
    if dict(zip(names, contents, strict=True)) in _FILES:
        return ColumnType("file", leaves)
    is_usable = bool(names) and len({*names}) == len(names) and _USABLE.issuperset(contents)
    return ColumnType("nested", leaves, stored=str(plain), arrow=plain) if is_usable else None


def are_alike(one: ColumnType, other: ColumnType) -> bool:
    """True if a column may have one type in a file and the other in the next: what has nothing but nulls in one, also inside of
    what is nested, has any type."""
    if "null" in (one.content, other.content) or one.layout == other.layout:
        return True
    are_nested = one.content == other.content == "nested" and one.json == other.json
    return are_nested and _are_alike(one.arrow, other.arrow)


def _are_alike(one: Any, other: Any) -> bool:
    import pyarrow as pa

    one, other = stored_type(pa, one), stored_type(pa, other)
    if pa.types.is_struct(one) and pa.types.is_struct(other):
        return [part.name for part in one] == [part.name for part in other] and all(
            _are_alike(part.type, matching.type) for part, matching in zip(one, other, strict=True)
        )
    if _is(pa, one, _LISTS) and _is(pa, other, _LISTS):
        return _are_alike(one.value_type, other.value_type)
    return are_alike(*(column_type(pa, kind)._replace(leaves=()) for kind in (one, other)))


def stored_type(pa: Any, kind: Any) -> Any:
    """A type without what an extension makes of it."""
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


def is_file(pa: Any, kind: Any) -> bool:
    """True for a struct of bytes and a path, as Hugging Face's datasets store pictures and audio."""
    return column_type(pa, kind).content == "file"


def _is(pa: Any, kind: Any, names: tuple[str, ...]) -> bool:
    return any(getattr(pa.types, f"is_{name}")(kind) for name in names)
