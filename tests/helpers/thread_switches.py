"""Threads that get in one another's way as often as Python lets them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable


def race(work: Callable[[int], object], num_threads: int = 4) -> None:
    """Run `work(number)` in `num_threads` threads at once, which take the GIL from one another after every few steps."""
    threads = [threading.Thread(target=work, args=[number]) for number in range(num_threads)]
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval_s)
