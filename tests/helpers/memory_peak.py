"""The most memory that this process has had since a moment, as the kernel counts it."""

from __future__ import annotations

import re
from pathlib import Path


def peak_bytes(name: str) -> int:
    """What the kernel says of this process's memory: VmRSS, or VmHWM, the most since `forget_peak`."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")
