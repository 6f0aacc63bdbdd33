"""A bound on bytes per second, shared by threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_NAP_S = 0.5  # the longest sleep, after which it is asked whether to go on


class Bandwidth:
    """Lets parts of at most `bytes_per_s` through, each at its time: n bytes take the n / `bytes_per_s` seconds that follow.

    So in any time at most one part more goes through than the bound says.
    """

    def __init__(
        self,
        bytes_per_s: int | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """None: no bound."""
        self._bytes_per_s, self._clock, self._sleep = bytes_per_s, clock, sleep
        self._lock = threading.Lock()
        self._free_s = 0.0  # when what has been let through is over

    def wait(self, num_bytes: int, check: Callable[[], None] = lambda: None) -> None:
        """Return when a part may go. `check` is called between naps, and may raise."""
        if self._bytes_per_s is None:
            return
        with self._lock:
            begin_s = max(self._free_s, self._clock())
            self._free_s = begin_s + num_bytes / self._bytes_per_s
        while (left_s := begin_s - self._clock()) > 0:
            check()
            self._sleep(min(left_s, _NAP_S))
