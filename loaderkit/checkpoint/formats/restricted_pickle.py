"""Read a pickle without running anything: what it names is looked up in a table of stand-ins, never imported.

A pickle is a program that names functions and calls them. Here a name that is in the table gives a stand-in of ours, and any
other name gives a class of `Opaque`, whose instances swallow whatever they are called with, built with or filled with. So a
file that names `os.system` yields an `Opaque` that says so. No stand-in can be changed by a pickle.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from loaderkit._internal.text import short_repr
from loaderkit.errors import FormatError
from loaderkit.native.garbage import collected_later

_SIMPLE_DTYPE = re.compile(r"[biufc]\d{1,2}")
_MOST_UNKNOWN = 1000  # names that are not in the table, each of which takes a kilobyte
_MOST_TUPLES = 100_000  # may be nested as they like: 300,000 in one another end the process when they are hashed
_MAX_NESTED = 1000
# Forty tuples, each of the one before twice, are 10^12 objects for a hash.
_FEW_SHARED = 12  # tuples taken from the memo: as they like
_MOST_UNFOLDED = 10**6  # objects in all the tuples that are taken from there, and 16 more a byte


class _Frozen(type):
    """A class whose attributes a pickle cannot set (its BUILD may try)."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise pickle.UnpicklingError(f"it sets {name!r} of a class")


def shown(value: Any) -> str:
    """A value of a pickle, for a message: see `short_repr`."""
    return value.what if isinstance(value, StandIn) else short_repr(value)


class StandIn:
    """What a pickle gets in place of what it names. None comes out of a checkpoint as a value: those with `is_settled` are
    replaced by a value, the others are refused. `what` is the name of what it stands for: "package.module.name"."""

    __slots__ = ()
    what: str
    is_settled: ClassVar[bool] = False


class Opaque(StandIn, metaclass=_Frozen):
    """Stands for an object that is not made. `what` is the class or function the file names: "package.module.name"."""

    __slots__ = ()
    what = "an unknown object"

    def __new__(cls, *_: Any, **__: Any) -> Opaque:
        return object.__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, state: object) -> None: ...

    def __setitem__(self, key: object, value: object) -> None: ...

    def append(self, item: object) -> None:
        """Swallow it, as all that follows."""

    def extend(self, items: object) -> None: ...

    def add(self, item: object) -> None: ...

    def __repr__(self) -> str:
        return f"<{self.what}, not loaded>"


def opaque(what: str) -> type[Opaque]:
    """A class of what is not made."""
    return _Frozen("Opaque", (Opaque,), {"__slots__": (), "what": what})  # type: ignore[return-value]


class Function(StandIn, metaclass=_Frozen):
    """A stand-in that may be called and not be changed: calling it calls `function`."""

    __slots__ = ("_function", "what")
    _function: Callable[..., Any]

    def __init__(self, what: str, function: Callable[..., Any]) -> None:
        object.__setattr__(self, "what", what)
        object.__setattr__(self, "_function", function)

    def __setattr__(self, name: str, value: object) -> None:
        raise pickle.UnpicklingError(f"it sets {name!r} of a function")

    def __call__(self, *values: Any) -> Any:
        return self._function(*values)


def functions(found: Mapping[str, Callable[..., Any]]) -> dict[str, Function]:
    """Stand-ins for functions, by name."""
    return {name: Function(name, function) for name, function in found.items()}


class Record(metaclass=_Frozen):
    """Stands for a dataclass: `state` is what its instance was built with. Equality is identity."""

    __slots__ = ("args", "state")

    def __new__(cls, *_: Any) -> Record:
        return object.__new__(cls)

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str, default: Any = None) -> Any:
        """A field, if the state is that of a dataclass."""
        return self.state.get(name, default) if isinstance(self.state, dict) else default


def record(what: str) -> type[Record]:
    """A class of stand-ins for the dataclass `what`."""
    return _Frozen(what.rpartition(".")[2], (Record,), {"__slots__": ()})  # type: ignore[return-value]


