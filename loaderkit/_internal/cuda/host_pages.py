"""Host memory that begins at a page. Where it is copied from or to, it is registered with CUDA, so that copies are fast
and asynchronous. torch's own pinned memory is rounded up to a power of two, and stays pinned until the process ends."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import torch

from loaderkit._internal.dtypes import Bytes
from loaderkit._internal.system.cgroups import num_cpus_of_rank

_SLICE_BYTES = 2**26
_MOST_THREADS = 8
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_madvise = ctypes.CDLL(None).madvise  # not mmap's, which keeps the GIL
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
logger = logging.getLogger("loaderkit")


def pages(num_bytes: int, *, is_registered: bool = False) -> Bytes:
    """Memory that begins at a page, uint8 [N], in large pages where the kernel has them. `is_registered`: it will be
    registered with CUDA."""
    # Of private memory that a device writes to, the kernel copies every page at a fork.
    sharing = mmap.MAP_SHARED if is_registered else mmap.MAP_PRIVATE
    memory = mmap.mmap(-1, max(num_bytes, 1), flags=sharing | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):  # not every kernel has them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8, num_bytes)


def make_pages(memory: Bytes, lo: int = 0, hi: int | None = None) -> bool:
    """Have the kernel make the pages of the bytes [lo, hi) now; they keep what they hold. False if it cannot.

    Several threads can do this at once, while CUDA makes pages one after another: it registers a GiB of existing pages
    in 0.06 s, and of others in 0.35 s.
    """
    num_bytes = (len(memory) if hi is None else hi) - lo
    return bool(_madvise(memory.ctypes.data + lo, num_bytes, _MADV_POPULATE_WRITE) == 0)


def make_all_pages(memory: Bytes) -> bool:
    """`make_pages` of all of the memory, by several threads."""
    with _threads() as threads:
        return all(threads.map(lambda part: make_pages(memory, *part), _slices(memory)))


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, min(_MOST_THREADS, num_cpus_of_rank())), "loaderkit-pages")


def _slices(memory: Bytes) -> list[tuple[int, int]]:
    return [(lo, min(lo + _SLICE_BYTES, len(memory))) for lo in range(0, len(memory), _SLICE_BYTES)]


class HostPins:
    """Registers memory with CUDA, until the system refuses once, because the limit of locked memory is reached. Any
    thread."""

    def __init__(self) -> None:
        self._is_refused = False

    def add(self, memory: Bytes, device: torch.device, lo: int = 0, hi: int | None = None) -> None:
        """Register the bytes [lo, hi) of an array that is no part of another, until it is collected. Warns if that cannot be:
        copies are slower then. `device`: a CUDA device in use; the memory is registered for all."""
        address, num_bytes = memory.ctypes.data + lo, (len(memory) if hi is None else hi) - lo
        if self._is_refused or not num_bytes:
            return
        make_pages(memory, lo, hi)
        with torch.cuda.device(device):  # this thread's may be number 0, where a context would begin
            code = int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0))  # type: ignore[no-untyped-call]
            if code == 0:
                weakref.finalize(memory, _unregister, address, device, os.getpid()).atexit = False
                return
            self._is_refused = True
            logger.warning("host memory cannot be pinned (CUDA error %d): copies from and to the GPU are slower", code)
            with suppress(RuntimeError):  # CUDA reports the error again at this thread's next kernel: start one here
                torch.ones(1, device=device)

    def pages(self, num_bytes: int, device: torch.device | None) -> Bytes:
        """`pages`, registered if there is a CUDA device."""
        memory = pages(num_bytes, is_registered=device is not None)
        if device is not None:
            self.add(memory, device)
        return memory


class PinnedSlices:
    """Memory whose slices are registered by threads, in order: copies to the first slices begin while later ones are
    registered."""

    def __init__(self, memory: Bytes, device: torch.device, pins: HostPins) -> None:
        threads = _threads()
        self._slices = [threads.submit(pins.add, memory, device, lo, hi) for lo, hi in _slices(memory)]
        threads.shutdown(wait=False)

    def cut(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """The parts [lo, hi) of [begin, end), in order, each once its slice is registered. A copy over two slices is
        cut, as CUDA refuses a copy whose memory is registered only in part."""
        while begin < end:
            number = begin // _SLICE_BYTES
            self._slices[number].result()
            hi = min(end, (number + 1) * _SLICE_BYTES)
            yield begin, hi
            begin = hi


def _unregister(address: int, device: torch.device, pid: int) -> None:
    if os.getpid() == pid:  # a fork has no CUDA
        with suppress(RuntimeError), torch.cuda.device(device):  # after a kernel's error all fails
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
