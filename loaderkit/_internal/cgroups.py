"""How many CPUs there really are for us."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_MOST_BYTES = 2**17  # of /proc/stat: 80 a CPU, and those come first


def num_cpus() -> int:
    """CPUs this process may use: its affinity and its cgroup's quota (v2 and v1), whichever is less; at least 1."""
    available = len(os.sched_getaffinity(0))
    for folder in cgroup_folders():
        quota, period = _quota_of(folder)
        if quota > 0 and period > 0:
            available = min(available, max(1, round(quota / period)))
    return available


def idle_so_far_s() -> float | None:
    """Seconds for which the CPUs this process may use have had nothing to run, added up; None if the kernel does not tell, or
    if a quota keeps the process from using them."""
    if _has_quota():
        return None
    available = os.sched_getaffinity(0)
    try:
        with io.FileIO("/proc/stat") as file:
            rows = [row.split() for row in file.read(_MOST_BYTES).splitlines()]
        idle = {int(row[0][3:]): int(row[4]) for row in rows if row[0].startswith(b"cpu") and row[0] != b"cpu"}
        return sum(idle[cpu] for cpu in available) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, KeyError):
        return None


@cache  # to look takes twice as long as all the rest
def _has_quota() -> bool:
    return num_cpus() < len(os.sched_getaffinity(0))


def cgroup_folders() -> Iterator[Path]:
    """Where the kernel keeps the CPU limits and counters of our cgroup and those around it, innermost first."""
    try:
        groups = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in groups:
        _, controllers, group = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = Path("/sys/fs/cgroup" + ("/cpu" if controllers else ""))
        folder = root / group.lstrip("/")
        yield from (place for place in (folder, *folder.parents) if place.is_relative_to(root))


def _quota_of(folder: Path) -> tuple[int, int]:
    """(quota, period) in microseconds; zeros without a limit at this level."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text()
            period = (folder / "cpu.cfs_period_us").read_text()
        return int(quota), int(period)
    except (OSError, ValueError):  # no such file, or "max"
        return 0, 0
