"""The kernel's counters of this process: memory, CPU time, throttling, and bytes read, from the page cache or a disk."""

from __future__ import annotations

import io
import resource
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

from loaderkit._internal.cgroups import cgroup_folders, idle_so_far_s

_SECONDS = {b"throttled_usec": 1e-6, b"throttled_time": 1e-9}  # the counters of cgroups, versions 2 and 1


@dataclass(frozen=True)
class HostStats:
    """Counters since the process began; resident memory is that of this moment.

    None if the kernel does not say: throttling outside of a cgroup with a quota, bytes without /proc/self/io.
    """

    rss_bytes: int
    rss_peak_bytes: int
    cpu_s: float
    throttled_s: float | None
    read_bytes: int | None  # by system calls, from the page cache or a disk
    disk_bytes: int | None  # fetched from a disk for them
    idle_s: float | None = None
    """For how long the CPUs this process may use were idle since the machine was booted, added up."""

    def minus(self, earlier: HostStats) -> HostStats:
        """The counters between two moments."""
        return HostStats(
            self.rss_bytes,
            self.rss_peak_bytes,
            self.cpu_s - earlier.cpu_s,
            _difference(self.throttled_s, earlier.throttled_s),
            _difference(self.read_bytes, earlier.read_bytes),
            _difference(self.disk_bytes, earlier.disk_bytes),
            _difference(self.idle_s, earlier.idle_s),
        )

    @property
    def page_cache_hits(self) -> float | None:
        """The share of the bytes read that came from the page cache; None if it is not known."""
        if not self.read_bytes or self.disk_bytes is None:
            return None
        # Below 0 where read-ahead fetched more than was read, or memory-mapped files were fetched without a read.
        return max(0.0, 1.0 - self.disk_bytes / self.read_bytes)


_MAX_BYTES = 2**16  # a user in hundreds of groups has a long /proc/self/status
Number = TypeVar("Number", int, float)


def _difference(later: Number | None, earlier: Number | None) -> Number | None:
    return None if later is None or earlier is None else later - earlier


def merged_hosts(hosts: Sequence[HostStats]) -> HostStats:
    """The counters of several processes, summed. Throttling is that of the cgroup they share, and idle time that of the
    machine: these are not summed."""
    throttled = [host.throttled_s for host in hosts if host.throttled_s is not None]
    idle = [host.idle_s for host in hosts if host.idle_s is not None]
    return HostStats(
        sum(host.rss_bytes for host in hosts),
        sum(host.rss_peak_bytes for host in hosts),
        sum(host.cpu_s for host in hosts),
        max(throttled, default=None),
        _sum(host.read_bytes for host in hosts),
        _sum(host.disk_bytes for host in hosts),
        max(idle, default=None),
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
    io = _numbers(_content("/proc/self/io"))
    status = _numbers(_content("/proc/self/status").replace(b" kB", b""))
    # In a process that was just started, the peak of `getrusage` begins as that of its parent.
    peak_kib = status.get(b"VmHWM", usage.ru_maxrss)
    return HostStats(
        rss_bytes=status.get(b"VmRSS", peak_kib) * 1024,
        rss_peak_bytes=peak_kib * 1024,
        cpu_s=usage.ru_utime + usage.ru_stime,
        throttled_s=max((_throttled_s(file) for file in _throttling_files()), default=None),
        read_bytes=io.get(b"rchar"),
        disk_bytes=io.get(b"read_bytes"),
        idle_s=idle_so_far_s(),
    )


@cache  # there are many folders, few of them with counters, and the search takes longer than all the rest
def _throttling_files() -> tuple[str, ...]:
    """The files that say how long a quota kept the tasks of this process's cgroups from running."""
    files = [str(folder / "cpu.stat") for folder in cgroup_folders("cpu")]
    return tuple(file for file in files if not _numbers(_content(file)).keys().isdisjoint(_SECONDS))


def _throttled_s(file: str) -> float:
    numbers = _numbers(_content(file))
    return max((numbers[name] * seconds for name, seconds in _SECONDS.items() if name in numbers), default=0.0)


def _content(path: str) -> bytes:
    """A short file of the kernel, read without the layers of `open`; empty if there is no such file, or no descriptor left."""
    try:
        with io.FileIO(path) as file:
            return file.read(_MAX_BYTES)
    except OSError:
        return b""


def _numbers(content: bytes) -> dict[bytes, int]:
    """The numbers of a file that has a name and a number in each line."""
    split = (line.replace(b":", b" ").split() for line in content.splitlines())
    return {name: int(value) for name, value in (words for words in split if len(words) == 2) if value.isdigit()}
