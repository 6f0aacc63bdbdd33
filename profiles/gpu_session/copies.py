"""Bare copies between host and device: what the bus gives, beside which everything else stands."""

from __future__ import annotations

import mmap
import statistics
import time
from typing import Any

import numpy as np
import torch

from profiles.gpu_session.context import Context

BATCH_BYTES = 256 * 3 * 224 * 224
"""A batch of 256 pictures as uint8, 38.5 MB."""


def measure(context: Context) -> None:
    """To the device and back, from pinned and from pageable memory; and what it costs to pin."""
    context.need_gpu()
    report = context.report
    for name, num_bytes in (("38mb", BATCH_BYTES), ("256mb", 256_000_000)):
        for kind in ("pinned", "pageable"):
            host = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=kind == "pinned")
            device = torch.empty_like(host, device=context.device)
            num_rounds = 20 if kind == "pinned" else 5
            report.add(**{f"to_device_{kind}_{name}_bytes_per_s": _rate(device, host, num_rounds)})
            report.add(**{f"to_host_{kind}_{name}_bytes_per_s": _rate(host, device, num_rounds)})
    report.add(**_registering(context.sized(2**30, 2**26)))
    begin_s = time.perf_counter()
    torch.empty(context.sized(2**30, 2**26), dtype=torch.uint8, pin_memory=True)
    report.add(torch_pin_memory_1gib_s=time.perf_counter() - begin_s)


def pinned_rate(context: Context, num_bytes: int = BATCH_BYTES, *, to_host: bool = False) -> float:
    """Bytes/s of bare copies from pinned memory to the device, or back, in the median of ten; for ratios within a step."""
    host = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=True)
    device = torch.ones(num_bytes, dtype=torch.uint8, device=context.device)
    return _rate(host, device, 10) if to_host else _rate(device, host, 10)


def _rate(target: torch.Tensor, source: torch.Tensor, num_rounds: int) -> float:
    event: Any = torch.cuda.Event
    begin, end = event(enable_timing=True), event(enable_timing=True)
    taken_ms: list[float] = []
    for number in range(num_rounds + 2):
        begin.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        if number > 1:
            taken_ms.append(begin.elapsed_time(end))
    return source.nbytes / (statistics.median(taken_ms) / 1000)


def _registering(num_bytes: int) -> dict[str, float]:
    """Seconds to register memory that was never written, that was, and to give it back."""
    cuda: Any = torch.cuda
    cudart, found = cuda.cudart(), {}
    for name in ("fresh", "written"):
        memory = np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)
        if name == "written":
            memory[:] = 1
        begin_s = time.perf_counter()
        _check(cudart.cudaHostRegister(memory.ctypes.data, num_bytes, 0))
        found[f"register_{name}_1gib_s"] = time.perf_counter() - begin_s
        begin_s = time.perf_counter()
        _check(cudart.cudaHostUnregister(memory.ctypes.data))
        found[f"unregister_{name}_1gib_s"] = time.perf_counter() - begin_s
    return found


def _check(error: Any) -> None:
    if int(error) != 0:
        raise RuntimeError(f"CUDA error {error}")
