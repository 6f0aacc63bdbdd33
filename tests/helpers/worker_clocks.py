"""Worker clocks as they are, and as they are where loaderkit was installed without a compiler."""

from __future__ import annotations

import importlib.util
import sys
from unittest import mock

import pytest

from loaderkit import native
from loaderkit.engine.metrics import worker_clock
from loaderkit.engine.metrics.worker_clock import ClockTotals, WorkerClock


def _in_python() -> type[WorkerClock]:
    spec = importlib.util.spec_from_file_location("worker_clock_in_python", worker_clock.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with mock.patch.object(native, "HAS_KERNELS", False), mock.patch.dict(sys.modules, {spec.name: module}):
        spec.loader.exec_module(module)
    found: type[WorkerClock] = module.WorkerClock
    return found


class HandClock:
    """A clock that stands still until it is told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


PythonWorkerClock = _in_python()
both = pytest.mark.parametrize("clock_type", [WorkerClock, PythonWorkerClock], ids=["as it is", "in Python"])


def state_s(one: WorkerClock, now: float) -> list[float]:
    """Its seconds by state."""
    return type(one).summed([one], now)[0]


def cpu_s(one: WorkerClock) -> list[float]:
    """Its CPU seconds by stage."""
    return [ClockTotals._make(row).cpu_s for row in type(one).summed([one], 0.0)[1]]
