"""Read a pickle without running anything: names in it are looked up in a table of stand-ins, and never imported.

A pickle is a program that names functions and calls them. A name in the table gives a stand-in of loaderkit's; any other name
gives a class of `Opaque`, whose instances ignore all arguments, state and items. So a file that names `os.system` yields an
`Opaque` that says so. A pickle cannot change a stand-in.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from loaderkit._internal.garbage import collector_off
from loaderkit._internal.text import short_repr
from loaderkit.checkpoint.formats.pickle_opcodes import check_opcodes
from loaderkit.errors import FormatError

_MAX_UNKNOWN = 1000  # names that are not in the table; each takes a kilobyte


class Frozen(type):
    """The metaclass of classes whose attributes a pickle cannot set, as its BUILD may try."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise pickle.UnpicklingError(f"it sets {name!r} of a class")


def shown(value: Any) -> str:
    """A value of a pickle, for an error message; see `short_repr`."""
    return value.what if isinstance(value, StandIn) else short_repr(value)


class StandIn:
    """The object that a pickle gets in place of what it names; `what` is the name, "package.module.name".

    No stand-in is a value of a restored checkpoint: one with `is_settled` is replaced by a value, any other is refused.
    """

    __slots__ = ()
    what: str
    is_settled: ClassVar[bool] = False


class Opaque(StandIn, metaclass=Frozen):
    """Stands for an object that is not made: `what` is the class or function that the file names."""

    __slots__ = ()
    what = "an unknown object"

    def __new__(cls, *_: Any, **__: Any) -> Opaque:
        return object.__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, state: object) -> None: ...

    def __setitem__(self, key: object, value: object) -> None: ...

    def append(self, item: object) -> None:
        """Ignore it, as the methods below."""

    def extend(self, items: object) -> None: ...

    def add(self, item: object) -> None: ...

    def __repr__(self) -> str:
        return f"<{self.what}, not loaded>"


def opaque(what: str) -> type[Opaque]:
    """A class for objects of `what` that are not made."""
    return Frozen("Opaque", (Opaque,), {"__slots__": (), "what": what})  # type: ignore[return-value]


class Function(StandIn, metaclass=Frozen):
    """A stand-in that a pickle can call and not change: calling it calls `function`."""

    __slots__ = ("_function", "what")
    _function: Callable[..., Any]

    def __init__(self, what: str, function: Callable[..., Any]) -> None:
        object.__setattr__(self, "what", what)
        object.__setattr__(self, "_function", function)

    def __setattr__(self, name: str, value: object) -> None:
        raise pickle.UnpicklingError(f"it sets {name!r} of a function")

    def __call__(self, *values: Any) -> Any:
        return self._function(*values)


def functions(by_name: Mapping[str, Callable[..., Any]]) -> dict[str, Function]:
    """Stand-ins for functions, by name."""
    return {name: Function(name, function) for name, function in by_name.items()}


class Record(metaclass=Frozen):
    """Stands for an instance of a dataclass: `state` is what it was built with. Equality is identity."""

    __slots__ = ("state",)
    state: Any

    def __new__(cls, *_: Any) -> Record:
        made = object.__new__(cls)  # not in __init__, which a pickle need not call
        made.state = None
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str, default: Any = None) -> Any:
        """A field; `default` if the state has none."""
        return self.state.get(name, default) if isinstance(self.state, dict) else default


def record(what: str) -> type[Record]:
    """A class of stand-ins for instances of the dataclass `what`."""
    return Frozen(what.rpartition(".")[2], (Record,), {"__slots__": ()})  # type: ignore[return-value]


class Global(StandIn):
    """A name that stands for itself, or for a `value` such as a dtype. A pickle cannot call it."""

    __slots__ = ("value", "what")
    value: Any

    def __init__(self, what: str, value: Any = None) -> None:
        object.__setattr__(self, "what", what)
        object.__setattr__(self, "value", value)

    def __setattr__(self, name: str, value: object) -> None:
        raise pickle.UnpicklingError(f"it sets {name!r} of {self.what}")


@collector_off()
def load_pickle(
    data: bytes | memoryview, names: Mapping[str, Any], persistent: Callable[[Any], Any] | None = None
) -> Any:
    """The value of a pickle, with stand-ins from `names` ("module.name" -> stand-in), and `Opaque` for any other name.

    `persistent` maps a persistent id to its value. Raises FormatError for data that is no pickle, or that no writer writes.
    """
    data = bytes(data)
    reader = _Reader(io.BytesIO(data), names, persistent)
    try:
        check_opcodes(data)
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
        stand_in = self._names.get(full) or self._opaque.get(full)
        if stand_in is None:
            if len(self._opaque) == _MAX_UNKNOWN:
                raise FormatError(f"it names more than {_MAX_UNKNOWN} classes that are not known here")
            stand_in = self._opaque[full] = opaque(full)
        return stand_in

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise FormatError("it refers to objects outside itself")
        return self._persistent(pid)
