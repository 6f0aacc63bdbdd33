"""Resolves the device that a config names."""

from __future__ import annotations

import torch


def resolve_device(wanted: str) -> torch.device:
    """The torch device of auto, cpu, cuda or cuda:N. Raises RuntimeError, naming the devices present, if it is missing."""
    if wanted == "cpu":
        return torch.device("cpu")  # without querying CUDA, which would load the driver
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "auto" and not num_devices:
        return torch.device("cpu")
    is_named = ":" in wanted
    number = int(wanted.partition(":")[2]) if is_named else torch.cuda.current_device() if num_devices else 0
    if number >= num_devices:
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        raise RuntimeError(
            f"device {wanted!r} was requested, but torch {torch.__version__}, {built}, sees {num_devices}"
        )
    return torch.device("cuda", number)
