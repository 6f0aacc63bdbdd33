"""Finds out whether a pool does better with one worker than with all of them, and has the gate that lets only one take
chunks.

Python code holds the GIL: two threads in it are slower than one, because they hand the GIL back and forth. Whether code holds
the GIL cannot be seen from outside, but measured: where workers that overlap spend much of their time off the CPU, one of
them works alone for a few chunks, and the faster way is kept for a while.

    all workers ──computing──> all for a thousand chunks, then the next look
                └─waiting──> one alone for a window ──faster──> one alone for 5 s, then all
                                                    └─slower──> all for 1,000, 2,000, ... 64,000 chunks
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from time import thread_time
from typing import NamedTuple

from loaderkit import native
from loaderkit.engine.autotune.chunk_window import LEAST_S, NUM_CHUNKS, ChunkMeter, ChunkWindow, Overlap, Started
from loaderkit.engine.autotune.gil_probe import GilProbe, gil_is_taken
from loaderkit.engine.metrics.contention import ContentionResult
from loaderkit.engine.metrics.worker_clock import Clock, WorkerClock

PATIENCE = 1000  # chunks until one worker alone is tried again, doubled after each trial that it lost
_MOST_PATIENCE = 64 * PATIENCE
PATIENCE_S = 5.0  # until all workers are tried again: the store may have turned slow
_BUSY_SHARE = 0.75  # of the time a worker could have had a CPU: one that had it for more does not wait for the GIL
_SUSPECT = 1 / 3  # share of the times at which the GIL was taken, above which workers may wait for it
_LONG_S = 2e-3  # chunk, beside which a look at the GIL costs nothing
_GAIN = 1.05  # one alone must be so much faster
_LEAST_ALONE, _HOPELESS = 3, 0.7  # chunks after which one alone is given up that has less than this share of the speed


class ProbedChunk(NamedTuple):
    """A chunk in work. `started` is None if it is not measured."""

    started: Started | None
    num_inside: int  # workers, this one included
    overlap_since_s: float


_UNMEASURED = ProbedChunk(None, 0, 0.0)


class _Baseline(NamedTuple):
    """What all workers did before one of them is tried alone."""

    by_sums: bool  # how they were judged; one alone is judged the same way
    speed: float  # samples/s
    overlap_speed: float  # samples/s while they overlapped
    sample_stages_s: list[float]


class SoloGate:
    """While `is_solo`, the first worker that comes takes all chunks, and the others wait."""

    def __init__(self) -> None:
        self.is_solo = False
        self._change = threading.Condition()
        self._chosen: WorkerClock | None = None  # the worker that takes the chunks while only one does
        self._is_closed = False

    def wait(self, worker_clock: WorkerClock, idle: int, pass_on: Callable[[], None] = lambda: None) -> None:
        """Return when this worker may take a chunk; its time until then counts as `idle`. `pass_on` wakes another
        worker that waits for work, because this one may have been woken instead."""
        if not self.is_solo:
            return
        with self._change:
            while self.is_solo and not self._is_closed and self._chosen not in (None, worker_clock):
                if worker_clock.open_state != idle:
                    worker_clock.enter(idle)
                    pass_on()
                self._change.wait()
            self._chosen = worker_clock if self.is_solo else None

    def leave(self, worker_clock: WorkerClock) -> None:
        """This worker takes no more chunks; another one may be chosen."""
        with self._change:
            if self._chosen is worker_clock:
                self._chosen = None
                self._change.notify_all()

    def let_one(self) -> None:
        """Let one worker take chunks."""
        self.is_solo = True

    def let_all(self) -> None:
        """Let all workers take chunks."""
        with self._change:
            self.is_solo = False
            self._chosen = None  # else the next solo waits for the worker of this one
            self._change.notify_all()

    def close(self) -> None:
        """Let every worker pass from now on."""
        with self._change:
            self._is_closed = True
            self._change.notify_all()


class ContentionProbe:
    """Measures the chunks of one pool, and opens its gate for all workers or for one.

    A trial is under way while the gate is solo and there is a baseline. `begin` and `end` are called by the workers.
    """

    def __init__(
        self,
        stages: Sequence[str],
        gate: SoloGate,
        clock: Clock,
        *,
        cpu_clock: Clock = thread_time,
        delay_clock: Clock = native.delayed,
        is_gil_taken: Callable[[], bool] = gil_is_taken,
    ) -> None:
        """`stages`: the names of all stages, as the worker clocks number them."""
        self._stages = stages
        self._gate = gate
        self._clock = clock
        self._meter = ChunkMeter(clock, cpu_clock, delay_clock)
        self._gil = GilProbe(clock, is_gil_taken)
        self._lock = threading.Lock()
        self._num_at_work = 0  # workers inside with chunks that are probed
        self._overlap = Overlap()
        self._window = ChunkWindow(0.0)
        self._durations: deque[float] = deque(maxlen=NUM_CHUNKS)
        self._is_long = False  # most chunks are
        self._num_left = NUM_CHUNKS  # chunks until the next decision; those beyond a window are not measured
        self._patience = PATIENCE
        self._solo_until_s = 0.0
        self._baseline: _Baseline | None = None
        self._result = ContentionResult()  # of the last trial

    @property
    def trial(self) -> ContentionResult:
        """The result of the last trial, and how often the GIL was taken lately."""
        return self._result._replace(gil_taken=self._gil.taken_share)

    def begin(self, worker_clock: WorkerClock) -> ProbedChunk | None:
        """A worker begins with a chunk. Returns None if the chunk is short, and so not measured."""
        is_measured = self._num_left <= NUM_CHUNKS
        if not is_measured and not self._is_long:
            return None
        if self._num_at_work and not self._gate.is_solo:
            self._gil.ask(every_time=self._is_long and is_measured)
        started = self._meter.start(worker_clock) if is_measured else None
        with self._lock:
            self._num_at_work += 1
            if started is None:
                return _UNMEASURED
            self._overlap.tick(self._clock())
            self._overlap.num_inside += 1
            return ProbedChunk(started, self._overlap.num_inside, self._overlap.seconds)

    def end(self, probed: ProbedChunk | None, num_samples: int) -> None:
        """The worker is done with it."""
        if probed is not None and probed.started is not None:
            self._end_measured(probed, probed.started, num_samples)
            return
        if probed is not None:
            with self._lock:
                self._num_at_work -= 1
        if self._num_left > NUM_CHUNKS:  # one that began before the window takes none of its chunks
            self._num_left -= 1  # workers may race here: the number need not be exact
        if self._gate.is_solo and self._clock() >= self._solo_until_s:
            with self._lock:
                self._let_all_in(NUM_CHUNKS)

    def _end_measured(self, probed: ProbedChunk, started: Started, num_samples: int) -> None:
        times = self._meter.stop(started)
        with self._lock:
            now, overlap = self._clock(), self._overlap
            overlap.tick(now)
            overlap_s = overlap.seconds - probed.overlap_since_s
            num_inside = max(probed.num_inside, overlap.num_inside, 1 + overlap_s / times.seconds)
            overlap.num_inside -= 1
            self._num_at_work -= 1
            self._durations.append(times.seconds)
            self._is_long = median(self._durations) > _LONG_S
            if not self._gate.is_solo:
                overlap.add(num_samples, times.seconds, probed.overlap_since_s)
            # A chunk says nothing of all workers if it ran alone, nor of one alone if it ran beside others.
            if (overlap_s > 0) == self._gate.is_solo or started.since_s < self._window.begin_s:
                return
            self._window.add(times, started.since_s, num_samples, num_inside)
            self._num_left -= 1
            is_whole = self._num_left <= 0 and (not self._by_sums or self._window.is_long_enough(now))
            if is_whole or self._is_hopeless(now):
                self._decide()

    @property
    def _by_sums(self) -> bool:
        """True if chunks are so short that sums decide, not medians."""
        return self._baseline.by_sums if self._gate.is_solo and self._baseline is not None else not self._is_long

    def _is_hopeless(self, now: float) -> bool:
        """True if one worker alone, on trial, is plainly slower. Where many workers wait for a store, more chunks with
        one worker would cost much."""
        baseline, window = self._baseline, self._window
        if not self._gate.is_solo or baseline is None or len(window) < _LEAST_ALONE:
            return False
        is_clear = not baseline.by_sums or now - window.first_s >= LEAST_S
        return is_clear and window.speed(baseline.by_sums) < _HOPELESS * baseline.speed

    # --------------------------------------------------------------------------------- decisions, under the lock

    def _decide(self) -> None:
        if not self._gate.is_solo:
            self._look()
        elif self._baseline is not None:
            self._judge(self._baseline)
        else:
            self._let_all_in(NUM_CHUNKS)

    def _look(self) -> None:
        """All workers have worked for a window: try one alone if they wait for something."""
        window, by_sums, overlap_speed = self._window, self._by_sums, self._overlap.speed
        cpu_share = window.cpu_share(by_sums)
        is_waiting = cpu_share < _BUSY_SHARE or (self._gil.taken_share or 0.0) > _SUSPECT
        self._result = ContentionResult(
            alone_share=self._result.alone_share if is_waiting else None,
            waiting_share=1 - cpu_share,
            num_inside=self._overlap.mean_inside,
            slowdowns=self._result.slowdowns if is_waiting else {},
        )
        if not is_waiting:
            self._let_all_in(self._patience)
            return
        speed = overlap_speed if by_sums else window.speed(by_sums)
        self._baseline = _Baseline(by_sums, speed, overlap_speed, window.sample_stages_s())
        self._gate.let_one()
        self._start_window(NUM_CHUNKS, longest_s=window.longest_s)

    def _judge(self, baseline: _Baseline) -> None:
        """One alone has worked for a window: keep that if it is faster."""
        window, by_sums = self._window, baseline.by_sums
        if baseline.overlap_speed > 0:
            stages = zip(self._stages, baseline.sample_stages_s, window.sample_stages_s(), strict=True)
            # Delays are known later than times: without them, a short time may come out below 0.
            self._result = self._result._replace(
                alone_share=window.undelayed_speed(by_sums) / baseline.overlap_speed,
                slowdowns={stage: all_s / alone_s for stage, all_s, alone_s in stages if min(all_s, alone_s) > 0},
            )
        self._baseline = None
        # Where the GIL is free, one alone is faster by chance: the slow samples of a burst fell to all workers.
        taken = self._gil.taken_share
        may_hold_gil = taken is None or taken > _SUSPECT
        if may_hold_gil and window.speed(by_sums) > _GAIN * baseline.speed:
            self._patience = PATIENCE
            self._solo_until_s = self._clock() + PATIENCE_S
            self._start_window(_MOST_PATIENCE)
        else:
            self._let_all_in(self._patience)
            self._patience = min(2 * self._patience, _MOST_PATIENCE)

    def _let_all_in(self, num_chunks: int) -> None:
        """Let all workers take chunks, for `num_chunks` until the next look."""
        self._gate.let_all()
        self._overlap.restart()
        self._start_window(num_chunks)

    def _start_window(self, num_chunks: int, longest_s: float = 0.0) -> None:
        self._num_left = num_chunks
        self._window = ChunkWindow(self._clock(), longest_s)
