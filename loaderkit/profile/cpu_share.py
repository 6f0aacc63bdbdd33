"""Measures the CPU time of other programs, which a prediction cannot use."""

from __future__ import annotations

import os
import time
from typing import NamedTuple

from loaderkit._internal.cgroups import num_cpus


class CpuTimes(NamedTuple):
    """CPU time so far in s, of the machine and of this process with its ended children."""

    at_s: float
    all_s: float
    own_s: float


def cpu_times() -> CpuTimes | None:
    """The times of now; None where this process may use a part of the CPUs only, and the load of the others does not matter."""
    if num_cpus() != os.cpu_count():
        return None
    try:
        with open("/proc/stat", encoding="ascii") as file:
            ticks = [int(number) for number in file.readline().split()[1:9]]
    except (OSError, ValueError):
        return None
    own = os.times()
    busy_s = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
    return CpuTimes(time.perf_counter(), busy_s, own.user + own.system)


def cpus_of_others(begin: CpuTimes | None, end: CpuTimes | None, more_s: float = 0.0) -> float | None:
    """The mean number of CPUs that other programs used; `more_s` is CPU time of our own other processes."""
    if begin is None or end is None or end.at_s <= begin.at_s:
        return None
    others_s = end.all_s - begin.all_s - (end.own_s - begin.own_s) - more_s
    return max(0.0, others_s / (end.at_s - begin.at_s))
