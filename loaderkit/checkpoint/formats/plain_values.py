"""Stand-ins for the plain values of a pickle: containers, numbers, bytes, and NumPy arrays of numbers."""

from __future__ import annotations

import pickle
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import numpy as np

from loaderkit.checkpoint.formats.restricted_pickle import Frozen, Global, StandIn, functions, opaque, shown

_SIMPLE_DTYPE = re.compile(r"[biufc]\d{1,2}")
_NO_NUMBER = opaque("numpy.generic that is no number")


@cache
def plain_names() -> Mapping[str, Any]:
    """Stand-ins for containers and plain values, and for NumPy arrays of numbers, which states of RNGs hold."""
    called: dict[str, Callable[..., Any]] = {
        "collections.OrderedDict": FrozenTable,
        "collections.defaultdict": lambda *_: {},
        "collections.Counter": FrozenCounter,
        "_codecs.encode": _encode,
        "numpy.dtype": Dtype,
    }
    for module in ("builtins", "__builtin__"):
        called[f"{module}.set"] = set
        called[f"{module}.frozenset"] = frozenset
        called[f"{module}.complex"] = complex
        called[f"{module}.bytearray"] = _bytearray
        called[f"{module}.bytes"] = _no_bytes
    for core in ("numpy.core", "numpy._core"):
        called[f"{core}.multiarray._reconstruct"] = lambda *_: Array()
        called[f"{core}.multiarray.scalar"] = _scalar
    return MappingProxyType({**functions(called), "numpy.ndarray": Global("numpy.ndarray"), "_io.BytesIO": BufferBytes})


def _encode(text: str, encoding: str = "latin1") -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"bytes encoded as {shown(encoding)}")
    return text.encode("latin1")


def _no_bytes(*data: object) -> bytes:
    if data:
        raise pickle.UnpicklingError("bytes of other than bytes")
    return b""  # others are encoded text


def _bytearray(data: object = b"", encoding: str = "latin1") -> bytearray:
    if isinstance(data, str):
        data = _encode(data, encoding)
    if not isinstance(data, bytes):
        raise pickle.UnpicklingError("a bytearray of other than bytes")
    return bytearray(data)


class FrozenTable(OrderedDict[Any, Any]):
    """Stands for an OrderedDict. Of its attributes only `_metadata`, the versions of a module's state, is set: a pickle could
    replace `items` with anything."""

    __slots__ = ("_metadata",)

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict) and isinstance(state.get("_metadata"), dict):
            self._metadata = state["_metadata"]


class FrozenCounter(Counter[Any]):
    """Stands for a Counter, whose attributes are not set."""

    __slots__ = ()

    def __init__(self, values: object = ()) -> None:
        super().__init__(dict(values) if isinstance(values, dict) else {})

    def __setstate__(self, state: object) -> None: ...


class NumpyStandIn(StandIn):
    """Of NumPy, once it is built; settled where `value` is one of numbers."""

    __slots__ = ("value",)
    value: Any

    @property
    def is_settled(self) -> bool:  # type: ignore[override]
        return self.value is not None


class Dtype(NumpyStandIn):
    """A NumPy dtype of numbers."""

    __slots__ = ()
    what = "numpy.dtype"

    def __init__(self, name: str, *_: Any) -> None:
        self.value = np.dtype(name) if isinstance(name, str) and _SIMPLE_DTYPE.fullmatch(name) else None

    def __setstate__(self, state: Any) -> None:
        if self.value is not None and isinstance(state, tuple) and len(state) > 1 and state[1] in ("<", ">"):
            self.value = self.value.newbyteorder(state[1])


class Array(NumpyStandIn):
    """A NumPy array of numbers."""

    __slots__ = ()
    what = "numpy.ndarray"

    def __init__(self) -> None:
        self.value = None

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, data = state
        if not isinstance(dtype, Dtype):
            raise pickle.UnpicklingError("an array without a dtype")
        if dtype.value is None:
            return
        if not isinstance(data, bytes):
            raise pickle.UnpicklingError("an array of numbers without its bytes")
        self.value = np.frombuffer(data, dtype.value).reshape(shape, order="F" if fortran else "C").copy()


class BufferBytes(StandIn, metaclass=Frozen):
    """An `io.BytesIO`, as Transformer Engine saves the state of its layers: its bytes, once it is built."""

    __slots__ = ("value",)
    what = "io.BytesIO"
    is_settled = True
    value: bytes

    def __new__(cls, *_: Any) -> BufferBytes:
        made = object.__new__(cls)
        made.value = b""
        return made

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, tuple) or not state or not isinstance(state[0], bytes):
            raise pickle.UnpicklingError("a buffer of other than bytes")
        self.value = state[0]


def _scalar(dtype: Any, data: Any = b"") -> Any:
    if isinstance(dtype, Dtype) and dtype.value is None:
        return _NO_NUMBER()
    if not isinstance(dtype, Dtype) or not isinstance(data, bytes) or len(data) != dtype.value.itemsize:
        raise pickle.UnpicklingError("a NumPy number of a type that is none")
    return np.frombuffer(data, dtype.value)[0]
