"""Loaders made and closed one after another in one process: memory stays what it was."""

from __future__ import annotations

import gc
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import loaderkit
from profiles.gpu_session.context import Context
from profiles.gpu_session.pictures_pipeline import ahead, crops

_WARM = 5
_MOST_MIB = {"allocated": 1.0, "reserved": 1.0, "pinned": 1.0, "on_gpu": 16.0, "resident": 64.0}


def measure(context: Context) -> None:
    """20 with threads; and some with a process of their own, and as many restores."""
    num_rebuilds = context.sized(20, 7)
    begin_s = time.perf_counter()
    rows = [_rebuilt(context, "thread") for _ in range(num_rebuilds)]
    context.report.add(num_rebuilds=num_rebuilds, seconds_a_rebuild=(time.perf_counter() - begin_s) / num_rebuilds)
    for name in rows[0]:
        context.report.add(**{f"{name}_mib": [round(row[name]) for row in rows]})
    for name in rows[0]:
        growth = rows[-1][name] - rows[_WARM - 1][name]
        context.report.bar(f"{name}_growth_mib", growth, most=_MOST_MIB[name])
    if context.is_tiny:
        return
    before = memory(context)
    for _ in range(2):
        _rebuilt(context, "process")
    context.report.add(**{f"process_{name}_growth_mib": memory(context)[name] - before[name] for name in before})
    _restores(context)


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
    """MiB of the process, of torch's allocators, and of the GPU."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    found: dict[str, float] = {"resident": resident}
    if context.on_gpu:
        free, total = torch.cuda.mem_get_info()
        found |= {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
        found |= {"pinned": torch.cuda.host_memory_stats()["allocated_bytes.current"], "on_gpu": total - free}
    return {name: value / 2**20 for name, value in found.items()}
