"""Resolves the device that a config names, and tells errors of earlier kernels from errors of the call that reports them."""

from __future__ import annotations

import logging

import torch

from loaderkit._internal.system.local_rank import local_rank
from loaderkit.errors import DeviceError

Device = torch.device
logger = logging.getLogger("loaderkit")

KERNEL_FAILURES = {
    214: "uncorrectable ECC error encountered",
    220: "uncorrectable NVLink error",
    700: "an illegal memory access was encountered",
    702: "the launch timed out and was terminated",
    710: "device-side assert triggered",
    714: "hardware stack error",
    715: "an illegal instruction was encountered",
    716: "misaligned address",
    717: "operation not supported on global/shared address space",
    718: "invalid program counter",
    719: "unspecified launch failure",
}
"""CUDA's errors, by number, that a kernel leaves behind: every later call of the process meets them, whichever code
makes it."""


def raise_kernel_failure(error: BaseException, where: str) -> None:
    """Raise DeviceError if an error that was met in `where` came from a kernel, whichever code launched it."""
    text = str(error)
    if isinstance(error, RuntimeError) and "CUDA" in text and any(one in text for one in KERNEL_FAILURES.values()):
        raise DeviceError(
            f"a kernel on the GPU has failed, of the training step or of any other code of this process; {where} was the next "
            f"to ask CUDA for something: {text.partition(chr(10))[0]}. This process can use its GPU no more. Run it with "
            "CUDA_LAUNCH_BLOCKING=1, and the error comes where the kernel is launched"
        ) from error


def resolve_device(wanted: str) -> torch.device:
    """The torch device of auto, cpu, cuda or cuda:N. Raises RuntimeError, naming the devices present, if it is missing."""
    if wanted == "cpu":
        return torch.device("cpu")  # without querying CUDA, which would load the driver
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "auto" and not num_devices:
        return torch.device("cpu")
    is_named = ":" in wanted
    number = int(wanted.partition(":")[2]) if is_named else torch.cuda.current_device() if num_devices else 0
    if wanted == "auto":
        number = _of_this_rank(number, num_devices)
    if number >= num_devices:
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        raise RuntimeError(
            f"device {wanted!r} was requested, but torch {torch.__version__}, {built}, sees {num_devices}"
        )
    return torch.device("cuda", number)


def _of_this_rank(current: int, num_devices: int) -> int:
    """The device with this process's number among the processes of its job on this machine, if the current device is
    the first one, as it is until one is set. Otherwise all ranks of a machine would copy to one GPU."""
    rank = local_rank()
    if current or not 0 < rank < num_devices:
        return current
    logger.warning(
        "device auto: cuda:%d, by the number that the launcher gave this process, as the current device is cuda:0. Call "
        "torch.cuda.set_device(%d) before `build`, so that all of the program uses it; or name the device",
        rank,
        rank,
    )
    return rank
