"""The format of `torch.save`: a zip archive without compression, with a pickle that describes the state and one record
for each storage.

The pickle (`data.pkl`) is read by `restricted_pickle`, so nothing in it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from loaderkit.checkpoint.formats.plain_values import plain_names
from loaderkit.checkpoint.formats.restricted_pickle import (
    Function,
    Global,
    Opaque,
    StandIn,
    functions,
    load_pickle,
    opaque,
    shown,
)
from loaderkit.checkpoint.formats.zip_records import Fetch, Read, ZipRecord, content_of, data_starts, read_directory
from loaderkit.errors import FormatError

_MAX_PICKLE = 2**31
_MAX_NUMBER = 2**62
_MAX_DIMENSIONS = 64  # torch has no tensor of more
_STORAGES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64", "Int": "int32",
    "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool", "ComplexFloat": "complex64",
    "ComplexDouble": "complex128", "Untyped": "uint8",
}  # fmt: skip
_CLASSES = ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.Parameter", "torch.nn.parameter.Buffer")


@dataclass(frozen=True, slots=True)
class Storage(StandIn):
    """A storage: the record with its bytes, and the number of elements of `dtype` that the pickle claims."""

    what = "torch.UntypedStorage"

    key: str
    dtype: torch.dtype
    num_elements: int

    def __setstate__(self, state: object) -> None:
        raise FormatError("it changes a storage")  # the method of a frozen dataclass would let a pickle


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
        """Elements of the storage from its first to behind its last; 0 for an empty tensor."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))


class Archive(NamedTuple):
    """The object in a whole archive, with a `View` for every tensor, and the start of each storage's bytes."""

    value: Any
    starts: dict[str, int]
    num_pickled: int


def read_archive(read: Read, size: int, fetch: Fetch | None = None) -> Archive:
    """Read the description of an archive of `size` bytes: its directory, its pickle, a header a storage. Raises FormatError."""
    records = read_directory(read, size)
    root = _root(records)
    order = records.get(f"{root}byteorder")
    if order is not None and (text := content_of(read, order, 16)) != b"little":
        raise FormatError(f"it was saved on a machine with byte order {text!r}: save it again on a little-endian one")
    pickled = content_of(read, records[f"{root}data.pkl"], _MAX_PICKLE)
    storages: dict[str, Storage] = {}
    value = load_pickle(pickled, names(), lambda pid: _storage(pid, storages))
    stored = {}
    for key, storage in storages.items():
        record = records.get(f"{root}data/{key}")
        if record is None:
            raise FormatError(f"it has no record data/{key}, which its pickle names: the archive is not whole")
        num_bytes = storage.num_elements * storage.dtype.itemsize
        if record.size != num_bytes:
            raise FormatError(f"its record data/{key} has {record.size} bytes, and its pickle says {num_bytes}")
        stored[key] = record
    starts = data_starts(read, [*stored.values()], fetch)
    return Archive(value, dict(zip(stored, starts, strict=True)), len(pickled))


def _root(records: dict[str, ZipRecord]) -> str:
    """The folder of all records in the archive, with its slash."""
    roots = [name.removesuffix("data.pkl") for name in records if name.rpartition("/")[2] == "data.pkl"]
    if len(roots) != 1:
        if any(name.endswith("constants.pkl") for name in records):
            raise FormatError("it is a TorchScript archive, which is a program: save its state_dict() instead")
        raise FormatError("it is a zip archive, but no checkpoint of torch.save: it has no data.pkl")
    return roots[0]


# ------------------------------------------------------------------------------------------------------ the pickle


@cache
def names() -> Mapping[str, Any]:
    """Stand-ins for the names in pickles of torch.save; a pickle cannot change them."""
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
    others: dict[str, Any] = {name: Global(name) for name in _CLASSES}
    for name, dtype in _STORAGES.items():
        for module in ("torch", "torch.storage"):
            others[f"{module}.{name}Storage"] = Global(f"{module}.{name}Storage", getattr(torch, dtype))
    for name, value in vars(torch).items():
        if isinstance(value, torch.dtype):
            others[f"torch.{name}"] = value
    return MappingProxyType({**plain_names(), **functions(called), **others})


def _storage(pid: Any, storages: dict[str, Storage]) -> Storage | Opaque:
    if not isinstance(pid, tuple) or len(pid) < 5 or pid[0] != "storage":
        raise FormatError(f"it refers to something that is no storage: {shown(pid)}")
    _, kind, key, _, num_elements = pid[:5]
    if isinstance(kind, type) and issubclass(kind, Opaque):
        return kind()  # as that of a quantized tensor
    if not isinstance(kind, Global) or kind.value is None or not isinstance(key, str) or not _is_size(num_elements):
        raise FormatError(f"it refers to a storage of an unknown kind: {shown(pid)}")
    storage = Storage(key, kind.value, num_elements)
    known = storages.setdefault(key, storage)
    if known.num_elements * known.dtype.itemsize != num_elements * storage.dtype.itemsize:
        raise FormatError(f"it says of the storage data/{key} that it has two sizes")
    return storage


def _rebuild(storage: Any, offset: Any, shape: Any, strides: Any, *more: Any) -> Any:
    # requires_grad, hooks and, in newer versions, a table that says if the numbers are conjugated or negated.
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
