"""Plain values as JSON, and back, without loss. A value that JSON has no form for is an object with one key that begins
with "$".

    (1, 2)   {"$tuple": [1, 2]}        b"ab"    {"$bytes": "YWI="}        inf    {"$float": "000000000000f07f"}

Nothing is pickled, so nothing can run when it is read. As in a pickle that the restricted reader reads, a defaultdict and a
Counter come back as a dict.
"""

from __future__ import annotations

import base64
import math
import re
import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from loaderkit.checkpoint.formats.safetensors import DTYPES
from loaderkit.errors import ConfigError, FormatError

_MAX_DEPTH = 100
_SMALL_INT = 2**63  # other readers of JSON hold no larger numbers
_NUMBERS = re.compile(r"[<>|][biufc]\d{1,2}")
_NAME_OF = {dtype: name for name, dtype in DTYPES.items()}


def encode(name: str, value: Any) -> Any:
    """The value `name` of a state in a form that `json.dumps` takes. Raises ConfigError for a value that cannot be
    stored without loss."""
    return _encoded(name, value, 0)


def _encoded(name: str, value: Any, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise ConfigError(f"state: {name!r} is nested more than {_MAX_DEPTH} levels deep")
    kind = type(value)
    if kind in _FORMS:
        return _FORMS[kind](name, value, depth + 1)
    if (kind is np.ndarray or isinstance(value, np.generic)) and value.dtype.kind in "biufc":
        data = _text(np.ascontiguousarray(value).tobytes())
        return {"$array": [value.dtype.str, [*value.shape], data, isinstance(value, np.generic)]}
    if kind is torch.Tensor and value.dtype in _NAME_OF and value.layout == torch.strided:
        flat = value.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1)
        data = _text(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
        return {"$tensor": [_NAME_OF[value.dtype], [*value.shape], data]}
    raise ConfigError(
        f"state: {name!r} is a {kind.__module__}.{kind.__qualname__}, which JSON cannot hold without loss: save it as numbers, "
        "text, bytes, arrays and containers of them, or use format dcp"
    )


def _unchanged(_: str, value: Any, __: int) -> Any:
    return value


def _int(_: str, value: int, __: int) -> Any:
    return value if abs(value) < _SMALL_INT else {"$int": hex(value)}


def _float(_: str, value: float, __: int) -> Any:
    return value if math.isfinite(value) else {"$float": struct.pack("<d", value).hex()}


def _complex(_: str, value: complex, __: int) -> Any:
    return {"$complex": struct.pack("<dd", value.real, value.imag).hex()}


def _bytes(_: str, value: bytes | bytearray, __: int) -> Any:
    return {f"${type(value).__name__}": _text(bytes(value))}


def _list(name: str, value: Iterable[Any], depth: int) -> list[Any]:
    return [_encoded(f"{name}.{number}", item, depth) for number, item in enumerate(value)]


def _sequence(name: str, value: Iterable[Any], depth: int) -> Any:
    return {"$size" if isinstance(value, torch.Size) else "$tuple": _list(name, value, depth)}


def _set(name: str, value: Iterable[Any], depth: int) -> Any:
    ordered = sorted(value, key=lambda item: (type(item).__name__, repr(item)))
    return {f"${type(value).__name__}": _list(name, ordered, depth)}


def _dict(name: str, value: Mapping[Any, Any], depth: int) -> Any:
    if all(type(key) is str and not key.startswith("$") for key in value):
        return {key: _encoded(f"{name}.{key}", item, depth) for key, item in value.items()}
    return {"$dict": _pairs(name, value, depth)}


def _ordered(name: str, value: Mapping[Any, Any], depth: int) -> Any:
    return {"$ordered": _pairs(name, value, depth)}


def _pairs(name: str, table: Mapping[Any, Any], depth: int) -> list[list[Any]]:
    return [
        [_encoded(f"{name} (a key)", key, depth), _encoded(f"{name}.{key}", item, depth)] for key, item in table.items()
    ]


_FORMS: Mapping[type, Callable[[str, Any, int], Any]] = MappingProxyType(
    {
        **dict.fromkeys((type(None), bool, str), _unchanged),
        **dict.fromkeys((bytes, bytearray), _bytes),
        **dict.fromkeys((tuple, torch.Size), _sequence),
        **dict.fromkeys((set, frozenset), _set),
        **dict.fromkeys((dict, defaultdict, Counter), _dict),
        int: _int,
        float: _float,
        complex: _complex,
        list: _list,
        OrderedDict: _ordered,
    }
)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def decode(value: Any) -> Any:
    """The value that was given to `encode`. Raises FormatError for data that `encode` never returns."""
    try:
        return _decoded(value, 0)
    except FormatError:
        raise
    except (ValueError, TypeError, KeyError, struct.error, RuntimeError, OverflowError) as error:
        raise FormatError(f"a plain value is damaged: {error!r:.200}") from None


def _decoded(value: Any, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise FormatError(f"a plain value is nested more than {_MAX_DEPTH} levels deep")
    if isinstance(value, list):
        return [_decoded(item, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1 and (key := next(iter(value))).startswith("$"):
        if key not in _MAKERS:
            raise FormatError(f"a plain value of the kind {key!r:.50}, which this version does not know")
        return _MAKERS[key](value[key], depth + 1)
    return {key: _decoded(item, depth + 1) for key, item in value.items()}


def _items(value: Any, depth: int) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r:.50} is no list")
    return [_decoded(item, depth) for item in value]


def _table(value: Any, depth: int) -> list[tuple[Any, Any]]:
    return [(key, item) for key, item in _items(value, depth)]


def _array(value: Any, _: int) -> Any:
    kind, shape, data, is_scalar = value
    if not isinstance(kind, str) or not _NUMBERS.fullmatch(kind):
        raise ValueError(f"a NumPy type {kind!r:.50} that is not a number's")
    array = np.frombuffer(base64.b64decode(data, validate=True), np.dtype(kind)).reshape(shape).copy()
    return array[()] if is_scalar else array


def _tensor(value: Any, _: int) -> torch.Tensor:
    kind, shape, data = value
    raw = bytearray(base64.b64decode(data, validate=True))
    if not raw:
        return torch.empty(shape, dtype=DTYPES[kind])
    return torch.frombuffer(raw, dtype=torch.uint8).view(DTYPES[kind]).reshape(shape)


_MAKERS: Mapping[str, Callable[[Any, int], Any]] = MappingProxyType(
    {
        "$int": lambda value, _: int(value, 16),
        "$float": lambda value, _: struct.unpack("<d", bytes.fromhex(value))[0],
        "$complex": lambda value, _: complex(*struct.unpack("<dd", bytes.fromhex(value))),
        "$bytes": lambda value, _: base64.b64decode(value, validate=True),
        "$bytearray": lambda value, _: bytearray(base64.b64decode(value, validate=True)),
        "$tuple": lambda value, depth: tuple(_items(value, depth)),
        "$size": lambda value, depth: torch.Size(_items(value, depth)),
        "$set": lambda value, depth: set(_items(value, depth)),
        "$frozenset": lambda value, depth: frozenset(_items(value, depth)),
        "$dict": lambda value, depth: dict(_table(value, depth)),
        "$ordered": lambda value, depth: OrderedDict(_table(value, depth)),
        "$array": _array,
        "$tensor": _tensor,
    }
)
