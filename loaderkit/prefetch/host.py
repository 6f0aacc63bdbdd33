"""What the kernel says of this process: memory, CPU time, throttling, and how much of what was read came from a disk."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from loaderkit.prefetch.cpus import cgroup_folders

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class HostStats:
    """Counters since the process began, but for the resident memory, which is as it is now.

    None where the kernel does not tell: throttling without a cgroup that has a quota, bytes without /proc/self/io.
    """

    rss_bytes: int
    rss_peak_bytes: int
    cpu_s: float
    throttled_s: float | None
    read_bytes: int | None  # by system calls of this process, from wherever
    disk_bytes: int | None  # of those, what the kernel had to fetch

    def minus(self, earlier: HostStats) -> HostStats:
        """The counters between two moments."""
        return HostStats(
            self.rss_bytes,
            self.rss_peak_bytes,
            self.cpu_s - earlier.cpu_s,
            _difference(self.throttled_s, earlier.throttled_s),
            _difference(self.read_bytes, earlier.read_bytes),
            _difference(self.disk_bytes, earlier.disk_bytes),
        )

    @property
    def page_cache_hits(self) -> float | None:
        """The share of the bytes read that was in the page cache; None if that cannot be known."""
        if not self.read_bytes or self.disk_bytes is None:
            return None
        # Read-ahead may fetch more than is asked for, and memory-mapped files are fetched without a read.
        return max(0.0, 1.0 - self.disk_bytes / self.read_bytes)


Number = TypeVar("Number", int, float)


def _difference(later: Number | None, earlier: Number | None) -> Number | None:
    return None if later is None or earlier is None else later - earlier


def together(parts: Sequence[HostStats]) -> HostStats:
    """The counters of several processes as those of one. Throttling is that of the cgroup they share: not a sum."""
    throttled = [part.throttled_s for part in parts if part.throttled_s is not None]
    return HostStats(
        sum(part.rss_bytes for part in parts),
        sum(part.rss_peak_bytes for part in parts),
        sum(part.cpu_s for part in parts),
        max(throttled, default=None),
        _sum(part.read_bytes for part in parts),
        _sum(part.disk_bytes for part in parts),
    )


def _sum(numbers: Iterable[int | None]) -> int | None:
    total = 0
    for number in numbers:
        if number is None:
            return None
        total += number
    return total


def host_stats() -> HostStats:
    """The counters now; takes 0.1 ms."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    io = _pairs(Path("/proc/self/io"))
    return HostStats(
        rss_bytes=_resident_bytes() or usage.ru_maxrss * 1024,
        rss_peak_bytes=usage.ru_maxrss * 1024,
        cpu_s=usage.ru_utime + usage.ru_stime,
        throttled_s=_throttled_s(),
        read_bytes=io.get("rchar"),
        disk_bytes=io.get("read_bytes"),
    )


def _resident_bytes() -> int | None:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
    except OSError:  # no descriptor left, say
        return None


def _throttled_s() -> float | None:
    """How long the tasks of our cgroup were kept from running by its CPU quota, or by one of those around it."""
    found = []
    for folder in cgroup_folders():
        pairs = _pairs(folder / "cpu.stat")
        if "throttled_usec" in pairs:  # version 2
            found.append(pairs["throttled_usec"] / 1e6)
        if "throttled_time" in pairs:  # version 1
            found.append(pairs["throttled_time"] / 1e9)
    return max(found, default=None)


def _pairs(path: Path) -> dict[str, int]:
    """The numbers of a file with a name and a number a line; empty if there is none."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    split = (line.replace(":", " ").split() for line in lines)
    return {name: int(value) for name, value in (words for words in split if len(words) == 2) if value.isdigit()}
