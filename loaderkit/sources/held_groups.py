"""Holds decoded groups of rows in memory, within a bound, for all workers of a process."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from loaderkit.errors import FormatError


class DecodedGroup(Protocol):
    """The memory that a group takes, and the bytes that were read for it."""

    @property
    def memory_bytes(self) -> int: ...

    @property
    def read_bytes(self) -> int: ...


Group = TypeVar("Group", bound=DecodedGroup)


class HeldGroups(Generic[Group]):
    """Row groups by number, decoded by `read` once each while they are held. The least recently used goes first.

    At most about `memory_bytes` are held or being decoded, `sizes` (int64 [row groups]) being what each will take; one of them
    may be larger. Any number of threads.
    """

    def __init__(self, read: Callable[[int], Group], sizes: NDArray[np.int64], memory_bytes: int) -> None:
        self._read, self._sizes, self._memory_bytes = read, sizes, memory_bytes
        self._changed = threading.Condition()
        self._held: OrderedDict[int, Group] = OrderedDict()
        self._damaged: dict[int, FormatError] = {}
        self._decoding: dict[int, int] = {}  # the memory reserved for each
        self._used_bytes = 0  # held and reserved

    def get(self, group: int) -> tuple[Group, int]:
        """A row group, and the bytes that had to be read for it now. Raises as `read` does; FormatError again each time."""
        with self._changed:
            while group in self._decoding:
                self._changed.wait()
            if group in self._damaged:
                error = self._damaged[group]
                raise FormatError(*error.args) from error
            if group in self._held:
                self._held.move_to_end(group)
                return self._held[group], 0
            self._decoding[group] = 0
            try:
                self._reserve(group)
            except BaseException:
                self._finish(group)
                raise
        found: Group | None = None
        try:
            found = self._read(group)
        except FormatError as error:
            with self._changed:
                self._damaged[group] = error.with_traceback(None)
            raise
        finally:
            with self._changed:
                self._finish(group)
                if found is not None:
                    self._held[group] = found
                    self._used_bytes += found.memory_bytes
                    self._drop(0)
        return found, found.read_bytes

    def _reserve(self, group: int) -> None:
        """Wait for room; the one that nothing else is decoded beside gets it in any case. Under the lock."""
        size = int(self._sizes[group])
        self._drop(size)
        while self._used_bytes + size > self._memory_bytes and any(self._decoding.values()):
            self._changed.wait()
            self._drop(size)
        self._decoding[group] = size
        self._used_bytes += size

    def _drop(self, num_bytes: int) -> None:
        """Drop the least recently used until there is room for `num_bytes`, or none is left. Under the lock."""
        most = len(self._held) if num_bytes else len(self._held) - 1  # the last one is needed now
        while most > 0 and self._used_bytes + num_bytes > self._memory_bytes:
            _, dropped = self._held.popitem(last=False)
            self._used_bytes -= dropped.memory_bytes
            most -= 1

    def _finish(self, group: int) -> None:
        self._used_bytes -= self._decoding.pop(group)
        self._changed.notify_all()

    def clear(self) -> None:
        """Drop all that is held; more may follow."""
        with self._changed:
            self._used_bytes -= sum(group.memory_bytes for group in self._held.values())
            self._held.clear()
            self._damaged.clear()
