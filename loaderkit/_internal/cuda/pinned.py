"""Pinned memory, from which copies to a GPU run asynchronously, and the message of loaders where the system refuses it."""

from __future__ import annotations

import logging
from contextlib import suppress

import torch

from loaderkit._internal.cuda.device import KERNEL_FAILURES, raise_kernel_failure
from loaderkit._internal.dtypes import Bytes

NOT_PINNED = "memory of batches cannot be pinned (%s): copies to the GPU are slower, and block a worker"
logger = logging.getLogger("loaderkit")


def cannot_pin(error: RuntimeError) -> bool:
    """True if memory cannot be pinned; False for an error of an earlier kernel, which CUDA reports at the next call."""
    return any(text in str(error) for text in ("out of memory", "not supported", "OS call failed"))


class PinnedMemory:
    """Gives pinned memory, until the system refuses once, because the limit of locked memory is reached."""

    def __init__(self, device: torch.device) -> None:
        """`device`: the CUDA device that the memory is copied to."""
        self._device = device
        self._is_refused = False

    def take(self, num_bytes: int) -> Bytes | None:
        """Memory, uninitialised; None, with one warning, if it cannot be pinned. Raises DeviceError if a kernel failed."""
        if self._is_refused:
            return None
        try:
            # Another thread's current device may be number 0, where a CUDA context would be created.
            with torch.cuda.device(self._device):
                return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True).numpy()
        except RuntimeError as error:
            if not cannot_pin(error):
                raise_kernel_failure(error, "pinning memory for batches")
                raise
            self._is_refused = True
            logger.warning(NOT_PINNED, str(error).partition("\n")[0])
            return None


class RegisteredMemory:
    """Parts of memory that CUDA has pinned where they are. Each is registered once, at first use."""

    def __init__(self, memory: Bytes, device: torch.device) -> None:
        """`device`: the CUDA device that the memory is copied to."""
        self._device = device
        self._address = memory.__array_interface__["data"][0]
        self._pinned: set[tuple[int, int]] = set()
        self._is_refused = False
        self._cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]

    def add(self, start: int, size: int) -> None:
        """Pin `size` bytes from `start` on, if the system still does."""
        if self._is_refused or (start, size) in self._pinned:
            return
        with torch.cuda.device(self._device):  # the current device of this thread may be another
            code = int(self._cudart.cudaHostRegister(self._address + start, size, 0))
        if code == 0:
            self._pinned.add((start, size))
            return
        if code in KERNEL_FAILURES:
            return  # the error of a kernel: `transfer` meets it next, and raises it
        self._is_refused = True  # the limit of locked memory is reached: the next part would be refused as well
        logger.warning(
            "shared memory cannot be pinned (CUDA error %d): copies to the GPU are slower and block a worker", code
        )
        with suppress(RuntimeError):  # CUDA reports the error again at this thread's next kernel: start one here
            torch.ones(1, device=self._device)

    def clear(self) -> None:
        """Pin none of it any more."""
        # After a kernel has failed every call does; what is pinned then ends with the process.
        with suppress(RuntimeError), torch.cuda.device(self._device):
            for start, _ in self._pinned:
                self._cudart.cudaHostUnregister(self._address + start)
        self._pinned.clear()
