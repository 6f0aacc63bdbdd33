"""Whether the workers of a pool do better one at a time.

Python code holds the GIL: two threads in it are slower than one, because they hand the GIL back and forth (a data set of
one-element tensors: 173,000 samples a second with two free threads, 225,000 when they take turns). Whether code holds the
GIL cannot be seen from outside, but be measured: where workers that overlap spend much of their time off the CPU, a few
chunks are run one at a time, and whichever way was faster is kept for a while.
"""

from __future__ import annotations

import threading
from collections import deque
from statistics import median
from time import thread_time
from typing import NamedTuple

from loaderkit.prefetch.accounts import Account, Clock

_WINDOW = 12  # chunks a way is tried for
_PATIENCE = 1000  # chunks until the other way is tried again
_BUSY_SHARE = 0.75  # of the time on the CPU: more of it means that the GIL is not what is waited for
_GAIN = 1.05


class Ticket(NamedTuple):
    """A chunk being worked on: whether alone, how many others were, since when, and the thread's CPU time then."""

    alone: bool
    num_inside: int
    since_s: float
    cpu_since_s: float


class Turns:
    """Lets the workers of one pool in: all at once, or one at a time."""

    def __init__(self, clock: Clock, cpu_clock: Clock = thread_time) -> None:
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._turn = threading.Lock()
        self._lock = threading.Lock()
        self._num_inside = 0
        self._num_left = _WINDOW  # chunks until the next look
        self._speeds: deque[float] = deque(maxlen=_WINDOW)  # of the pool, in samples a second, as each chunk had it
        self._cpu_shares: deque[float] = deque(maxlen=_WINDOW)
        self._free_speed: float | None = None  # samples a second when it was last measured; None: not yet
        self.one_at_a_time = False

    def begin(self, account: Account, idle: int) -> Ticket:
        """Wait for a turn, if turns are taken, accounted as idle."""
        alone = self.one_at_a_time
        if alone and not self._turn.acquire(blocking=False):
            account.enter(idle)
            self._turn.acquire()
        with self._lock:
            self._num_inside += 1
            return Ticket(alone, self._num_inside, self._clock(), self._cpu_clock())

    def end(self, ticket: Ticket, num_samples: int) -> None:
        """Note what came of it, and let the next in."""
        seconds, cpu_s = self._clock() - ticket.since_s, self._cpu_clock() - ticket.cpu_since_s
        with self._lock:
            overlapped = max(ticket.num_inside, self._num_inside) > 1
            self._num_inside -= 1
            # What ran while the way was changed, or beside nobody, says nothing of either way.
            if ticket.alone == self.one_at_a_time and (overlapped or ticket.alone):
                num_inside = 1 if ticket.alone else max(ticket.num_inside, 2)
                seconds = max(seconds, 1e-9)
                self._speeds.append(num_inside * num_samples / seconds)
                self._cpu_shares.append(cpu_s / seconds)
                self._num_left -= 1
                if self._num_left <= 0:
                    self._decide()
        if ticket.alone:
            self._turn.release()

    def _decide(self) -> None:
        # Medians: a chunk during which the whole process stood still says nothing of either way.
        speed, is_waiting = median(self._speeds), median(self._cpu_shares) < _BUSY_SHARE
        self._speeds.clear()
        self._cpu_shares.clear()
        if not self.one_at_a_time:
            self._free_speed = speed
            self.one_at_a_time = is_waiting
            self._num_left = _WINDOW if is_waiting else _PATIENCE
        elif self._free_speed is not None and speed > _GAIN * self._free_speed:
            self._free_speed = None  # turns are better: keep them, and look at the other way again later
            self._num_left = _PATIENCE
        else:
            self.one_at_a_time = False
            self._num_left = _WINDOW if self._free_speed is None else _PATIENCE
