"""Sends exceptions to another process: their type, attributes and causes, and the text of their tracebacks."""

from __future__ import annotations

import pickle
import traceback
from typing import Any, NamedTuple

import cloudpickle

from loaderkit.errors import RemoteError


class PackedError(NamedTuple):
    """An exception with its cause. Tracebacks cannot travel; their text does, as a note."""

    pickled: bytes
    traceback: str
    cause: PackedError | None
    context: PackedError | None


def pack_error(error: BaseException, depth: int = 0) -> PackedError:
    """An exception in a form that can always be pickled; one that cannot is replaced by a RemoteError."""
    trace = "".join(traceback.format_tb(error.__traceback__)) if error.__traceback__ is not None else ""
    pickled = next(filter(None, map(_try_pickle, (error, _Remade(error)))), None)
    if pickled is None:
        pickled = pickle.dumps(RemoteError(f"{type(error).__module__}.{type(error).__qualname__}: {_text(error)}"))
    related = [error.__cause__, None if error.__suppress_context__ else error.__context__]
    cause, context = (pack_error(one, depth + 1) if one is not None and depth < 8 else None for one in related)
    return PackedError(pickled, trace, cause, None if cause is not None else context)


class _Remade:
    """Pickles an exception without calling its `__init__`, which may take arguments other than `args`, and without
    attributes that cannot be pickled."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> tuple[Any, ...]:
        attributes = {name: value for name, value in self.error.__dict__.items() if _can_pickle(value)}
        return _remake, (type(self.error), self.error.args, attributes)


def _remake(kind: type[BaseException], args: tuple[Any, ...], attributes: dict[str, Any]) -> BaseException:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error


def _can_pickle(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True


def _try_pickle(value: Any) -> bytes | None:
    """The pickled exception, if it can be unpickled again; else None. Its class may be one of a script, as a function's is."""
    try:
        pickled = cloudpickle.dumps(value)
        return pickled if isinstance(pickle.loads(pickled), BaseException) else None  # noqa: S301 - just written
    except Exception:
        return None


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(its text cannot be made)"


def unpack_error(packed: PackedError, where: str = "the process that loads") -> BaseException:
    """The exception with its attributes and cause; the text of its traceback is its last note, which says `where` it was."""
    try:
        error = pickle.loads(packed.pickled)  # noqa: S301 - of our own process
    except Exception as failed:
        error = RemoteError(f"an exception of {where} cannot be made again here: {failed!r}")
    assert isinstance(error, BaseException)
    if packed.traceback:
        error.add_note(f"Traceback in {where} (most recent call last):\n{packed.traceback.rstrip()}")
    if packed.cause is not None:
        error.__cause__ = unpack_error(packed.cause, where)
    elif packed.context is not None:
        error.__context__ = unpack_error(packed.context, where)
    return error
