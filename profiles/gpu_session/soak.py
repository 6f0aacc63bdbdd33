"""Loaders that decode on the GPU and on the CPU in turns, rebuilt again and again: memory stays what it was."""

from __future__ import annotations

import ctypes
import gc
import time

import loaderkit
from profiles.gpu_session.context import Context
from profiles.gpu_session.gpu_decoding import decoder
from profiles.gpu_session.pictures_pipeline import ahead, crops
from profiles.gpu_session.rebuilds import bar_growth, memory

_SECONDS = 17.0


def measure(context: Context) -> None:
    """Memory after every pair, one on the GPU and one on the CPU."""
    device, until_s = decoder(context), time.perf_counter() + context.sized(_SECONDS, 1.0)
    rows: list[dict[str, float]] = []
    num_images = 0
    begin_s = time.perf_counter()
    while time.perf_counter() < until_s or len(rows) < 2:
        for each in (device, "cpu"):
            num_images += _epoch(context, each)
        rows.append(memory(context))
        context.report.add(
            num_pairs=len(rows), **{f"{name}_each_mib": [round(row[name]) for row in rows] for name in rows[0]}
        )
    context.report.add(num_images=num_images, seconds_a_pair=(time.perf_counter() - begin_s) / len(rows))
    # What malloc keeps of what was freed is no leak.
    ctypes.CDLL(None).malloc_trim(0)
    context.report.add(resident_trimmed_mib=memory(context)["resident"])
    bar_growth(context, rows, most_mib={"resident": 128.0})


def _epoch(context: Context, device: str) -> int:
    num_images = 0
    with loaderkit.build(crops(context, device), overrides=ahead()) as loader:
        for batch in loader:
            num_images += len(batch["image"])
        context.wait()
        del batch
    del loader
    gc.collect()
    return num_images
