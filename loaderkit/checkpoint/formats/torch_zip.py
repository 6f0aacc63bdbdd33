"""What `torch.save` writes: a zip archive, never packed, with a pickle that describes and one record a storage.

The directory at the archive's end says where records lie; the pickle (`data.pkl`) is read by `unpickling`, so nothing runs.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from loaderkit.checkpoint.formats.restricted_pickle import (
    Function,
    Global,
    Opaque,
    StandIn,
    functions,
    load_pickle,
    opaque,
    plain_names,
    shown,
)
from loaderkit.errors import FormatError
from loaderkit.native.garbage import collected_later

_END = struct.Struct("<4s4H2LH")
_END64_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_ENTRY_CRC, _LOCAL_CRC = 16, 14  # where four bytes of checksum stand in them
_MAX_COMMENT = 65535
_MAX_PICKLE = 2**31
_MAX_NUMBER = 2**62
_MAX_DIMENSIONS = 64  # torch has no tensor of more
MAGIC = b"PK\x03\x04"
_LEGACY = (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", b"\x80\x02\x8a\x0al\xfc")
Read = Callable[[int, memoryview], None]
Fetch = Callable[[Sequence[tuple[int, int]]], list[bytes]]
"""The bytes of many ranges, (start, length) each, of the archive: all at once where that pays."""

_HEADERS_GAP = 32 * 2**10  # headers of records that lie no further apart are read together
_HEADERS_MOST = 2**20
_STORAGES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64", "Int": "int32",
    "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool", "ComplexFloat": "complex64",
    "ComplexDouble": "complex128", "Untyped": "uint8",
}  # fmt: skip
_CLASSES = ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.Parameter", "torch.nn.parameter.Buffer")


class ZipRecord(NamedTuple):
    """One record of the archive: its header's place and its size are known from the directory, not where its bytes begin.
    They end before `limit`, where the next record begins."""

    name: str
    header: int
    header_size: int  # with the name, which stands there once more
    size: int
    limit: int


@dataclass(frozen=True, slots=True)
class Storage(StandIn):
    """A storage: the record with its bytes, and how many elements of `dtype` the pickle says it has."""

    what = "torch.UntypedStorage"

    key: str
    dtype: torch.dtype
    num_elements: int

    def __setstate__(self, state: object) -> None:
        raise FormatError("it changes a storage")  # else a pickle could, by what dataclasses have for their own


@dataclass(frozen=True, slots=True)
class View(StandIn):
    """A tensor: a strided view of a storage. Offset and strides are in elements of `dtype`."""

    what = "torch.Tensor"
    is_settled = True

    storage: Storage
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def __setstate__(self, state: object) -> None:
        raise FormatError("it changes a tensor")

    @property
    def num_spanned(self) -> int:
        """Elements from its first to behind its last; 0 without any."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))


class Archive(NamedTuple):
    """A whole archive: the object it holds, with a `View` for every tensor, and where each storage's bytes begin."""

    value: Any
    starts: dict[str, int]
    num_pickled: int


def is_legacy(head: bytes) -> bool:
    """Whether a file that begins with `head` is what torch.save wrote before 1.6."""
    return head.startswith(_LEGACY)


def read_archive(read: Read, size: int, fetch: Fetch | None = None) -> Archive:
    """Read the description of an archive of `size` bytes: its end, its pickle, and a header a storage. Raises FormatError."""
    fetch = fetch or (lambda ranges: [_get(read, start, length) for start, length in ranges])
    records = read_directory(read, size)
    root = _root(records)
    order = records.get(f"{root}byteorder")
    if order is not None and (text := _content(read, order, 16)) != b"little":
        raise FormatError(f"it was saved on a machine with byte order {text!r}: save it again on a little-endian one")
    pickled = _content(read, records[f"{root}data.pkl"], _MAX_PICKLE)
    storages: dict[str, Storage] = {}
    value = load_pickle(pickled, names(), lambda pid: _storage(pid, storages))
    found = {}
    for key, storage in storages.items():
        record = records.get(f"{root}data/{key}")
        if record is None:
            raise FormatError(f"it has no record data/{key}, which its pickle names: the archive is not whole")
        num_bytes = storage.num_elements * storage.dtype.itemsize
        if record.size != num_bytes:
            raise FormatError(f"its record data/{key} has {record.size} bytes, and its pickle says {num_bytes}")
        found[key] = record
    return Archive(value, dict(zip(found, _data_starts(fetch, [*found.values()]), strict=True)), len(pickled))


