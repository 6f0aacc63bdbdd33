"""The pipelines that the steps measure, and a loop's step on the GPU."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from loaderkit import Pipeline
from loaderkit._internal.system.cgroups import num_cpus
from profiles.gpu_session.context import Context

SIZE = 224


def crops(context: Context, device: Any = "cpu", *, batch: int | None = None) -> Pipeline:
    """Crops of the photographs, normalised on the GPU, decoded on `device`."""
    pipeline = Pipeline.files(context.photos(), include="**/*.jpg", label="parent").shuffle(seed=0).read()
    pipeline = pipeline.decode(device=device).random_resized_crop(SIZE).random_horizontal_flip()
    size = batch or context.sized(256, 16)
    return pipeline.batch(size, drop_last=True).transfer(str(context.device)).normalize()


def ahead(**settings: Any) -> dict[str, Any]:
    """Settings with all CPUs at work and room for batches ahead."""
    cpus = num_cpus()
    return {"prefetch.concurrency": cpus, "prefetch.batches": max(4, cpus // 4), "prefetch.memory": "16GiB"} | settings


class Step:
    """Matrix products for `step_s` seconds, as measured once, in the place of a forward and a backward pass."""

    def __init__(self, context: Context, step_s: float) -> None:
        self._context = context
        self._matrix = torch.randn(2048 if context.on_gpu else 256, 2048, device=context.device)
        self._count = 1
        self()  # the first one sets up what multiplies matrices, which takes longer than to multiply them
        while (took_s := self.took_s()) < step_s / 4 and self._count < 2**20:
            self._count *= 2
        self._count = max(1, round(self._count * step_s / took_s))
        self.step_s = statistics.median(self.took_s() for _ in range(3))

    def took_s(self) -> float:
        """How long one takes, by itself."""
        begin_s = time.perf_counter()
        self()
        return time.perf_counter() - begin_s

    def __call__(self) -> None:
        for _ in range(self._count):
            torch.mm(self._matrix, self._matrix.T)
        self._context.wait()
