"""The kernel's counters of this process: memory, CPU time, throttling, and bytes read, from the page cache or a disk."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeVar

from threadpoolctl import threadpool_info

from loaderkit._internal.system.cgroups import CpuTimes, cgroup_folders, cpu_quota, cpu_times_so_far
from loaderkit._internal.system.kernel_files import content, numbers_of

_SECONDS = {b"throttled_usec": 1e-6, b"throttled_time": 1e-9}  # the counters of cgroups, versions 2 and 1


@dataclass(frozen=True)
class HostStats:
    """Counters since the process began; `idle_s` and `others_s` since the loop's first wait. Memory is as of this moment.

    A counter is None where the kernel does not give it: throttling outside of a cgroup with a quota, bytes without
    /proc/self/io, the CPUs' times with a quota.
    """

    rss_bytes: int
    rss_peak_bytes: int
    cpu_s: float
    throttled_s: float | None
    read_bytes: int | None  # by system calls, from the page cache or a disk
    disk_bytes: int | None  # fetched from a disk for them
    idle_s: float | None = None  # of the CPUs that this process may use, added up
    others_s: float | None = (
        None  # of these CPUs, used by other programs or taken away by the host of a virtual machine
    )
    native_s: float = 0.0  # CPU time of threads that Python did not start: pools of BLAS, OpenMP, torch
    swapped_bytes: int = 0  # of this process, at this moment
    quota_cpus: float | None = None  # CPUs that its cgroup leaves it; None without a quota

    def minus(self, earlier: HostStats) -> HostStats:
        """The counters between two moments."""
        return replace(
            self,
            cpu_s=self.cpu_s - earlier.cpu_s,
            throttled_s=_difference(self.throttled_s, earlier.throttled_s),
            read_bytes=_difference(self.read_bytes, earlier.read_bytes),
            disk_bytes=_difference(self.disk_bytes, earlier.disk_bytes),
            idle_s=_difference(self.idle_s, earlier.idle_s or 0.0),  # None before the first wait
            others_s=_difference(self.others_s, earlier.others_s or 0.0),
            native_s=max(0.0, self.native_s - earlier.native_s),  # a thread that has ended takes its time with it
        )

    @property
    def page_cache_hits(self) -> float | None:
        """The share of the bytes read that came from the page cache; None if it is not known."""
        if not self.read_bytes or self.disk_bytes is None:
            return None
        # Below 0 where read-ahead fetched more than was read, or memory-mapped files were fetched without a read.
        return max(0.0, 1.0 - self.disk_bytes / self.read_bytes)


class CpuWatch:
    """What the CPUs that this process may use have done since `begin`."""

    def __init__(self) -> None:
        self._first: tuple[CpuTimes | None, float] = (None, 0.0)

    def begin(self) -> None:
        """Start to count."""
        self._first = (cpu_times_so_far(), time.process_time())

    def added_to(self, host: HostStats, children_s: float = 0.0) -> HostStats:
        """`host` with the CPUs' times; `children_s` of them went to this program's other processes."""
        (first, first_own_s), now = self._first, cpu_times_so_far()
        if first is None or now is None:
            return replace(host, idle_s=None, others_s=None)
        own_s = time.process_time() - first_own_s + children_s
        # Below 0 where the other processes had started before: between two moments that does not count.
        return replace(host, idle_s=now.idle_s - first.idle_s, others_s=now.busy_s - first.busy_s - own_s)


Number = TypeVar("Number", int, float)


def _difference(later: Number | None, earlier: Number | None) -> Number | None:
    return None if later is None or earlier is None else later - earlier


def merged_hosts(hosts: Sequence[HostStats]) -> HostStats:
    """The counters of several processes, summed. Throttling is counted for the cgroup they share, so it is not summed.
    What the CPUs did cannot be known from them."""
    throttled = [host.throttled_s for host in hosts if host.throttled_s is not None]
    return HostStats(
        rss_bytes=sum(host.rss_bytes for host in hosts),
        rss_peak_bytes=sum(host.rss_peak_bytes for host in hosts),
        cpu_s=sum(host.cpu_s for host in hosts),
        throttled_s=max(throttled, default=None),
        read_bytes=_sum(host.read_bytes for host in hosts),
        disk_bytes=_sum(host.disk_bytes for host in hosts),
        native_s=sum(host.native_s for host in hosts),
        swapped_bytes=sum(host.swapped_bytes for host in hosts),
        quota_cpus=hosts[0].quota_cpus,
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
    io = numbers_of(content("/proc/self/io"))
    status = numbers_of(content("/proc/self/status").replace(b" kB", b""))
    # In a process that was just started, the peak of `getrusage` begins with its parent's peak.
    peak_kib = status.get(b"VmHWM", usage.ru_maxrss)
    return HostStats(
        rss_bytes=status.get(b"VmRSS", peak_kib) * 1024,
        rss_peak_bytes=peak_kib * 1024,
        cpu_s=usage.ru_utime + usage.ru_stime,
        throttled_s=max((_throttled_s(file) for file in _throttling_files()), default=None),
        read_bytes=io.get(b"rchar"),
        disk_bytes=io.get(b"read_bytes"),
        native_s=_native_s(),
        swapped_bytes=status.get(b"VmSwap", 0) * 1024,
        quota_cpus=_quota(),
    )


def _native_s() -> float:
    """CPU time so far of the threads that Python did not start; 10 us each."""
    # In a fork, Python still has the number of the parent's main thread for the main thread.
    started = {str(os.getpid()), *(str(thread.native_id) for thread in threading.enumerate())}
    total_ns = 0
    try:
        threads = os.listdir("/proc/self/task")
    except OSError:  # no such folder, or no descriptor left
        return 0.0
    for thread in threads:
        if thread not in started and (words := content(f"/proc/self/task/{thread}/schedstat").split()):
            total_ns += int(words[0])
    return total_ns * 1e-9


_quota = cache(cpu_quota)


@cache  # there are many folders, few of them with counters, and the search takes longer than all the rest
def _throttling_files() -> tuple[str, ...]:
    """The files that say how long a quota kept the tasks of this process's cgroups from running."""
    files = [str(folder / "cpu.stat") for folder in cgroup_folders("cpu")]
    return tuple(file for file in files if not numbers_of(content(file)).keys().isdisjoint(_SECONDS))


def _throttled_s(file: str) -> float:
    numbers = numbers_of(content(file))
    return max((numbers[name] * seconds for name, seconds in _SECONDS.items() if name in numbers), default=0.0)


_VARIABLES = {
    "openblas": "OPENBLAS_NUM_THREADS",
    "mkl": "MKL_NUM_THREADS",
    "blis": "BLIS_NUM_THREADS",
    "openmp": "OMP_NUM_THREADS",
}


def thread_variables() -> list[str]:
    """The environment variables that set how many threads the libraries in this process compute with, where that is several."""
    several = {pool["internal_api"] for pool in threadpool_info() if pool["num_threads"] > 1}
    return [variable for library, variable in _VARIABLES.items() if library in several] or [*_VARIABLES.values()]
