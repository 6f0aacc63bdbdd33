"""How many CPUs there really are for us."""

from __future__ import annotations

import os
from pathlib import Path


def num_cpus() -> int:
    """CPUs this process may use: its affinity and its cgroup's quota (v2 and v1), whichever is less; at least 1."""
    available = len(os.sched_getaffinity(0))
    for quota, period in _cgroup_quotas():
        if quota > 0 and period > 0:
            available = min(available, max(1, round(quota / period)))
    return available


def _cgroup_quotas() -> list[tuple[int, int]]:
    found = []
    try:
        groups = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in groups:
        _, controllers, group = line.split(":", 2)
        folder = Path("/sys/fs/cgroup" + ("" if not controllers else "/cpu")) / group.lstrip("/")
        for place in (folder, *folder.parents):
            try:
                if not controllers:
                    quota, period = (place / "cpu.max").read_text().split()
                elif "cpu" in controllers.split(","):
                    quota = (place / "cpu.cfs_quota_us").read_text()
                    period = (place / "cpu.cfs_period_us").read_text()
                else:
                    break
                found.append((int(quota), int(period)))
            except (OSError, ValueError):  # no such file at this level, or "max"
                continue
    return found
