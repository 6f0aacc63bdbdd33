"""Whether a pool does better with one worker than with all of them.

Python code holds the GIL: two threads in it are slower than one, because they hand the GIL back and forth. Whether code holds
the GIL cannot be seen from outside, but be measured: where workers that overlap spend much of their time off the CPU, one of
them works alone for a few chunks, and whichever way was faster is kept for a while.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
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
    """A chunk being worked on: how many workers were inside with it, since when, the thread's CPU time then, and for how
    long workers had overlapped so far."""

    num_inside: int
    since_s: float
    cpu_since_s: float
    overlap_since_s: float


@dataclass
class _Flow:
    """What was got done, and in what time."""

    num_samples: float = 0.0
    seconds: float = 0.0

    @property
    def speed(self) -> float:
        return self.num_samples / self.seconds if self.seconds > 0 else 0.0


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
        self._free, self._alone = _Flow(), _Flow()
        self._overlap_s = 0.0  # how long two workers or more have been inside, while it is measured
        self._overlap_begun_s = 0.0
        self._changed_s = 0.0
        self.alone_share: float | None = None
        """What one worker alone got done in the last trial, in shares of what all did together. About one over their number:
        each goes at its own pace. About 1: there is something that only one of them can use at a time."""

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
            now = self._clock()
            self._note_overlap(now)
            self._num_inside += 1
            return Ticket(self._num_inside, now, self._cpu_clock(), self._overlap_s)

    def end(self, ticket: Ticket | None, num_samples: int) -> None:
        """It is done with it: note what came of that."""
        if ticket is None:
            self._num_left -= 1  # workers may race here: it is a number of chunks, more or less
            if self.one_at_a_time and self._clock() >= self._until_s:
                with self._change:
                    self._let_all_in(_WINDOW)
            return
        cpu_s = self._cpu_clock() - ticket.cpu_since_s
        with self._change:
            now = self._clock()
            seconds = max(now - ticket.since_s, 1e-9)
            num_inside = max(ticket.num_inside, self._num_inside)
            self._note_overlap(now)
            self._num_inside -= 1
            if not self.one_at_a_time:
                self._free.num_samples += num_samples * (self._overlap_s - ticket.overlap_since_s) / seconds
            elif num_inside == 1:
                self._alone.num_samples += num_samples
                self._alone.seconds += seconds
            # A worker beside nobody says nothing of all of them, nor does one beside others of one alone.
            if (num_inside == 1) != self.one_at_a_time:
                return
            self._speeds.append(num_inside * num_samples / seconds)
            self._cpu_shares.append(cpu_s / seconds)
            self._num_left -= 1
            if self._num_left <= 0 or self._is_hopeless():
                self._decide()

    def _note_overlap(self, now: float) -> None:
        """Count the time up to now, if workers overlapped, before their number changes. Under the lock.

        What all get done while they overlap is not the sum of what each does at its own speed: where they share a lock, one
        may have it many times while another waits.
        """
        if self._num_inside > 1:
            self._overlap_s += now - self._changed_s
        self._changed_s = now

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
        self._compare(is_waiting)
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

    def _compare(self, is_tried_alone: bool) -> None:
        """One way has been tried: if both have, say what came of it. Under the lock."""
        if not self.one_at_a_time and is_tried_alone:
            self._free.seconds = self._overlap_s - self._overlap_begun_s
            self._alone = _Flow()
            return
        if self.one_at_a_time and self._free.speed > 0 and self._alone.speed > 0:
            self.alone_share = self._alone.speed / self._free.speed
        self._free = _Flow()
        self._overlap_begun_s = self._overlap_s

    def _let_all_in(self, num_chunks: int) -> None:
        """All workers, for so many chunks until the next look. Under the lock."""
        self.one_at_a_time = False
        self._chosen = None  # else the next trial waits for whoever was chosen in the last one
        self._num_left = num_chunks
        self._speeds.clear()
        self._cpu_shares.clear()
        self._change.notify_all()
