"""Runs variants of a pipeline in interleaved windows and compares their rates.

The load of a machine changes from second to second, by tens of percent. So the windows of two variants alternate, and the
result is the median ratio of neighbouring windows with its interval. A variant that pauses fills its batches ahead: those
are taken without being counted when its turn comes again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from loaderkit.diagnosis.stats import Stats
from loaderkit.profile.experiments.loops import Batches, Step, endless
from loaderkit.profile.report_parts import Rate
from loaderkit.profile.statistics import median_of, paired
from loaderkit.stages.slowed import Slowdown

_LEAST_ROUNDS = 3
LEAST_BATCHES = 2 * (1 + _LEAST_ROUNDS) * 4
"""Batches that two variants take at least: in each window one is drained, one begins it and two are counted, and the first
window of each is dropped."""
_LOOK_S = 0.01  # between two looks at a loader that pauses


class ExperimentLoader(Batches, Protocol):
    """A loader that an experiment runs."""

    def stats(self) -> Stats: ...

    def set_epoch(self, epoch: int, /) -> None: ...


Make = Callable[[Mapping[str, Any], Slowdown | None], AbstractContextManager[ExperimentLoader]]
"""Makes a loader of the pipeline with these overrides and one stage slowed down; to be closed after use."""


class Clock(NamedTuple):
    """What experiments read the time from and sleep by."""

    now_s: Callable[[], float]
    sleep: Callable[[float], object]


SYSTEM_CLOCK = Clock(time.perf_counter, time.sleep)


class RateWindow(NamedTuple):
    """What a loop did in a window of time."""

    num_samples: int
    seconds: float
    stall_s: float
    num_batches: int
    cpu_s: float = 0.0  # of the workers

    @property
    def rate(self) -> float:
        return self.num_samples / max(self.seconds, 1e-9)

    @property
    def stalled(self) -> float:
        """Share of the time that the loop waited."""
        return min(1.0, self.stall_s / max(self.seconds, 1e-9))


@dataclass
class Variant:
    """A loader whose windows alternate with other loaders' windows, and the step after each batch."""

    loader: ExperimentLoader
    step: Step
    clock: Clock = SYSTEM_CLOCK

    def __post_init__(self) -> None:
        self.batches: Iterator[Any] = endless(self.loader)
        self.windows: list[RateWindow] = []

    def drain(self, most_s: float) -> None:
        """Take the batches that were made ahead during the pause: after that they come as fast as they are made."""
        until_s = self.clock.now_s() + most_s
        for _ in range((self.loader.stats().tuning.batches or 0) + 1):
            next(self.batches)
            if self.clock.now_s() >= until_s:
                return

    def run(self, seconds: float) -> RateWindow:
        """Run a window of at least `seconds` and two batches. It counts from one delivered batch to the last."""
        batch = next(self.batches)
        before, begin_s = self.loader.stats(), self.clock.now_s()
        num_batches = 0
        while num_batches < 2 or self.clock.now_s() - begin_s < seconds:
            self.step(batch)
            batch = next(self.batches)
            num_batches += 1
        after, end_s = self.loader.stats(), self.clock.now_s()
        stall_s = sum(after.stall_s.values()) - sum(before.stall_s.values())
        cpu_s = sum(row.cpu_s for row in after.stages) - sum(row.cpu_s for row in before.stages)
        window = RateWindow(after.num_samples - before.num_samples, end_s - begin_s, stall_s, num_batches, cpu_s)
        self.windows.append(window)
        return window

    def rest(self, most_s: float) -> None:
        """Wait until the batches ahead are there: else their work takes the CPUs from the next loader's window."""
        until_s, before_s = self.clock.now_s() + most_s, -1.0
        while self.clock.now_s() < until_s:
            busy_s = sum(row.busy_s for row in self.loader.stats().stages)
            if busy_s == before_s:
                return
            before_s = busy_s
            self.clock.sleep(_LOOK_S)

    @property
    def rate(self) -> Rate:
        """The speed over all windows."""
        return rate_of(self.windows)

    @property
    def cpus(self) -> float:
        """CPUs that its workers used."""
        return sum(one.cpu_s for one in self.windows) / max(sum(one.seconds for one in self.windows), 1e-9)

    @property
    def stall_percent(self) -> float:
        seconds = sum(window.seconds for window in self.windows)
        return min(100.0, 100.0 * sum(window.stall_s for window in self.windows) / max(seconds, 1e-9))


def interleave(
    variants: Sequence[Variant],
    *,
    rounds: int = 1000,
    window_s: float,
    most_s: float = 0.0,
    is_enough: Callable[[], bool] = lambda: False,
    clock: Clock = SYSTEM_CLOCK,
) -> None:
    """Run every variant once a round, in alternating order, after a first window that does not count: while threads start and
    chunks find their size, a variant is slower.

    There are at least three rounds, the fewest that give an interval, and after these only such as begin within `most_s`
    (default: the time for windows and draining), until `is_enough`.
    """
    most_s = most_s or 2 * rounds * len(variants) * window_s
    until_s = math.inf
    for number in range(1 + rounds):
        if number > _LEAST_ROUNDS and (clock.now_s() >= until_s or is_enough()):
            return
        for variant in variants if number % 2 else variants[::-1]:
            variant.drain(window_s)
            variant.run(window_s)
            if number == 0:
                variant.windows.pop()
            variant.rest(window_s)
        until_s = min(until_s, clock.now_s() + most_s)


def rate_of(windows: Sequence[RateWindow]) -> Rate:
    """The speed of some windows, with its 95 % interval."""
    rates = [window.rate for window in windows]
    mean, _, high = paired(rates) if len(rates) > 1 else (rates[0], 0.0, 2 * rates[0])
    return Rate(
        samples_per_s=mean,
        interval_percent=100.0 * (high - mean) / mean if mean > 0 else 100.0,
        seconds=sum(window.seconds for window in windows),
        num_batches=sum(window.num_batches for window in windows),
    )


def ratio_of(one: Variant, other: Variant) -> tuple[float, float]:
    """How many times as fast `one` is as `other`: the median of neighbouring windows, half the width of its 95 % interval."""
    ratio, low, high = median_of([a.rate / max(b.rate, 1e-9) for a, b in zip(one.windows, other.windows, strict=True)])
    return ratio, (high - low) / 2
