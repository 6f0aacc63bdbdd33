"""Pinned memory, from which copies to a GPU run asynchronously; and the loaders' message where the system gives none."""

from __future__ import annotations

import logging

import torch

from loaderkit._internal.device import raise_kernel_failure
from loaderkit._internal.dtypes import Bytes

NOT_PINNED = "memory of batches cannot be pinned (%s): copies to the GPU are slower, and block a worker"
logger = logging.getLogger("loaderkit")


def cannot_pin(error: RuntimeError) -> bool:
    """True if memory cannot be pinned; False for an error of an earlier kernel, which CUDA reports at the next call."""
    return any(text in str(error) for text in ("out of memory", "not supported", "OS call failed"))


class PinnedMemory:
    """Gives pinned memory until the system refuses it once: the limit of locked memory is reached then."""

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
