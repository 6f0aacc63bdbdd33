"""Host memory for parts of files, kept between saves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from loaderkit._internal.cuda.host_pages import HostPins
from loaderkit._internal.dtypes import Bytes


class PartBuffers:
    """Buffers for parts of files, kept when they are given back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pins = HostPins()
        self._free: dict[bool, list[Bytes]] = {False: [], True: []}  # by whether they are for a GPU's tensors

    @contextmanager
    def buffer(self, num_bytes: int, device: torch.device | None = None) -> Iterator[Bytes]:
        """A buffer of at least `num_bytes`, uint8 [N]; its content is what was there. It is pinned if tensors on a CUDA
        `device` are to be copied to it."""
        free = self._free[device is not None]
        with self._lock:
            fitting = [n for n, buffer in enumerate(free) if len(buffer) >= num_bytes]
            kept = free.pop(fitting[0]) if fitting else None
            if kept is None:
                free.clear()  # too small for this store
        buffer = self._pins.pages(num_bytes, device) if kept is None else kept
        try:
            yield buffer
        finally:
            with self._lock:
                free.append(buffer)
