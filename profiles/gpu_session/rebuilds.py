"""Loaders made and closed one after another in one process: memory stays what it was."""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import loaderkit
from profiles.gpu_session.context import Context
from profiles.gpu_session.pictures_pipeline import ahead, crops

Row = Mapping[str, float]
_PROCESS_S = 12.0
_RISE_MIB = 8.0  # less is what the kernel and malloc do in between
_MOST_RISES = 2


def measure(context: Context) -> None:
    """16 with threads; as many restores as half of them; and, if there is time, two with a process of their own."""
    num_rebuilds = context.sized(16, 6)
    begin_s = time.perf_counter()
    rows = [_rebuilt(context, "thread") for _ in range(num_rebuilds)]
    context.report.add(num_rebuilds=num_rebuilds, seconds_a_rebuild=(time.perf_counter() - begin_s) / num_rebuilds)
    bar_growth(context, rows, most_mib={"resident": 64.0})
    if context.is_tiny:
        return
    _restores(context)
    if context.left_s() > _PROCESS_S:
        _rebuilt(context, "process")
        before = memory(context)
        _rebuilt(context, "process")
        context.report.add(**{f"process_{name}_growth_mib": memory(context)[name] - before[name] for name in before})


def bar_growth(context: Context, rows: Sequence[Row], *, most_mib: Mapping[str, float]) -> None:
    """What is allocated stays the same. Allocators may take more in a step or two, by no more than the first loader took
    (`most_mib`, where that is not known); a leak is a step with every loader."""
    for name in rows[0]:
        context.report.add(**{f"{name}_each_mib": [round(row[name]) for row in rows]})
    if context.is_tiny:
        return
    for name in rows[0]:
        mib, num_rises = growth([row[name] for row in rows])
        most = most_mib.get(name, 1.0 if name == "allocated" else rows[0].get("reserved", 0.0))
        context.report.bar(f"{name}_growth_mib", mib, most=most)
        context.report.bar(f"{name}_rises", num_rises, most=_MOST_RISES)


def growth(values: Sequence[float]) -> tuple[float, int]:
    """Of the second half of MiB: how far it rises above all of the first, and in how many steps."""
    half = len(values) // 2
    first = most = max(values[:half])
    num_rises = 0
    for value in values[half:]:
        if value > most + _RISE_MIB:
            most = value
            num_rises += 1
    return max(0.0, max(values[half:]) - first), num_rises


def _rebuilt(context: Context, executor: str) -> dict[str, float]:
    with loaderkit.build(crops(context), overrides=ahead(**{"prefetch.executor": executor})) as loader:
        for _, batch in zip(range(3), loader, strict=False):
            batch["image"].sum()
        context.wait()
        del batch
    del loader
    gc.collect()
    return memory(context)


def _restores(context: Context) -> None:
    """The streams and the staging memory of restores are given back as well."""
    with tempfile.TemporaryDirectory(dir=context.work) as name:
        path = Path(name) / "state.pt"
        torch.save({f"t{number}": torch.ones(2**20) for number in range(16)}, path)
        rows: list[dict[str, Any]] = []
        for _ in range(8):
            loaderkit.restore(path, device=context.device)
            gc.collect()
            rows.append(memory(context))
    context.report.add(**{f"restores_{key}_growth_mib": rows[-1][key] - rows[2][key] for key in rows[0]})


def memory(context: Context) -> dict[str, float]:
    """MiB of the process without pinned memory, of torch's allocators, and of the GPU."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    found: dict[str, float] = {"resident": resident}
    if context.on_gpu:
        free, total = torch.cuda.mem_get_info()
        pinned = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
        found = {"resident": resident - pinned, "pinned": pinned, "on_gpu": total - free}
        found |= {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
    return {name: value / 2**20 for name, value in found.items()}
