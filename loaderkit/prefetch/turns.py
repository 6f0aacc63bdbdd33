"""Whether a pool does better with one worker than with all of them.

Python code holds the GIL: two threads in it are slower than one, because they hand the GIL back and forth. Whether code holds
the GIL cannot be seen from outside, but be measured: where workers that overlap spend much of their time off the CPU, one of
them works alone for a few chunks, and whichever way was faster is kept for a while.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from statistics import median
from time import thread_time
from typing import NamedTuple

from loaderkit.prefetch.accounts import Account, Clock

_WINDOW = 12  # chunks a way is tried for
_PATIENCE = 1000  # chunks until the other way is tried again
_PATIENCE_S = 5.0  # and no longer than that with one worker alone: its store may have turned slow
_BUSY_SHARE = 0.75  # of the time on the CPU: more of it means that the GIL is not what is waited for
_GAIN = 1.05
_LEAST = 3  # chunks after which a trial that plainly loses is given up
_HOPELESS = 0.7
_MOST_PATIENCE = 64 * _PATIENCE


class Ticket(NamedTuple):
    """A chunk being worked on: how many workers were inside with it, since when, and the thread's CPU time then."""

    num_inside: int
    since_s: float
    cpu_since_s: float


class Turns:
    """Lets the workers of one pool take chunks: all of them, or one."""

    def __init__(self, clock: Clock, cpu_clock: Clock = thread_time) -> None:
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._change = threading.Condition()
        self._chosen: Account | None = None  # who works while only one does
        self._num_inside = 0
        self._num_left = _WINDOW  # chunks until the next look
        self._until_s = 0.0  # one alone, and settled: when all are tried again at the latest
        self._patience = _PATIENCE  # doubled with every trial that was lost
        self._speeds: deque[float] = deque(maxlen=_WINDOW)  # of the pool, in samples a second, as each chunk had it
        self._cpu_shares: deque[float] = deque(maxlen=_WINDOW)
        self._free_speed: float | None = None  # with all workers, if that was just measured
        self._is_closed = False
        self.one_at_a_time = False

    def wait(self, account: Account, idle: int, pass_on: Callable[[], None] = lambda: None) -> None:
        """Return when this worker may take a chunk; until then it is accounted as idle. `pass_on` wakes another worker that
        waits for work: this one may have been woken in its place."""
        if not self.one_at_a_time:
            return
        with self._change:
            while self.one_at_a_time and not self._is_closed and self._chosen not in (None, account):
                if account.open_state != idle:
                    account.enter(idle)
                    pass_on()
                self._change.wait()
            self._chosen = account if self.one_at_a_time else None

    def leave(self, account: Account) -> None:
        """This worker takes no more chunks: another one may have its turn."""
        with self._change:
            if self._chosen is account:
                self._chosen = None
                self._change.notify_all()

    def begin(self) -> Ticket | None:
        """A worker begins with a chunk. None: for now it is settled who works, and nobody measures."""
        if self._num_left > _WINDOW:
            return None
        with self._change:
            self._num_inside += 1
            return Ticket(self._num_inside, self._clock(), self._cpu_clock())

    def end(self, ticket: Ticket | None, num_samples: int) -> None:
        """It is done with it: note what came of that."""
        if ticket is None:
            self._num_left -= 1  # workers may race here: it is a number of chunks, more or less
            if self.one_at_a_time and self._clock() >= self._until_s:
                with self._change:
                    self._let_all_in(_WINDOW)
            return
        seconds, cpu_s = max(self._clock() - ticket.since_s, 1e-9), self._cpu_clock() - ticket.cpu_since_s
        with self._change:
            num_inside = max(ticket.num_inside, self._num_inside)
            self._num_inside -= 1
            # A worker beside nobody says nothing of all of them, nor does one beside others of one alone.
            if (num_inside == 1) != self.one_at_a_time:
                return
            self._speeds.append(num_inside * num_samples / seconds)
            self._cpu_shares.append(cpu_s / seconds)
            self._num_left -= 1
            if self._num_left <= 0 or self._is_hopeless():
                self._decide()

    def _is_hopeless(self) -> bool:
        """One alone, on trial, is plainly slower: with many workers that wait for a store each of its chunks is dear."""
        return (
            self.one_at_a_time
            and self._free_speed is not None
            and len(self._speeds) >= _LEAST
            and median(self._speeds) < _HOPELESS * self._free_speed
        )

    def close(self) -> None:
        """Let everybody go."""
        with self._change:
            self._is_closed = True
            self._change.notify_all()

    def _decide(self) -> None:
        # Medians: a chunk during which the whole process stood still says nothing of either way.
        speed, is_waiting = median(self._speeds), median(self._cpu_shares) < _BUSY_SHARE
        self._speeds.clear()
        self._cpu_shares.clear()
        if not self.one_at_a_time:
            self._free_speed = speed
            self.one_at_a_time = is_waiting
            self._num_left = _WINDOW if is_waiting else self._patience
        elif self._free_speed is not None and speed > _GAIN * self._free_speed:
            self._free_speed = None  # one alone is better: keep that, and look at the other way again later
            self._num_left = self._patience = _PATIENCE
            self._until_s = self._clock() + _PATIENCE_S
        elif self._free_speed is None:
            self._let_all_in(_WINDOW)
        else:
            self._let_all_in(self._patience)
            self._patience = min(2 * self._patience, _MOST_PATIENCE)

    def _let_all_in(self, num_chunks: int) -> None:
        """All workers, for so many chunks until the next look. Under the lock."""
        self.one_at_a_time = False
        self._chosen = None  # else the next trial waits for whoever was chosen in the last one
        self._num_left = num_chunks
        self._speeds.clear()
        self._cpu_shares.clear()
        self._change.notify_all()
