"""Runs a ported pipeline with the script's own step, as it was measured, for a few seconds."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from loaderkit._internal.system.cgroups import num_cpus
from loaderkit.profile.experiments.headroom import num_samples_of
from loaderkit.profile.experiments.interleave import RateWindow, rate_of
from loaderkit.profile.experiments.loops import Step, endless
from loaderkit.profile.port.check import Build
from loaderkit.profile.port.loader import PortedPipeline
from loaderkit.profile.report import Report
from loaderkit.profile.report_parts import Rate

_SETTLE_S, _MOST_S = 4.0, 12.0  # in the first seconds workers start and are tuned
_MOVE_S = 20.0  # in which a loader that waits for code of the user has moved to processes, if it will
_WINDOW_S, _LEAST_WINDOWS = 1.0, 4
_SURE = 5.0  # percent
_OUTLIER = 10.0  # times the median: a first step that compiles or allocates
_IDLE = 0.02  # CPUs of a step that only waits, as for a GPU
_LATE_S = 1e-3  # a timer is no later; a longer delay is that of a busy machine
_SIDE = 96  # of matrices whose product takes 50 us: as long as an operation of a small model


class ScriptStep(NamedTuple):
    """A step of the script: how long it takes, and how many CPUs it uses meanwhile."""

    seconds: float
    cpus: float


def step_of(report: Report, cpu_s: float, delayed_share: float) -> ScriptStep | None:
    """The mean step of a watched loop; None if there was no step between two batches.

    `cpu_s`: CPU time of the process in all steps. `delayed_share`: the share of the steps' time in which their thread
    was ready to run while the workers had the CPUs.
    """
    steps = [step.compute_s for step in report.steps.steps]
    most_s = _OUTLIER * (report.steps.compute_p50_s or math.inf)
    usual = [step_s for step_s in steps if step_s <= most_s] or steps
    if not usual:
        return None
    saved_s = report.steps.save_waiting_s + report.steps.save_staging_s
    whole_s = max(report.steps.compute_s - saved_s, 1e-9)
    mean_s, running = sum(usual) / len(usual), 1 - min(0.9, delayed_share)
    return ScriptStep(mean_s * running, min(cpu_s / (whole_s * running), float(num_cpus() or 1)))


def run_with_step(ported: PortedPipeline, step: ScriptStep | None, build: Build) -> tuple[Rate, float]:
    """The pipeline's speed in a loop with that step (None for the pipeline alone), and how much of the time it waits,
    in percent. Raises LoaderkitError."""
    imitation = _Imitation(step or ScriptStep(0.0, 0.0))
    try:
        with build(ported.here(), overrides={"order.epochs": None}) as loader:
            batches, windows, executor = endless(loader), list[RateWindow](), loader.stats().tuning.executor
            while not windows or loader.stats().tuning.executor != executor:  # it moved to processes meanwhile
                executor = loader.stats().tuning.executor
                windows = _windows_of(batches, imitation, may_move=executor == "thread" and ported.runs_own_code)
    finally:
        imitation.close()
    waited_s, whole_s = sum(one.stall_s for one in windows), sum(one.seconds for one in windows)
    return rate_of(windows), 100 * waited_s / max(whole_s, 1e-9)


def _windows_of(batches: Iterator[Any], step: Step, *, may_move: bool) -> list[RateWindow]:
    """Windows from when workers have started and are tuned, until the speed is known; with `may_move`, long enough for a
    move to processes."""
    begin_s, windows = time.perf_counter(), list[RateWindow]()
    while True:
        ran_s = time.perf_counter() - begin_s
        sure = len(windows) >= _LEAST_WINDOWS and rate_of(windows).interval_percent < _SURE
        if len(windows) >= 2 and (ran_s > (_MOVE_S if may_move else _MOST_S) or (sure and not may_move)):
            return windows
        window = _window(batches, step)
        if ran_s >= _SETTLE_S:
            windows.append(window)


def _window(batches: Iterator[Any], step: Step) -> RateWindow:
    """Steps for a while, by a clock of its own: the loader's counters begin anew when it takes other processes."""
    batch = next(batches)
    begin_s = time.perf_counter()
    num_samples = num_batches = 0
    waited_s = 0.0
    while num_batches < 2 or time.perf_counter() - begin_s < _WINDOW_S:
        step(batch)
        asked_s = time.perf_counter()
        batch = next(batches)
        waited_s += time.perf_counter() - asked_s
        num_batches += 1
        num_samples += num_samples_of(batch)
    return RateWindow(num_samples, time.perf_counter() - begin_s, waited_s, num_batches)


class _Imitation:
    """A step that uses the same number of CPUs for the same time, by products of small matrices, which hold the GIL as
    little as a model's operations do. What one step takes too long, since a product or the system's timer is that coarse,
    the next ones take less."""

    def __init__(self, step: ScriptStep) -> None:
        self._seconds = step.seconds
        num_threads = max(1, math.ceil(step.cpus - 0.25))
        self._cpu_s = step.seconds * step.cpus / num_threads if step.cpus >= _IDLE else 0.0
        self._burners = [_Burner() for _ in range(num_threads)]
        self._pool = ThreadPoolExecutor(num_threads - 1) if num_threads > 1 else None
        self._over_s = 0.0

    def __call__(self, batch: Any) -> None:
        end_s = time.perf_counter() + self._seconds - self._over_s
        if self._cpu_s:
            first, *others = self._burners
            started = [] if self._pool is None else [self._pool.submit(other.burn, self._cpu_s) for other in others]
            first.burn(self._cpu_s)
            for one in started:
                one.result()
        if (left_s := end_s - time.perf_counter()) > 0:
            time.sleep(left_s)
            self._over_s = min(time.perf_counter() - end_s, max(self._seconds, _LATE_S))
        else:  # what other threads took from it is not to be made up for
            known_s = self._over_s + max(burner.over_s for burner in self._burners)
            self._over_s = min(-left_s, known_s, max(self._seconds, _LATE_S))

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()


class _Burner:
    """Uses CPU time in one thread; `over_s`: what it has used more than it was asked for."""

    def __init__(self) -> None:
        self.over_s = 0.0
        self._matrix = torch.ones(_SIDE, _SIDE)

    def burn(self, cpu_s: float) -> None:
        now_s = time.thread_time()
        end_s = now_s + cpu_s - self.over_s
        while now_s < end_s:
            torch.mm(self._matrix, self._matrix)
            now_s = time.thread_time()
        self.over_s = now_s - end_s
