"""The figures by which the tuner judges: rates and shares of one window of time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import NamedTuple

from loaderkit.engine.autotune.tuned_setting import TunedSetting
from loaderkit.engine.metrics.snapshot import ALWAYS, Snapshot
from loaderkit.engine.metrics.stalls import WAKEUP

CPUS_FULL = 0.9


class TunerWindow(NamedTuple):
    """Rates and shares of one window of time."""

    rate: float  # samples/s that landed
    error: float  # relative standard error of that
    stalled: float  # share of the time that the loop waited for something that could be quicker
    cause: str | None  # of most of that
    cpu_share: float  # of all CPUs, by the workers
    cpus: float  # the same in CPUs
    is_gil_held: bool  # by workers
    has_room: bool  # CPUs are free, or further processes bring some
    is_in_turn: bool  # a stage that one worker at a time runs, in each process, is the limit
    busy: Mapping[str, float]  # by setting (all workers, for the number of batches): those that were busy, on average
    computing: Mapping[str, float]  # by setting: share of that time on a CPU
    alone: Mapping[str, float]  # by setting: share of that time in stages that one worker at a time runs
    blocked: Mapping[str, float]  # by setting: share of the workers' time without room

    @classmethod
    def of(
        cls,
        passed: Snapshot,
        rates: Sequence[float],
        settings: Sequence[TunedSetting],
        num_cpus: int,
        cpus_each: float = 0.0,
    ) -> TunerWindow:
        """The window in which the counters rose by `passed`, and of which `rates` are parts. `num_cpus`, `cpus_each`: see
        `Tuner`."""
        wall_s = max(passed.wall_s, 1e-9)
        stalls = {cause: seconds for cause, seconds in passed.stall_s.items() if cause != WAKEUP}
        is_in_turn = passed.full_turn is not None or passed.alone_share >= ALWAYS
        if is_in_turn:  # no sizes would make anything quicker
            stalls = {}
        rows = {row.name: row for row in passed.stages}
        busy, computing, alone, blocked = {}, {}, {}, {}
        for setting in settings:
            mine = [rows[name] for name in setting.stages] or passed.stages
            busy_s = sum(row.busy_s for row in mine)
            busy[setting.name] = busy_s / wall_s
            computing[setting.name] = sum(row.cpu_s for row in mine) / max(busy_s, 1e-9)
            alone[setting.name] = sum(row.busy_s for row in mine if row.alone) / max(busy_s, 1e-9)
            blocked[setting.name] = sum(row.blocked_s for row in mine) / max(sum(row.slot_s for row in mine), 1e-9)
        cpus = sum(row.cpu_s for row in passed.stages) / wall_s
        cpu_share = cpus / (cpus_each * (passed.tuning.processes or 1) or num_cpus)
        rate = mean(rates)
        spread = stdev(rates) / math.sqrt(len(rates)) if len(rates) > 1 else rate
        return cls(
            rate=rate,
            error=spread / rate if rate > 0 else 1.0,
            stalled=sum(stalls.values()) / wall_s,
            cause=max(stalls, key=stalls.__getitem__, default=None),
            cpu_share=cpu_share,
            cpus=cpus,
            is_gil_held=any(trial.holds_gil for trial in passed.trials.values()),
            has_room=cpu_share < CPUS_FULL or bool(cpus_each),
            is_in_turn=is_in_turn,
            busy=busy,
            computing=computing,
            alone=alone,
            blocked=blocked,
        )
