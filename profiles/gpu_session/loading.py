"""A loader to the GPU beside steps of 80 ms: how fast it copies, and whether the loop ever waits for a copy."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

import loaderkit
from profiles.gpu_session.context import Context, Report
from profiles.gpu_session.copies import pinned_rate
from profiles.gpu_session.pictures_pipeline import Step, ahead, crops

Span = tuple[float, float]
_OVERLAP, _SHARE = 0.95, 0.9


def measure(context: Context) -> None:
    """With threads, and with a process of the loader's own."""
    step = Step(context, context.sized(0.08, 0.01))
    context.report.add(step_s=step.step_s)
    for executor in ("thread", "process"):
        _one(context, executor, step)


def _one(context: Context, executor: str, step: Step) -> None:
    report, num_steps = context.report, context.sized(60, 3)
    overrides = ahead(**{"prefetch.executor": executor})
    begin_s = time.perf_counter()
    with loaderkit.build(crops(context), overrides=overrides) as loader:
        batches = (batch for _ in itertools.count() for batch in loader)
        next(batches)
        context.wait()
        report.add(**{f"{executor}_first_batch_s": time.perf_counter() - begin_s})
        for _ in range(context.sized(15, 1)):  # until what was made while nobody took it is gone
            _turn(context, batches, step)
        before, begin_s, waited_s = loader.stats(), time.perf_counter(), 0.0
        for _ in range(num_steps):
            waited_s += _turn(context, batches, step)
        loop_s = time.perf_counter() - begin_s
        copies = loader.stats(since=before).to_dict()["transfer"]
        size = context.sized(256, 16)
        report.add(
            **{
                f"{executor}_images_per_s": num_steps * size / loop_s,
                f"{executor}_waited_share": waited_s / loop_s,
            }
        )
        if not context.on_gpu:
            return
        bare = pinned_rate(context)
        report.add(**{f"{executor}_{name}": value for name, value in copies.items()})
        report.add(**{f"{executor}_bare_bytes_per_s": bare})
        own_account(report, executor, copies, bare)
        try:
            _profiled(context, executor, batches, step, bare)
        except (OSError, RuntimeError, KeyError) as error:  # a machine may not let the profiler in
            report.add(**{f"{executor}_profiler_error": f"{type(error).__name__}: {error}"})


def own_account(report: Report, executor: str, copies: dict[str, float], bare: float) -> None:
    """The bars by the loader's own account. Where no batch was timed they are those of the profiler alone."""
    if "overlap" in copies:
        report.bar(f"{executor}_overlap", copies["overlap"], least=_OVERLAP)
        report.bar(f"{executor}_share_of_bus", copies["bytes_per_s"] / bare, least=_SHARE)


def _turn(context: Context, batches: Iterator[dict[str, Any]], step: Step) -> float:
    """A batch and a step; the seconds that the batch was waited for."""
    begin_s = time.perf_counter()
    batch = next(batches)
    batch["image"].sum()
    context.wait()
    waited_s = time.perf_counter() - begin_s
    step()
    return waited_s


def _profiled(context: Context, executor: str, batches: Iterator[dict[str, Any]], step: Step, bare: float) -> None:
    """The same once more under torch's profiler, whose copies are the driver's own account."""
    trace = context.work / f"trace-{executor}.json"
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(15):
            _turn(context, batches, step)
    profiler.export_chrome_trace(str(trace))
    found = account(trace)
    context.report.add(**{f"{executor}_profiler_{name}": value for name, value in found.items()})
    if found["copied_bytes"]:
        share = found["copied_bytes"] / found["copies_s"] / bare
        context.report.bar(f"{executor}_profiler_share_of_bus", share, least=_SHARE)
        context.report.bar(
            f"{executor}_profiler_overlap", found["beside_kernels_s"] / found["copies_s"], least=_OVERLAP
        )


def account(trace: Path) -> dict[str, float]:
    """The large copies to the device in a trace, and for how much of their time kernels of a step ran beside them."""
    events = json.loads(trace.read_text())["traceEvents"]
    timed = [event for event in events if event.get("ph") == "X"]
    copies = [event for event in timed if event.get("cat") == "gpu_memcpy" and "HtoD" in event["name"]]
    large = [event for event in copies if event["args"].get("bytes", 0) >= 2**20]
    kernels = [(event["ts"], event["ts"] + event["dur"]) for event in timed if event.get("cat") == "kernel"]
    spans = [(event["ts"], event["ts"] + event["dur"]) for event in large]
    return {
        "num_copies": float(len(large)),
        "num_pageable": float(sum("Pageable" in event["name"] for event in large)),
        "copied_bytes": float(sum(event["args"]["bytes"] for event in large)),
        "copies_s": sum(event["dur"] for event in large) / 1e6,
        "beside_kernels_s": shared_time(spans, kernels) / 1e6,
    }


def shared_time(spans: Iterable[Span], others: Iterable[Span]) -> float:
    """For how long one of `spans` and one of `others` went on at once; those of one list may overlap one another."""
    one, other = merged(spans), merged(others)
    total, place = 0.0, 0
    for begin, end in one:
        while place < len(other) and other[place][1] <= begin:
            place += 1
        for first, last in other[place:]:
            if first >= end:
                break
            total += min(end, last) - max(begin, first)
    return total


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same time in spans that do not overlap, in order."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found
