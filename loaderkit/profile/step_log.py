"""The loop, cut at its batches: how long it computed and waited, in bounded memory and 3 us a batch."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable

from loaderkit.engine.metrics.histogram import Histogram

_MOST_STEPS = 2048


class StepLog:
    """Sums over all steps, and single ones, thinned out when there are too many. One thread writes.

    outside ──asks──> waiting ──gets──> computing ──asks──> waiting ──ends──> outside
                                            └──────────turns, close──────────────┘

    A step begins when the loop has got a batch: it computes until it asks for the next one, and is over when it gets that.
    What the loop did with a batch after which it asked for no other cannot be told from what came later, such as a
    validation after `break`: it is `outside`.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.end_s = self._mark_s = clock()
        self.restarts()

    def restarts(self) -> None:
        """An error has ended what was before, and the accounts begin anew: so do the sums, from when it last asked."""
        self.begin_s = self._mark_s
        self._computed_s: float | None = None  # in the step that is under way; None: there is none
        self._is_computing = False
        self.num_batches = self.num_steps = 0
        self.compute_s = self.next_s = self.outside_s = 0.0  # they sum to end_s - begin_s
        self.first_wait_s: float | None = None
        self.computes, self.waits, self.steps = Histogram(), Histogram(), Histogram()
        self.every = 1
        self._kept = array("d")  # at, compute, wait of every `every`th step, one behind another

    def asks(self) -> None:
        """The loop asks for a batch."""
        passed_s = self._pass()
        if self._is_computing:
            self.compute_s += passed_s
            self._computed_s = passed_s
        else:
            self.outside_s += passed_s
            self._computed_s = None
        self._is_computing = False

    def gets(self) -> None:
        """It is given one."""
        wait_s = self._pass()
        self.next_s += wait_s
        if self.first_wait_s is None:
            self.first_wait_s = wait_s
        self._count(wait_s)
        self.num_batches += 1
        self._is_computing = True

    def ends(self) -> None:
        """There is none any more: the epoch is over, or an error came."""
        self.next_s += self._pass()
        self._count(0.0)

    def probe(self) -> None:
        """The loop begins another pass over the data, whatever became of the last one."""
        self.outside_s += self._pass()
        self._is_computing = False

    def close(self) -> None:
        """Nothing more is noted."""
        self.probe()
        self.end_s = self._mark_s

    def kept(self) -> list[tuple[float, float, float]]:
        """(at, compute, wait) of single steps in s, `at` since the beginning."""
        kept = self._kept
        return [(kept[n], kept[n + 1], kept[n + 2]) for n in range(0, len(kept), 3)]

    def _pass(self) -> float:
        now = self._clock()
        passed_s, self._mark_s = now - self._mark_s, now
        return passed_s

    def _count(self, wait_s: float) -> None:
        compute_s, self._computed_s = self._computed_s, None
        if compute_s is None:
            return
        if self.num_steps % self.every == 0:
            self._kept.extend((self._mark_s - wait_s - compute_s - self.begin_s, compute_s, wait_s))
            if len(self._kept) > 3 * _MOST_STEPS:
                self._kept = array("d", [value for step in self.kept()[::2] for value in step])
                self.every *= 2
        self.num_steps += 1
        self.computes.add(compute_s, 1)
        self.waits.add(wait_s, 1)
        self.steps.add(compute_s + wait_s, 1)