class Global(StandIn):
    """A name that stands for itself, or for a `value` such as a dtype. It cannot be called."""

    __slots__ = ("value", "what")
    value: Any

    def __init__(self, what: str, value: Any = None) -> None:
        object.__setattr__(self, "what", what)
        object.__setattr__(self, "value", value)

    def __setattr__(self, name: str, value: object) -> None:
        raise pickle.UnpicklingError(f"it sets {name!r} of {self.what}")


@collected_later
def load_pickle(
    data: bytes | memoryview,
    names: Mapping[str, Any],
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """What a pickle describes, with `names` ("module.name" -> stand-in, such as `plain_names()`), and `Opaque` for the rest.

    `persistent` gives what a persistent id stands for. Raises FormatError for what is no pickle, and for one that does what
    no writer does.
    """
    data = bytes(data)
    reader = _Reader(io.BytesIO(data), names, persistent)
    try:
        _check(data)
        return reader.load()
    except FormatError:
        raise
    except RecursionError:
        raise FormatError("it is nested too deeply to be a checkpoint") from None
    except MemoryError:
        raise FormatError("it asks for more memory than there is") from None
    except Exception as error:
        raise FormatError(f"it cannot be read without running code, or is damaged: {error}") from None


class _Reader(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, names: Mapping[str, Any], persistent: Callable[[Any], Any] | None) -> None:
        super().__init__(file, encoding="utf-8")
        self._names = names
        self._persistent = persistent
        self._opaque: dict[str, type[Opaque]] = {}

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        found = self._names.get(full)
        if found is None:
            found = self._opaque.get(full)
            if found is None:
                if len(self._opaque) == _MOST_UNKNOWN:
                    raise FormatError(f"it names more than {_MOST_UNKNOWN} classes that are not known here")
                found = self._opaque[full] = opaque(full)
        return found

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise FormatError("it refers to objects outside itself")
        return self._persistent(pid)


# ---------------------------------------------------------------------------- what the unpickler itself does not survive

_LINE, _TWO_LINES, _PLACE_LINE, _PUT, _PUT4, _MEMOIZE, _GET, _GET4, _TUPLE, _BUILD, _OLD, _STOP = range(-1, -13, -1)
_SIZED1, _SIZED4, _SIZED8 = range(-13, -16, -1)
_WIDTHS = {_SIZED1: 1, _SIZED4: 4, _SIZED8: 8}  # of the number in front that says how many bytes follow
_OPCODES = {ord(opcode.code): opcode for opcode in pickletools.opcodes}
_SPECIAL = {
    "GLOBAL": _TWO_LINES,
    "INST": _TWO_LINES,
    "BUILD": _BUILD,
    "STOP": _STOP,
    "BINPUT": _PUT,
    "LONG_BINPUT": _PUT4,
    "MEMOIZE": _MEMOIZE,
    "BINGET": _GET,
    "LONG_BINGET": _GET4,
    **dict.fromkeys(("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"), _TUPLE),
    "PUT": _PLACE_LINE,
    "GET": _PLACE_LINE,
    "DUP": _OLD,
    "POP": _OLD,
    "POP_MARK": _OLD,
}


def _argument_of(code: int) -> int:
    """How many bytes follow an opcode; below 0: how that is to be found out, or what else it is about."""
    opcode = _OPCODES.get(code)
    if opcode is None:  # the unpickler says so
        return _STOP
    if opcode.name in _SPECIAL:
        return _SPECIAL[opcode.name]
    if opcode.arg is None:
        return 0
    sized = {
        pickletools.UP_TO_NEWLINE: _LINE,
        pickletools.TAKEN_FROM_ARGUMENT1: _SIZED1,
        pickletools.TAKEN_FROM_ARGUMENT4: _SIZED4,
        pickletools.TAKEN_FROM_ARGUMENT4U: _SIZED4,
        pickletools.TAKEN_FROM_ARGUMENT8U: _SIZED8,
    }
    return sized.get(opcode.arg.n, opcode.arg.n)


_ARGUMENTS = tuple(map(_argument_of, range(256)))


def _check(data: bytes) -> None:  # noqa: C901, PLR0912, PLR0915 - a call for every opcode would take twice as long
    """Raise FormatError for what ends or stops the process before the unpickler could refuse it: an object stored at a place so
    high that the table for it takes all memory (nine bytes are enough), and tuples that cannot be hashed.

    0.15 to 0.3 us an opcode: a tenth of what it takes to restore many small tensors.
    """
    at, end, num_tuples, num_shared, num_memoized = 0, len(data), 0, 0, 0
    tuples: set[int] = set()  # places of the memo that may hold one
    left_at = -1  # behind the last opcode that may have left a tuple. (REDUCE: our stand-ins give none, or a flat one.)
    has_places = is_unusual = False
    while at < end:
        kind = _ARGUMENTS[data[at]]
        at += 1
        if kind >= 0:
            at += kind
        elif kind == _MEMOIZE:
            if left_at == at - 1:
                tuples.add(num_memoized)
                left_at = at
            num_memoized += 1
        elif kind == _GET:
            num_shared += at < end and data[at] in tuples
            left_at = at = at + 1
        elif kind == _TUPLE:
            num_tuples += 1
            left_at = at
        elif kind == _GET4:
            num_shared += int.from_bytes(data[at : at + 4], "little") in tuples
            left_at = at = at + 4
        elif kind in (_PUT, _PUT4):
            width = 1 if kind == _PUT else 4
            place = int.from_bytes(data[at : at + width], "little")
            _check_place(place, end)
            if left_at == at - 1:
                tuples.add(place)
                left_at = at + width
            at, has_places = at + width, True
        elif kind == _BUILD:
            left_at = at
        elif kind in _WIDTHS:
            width = _WIDTHS[kind]
            at += width + int.from_bytes(data[at : at + width], "little")
        elif kind == _STOP:
            break
        elif kind == _OLD:
            is_unusual = True
        else:
            line_end = data.find(b"\n", at)
            if kind == _PLACE_LINE:
                is_unusual = True
                digits = data[at:line_end]
                _check_place(
                    int(digits) if digits.isdigit() and len(digits) < 20 else 0, end
                )  # else it is refused later
            elif kind == _TWO_LINES and line_end >= 0:
                line_end = data.find(b"\n", line_end + 1)
            at = line_end + 1 or end  # without an end of line there is nothing more
    else:
        raise FormatError("it ends in the middle of its pickle: it was cut short, or is damaged")
    if num_tuples > _MOST_TUPLES or num_shared > _FEW_SHARED or is_unusual or (has_places and num_memoized):
        _check_tuples(data)


def _check_place(place: int, num_bytes: int) -> None:
    if place > num_bytes:  # every object takes a byte at least
        raise FormatError(
            f"it stores an object at a place that {num_bytes} bytes cannot need: it is damaged, or a bomb"
        )


def _check_tuples(data: bytes) -> None:
    """Raise FormatError for tuples that cannot be hashed. A hash goes down to the last of those in one another, and asks nobody
    how deep that is: it may end the process. And it looks at what stands at several places again for each: it may not end."""
    stack: list[
        tuple[int, int]
    ] = []  # of what is there: how deep tuples are nested, and how many objects that is; or more
    marks: list[int] = []
    stored: dict[int, tuple[int, int]] = {}
    num_unfolded, most_unfolded = 0, _MOST_UNFOLDED + 16 * len(data)
    for opcode, argument, _ in pickletools.genops(data):
        before, after = opcode.stack_before, opcode.stack_after
        if opcode.name == "MARK":
            marks.append(len(stack))
        elif opcode.name == "MEMOIZE" or "PUT" in opcode.name:
            stored[len(stored) if argument is None else int(argument)] = stack[-1]
        elif "GET" in opcode.name or opcode.name == "DUP":
            stack.append(stack[-1] if opcode.name == "DUP" else stored[int(argument or 0)])
            num_unfolded += stack[-1][1]
        elif opcode.name == "POP" and marks and marks[-1] == len(stack):
            marks.pop()
        else:
            takes_mark = pickletools.markobject in before
            num_fixed = before.index(pickletools.markobject) if takes_mark else len(before)
            cut = (marks.pop() if takes_mark else len(stack)) - num_fixed
            depth = max((depth for depth, _ in stack[cut:]), default=0) + opcode.name.startswith("TUPLE")
            size = 1 + sum(size for _, size in stack[cut:])
            if depth > _MAX_NESTED:
                raise FormatError("it is nested too deeply to be a checkpoint")
            if num_unfolded > most_unfolded:
                raise FormatError(
                    f"it repeats tuples in tuples that hold more than {most_unfolded} objects in all: it is a bomb"
                )
            del stack[cut:]
            is_hashed = bool(after) and after[0] in (pickletools.anyobject, pickletools.pytuple)
            stack += [(depth, size) if is_hashed else (0, 1)] * len(after)


# ------------------------------------------------------------------------------------------------- plain values


@cache
def plain_names() -> Mapping[str, Any]:
    """Stand-ins for containers and plain values, and for NumPy's arrays of numbers, which states of RNGs hold."""
    found: dict[str, Callable[..., Any]] = {
        "collections.OrderedDict": FrozenTable,
        "collections.defaultdict": lambda *_: {},
        "collections.Counter": lambda values=(): dict(values),
        "_codecs.encode": _encode,
        "numpy.dtype": Dtype,
    }
    for module in ("builtins", "__builtin__"):
        found[f"{module}.set"] = set
        found[f"{module}.frozenset"] = frozenset
        found[f"{module}.complex"] = complex
        found[f"{module}.bytearray"] = _bytearray
    for core in ("numpy.core", "numpy._core"):
        found[f"{core}.multiarray._reconstruct"] = lambda *_: Array()
        found[f"{core}.multiarray.scalar"] = _scalar
    return MappingProxyType({**functions(found), "numpy.ndarray": Global("numpy.ndarray")})


def _encode(text: str, encoding: str = "latin1") -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"bytes encoded as {shown(encoding)}")
    return text.encode("latin1")


