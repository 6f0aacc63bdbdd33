"""Decides how sure the kind of a wait is. The rules are asked again with one figure at a time changed, by as much as it
differs from run to run of one pipeline. If the rules then name another kind, the two cannot be told apart.

So no rule needs a margin of its own, and a rule that is added later has one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from loaderkit.diagnosis.verdict import Verdict
from loaderkit.engine.metrics.contention import ContentionResult
from loaderkit.engine.metrics.snapshot import Snapshot, StageStats

_CPU = 0.1  # of the CPU time
_DELAYED = 0.05  # of the busy time
_BLOCKED = 0.04  # of the time of all workers
_TAKEN = 0.12  # share of the times at which the GIL was taken; of 32 answers
_ALONE = 1.12  # times the throughput of one worker alone
_SLOWED = 1.1  # times a slowdown
_WAITED = 0.08  # share of the time of workers side by side
_BUSY = 1.08  # times the time in a stage
_ITEMS = 1.12  # times their number
_IDLE = 0.2  # CPUs
_NATIVE = 1.25  # times the CPU time of threads of libraries

_OTHERS = 0.2  # of the CPUs; where other programs have more, what was tried with one worker is less sure

Nudge = Callable[[Snapshot, int], Snapshot | None]
"""The figures with one of them larger (1) or smaller (-1), or by two such steps; None if it was not measured."""


def rival(snapshot: Snapshot, verdict: Verdict, again: Callable[[Snapshot], Verdict]) -> Verdict | None:
    """The verdict of another kind that fits the figures about as well; of several the one that fits most often; None if
    there is none. A verdict that does not know what is waited for comes last."""
    others = [other for nudged in _nudged(snapshot) if (other := again(nudged)).kind != verdict.kind]
    often = Counter(other.kind for other in others)
    return max(others, key=lambda other: (other.kind != "waiting", often[other.kind]), default=None)


def _nudged(snapshot: Snapshot) -> Iterator[Snapshot]:
    others_cpus = (snapshot.host.others_s or 0.0) / (snapshot.wall_s + snapshot.paused_s)
    steps = 2 if others_cpus > _OTHERS * (snapshot.tuning.cpus or 1) else 1
    nudges = [(nudge, 1) for nudge in _OF_ALL] + [(nudge, steps) for nudge in _OF_TRIALS]
    for nudge, num in nudges:
        for sign in (num, -num):
            if (nudged := nudge(snapshot, sign)) is not None:
                yield nudged


def _with_rows(snapshot: Snapshot, change: Callable[[StageStats], StageStats]) -> Snapshot:
    return replace(snapshot, stages=[change(row) for row in snapshot.stages])


def _with_trials(snapshot: Snapshot, change: Callable[[ContentionResult], ContentionResult]) -> Snapshot | None:
    """None if that changes nothing, because nothing was tried."""
    trials = {stage: change(trial) for stage, trial in snapshot.trials.items()}
    return None if trials == snapshot.trials else replace(snapshot, trials=trials)


def _computing(snapshot: Snapshot, sign: int) -> Snapshot:
    def moved(row: StageStats) -> StageStats:
        most_s = max(row.cpu_s, row.busy_s - row.delayed_s)
        return replace(row, cpu_s=min(most_s, row.cpu_s * (1 + _CPU * sign)))

    return _with_rows(snapshot, moved)


def _delayed(snapshot: Snapshot, sign: int) -> Snapshot:
    def moved(row: StageStats) -> StageStats:
        most_s = max(row.delayed_s, row.busy_s - row.cpu_s)
        return replace(row, delayed_s=min(most_s, max(0.0, row.delayed_s + _DELAYED * sign * row.busy_s)))

    return _with_rows(snapshot, moved)


def _blocked(snapshot: Snapshot, sign: int) -> Snapshot | None:
    def moved(row: StageStats) -> StageStats:
        return replace(row, blocked_s=max(0.0, row.blocked_s + _BLOCKED * sign * whole_s)) if row.blocked_s else row

    whole_s = sum(row.busy_s + row.starved_s + row.blocked_s for row in snapshot.stages)
    return _with_rows(snapshot, moved) if any(row.blocked_s for row in snapshot.stages) else None


def _taken(snapshot: Snapshot, sign: int) -> Snapshot | None:
    def moved(trial: ContentionResult) -> ContentionResult:
        taken = trial.gil_taken
        return trial if taken is None else trial._replace(gil_taken=min(1.0, max(0.0, taken + _TAKEN * sign)))

    return _with_trials(snapshot, moved)


def _alone(snapshot: Snapshot, sign: int) -> Snapshot | None:
    def moved(trial: ContentionResult) -> ContentionResult:
        alone = trial.alone_share
        return trial if alone is None else trial._replace(alone_share=alone * _ALONE**sign)

    return _with_trials(snapshot, moved)


def _slowed(snapshot: Snapshot, sign: int) -> Snapshot | None:
    def moved(trial: ContentionResult) -> ContentionResult:
        return trial._replace(slowdowns={stage: times * _SLOWED**sign for stage, times in trial.slowdowns.items()})

    return _with_trials(snapshot, moved)


def _waited(snapshot: Snapshot, sign: int) -> Snapshot | None:
    def moved(trial: ContentionResult) -> ContentionResult:
        waited = trial.waiting_share
        return trial if waited is None else trial._replace(waiting_share=min(1.0, max(0.0, waited + _WAITED * sign)))

    return _with_trials(snapshot, moved)


def _in_turn(snapshot: Snapshot, sign: int) -> Snapshot | None:
    """For stages that one worker at a time runs: how much of the time one did."""

    def moved(row: StageStats) -> StageStats:
        return replace(row, busy_s=row.busy_s * _BUSY**sign) if row.in_turn or row.alone else row

    return _with_rows(snapshot, moved) if any(row.in_turn or row.alone for row in snapshot.stages) else None


def _items(snapshot: Snapshot, sign: int) -> Snapshot:
    return _with_rows(snapshot, lambda row: replace(row, num_items=round(row.num_items * _ITEMS**sign)))


def _idle(snapshot: Snapshot, sign: int) -> Snapshot | None:
    idle_s = snapshot.host.idle_s
    if idle_s is None:
        return None
    off_s = _IDLE * sign * (snapshot.wall_s + snapshot.paused_s)
    return replace(snapshot, host=replace(snapshot.host, idle_s=max(0.0, idle_s + off_s)))


def _native(snapshot: Snapshot, sign: int) -> Snapshot | None:
    native_s = snapshot.host.native_s
    return replace(snapshot, host=replace(snapshot.host, native_s=native_s * _NATIVE**sign)) if native_s else None


_OF_ALL: Sequence[Nudge] = (_computing, _delayed, _blocked, _in_turn, _items, _idle, _native)
_OF_TRIALS: Sequence[Nudge] = (_taken, _alone, _slowed, _waited)
