"""What the steps that decode through DALI share."""

from __future__ import annotations

import time

import torch

from loaderkit.stages.image.dali.trial import decodes_regions
from profiles.gpu_session.context import Context
from profiles.gpu_session.dali_import import need_dali

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def decoder(context: Context) -> str:
    """What `decode: device` is to be; the trial whether regions can be decoded takes seconds, and is kept for later steps.
    Raises Skipped without DALI."""
    need_dali()
    if not context.on_gpu:
        return "dali-cpu"
    begin_s = time.perf_counter()
    context.report.add(decodes_regions=decodes_regions(0), regions_trial_s=time.perf_counter() - begin_s)
    return "gpu"


def levels(images: torch.Tensor) -> torch.Tensor:
    """Normalised pictures [n, 3, h, w] in levels of 255."""
    mean, std = (torch.tensor(values, device=images.device)[:, None, None] for values in (MEAN, STD))
    return (images.float() * std + mean) * 255