# -------------------------------------------------------------------------------------------------- the directory


def read_directory(read: Read, size: int) -> dict[str, ZipRecord]:
    """The records of a zip archive by name. Raises FormatError for one that is not whole, or is packed."""
    data, count, start, _ = _directory(read, size)
    return _entries(data, count, start)


def telling_bytes(read: Read, size: int) -> list[tuple[int, int]]:
    """The half-open ranges of an archive's bytes that `read_archive` goes by: two archives of one size that have the same bytes
    there are laid out alike. Its directory, the headers of records, and what describes: all but checksums and tensors."""
    data, count, start, wide = _directory(read, size)
    found = [(start + len(data), size), wide]
    place = 0
    for _ in range(count):
        names = _ENTRY.unpack_from(data, place)[10:13]
        end = place + _ENTRY.size + sum(names)
        found += [(start + place, start + place + _ENTRY_CRC), (start + place + _ENTRY_CRC + 4, start + end)]
        place = end
    found.append((start + place, start + len(data)))
    for record in _entries(data, count, start).values():
        header = record.header
        found += [(header, header + _LOCAL_CRC), (header + _LOCAL_CRC + 4, header + record.header_size)]
        if "/data/" not in record.name and "/.data/" not in record.name:
            content = _start_after(_get(read, header, record.header_size), record)
            found.append((content, content + record.size))
    return found


def _directory(read: Read, size: int) -> tuple[bytes, int, int, tuple[int, int]]:
    """(the directory, how many entries it has, where it begins, where its 64-bit record lies)."""
    wide = (size, size)
    tail_start = max(0, size - _END.size - _END64_LOCATOR.size - 2048)
    tail = _get(read, tail_start, size - tail_start)
    place = tail.rfind(b"PK\x05\x06")
    if place < 0 and tail_start:
        tail_start = max(0, size - _END.size - _END64_LOCATOR.size - _MAX_COMMENT)
        tail = _get(read, tail_start, size - tail_start)
        place = tail.rfind(b"PK\x05\x06")
    if place < 0 or place + _END.size > len(tail):
        raise FormatError(f"not a whole zip archive ({size} bytes): its directory, at the end, is missing")
    *_, count, length, start, _comment = _END.unpack_from(tail, place)
    if place >= _END64_LOCATOR.size and tail[place - _END64_LOCATOR.size :][:4] == b"PK\x06\x07":
        _, _, end64, _ = _END64_LOCATOR.unpack_from(tail, place - _END64_LOCATOR.size)
        wide = (end64, end64 + _END64.size)
        if end64 + _END64.size > size:
            raise FormatError("not a whole zip archive: its 64-bit directory lies beyond its end")
        signature, *_, count, length, start = _END64.unpack(_get(read, end64, _END64.size))
        if signature != b"PK\x06\x06":
            raise FormatError("not a whole zip archive: its 64-bit directory is not where it should be")
    if start + length > size or count * _ENTRY.size > length:
        raise FormatError(
            f"not a whole zip archive: its directory of {length} bytes from byte {start} on lies beyond it"
        )
    inside = start - tail_start
    data = tail[inside : inside + length] if inside >= 0 else _get(read, start, length)
    return data, count, start, wide


@collected_later
def _entries(data: bytes, count: int, limit: int) -> dict[str, ZipRecord]:
    found: dict[str, ZipRecord] = {}
    place = 0
    for _ in range(count):
        if place + _ENTRY.size > len(data) or data[place : place + 4] != b"PK\x01\x02":
            raise FormatError("the zip archive's directory is damaged")
        fields = _ENTRY.unpack_from(data, place)
        flags, method = fields[3], fields[4]
        packed, unpacked, len_name, len_extra, len_comment, header = *fields[8:13], fields[16]
        name_start = place + _ENTRY.size
        name = data[name_start : name_start + len_name].decode("utf-8", "replace")
        if 0xFFFFFFFF in (packed, unpacked, header):
            extra = data[name_start + len_name : name_start + len_name + len_extra]
            unpacked, packed, header = _wide(extra, unpacked, packed, header, name)
        if method != 0 or packed != unpacked or flags & 1:
            raise FormatError(f"its record {name!r:.200} is packed or encrypted, which torch.save never does")
        if name in found:
            raise FormatError(f"it has two records called {name!r:.200}")
        found[name] = ZipRecord(name, header, _LOCAL.size + len_name, unpacked, limit)
        place = name_start + len_name + len_extra + len_comment
    return _limited(found, limit)


