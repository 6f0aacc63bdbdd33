"""What /proc says about a session of processes: who is in it, how long it computed, how much memory it holds."""

from __future__ import annotations

import ctypes
import os
import signal
from contextlib import suppress
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_PR_SET_PDEATHSIG = 1


def members(session: int) -> list[int]:
    """The processes of a session, zombies left out."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            fields = _stat(int(folder.name))
            if fields and int(fields[3]) == session and fields[0] != "Z":
                found.append(int(folder.name))
    return found


def cpu_seconds(session: int) -> float:
    """Seconds on a CPU of all processes of a session, and of the children they have waited for."""
    ticks = 0
    for process in members(session):
        fields = _stat(process)
        ticks += sum(int(value) for value in fields[11:15])
    return ticks / _TICKS


def memory_bytes(session: int) -> int:
    """Proportional memory of a session: a page that n processes share counts n-th for each, so once in all."""
    total = 0
    for process in members(session):
        with suppress(OSError):
            for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total


def resident_bytes(field: str) -> int:
    """VmRSS (now) or VmHWM (the most ever) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def send(session: int, sign: signal.Signals, spare: str | None = None) -> None:
    """A signal to every process of a session, also to those that left its first group; not to those whose command line
    contains `spare`."""
    for process in members(session):
        with suppress(ProcessLookupError):
            if spare is None or spare not in _command(process):
                os.kill(process, sign)


def _command(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_text(errors="replace")
    except OSError:
        return ""


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that started it is gone, however it went."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _stat(process: int) -> list[str]:
    """The fields of /proc/<pid>/stat from the state on; empty if there is no such process any more."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
