"""The CPUs and the memory that this process may use: the machine's, within the limits of its cgroups (versions 1 and 2)."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

_ROOT = Path("/")
_MAX_STAT_BYTES = 2**17  # of /proc/stat: 80 a CPU, and those come first
_MEMORY_FILES = (  # limit, use, and in memory.stat the cached pages of files; versions 2 and 1
    ("memory.max", "memory.current", "{}_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_{}_file"),
)
_OOM_FILES = ("memory.events", "memory.oom_control")  # versions 2 and 1


def cgroup_folders(controller: str, root: Path = _ROOT) -> Iterator[Path]:
    """The folders of this process's cgroup and of its ancestors, innermost first."""
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in groups:
        _, controllers, group = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mounted = root / "sys/fs/cgroup" / (controller if controllers else "")
        folder = mounted / group.lstrip("/")
        yield from (ancestor for ancestor in (folder, *folder.parents) if ancestor.is_relative_to(mounted))


def num_cpus() -> int:
    """CPUs this process may use: its affinity and its cgroup's quota (v2 and v1), whichever is less; at least 1."""
    available, quota = len(os.sched_getaffinity(0)), cpu_quota()
    return available if quota is None else min(available, max(1, round(quota)))


def num_cpus_of_rank() -> int:
    """The same for one of the ranks of this machine, which share its CPUs evenly; 0 if there are more ranks than CPUs."""
    ranks_here = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return num_cpus() // max(1, int(ranks_here) if ranks_here.isdigit() else 1)


def cpu_quota() -> float | None:
    """The CPUs that the quotas of this process's cgroups leave it; None without a quota."""
    quotas = [_quota_of(folder) for folder in cgroup_folders("cpu")]
    return min((quota / period for quota, period in quotas if quota > 0 and period > 0), default=None)


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


@cache  # this takes two thirds of the time of `cpu_times_so_far`
def _has_quota() -> bool:
    quota = cpu_quota()
    return quota is not None and quota < len(os.sched_getaffinity(0))


class CpuTimes(NamedTuple):
    """Seconds since the machine was booted, summed over the CPUs that this process may use."""

    idle_s: float
    busy_s: float  # with any program, or taken away by the host of a virtual machine


def cpu_times_so_far() -> CpuTimes | None:
    """None if the kernel does not say, or if a quota limits the process."""
    if _has_quota():
        return None
    available = os.sched_getaffinity(0)
    try:
        with io.FileIO("/proc/stat") as file:
            rows = [row.split() for row in file.read(_MAX_STAT_BYTES).splitlines()]
        ticks = {
            int(row[0][3:]): [*map(int, row[1:9])] for row in rows if row[0].startswith(b"cpu") and row[0] != b"cpu"
        }
        user, nice, system, idle, _, irq, softirq, steal = (
            sum(column) for column in zip(*(ticks[cpu] for cpu in available), strict=True)
        )
    except (OSError, ValueError, IndexError, KeyError):
        return None
    a_second = os.sysconf("SC_CLK_TCK")
    return CpuTimes(idle / a_second, (user + nice + system + irq + softirq + steal) / a_second)


def free_memory(root: Path = _ROOT) -> tuple[int | None, str]:
    """Bytes that can be allocated before the system kills a process (None if the kernel does not say), and what sets
    that limit: the machine or a cgroup."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        kilobytes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
        free = 1024 * (kilobytes["MemAvailable"] + kilobytes["SwapFree"])
    except (OSError, KeyError, ValueError):
        return None, ""
    limits = {"the machine": free}
    for folder in cgroup_folders("memory", root):
        if (left := _free_in(folder)) is not None:
            limits[f"this process's cgroup ({folder})"] = left
    tightest = min(limits, key=limits.__getitem__)
    return limits[tightest], tightest


def oom_kills(root: Path = _ROOT) -> int | None:
    """How many processes the kernel has killed in this process's cgroup because memory was short; outside of a cgroup,
    how many on the machine. None if the kernel does not say."""
    files = [folder / name for folder in cgroup_folders("memory", root) for name in _OOM_FILES]
    for file in (*files, root / "proc/vmstat"):
        try:
            counters = dict(line.split() for line in file.read_text().splitlines())
            return int(counters["oom_kill"])
        except (OSError, KeyError, ValueError):  # no such file at this level, or an older kernel
            continue
    return None


def _free_in(folder: Path) -> int | None:
    """Bytes left in a cgroup; None without a limit at this level. Cached pages of files count as free: the kernel drops them
    before it kills a process."""
    for limit, used, cached in _MEMORY_FILES:
        try:
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            droppable = int(stat[cached.format("active")]) + int(stat[cached.format("inactive")])
            return int((folder / limit).read_text()) - int((folder / used).read_text()) + droppable
        except (OSError, KeyError, ValueError):  # no such file at this level, or "max"
            continue
    return None