def _limited(records: dict[str, ZipRecord], limit: int) -> dict[str, ZipRecord]:
    """Records, each ending where the next begins at the latest: those that share bytes would be more than the archive holds."""
    found = {}
    for record in sorted(records.values(), key=lambda record: record.header, reverse=True):
        if record.header + record.header_size + record.size > limit:
            raise FormatError(
                f"its record {record.name!r:.200} of {record.size} bytes reaches beyond byte {limit}, where the next begins"
            )
        found[record.name] = record._replace(limit=limit)
        limit = record.header
    return {name: found[name] for name in records}


def _wide(extra: bytes, unpacked: int, packed: int, header: int, name: str) -> tuple[int, int, int]:
    """The 64-bit numbers of an entry, in the order in which those that do not fit stand in its extra field."""
    place = 0
    while place + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, place)
        if kind == 1:
            numbers = iter(struct.unpack_from(f"<{min(length, len(extra) - place - 4) // 8}Q", extra, place + 4))
            try:
                found = [next(numbers) if value == 0xFFFFFFFF else value for value in (unpacked, packed, header)]
            except StopIteration:
                break
            return found[0], found[1], found[2]
        place += 4 + length
    raise FormatError(f"its record {name!r:.200} says nowhere how long it is")


def _data_starts(fetch: Fetch, records: Sequence[ZipRecord]) -> list[int]:
    """Where the bytes of records begin. Small records are neighbours: their headers are read together."""
    order = sorted(range(len(records)), key=lambda number: records[number].header)
    spans: list[tuple[int, int]] = []
    span_of: dict[int, int] = {}
    for number in order:
        begin = records[number].header
        end = begin + records[number].header_size
        if spans and begin - sum(spans[-1]) <= _HEADERS_GAP and end - spans[-1][0] <= _HEADERS_MOST:
            spans[-1] = (spans[-1][0], end - spans[-1][0])
        else:
            spans.append((begin, end - begin))
        span_of[number] = len(spans) - 1
    read = fetch(spans)
    starts = [0] * len(records)
    for number in order:
        span = span_of[number]
        place = records[number].header - spans[span][0]
        starts[number] = _start_after(read[span][place : place + records[number].header_size], records[number])
    return starts


def _start_after(header: bytes, record: ZipRecord) -> int:
    """Where a record's bytes begin: behind its own header, which repeats its name and may be padded."""
    fields = _LOCAL.unpack_from(header)
    name = header[_LOCAL.size :].decode("utf-8", "replace")
    if fields[0] != MAGIC or fields[9] != len(header) - _LOCAL.size or name != record.name:
        raise FormatError(f"its record {record.name!r:.200} is not where its directory says")
    start: int = record.header + len(header) + fields[10]
    if fields[3] != 0 or start + record.size > record.limit:
        raise FormatError(f"its record {record.name!r:.200} is packed, or reaches beyond the archive or into the next")
    return start


def _content(read: Read, record: ZipRecord, limit: int) -> bytes:
    if record.size > limit:
        raise FormatError(
            f"its record {record.name!r:.200} has {record.size} bytes, and {limit} are the most it may have"
        )
    header = _get(read, record.header, record.header_size)
    return _get(read, _start_after(header, record), record.size)


def _root(records: dict[str, ZipRecord]) -> str:
    """The folder in the archive that all records lie in, with its slash."""
    roots = [name.removesuffix("data.pkl") for name in records if name.rpartition("/")[2] == "data.pkl"]
    if len(roots) != 1:
        if any(name.endswith("constants.pkl") for name in records):
            raise FormatError("it is a TorchScript archive, which is a program: save its state_dict() instead")
        raise FormatError("it is a zip archive, but no checkpoint of torch.save: it has no data.pkl")
    return roots[0]


def _get(read: Read, start: int, length: int) -> bytes:
    data = bytearray(length)
    read(start, memoryview(data))
    return bytes(data)


# ------------------------------------------------------------------------------------------------------ the pickle