def _bytearray(data: object = b"", encoding: str = "latin1") -> bytearray:
    if isinstance(data, str):
        data = _encode(data, encoding)
    if not isinstance(data, bytes):
        raise pickle.UnpicklingError("a bytearray of other than bytes")
    return bytearray(data)


class FrozenTable(OrderedDict[Any, Any]):
    """Stands for an OrderedDict. Attributes, such as the `_metadata` of a module's state, are not set: else a pickle could put
    anything in the place of `items`."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None: ...


class Dtype(StandIn):
    """A type of NumPy's: numbers only."""

    __slots__ = ("value",)
    what = "numpy.dtype"
    is_settled = True

    def __init__(self, name: str, *_: Any) -> None:
        if not isinstance(name, str) or not _SIMPLE_DTYPE.fullmatch(name):
            raise pickle.UnpicklingError(f"a NumPy type {shown(name)} that is not a number's")
        self.value = np.dtype(name)

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) > 1 and state[1] in ("<", ">"):
            self.value = self.value.newbyteorder(state[1])


class Array(StandIn):
    """A NumPy array of numbers, once it is built."""

    __slots__ = ("value",)
    what = "numpy.ndarray"
    is_settled = True

    def __init__(self) -> None:
        self.value: Any = None

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, data = state
        if not isinstance(dtype, Dtype) or not isinstance(data, bytes):
            raise pickle.UnpicklingError("an array of objects")
        self.value = np.frombuffer(data, dtype.value).reshape(shape, order="F" if fortran else "C").copy()


def _scalar(dtype: Any, data: Any = b"") -> Any:
    if not isinstance(dtype, Dtype) or not isinstance(data, bytes) or len(data) != dtype.value.itemsize:
        raise pickle.UnpicklingError("a NumPy number of a type that is none")
    return np.frombuffer(data, dtype.value)[0]
