"""Host memory that begins at a page, and is kept between saves."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
import torch
from numpy.typing import NDArray


class PartBuffers:
    """Buffers for parts of files, kept when they are given back; pinned where there is CUDA."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[NDArray[np.uint8]] = []

    @contextmanager
    def buffer(self, num_bytes: int) -> Iterator[NDArray[np.uint8]]:
        """A buffer of at least `num_bytes`, uint8 [N]; its content is what was there."""
        with self._lock:
            fitting = [n for n, buffer in enumerate(self._free) if len(buffer) >= num_bytes]
            kept = self._free.pop(fitting[0]) if fitting else None
            if kept is None:
                self._free.clear()  # too small for this store
        buffer = pages(num_bytes) if kept is None else kept
        try:
            yield buffer
        finally:
            with self._lock:
                self._free.append(buffer)


def pages(num_bytes: int) -> NDArray[np.uint8]:
    """Memory that begins at a page, uint8 [N]; pinned where there is CUDA, else of large pages where the kernel has them."""
    if torch.cuda.is_available():
        pinned: NDArray[np.uint8] = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy()
        return pinned
    memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):  # not every kernel has them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)[:num_bytes]
