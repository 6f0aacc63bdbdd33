"""What the steps that decode through DALI share."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from profiles.gpu_session.context import Context
from profiles.gpu_session.dali_import import need_dali

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def decoder(context: Context) -> str:
    """What `decode: device` is to be. Raises Skipped without DALI."""
    need_dali()
    return "gpu" if context.on_gpu else "dali-cpu"


def digest(batch: dict[str, Any]) -> str:
    """Of a batch's pictures, labels and keys."""
    found = hashlib.sha256(repr(list(batch["__key__"])).encode())
    for name in ("image", "label"):
        found.update(batch[name].cpu().numpy().tobytes())
    return found.hexdigest()[:16]


def levels(images: torch.Tensor) -> torch.Tensor:
    """Normalised pictures [n, 3, h, w] in levels of 255."""
    mean, std = (torch.tensor(values, device=images.device)[:, None, None] for values in (MEAN, STD))
    return (images.float() * std + mean) * 255
