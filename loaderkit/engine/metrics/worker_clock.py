"""The clock of one worker: its present state, and its time in each state so far.

Only the worker itself writes to its clock, without a lock. `native.StateClock` keeps the time by state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from loaderkit import native
from loaderkit.engine.metrics.slow_samples import SlowItems

Clock = Callable[[], float]

MOMENT_S = 50e-6
"""A shorter interval is a hand-off, not a wait. It counts as computing without a check, since reading the CPU clock is
a system call."""


class WorkerStates:
    """The numbers of a worker's states: stages 0 .. num_stages - 1, then the states between stages."""

    __slots__ = ("blocked", "idle", "num_stages", "num_states", "starved")

    def __init__(self, num_stages: int) -> None:
        self.num_stages = num_stages
        self.starved = num_stages  # waiting for input
        self.blocked = num_stages + 1  # waiting for room downstream
        self.idle = num_stages + 2  # taken out of service
        self.num_states = num_stages + 3


class ClockTotals(NamedTuple):
    """The counters of one stage, summed over workers."""

    num_items: int
    num_bytes: int
    num_failed: int
    cpu_s: float
    delayed_s: float  # ready to run, and no CPU was free
    services: dict[int, int]  # durations of items: number by bucket of a Histogram


class WorkerClock(native.StateClock):
    """The time of one worker by state, and whether that worker is wanted."""

    __slots__ = ("is_wanted", "slow_items")

    def __init__(
        self,
        states: WorkerStates,
        clock: Clock,
        *,
        first_state: int,
        since_s: float | None = None,
        slow_items: SlowItems | None = None,
    ) -> None:
        """`since_s`: when the clock begins; default: now. `slow_items`: shared with the other workers; default: its own."""
        self.is_wanted = True  # False: the worker is taken out of service, since fewer are wanted
        self.slow_items = slow_items or SlowItems(states.num_stages)
        start_s = clock() if since_s is None else since_s
        sizes = (states.num_stages, states.num_states)
        super().__init__(*sizes, clock, first_state=first_state, since_s=start_s, slow_items=self.slow_items)
