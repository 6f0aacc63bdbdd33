"""Memory for copies of a state that two processes map. It lies in files without a name, so nothing is left when both
have ended."""

from __future__ import annotations

import io
import itertools
import mmap
import os
import weakref
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from loaderkit._internal.cuda.host_pages import make_all_pages
from loaderkit._internal.dtypes import Bytes
from loaderkit._internal.system.descriptors import mapped, memory_file
from loaderkit._internal.units import say_bytes
from loaderkit.errors import CheckpointError


class AreaOffset(NamedTuple):
    """A place in the shared memory: the number of an area, and the first byte in it."""

    area: int
    start: int


class _SharedArea(NamedTuple):
    file: io.FileIO
    address: int
    num_bytes: int


class SharedPages:
    """The areas in the process that copies states. An area is kept as long as any array in it."""

    def __init__(self) -> None:
        self._areas: dict[int, _SharedArea] = {}
        self._numbers = itertools.count()

    def allocate(self, num_bytes: int) -> NDArray[np.uint8]:
        """Memory that begins at a page, uint8 [N]. Raises CheckpointError without room for it."""
        file = memory_file("loaderkit-copy")
        try:
            file.truncate(max(num_bytes, 1))
            memory = _array(file)
            if not make_all_pages(memory):
                # An old kernel; or a lack of memory, which would be SIGBUS at the first access.
                os.posix_fallocate(file.fileno(), 0, len(memory))
        except OSError as error:
            file.close()
            raise CheckpointError(
                f"there are no {say_bytes(num_bytes)} of shared memory for a copy of the state ({error.strerror}): free some, "
                "save less, or use flush: thread"
            ) from error
        number = next(self._numbers)
        self._areas[number] = _SharedArea(file, memory.ctypes.data, num_bytes)
        weakref.finalize(memory, self._release, number).atexit = False
        return memory

    def _release(self, number: int) -> None:
        self._areas.pop(number).file.close()

    def numbers(self) -> list[int]:
        """The areas there are."""
        return list(self._areas)

    def place_of(self, address: int, num_bytes: int) -> AreaOffset | None:
        """Where memory of this process lies, or None if it is in no area."""
        for number, area in list(self._areas.items()):
            start = address - area.address
            if start >= 0 and start + num_bytes <= area.num_bytes:
                return AreaOffset(number, start)
        return None

    def file_of(self, number: int) -> io.FileIO:
        """The file of an area of which an array is kept."""
        return self._areas[number].file


class MappedPages:
    """The areas in the process that reads them."""

    def __init__(self) -> None:
        self._areas: dict[int, Bytes] = {}

    def add(self, number: int, descriptor: int) -> None:
        """Map an area; the descriptor may be closed then. Raises OSError."""
        with io.FileIO(os.dup(descriptor), "r+") as file:
            self._areas[number] = _array(file)

    def keep(self, numbers: list[int]) -> None:
        """Drop all other areas. The memory goes when no array of it is left."""
        self._areas = {number: memory for number, memory in self._areas.items() if number in numbers}

    def at(self, place: AreaOffset, num_bytes: int) -> Bytes:
        """The memory there, uint8 [N]."""
        return self._areas[place.area][place.start : place.start + num_bytes]

    def owns(self, tensor: torch.Tensor) -> bool:
        """True if a tensor is part of a copy, which nothing changes while it is being written."""
        address = tensor.data_ptr()
        return any(0 <= address - memory.ctypes.data < len(memory) for memory in self._areas.values())


def _array(file: io.FileIO) -> NDArray[np.uint8]:
    mapping = mapped(file.fileno())
    with suppress(OSError, AttributeError):  # not every kernel has large pages, and for shared memory
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapping, np.uint8)
