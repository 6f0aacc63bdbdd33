"""Whether a pool does better with one worker than with all of them.

Python code holds the GIL: two threads in it are slower than one, because they hand the GIL back and forth. Whether code holds
the GIL cannot be seen from outside, but be measured: where workers that overlap spend much of their time off the CPU, one of
them works alone for a few chunks, and whichever way was faster is kept for a while.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from operator import sub
from statistics import fmean, median
from time import thread_time
from typing import NamedTuple

from loaderkit import native
from loaderkit.engine.metrics.concurrency import ContentionResult
from loaderkit.engine.metrics.worker_clock import Clock, WorkerClock

_WINDOW = 12  # chunks a way is tried for
# With short chunks no shorter than this: who has the GIL keeps it for 5 ms, and may do a score of them meanwhile. Nor than so
# many times the longest of them, which may have waited for a disk, as one in a hundred does.
_WINDOW_S = 0.05
_NUM_LONGEST = 10
_MOST_WINDOW_S = 0.5
_PATIENCE = 1000  # chunks until one worker alone is tried again
_PATIENCE_S = 5.0  # until all are again: the store may have turned slow
# Of the time it could have had a CPU, on one: more of it means that the GIL is not what is waited for.
_BUSY_SHARE = 0.75
# Whether a thread that wakes up finds the GIL taken says whether the others hold it. It is asked many times: workers in Python
# have it at 68 to 100 % of the times, workers in a decoder at 0 to 61 %, on two CPUs, alone and beside four other programs. A
# shorter sleep ends before another one has taken the GIL. Asked of short chunks only while it is not settled who works.
_PROBE_S = 1e-3
_TAKEN_S = 1e-4  # a longer wait for the GIL means that it was taken
_TAKEN_OR_LATE_S = 3e-4  # as seen from Python, where the thread may have woken up late as well
_SUSPECT = 1 / 3
_LONG_S = 2e-3
_NUM_PROBES = 3
_MOST_PROBES = 32
_FEW_PROBES = 8
_PROBE_SOON_S, _PROBE_EVERY_S = (
    5e-3,
    0.1,
)  # the first few, and then; of long chunks every one while it is not settled who works
_GAIN = 1.05
_LEAST = 3  # chunks after which a trial that plainly loses is given up
_HOPELESS = 0.7
_MOST_PATIENCE = 64 * _PATIENCE


class Ticket(NamedTuple):
    """A chunk being worked on: by whom, the seconds in each stage before it, how many workers were inside with it, since when,
    and then: the thread's CPU time, the time it was ready to run with no CPU free, and for how long workers had overlapped so
    far."""

    worker_clock: WorkerClock | None
    stages_since_s: Sequence[float]
    num_inside: int
    since_s: float
    cpu_since_s: float
    delayed_since_s: float
    overlap_since_s: float


_SETTLED = Ticket(None, (), 0, 0.0, 0.0, 0.0, 0.0)  # of a long chunk that is not measured


@dataclass
class _Sums:
    """Of all chunks of a window."""

    num_samples: int = 0
    seconds: float = 0.0
    undelayed_s: float = 0.0
    cpu_s: float = 0.0
    stages_s: list[float] = field(default_factory=list)


@dataclass
class _Together:
    """What was got done while workers overlapped, from when on."""

    num_samples: float = 0.0
    overlap_begun_s: float = 0.0
    inside_begun_s: float = 0.0


class ContentionProbe:
    """Lets the workers of one pool take chunks: all of them, or one."""

    def __init__(
        self, stages: Sequence[str], clock: Clock, cpu_clock: Clock = thread_time, delay_clock: Clock = native.delayed
    ) -> None:
        """`stages`: the names of all there are, as the workers' accounts number them."""
        self._stages = stages
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._delay_clock = delay_clock
        self._lock = threading.RLock()
        self._change = threading.Condition(self._lock)
        self._chosen: WorkerClock | None = None  # who works while only one does
        self._num_inside = 0
        self._num_left = _WINDOW  # chunks until the next look
        self._until_s = 0.0  # one alone, and settled: when all are tried again at the latest
        self._patience = _PATIENCE  # doubled with every trial that was lost
        self._speeds: deque[float] = deque(maxlen=_WINDOW)  # of the pool, in samples a second, as each chunk had it
        self._undelayed_speeds: deque[float] = deque(maxlen=_WINDOW)  # of each worker, had it always had a CPU
        self._cpu_shares: deque[float] = deque(maxlen=_WINDOW)
        self._sums = _Sums()
        self._window_begins_s = 0.0  # when it was decided upon
        self._window_since_s = 0.0  # when the first chunk in it was begun
        self._longest_s = 0.0  # chunk of what is compared
        self._durations: deque[float] = deque(maxlen=_WINDOW)
        self._gil_taken: deque[bool] = deque(maxlen=_MOST_PROBES)  # whether it was, at the latest times
        self._next_probe_s = 0.0  # the earliest, while it is settled who works
        self._is_long = False  # chunks take so long that to ask for the GIL costs nothing
        self._num_at_work = 0  # workers inside with chunks that are measured, or long
        self._free_speed: float | None = None  # with all workers, if that was just measured
        self._by_sums = False  # how that was measured, and what it is compared with is to be
        self._is_closed = False
        self.one_at_a_time = False
        self._together = _Together()
        self._together_s = 0.0  # how long workers overlapped in the window that ended last
        self._together_stages_s: list[float] = []  # and how long a sample took them in each stage
        self._overlap_s = 0.0  # how long two workers or more have been inside, while it is measured
        self._inside_s = 0.0  # the same time, as often as there were workers
        self._changed_s = 0.0
        self._trial = ContentionResult()  # the last one

    @property
    def trial(self) -> ContentionResult:
        """What came of the last one, and how often the GIL was taken lately."""
        return self._trial._replace(gil_taken=self._gil_taken_share())

    def _gil_taken_share(self) -> float | None:
        taken = list(self._gil_taken)  # at once: workers go on
        return fmean(taken) if len(taken) >= _NUM_PROBES else None

    def wait(self, worker_clock: WorkerClock, idle: int, pass_on: Callable[[], None] = lambda: None) -> None:
        """Return when this worker may take a chunk; until then it is accounted as idle. `pass_on` wakes another worker that
        waits for work: this one may have been woken in its place."""
        if not self.one_at_a_time:
            return
        with self._lock:
            while self.one_at_a_time and not self._is_closed and self._chosen not in (None, worker_clock):
                if worker_clock.open_state != idle:
                    worker_clock.enter(idle)
                    pass_on()
                self._change.wait()
            self._chosen = worker_clock if self.one_at_a_time else None

    def leave(self, worker_clock: WorkerClock) -> None:
        """This worker takes no more chunks: another one may have its turn."""
        with self._lock:
            if self._chosen is worker_clock:
                self._chosen = None
                self._change.notify_all()

    def begin(self, worker_clock: WorkerClock) -> Ticket | None:
        """A worker begins with a chunk. None: for now it is settled who works, and nothing is measured."""
        is_settled = self._num_left > _WINDOW
        if is_settled and not self._is_long:
            return None
        if self._num_at_work and not self.one_at_a_time and self._clock() >= self._next_probe_s:
            self._gil_taken.append(self._finds_gil_taken())
            self._next_probe_s = self._clock() + self._until_next_probe_s(is_settled)
        with self._lock:
            self._num_at_work += 1
            if is_settled:
                return _SETTLED
            spent_s = self._spent(worker_clock)
            now = self._clock()
            self._note_overlap(now)
            self._num_inside += 1
            return Ticket(
                worker_clock,
                spent_s,
                self._num_inside,
                now,
                self._cpu_clock(),
                self._delay_clock(),
                self._overlap_s,
            )

    def end(self, ticket: Ticket | None, num_samples: int) -> None:
        """It is done with it: note what came of that."""
        if ticket is None or ticket.worker_clock is None:
            if ticket is not None:
                with self._lock:
                    self._num_at_work -= 1
            self._num_left -= 1  # workers may race here: it is a number of chunks, more or less
            if self.one_at_a_time and self._clock() >= self._until_s:
                with self._lock:
                    self._let_all_in(_WINDOW)
            return
        cpu_s, delayed_s = self._cpu_clock() - ticket.cpu_since_s, self._delay_clock() - ticket.delayed_since_s
        with self._lock:
            now = self._clock()
            seconds = max(now - ticket.since_s, 1e-9)
            self._note_overlap(now)
            overlap_s = self._overlap_s - ticket.overlap_since_s
            num_inside = max(ticket.num_inside, self._num_inside, 1 + overlap_s / seconds)
            self._num_inside -= 1
            self._num_at_work -= 1
            self._durations.append(seconds)
            self._is_long = median(self._durations) > _LONG_S
            if not self.one_at_a_time:
                counted_s = self._overlap_s - max(ticket.overlap_since_s, self._together.overlap_begun_s)
                self._together.num_samples += num_samples * counted_s / seconds
            # A worker that ran alone says nothing of all of them, nor one that ran beside others of one alone, nor a chunk that
            # was begun before this window.
            if (overlap_s > 0) == self.one_at_a_time or ticket.since_s < self._window_begins_s:
                return
            if not self._speeds:
                self._window_since_s = ticket.since_s
            self._speeds.append(num_inside * num_samples / seconds)
            # A thread that another program keeps from its CPU does not wait: one alone would be no better off.
            undelayed_s = max(seconds - delayed_s, cpu_s, 1e-9)
            self._undelayed_speeds.append(num_samples / undelayed_s)
            self._cpu_shares.append(cpu_s / undelayed_s)
            sums = self._sums
            sums.num_samples += num_samples
            sums.seconds += seconds
            sums.undelayed_s += undelayed_s
            sums.cpu_s += cpu_s
            in_stages_s = map(sub, self._spent(ticket.worker_clock), ticket.stages_since_s)
            sums.stages_s = [sum(pair) for pair in zip_longest(sums.stages_s, in_stages_s, fillvalue=0.0)]
            self._longest_s = max(self._longest_s, seconds)
            self._num_left -= 1
            if (self._num_left <= 0 and self._is_long_enough(now)) or self._is_hopeless(now):
                self._decide()

    def _spent(self, worker_clock: WorkerClock) -> list[float]:
        """By this worker in each stage so far, in s, but for what it was ready to run with no CPU free."""
        states_s, totals = worker_clock.summed([worker_clock], self._clock())
        return [seconds - delayed_s for seconds, (_, _, _, _, delayed_s, _) in zip(states_s, totals, strict=False)]

    def _finds_gil_taken(self) -> bool:
        """Sleep for a moment, and tell whether another thread has the GIL then."""
        if native.HAS_KERNELS:
            return bool(native.gil_wait(_PROBE_S) > _TAKEN_S)
        begin, delayed_s = self._clock(), self._delay_clock()
        time.sleep(_PROBE_S)
        return self._clock() - begin - _PROBE_S - (self._delay_clock() - delayed_s) > _TAKEN_OR_LATE_S

    def _until_next_probe_s(self, is_settled: bool) -> float:
        if self._is_long and not is_settled:
            return 0.0
        return _PROBE_SOON_S if len(self._gil_taken) < _FEW_PROBES else _PROBE_EVERY_S

    def _note_overlap(self, now: float) -> None:
        """Count the time up to now, if workers overlapped, before their number changes. Under the lock.

        What all get done while they overlap is not the sum of what each does at its own speed: where they share a lock, one
        may have it many times while another waits.
        """
        if self._num_inside > 1:
            self._overlap_s += now - self._changed_s
            self._inside_s += self._num_inside * (now - self._changed_s)
        self._changed_s = now

    def _is_long_enough(self, now: float) -> bool:
        """Whether the window has lasted long enough for what is in it to be typical."""
        if not (self._by_sums if self._is_trial() else not self._is_long):
            return True
        wanted_s = min(_NUM_LONGEST * self._longest_s, _MOST_WINDOW_S)
        return now - self._window_since_s >= max(_WINDOW_S, wanted_s)

    def _is_trial(self) -> bool:
        """One works alone, and is compared with what all did before."""
        return self.one_at_a_time and self._free_speed is not None

    def _is_hopeless(self, now: float) -> bool:
        """One alone, on trial, is plainly slower: with many workers that wait for a store each of its chunks is dear."""
        if not self._is_trial() or len(self._speeds) < _LEAST:
            return False
        assert self._free_speed is not None
        if self._by_sums:
            speed = self._sums.num_samples / self._sums.seconds
            return now - self._window_since_s >= _WINDOW_S and speed < _HOPELESS * self._free_speed
        return median(self._speeds) < _HOPELESS * self._free_speed

    def close(self) -> None:
        """Let everybody go."""
        with self._lock:
            self._is_closed = True
            self._change.notify_all()

    def _decide(self) -> None:
        # Medians: a chunk during which the whole process stood still says nothing of either way.
        speed, alone_speed, cpu_share = map(median, (self._speeds, self._undelayed_speeds, self._cpu_shares))
        if not self._is_trial():
            self._by_sums = not self._is_long
        if self._by_sums:  # but one short chunk in a score may have waited for the GIL longer than all others took
            sums, together = self._sums, self._together
            speed, alone_speed = sums.num_samples / sums.seconds, sums.num_samples / sums.undelayed_s
            if not self.one_at_a_time:
                speed = together.num_samples / max(self._overlap_s - together.overlap_begun_s, 1e-9)
            cpu_share = sums.cpu_s / sums.undelayed_s
        is_waiting = cpu_share < _BUSY_SHARE or (self._gil_taken_share() or 0.0) > _SUSPECT
        self._compare(alone_speed, ContentionResult(None, 1 - cpu_share), is_waiting)
        self._forget()
        if self.one_at_a_time or not is_waiting:
            self._longest_s = 0.0
        if not self.one_at_a_time:
            self._free_speed = speed
            self.one_at_a_time = is_waiting
            self._num_left = _WINDOW if is_waiting else self._patience
        elif self._free_speed is not None and speed > _GAIN * self._free_speed:
            self._free_speed = None  # one alone is better: keep that, and look at the other way again later
            self._num_left, self._patience = _MOST_PATIENCE, _PATIENCE
            self._until_s = self._clock() + _PATIENCE_S
        elif self._free_speed is None:
            self._let_all_in(_WINDOW)
        else:
            self._let_all_in(self._patience)
            self._patience = min(2 * self._patience, _MOST_PATIENCE)

    def _compare(self, alone_speed: float, seen: ContentionResult, is_tried_alone: bool) -> None:
        """One way has been tried: if both have, say what came of it. `alone_speed` in samples a second. Under the lock."""
        together, sums = self._together, self._sums
        stages_s = [seconds / sums.num_samples for seconds in sums.stages_s]
        if not self.one_at_a_time:
            self._together_s = self._overlap_s - together.overlap_begun_s
            self._together_stages_s = stages_s
            inside_s = self._inside_s - together.inside_begun_s
            self._trial = seen._replace(
                alone_share=self._trial.alone_share if is_tried_alone else None,
                slowdowns=self._trial.slowdowns if is_tried_alone else {},
                num_inside=inside_s / self._together_s if self._together_s > 0 else None,
            )
            if is_tried_alone:
                return
        elif together.num_samples > 0:
            both = zip(self._stages, self._together_stages_s, stages_s, strict=True)
            self._trial = self._trial._replace(
                alone_share=alone_speed * self._together_s / together.num_samples,
                slowdowns={stage: all_s / alone_s for stage, all_s, alone_s in both if alone_s > 0},
            )
        self._together = _Together(overlap_begun_s=self._overlap_s, inside_begun_s=self._inside_s)

    def _let_all_in(self, num_chunks: int) -> None:
        """Let all workers take chunks, for `num_chunks` until the next look. Under the lock."""
        self.one_at_a_time = False
        self._chosen = None  # else the next trial waits for the worker that was chosen in the last one
        self._num_left = num_chunks
        self._forget()
        self._change.notify_all()

    def _forget(self) -> None:
        for seen in (self._speeds, self._undelayed_speeds, self._cpu_shares):
            seen.clear()
        self._sums = _Sums()
        self._window_begins_s = self._clock()
