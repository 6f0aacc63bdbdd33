"""Reads the kernel's counters of other processes: what loading processes do, and which programs use the CPUs."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple, Self

from loaderkit._internal.system.kernel_files import content, numbers_of

_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class ProcessCounters:
    """Counters of one process or, added up, of several, since they began; `rss_bytes` is of this moment."""

    cpu_s: float = 0.0  # of all threads
    kernel_s: float = 0.0  # of cpu_s, in the kernel: new pages of memory, copies to and from files and pipes
    delayed_s: float = 0.0  # threads were ready to run, and no CPU was free
    disk_wait_s: float = 0.0  # threads waited for a disk; 0, too, where the kernel does not count it
    read_bytes: int = 0  # by system calls, from the page cache or a disk
    disk_bytes: int = 0  # fetched from a disk for them
    num_disk_faults: int = 0  # pages of mapped files or of swap that a disk had to give
    rss_bytes: int = 0

    def plus(self, other: ProcessCounters) -> Self:
        """Both together."""
        return type(self)(*(getattr(self, name) + getattr(other, name) for name in _COUNTERS))

    def minus(self, earlier: ProcessCounters) -> Self:
        """The rise since `earlier`; memory is the present memory."""
        rise = {name: getattr(self, name) - getattr(earlier, name) for name in _COUNTERS if name != "rss_bytes"}
        return type(self)(**rise, rss_bytes=self.rss_bytes)


_COUNTERS = tuple(field.name for field in fields(ProcessCounters))


def process_counters(pid: int) -> ProcessCounters | None:
    """The counters of a process of this user; None if no process has that number, or if it has ended. Takes 0.1 ms."""
    row = _stat(pid)
    if row is None or row.state in "ZX":
        return None
    io = numbers_of(content(f"/proc/{pid}/io"))
    ran_s, delayed_s = thread_times(pid)
    return ProcessCounters(
        cpu_s=max(row.cpu_s, ran_s),  # ticks count threads that have ended, too, and are coarse
        kernel_s=row.kernel_s,
        delayed_s=delayed_s,
        disk_wait_s=row.disk_wait_s,
        read_bytes=io.get(b"rchar", 0),
        disk_bytes=io.get(b"read_bytes", 0),
        num_disk_faults=row.num_disk_faults,
        rss_bytes=row.rss_bytes,
    )


def thread_times(pid: int | str, thread: int | None = None) -> tuple[float, float]:
    """How long the threads of a process, or one of them, ran and how long they were ready to run without a CPU, in seconds."""
    threads: Collection[str | int]
    try:
        threads = os.listdir(f"/proc/{pid}/task") if thread is None else (thread,)
    except OSError:
        return 0.0, 0.0
    rows = [content(f"/proc/{pid}/task/{one}/schedstat").split() for one in threads]
    return sum(int(row[0]) for row in rows if row) * 1e-9, sum(int(row[1]) for row in rows if row) * 1e-9


def thread_delayed_s() -> float:
    """How long this thread was ready to run so far while no CPU was free, in seconds; 0 where the kernel does not say."""
    row = content("/proc/thread-self/schedstat").split()
    return int(row[1]) * 1e-9 if row else 0.0


def process_started_s(pid: int) -> float | None:
    """When a process was started, by CLOCK_BOOTTIME; None if no process has that number."""
    row = _stat(pid)
    return None if row is None else row.started_s


class Program(NamedTuple):
    """A process, and the CPU time it has used so far."""

    name: str
    cpu_s: float
    parent: int
    started_s: float


def programs() -> dict[int, Program]:
    """All processes that can be seen from here, by number; takes 20 us for each."""
    rows = ((int(name), _stat(int(name))) for name in os.listdir("/proc") if name.isdigit())
    return {pid: Program(row.name, row.cpu_s, row.parent, row.started_s) for pid, row in rows if row is not None}


def busiest(before: Mapping[int, Program], now: Mapping[int, Program], own: int) -> list[tuple[str, float]]:
    """What other programs used in between, as (name with number, CPU seconds), the busiest first. The process `own` and
    those that it has started are left out."""
    used = []
    for pid, program in now.items():
        if own in (pid, program.parent):
            continue
        earlier = before.get(pid)
        is_same = earlier is not None and earlier.started_s == program.started_s
        used_s = program.cpu_s - (earlier.cpu_s if earlier is not None and is_same else 0.0)
        used.append((f"{program.name} ({pid})", used_s))
    return sorted((row for row in used if row[1] > 0), key=lambda row: -row[1])


class _Stat(NamedTuple):
    name: str
    state: str
    parent: int
    cpu_s: float
    kernel_s: float
    disk_wait_s: float
    num_disk_faults: int
    started_s: float
    rss_bytes: int


def _stat(pid: int) -> _Stat | None:
    """What /proc/PID/stat says. The name in it may hold anything, blanks and brackets, too."""
    head, _, tail = content(f"/proc/{pid}/stat").rpartition(b")")
    values = tail.split()
    if len(values) < 40:
        return None
    return _Stat(
        name=head.partition(b"(")[2].decode(errors="backslashreplace"),
        state=values[0].decode(),
        parent=int(values[1]),
        cpu_s=(int(values[11]) + int(values[12])) * _TICK_S,
        kernel_s=int(values[12]) * _TICK_S,
        disk_wait_s=int(values[39]) * _TICK_S,
        num_disk_faults=int(values[9]),
        started_s=int(values[19]) * _TICK_S,
        rss_bytes=int(values[21]) * _PAGE_BYTES,
    )