@cache
def names() -> Mapping[str, Any]:
    """Stand-ins for what torch.save's pickles name; no pickle can change them."""
    called: dict[str, Callable[..., Any]] = {
        "torch._utils._rebuild_tensor_v2": _rebuild,
        "torch._utils._rebuild_tensor": _rebuild,
        "torch._utils._rebuild_tensor_v3": _rebuild_v3,
        "torch._utils._rebuild_parameter": _parameter,
        "torch._utils._rebuild_parameter_with_state": _parameter,
        "torch._tensor._rebuild_from_type_v2": _rebuild_from_type,
        "torch.Size": _size,
        "torch.device": _device,
        "torch.serialization._get_layout": shown,
    }
    found: dict[str, Any] = {name: Global(name) for name in _CLASSES}
    for name, dtype in _STORAGES.items():
        for module in ("torch", "torch.storage"):
            found[f"{module}.{name}Storage"] = Global(f"{module}.{name}Storage", getattr(torch, dtype))
    for name, value in vars(torch).items():
        if isinstance(value, torch.dtype):
            found[f"torch.{name}"] = value
    return MappingProxyType({**plain_names(), **functions(called), **found})


def _storage(pid: Any, storages: dict[str, Storage]) -> Storage:
    if not isinstance(pid, tuple) or len(pid) < 5 or pid[0] != "storage":
        raise FormatError(f"it refers to something that is no storage: {shown(pid)}")
    _, kind, key, _, num_elements = pid[:5]
    if not isinstance(kind, Global) or kind.value is None or not isinstance(key, str) or not _is_size(num_elements):
        raise FormatError(f"it refers to a storage of an unknown kind: {shown(pid)}")
    storage = Storage(key, kind.value, num_elements)
    known = storages.setdefault(key, storage)
    if known.num_elements * known.dtype.itemsize != num_elements * storage.dtype.itemsize:
        raise FormatError(f"it says of the storage data/{key} that it has two sizes")
    return storage


def _rebuild(storage: Any, offset: Any, shape: Any, strides: Any, *more: Any) -> Any:
    # requires_grad, hooks, and lately a table that says whether the bytes mean conjugated or negated numbers.
    if len(more) > 2 and isinstance(more[2], dict) and any(more[2].values()):
        return opaque("a conjugated or negated tensor")()
    return _view(storage, storage.dtype if isinstance(storage, Storage) else None, offset, shape, strides)


def _rebuild_v3(
    storage: Any, offset: Any, shape: Any, strides: Any, _grad: Any, _hooks: Any, dtype: Any, *_: Any
) -> Any:
    return _view(storage, dtype, offset, shape, strides)


def _view(storage: Any, dtype: Any, offset: Any, shape: Any, strides: Any) -> Any:
    if isinstance(storage, Opaque):
        return storage
    if not isinstance(storage, Storage) or not isinstance(dtype, torch.dtype):
        raise FormatError("it describes a tensor without a storage")
    are_numbers = _are_sizes(shape) and _are_sizes(strides) and _is_size(offset)
    if not are_numbers or len(shape) != len(strides) or len(shape) > _MAX_DIMENSIONS:
        raise FormatError(f"it describes a tensor of shape {shown(shape)} with strides {shown(strides)}")
    if prod(max(size, 1) for size in shape) > _MAX_NUMBER:
        raise FormatError(f"it describes a tensor of shape {shown(shape)}, which is larger than anything")
    view = View(storage, dtype, offset, tuple(shape), tuple(strides))
    num_bytes = storage.num_elements * storage.dtype.itemsize
    if view.num_spanned and (offset + view.num_spanned) * dtype.itemsize > num_bytes:
        raise FormatError(
            f"it describes a tensor of shape {list(shape)} that reaches beyond its storage data/{storage.key} of "
            f"{num_bytes} bytes"
        )
    return view


def _rebuild_from_type(function: Any, kind: Any, args: Any, _state: Any) -> Any:
    if not isinstance(kind, Global) or not isinstance(function, Function) or not isinstance(args, tuple):
        return kind() if isinstance(kind, type) and issubclass(kind, Opaque) else opaque("a tensor's subclass")()
    return function(*args)


def _parameter(data: Any, *_: Any) -> Any:
    if not isinstance(data, (View, Opaque)):
        raise FormatError(f"it makes a parameter of {shown(data)}")
    return data


def _device(kind: Any, index: Any = None) -> str:
    if not isinstance(kind, str) or not isinstance(index, int | None):
        raise FormatError(f"it names a device {shown(kind)}, {shown(index)}")
    return kind if index is None else f"{kind}:{index}"


def _size(values: Any = ()) -> tuple[int, ...]:
    if not _are_sizes(values):
        raise FormatError(f"it has a size {shown(values)}")
    if len(values) > _MAX_DIMENSIONS:
        raise FormatError(f"it has a size of {len(values)} dimensions")
    return tuple(values)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_NUMBER


def _are_sizes(values: Any) -> bool:
    return isinstance(values, (tuple, list)) and all(map(_is_size, values))
