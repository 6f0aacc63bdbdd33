"""DALI as it was carried here: that it loads, and in which versions."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import time
from typing import Any

from loaderkit.stages.image.dali.trial import decodes_regions
from profiles.gpu_session.context import Context, Skipped

_PACKAGES = ("nvidia-dali-cuda130", "nvidia-nvimgcodec-cu13", "nvidia-nvjpeg", "nvidia-cuda-runtime")


def need_dali() -> None:
    """Raises Skipped where DALI is not installed."""
    try:
        is_there = importlib.util.find_spec("nvidia.dali") is not None
    except ModuleNotFoundError:
        is_there = False
    if not is_there:
        raise Skipped("DALI is not installed")


def measure(context: Context) -> None:
    """Import it, run its smallest pipeline on each backend, and try regions, which is kept for the steps behind this one."""
    need_dali()
    begin_s = time.perf_counter()
    dali: Any = importlib.import_module("nvidia.dali")
    context.report.add(import_s=time.perf_counter() - begin_s, dali=dali.__version__)
    for name in _PACKAGES:
        try:
            context.report.add(**{name: importlib.metadata.version(name)})
        except importlib.metadata.PackageNotFoundError:
            continue
    for device in ("cpu", "gpu") if context.on_gpu else ("cpu",):
        begin_s = time.perf_counter()
        context.report.add(**{f"{device}_sum": _smallest(dali, device), f"{device}_s": time.perf_counter() - begin_s})
    context.photos()
    if context.on_gpu:
        begin_s = time.perf_counter()
        context.report.add(decodes_regions=decodes_regions(0), regions_trial_s=time.perf_counter() - begin_s)


def _smallest(dali: Any, device: str) -> float:
    def define() -> Any:
        return dali.fn.random.uniform(device=device, range=[1.0, 2.0], shape=[4])

    pipeline = dali.pipeline_def(define)(batch_size=1, num_threads=1, device_id=0 if device == "gpu" else None)
    pipeline.build()
    (output,) = pipeline.run()
    tensor = output.as_cpu() if device == "gpu" else output
    return float(tensor.as_array().sum())
