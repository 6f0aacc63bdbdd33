"""Loaders that decode on the GPU and on the CPU in turns, rebuilt again and again: memory stays what it was."""

from __future__ import annotations

import gc
import time

import loaderkit
from profiles.gpu_session.context import Context
from profiles.gpu_session.gpu_decoding import decoder
from profiles.gpu_session.pictures_pipeline import ahead, crops
from profiles.gpu_session.rebuilds import memory

_SECONDS = 20.0
_MOST_MIB = {"allocated": 1.0, "reserved": 16.0, "pinned": 1.0, "on_gpu": 64.0, "resident": 128.0}


def measure(context: Context) -> None:
    """Memory after every loader; of the growth, what came behind the first third."""
    device, until_s = decoder(context), time.perf_counter() + context.sized(_SECONDS, 1.0)
    rows: list[dict[str, float]] = []
    num_images = 0
    while time.perf_counter() < until_s or len(rows) < 2:
        with loaderkit.build(crops(context, device if len(rows) % 2 == 0 else "cpu"), overrides=ahead()) as loader:
            for batch in loader:
                num_images += len(batch["image"])
            context.wait()
            del batch
        del loader
        gc.collect()
        rows.append(memory(context))
        if len(rows) % 5 == 0:
            context.report.add(num_loaders=len(rows), **{f"{name}_mib": round(rows[-1][name]) for name in rows[0]})
    context.report.add(num_loaders=len(rows), num_images=num_images)
    for name in rows[0]:
        context.report.add(**{f"{name}_each_mib": [round(row[name]) for row in rows[:: max(1, len(rows) // 12)]]})
        if not context.is_tiny:
            context.report.bar(f"{name}_growth_mib", rows[-1][name] - rows[len(rows) // 3][name], most=_MOST_MIB[name])
