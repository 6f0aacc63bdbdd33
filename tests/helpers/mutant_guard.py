"""Bounds on time and memory for reading one damaged file, and what is left behind."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import resource
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

IS_SANITIZED = "libasan" in os.environ.get("LD_PRELOAD", "")
MOST_CPU_S = 30 if IS_SANITIZED else 5  # of one file: the process's CPU time, which others do not add to
MOST_WAIT_S = 300.0  # nothing computed and nothing done: only what waits for ever takes so long
MOST_TIMES, MOST_MORE = 20, 64 * 2**20  # a file's size, and bytes besides
ROOM = 4 * 2**30  # of address space: more is refused by the system, before it hurts the machine


class Guard:
    """Ends the process if one file takes too long, and says what is left of it: memory, threads, processes, descriptors."""

    def __init__(self) -> None:
        faulthandler.register(signal.SIGPROF, chain=True)  # says where it was; then the signal kills it
        if not IS_SANITIZED:  # which takes 20 TB of addresses itself
            resource.setrlimit(resource.RLIMIT_AS, (_status("VmSize") + ROOM,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def begin(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, MOST_CPU_S)
        faulthandler.dump_traceback_later(MOST_WAIT_S, exit=True)
        self._threads = threading.active_count()
        self._descriptors = len(os.listdir("/proc/self/fd"))
        Path("/proc/self/clear_refs").write_text("5")  # the peak is that of now
        self._before = _status("VmRSS")

    def end(self, size: int) -> Iterator[str]:
        signal.setitimer(signal.ITIMER_PROF, 0)
        more = _status("VmHWM") - self._before
        if more > MOST_TIMES * size + MOST_MORE and not IS_SANITIZED:
            yield f"memory grew by {more / 2**20:.0f} MiB, over a file of {size} bytes"
        if threading.active_count() > self._threads:
            yield f"threads are left: {threading.enumerate()}"
        if multiprocessing.active_children():
            yield "processes are left"
        if len(os.listdir("/proc/self/fd")) > self._descriptors:
            gc.collect()
            if len(os.listdir("/proc/self/fd")) > self._descriptors:
                yield "descriptors are left"


def _status(name: str) -> int:
    """A line of the process's status, in bytes."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.partition(f"{name}:")[2].split()[0])
