"""The tuner finds how many workers and how many batches ahead a loader needs by trying, one change at a time.

    look(stats) ──> a window of at least a second ──> stalled: more workers where the stall is, or deeper, or fewer workers
                                                      calm:    as few workers as the work needs
                                                      between: leave it
    the next window decides: a change that paid is kept, else it is rolled back and not tried again for a while

Processes are added where each of the present ones keeps a CPU busy, as code does that holds the GIL, and CPUs are free.
Processes are removed where fewer can do the work.

This is hill climbing on measured throughput, in steps of a ladder, as autotuners of this kind do. Unlike them it climbs
where the stall accounts show a stall, it also climbs down, and a gain must exceed the noise of its own windows. The
tuner has no thread and no clock: `monitor.py` calls it, tests call it with made-up accounts.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from loaderkit.engine.autotune.tuned_setting import Decision, Move, TunedSetting
from loaderkit.engine.autotune.tuner_window import CPUS_FULL, TunerWindow
from loaderkit.engine.metrics.snapshot import Snapshot
from loaderkit.engine.metrics.stalls import MEMORY, RESTART

_STALLED = 0.03  # share of the time waiting above which a change is worth a trial
_CALM = 0.01  # share of the time waiting below which training is the limit
_WINDOW_S = 1.0
_LONG_WINDOW_S = 4.0  # a fairly steady rate is good enough then
_SETTLING_S = 0.4  # after a change, for chunks of the old size that are still under way
_JOINING_S = 1.0  # the same for a process that has joined, and makes its first batches
_LONGEST_WINDOW_S = 16.0  # any rate must be good enough then, unless too few samples have landed
_PATIENT_WINDOW_S = 60.0  # after which a window ends with however few samples
_LEAST_ROUNDS, _LEAST_LANDED = 2, 8  # samples per worker, and in all, that must land in a window
# Relative standard errors of a rate: enough to try a change, enough after 4 s, enough to judge a change.
_ROUGH, _FAIR, _FINE = 0.10, 0.05, 0.02
_GAIN, _MOST_GAIN = 0.03, 0.25  # a change must bring the first at least, and the second is enough however noisy it is
_LATEST, _FAR = 4, 6  # looks since a change of the rate, and the standard errors by which it is none of chance
_PAUSE_S, _PAUSE_STEPS = 1.0, 4  # a loop that stays away for longer than both pauses
_NUM_STEPS = 9
_WAITING, _COMPUTING = 0.25, 0.75  # share of the busy time on a CPU: a pool below waits for a store, one above computes
_BURSTY = 0.1  # share of the workers' time without room: if the loop waits, too, the buffer is too small for the jitter
_SPARE = 1.25  # workers kept, as a multiple of those that are busy
_BUSY = 0.7  # CPUs that a process uses, above which it may be the GIL that it lacks
BATCHES_EACH = 2  # of a process, for which there has to be memory
_PATIENCE = 10  # windows until a change that did not help is tried again; doubled each time
_MOST_PATIENCE = 640
_SHIFT = 0.25  # a rate that is off by more, twice in a row, means another workload
_NUM_DECISIONS = 100


@dataclass
class _Trial:
    setting: TunedSetting
    before: int
    baseline: TunerWindow
    decision: Decision
    num_rungs: int
    gives_back: bool  # the change saves workers, and is kept if it costs nothing


@dataclass
class _RestingChange:
    """The windows for which a kind of change that did not help is not tried again."""

    until: int = 0
    length: int = _PATIENCE


@dataclass
class Tuner:
    """Changes `settings`. `landing`: the stage whose samples count as done. `num_cpus`: the CPUs the workers may fill,
    within the cgroup's quota. `most_processes`: how many processes there may be now, given how many there are.
    `cpus_each`: the CPUs that each process brings, where processes are on other machines."""

    settings: list[TunedSetting]
    landing: str
    num_cpus: int
    most_processes: Callable[[int], int] = lambda num: num
    cpus_each: float = 0.0
    decisions: deque[Decision] = field(default_factory=lambda: deque(maxlen=_NUM_DECISIONS))

    def __post_init__(self) -> None:
        self.is_settled = False  # no change is on trial, and none was worth a trial at the last look
        self._is_second = False  # the window has begun anew, as the rate had changed: it does so once
        self._begin: Snapshot | None = None
        self._before: Snapshot | None = None
        self._rates: list[float] = []
        self._left: Snapshot | None = None  # the last look that saw the loop, if the latest one did not
        self._num_rates_then = 0
        self._steps: deque[float] = deque(maxlen=_NUM_STEPS)  # s between two batches, lately
        self._settles_until_s = 0.0
        self._trial: _Trial | None = None
        self._number = 0  # of the window
        self._reach: dict[str, int] = {}  # by setting: how many rungs up at most
        self._rests: dict[tuple[str, bool], _RestingChange] = {}  # by setting, and whether upwards
        self._usual: float | None = None  # samples/s, since the last change that was kept
        self._num_odd = 0  # windows in a row whose rate was far from that

    def forget(self, stages: Sequence[str]) -> None:
        """From now on do not change the workers of these stages, or the depth if there are no stages: the user has set
        them."""
        self.settings = [
            setting
            for setting in self.settings
            if set(setting.stages).isdisjoint(stages) and (stages or setting.kind != "batches")
        ]
        if self._trial is not None and self._trial.setting not in self.settings:
            self._trial = None

    def refused(self, move: Move, reason: str) -> None:
        """Undo the last move, which could not be made (no more threads, say), and try less next time."""
        setting, trial = move.setting, self._trial
        setting.most = max(setting.rung(-1), move.before)
        setting.value = move.before
        if trial is not None:
            trial.decision.kept, trial.decision.effect = False, f"refused: {reason}"
            self._leave_alone(setting, up=move.value > move.before)
        self._trial = None

    @property
    def _processes(self) -> TunedSetting | None:
        return next((setting for setting in self.settings if setting.kind == "processes"), None)

    @property
    def _depth(self) -> TunedSetting | None:
        return next((setting for setting in self.settings if setting.kind == "batches"), None)

    def rescale(self, num_processes: int, workers: Mapping[str, int], batches: int | None) -> None:
        """Note another number of processes, and the sizes that come with it: by first stage the workers, and the batches
        ahead."""
        for setting in self.settings:
            if setting.kind == "workers":
                setting.unit, setting.value = num_processes, workers[setting.stages[0]]
            elif setting.kind == "batches" and batches is not None:
                setting.unit, setting.value = num_processes, batches
            elif setting.kind == "processes":
                setting.value = num_processes

    def look(self, now: Snapshot) -> Move | None:
        """Read the accounts, several times a second. Returns the change to be made now, if any; the tuner takes it as made."""
        before = self._before
        if before is None or self._says_nothing(before, now):
            self._restart(now)
            return None
        seconds = now.now_s - before.now_s
        if seconds <= 0:
            return None
        self._rates.append((self._landed(now) - self._landed(before)) / seconds)
        self._before = now
        if not self._is_there(before, now):
            return None
        assert self._begin is not None
        passed = now.since(self._begin)
        window = TunerWindow.of(passed, self._rates, self.settings, self.num_cpus, self.cpus_each)
        if not self._is_enough(window, passed):
            if not self._is_second and self._has_changed():
                self._num_odd = 1
                self._restart(now)
                self._is_second = True
            return None
        self._number += 1
        self._restart(now)
        if self._trial is not None:
            return self._judge(self._trial, window)
        move = self._choose(window, now)
        self.is_settled = move is None
        return move

    def _says_nothing(self, before: Snapshot, now: Snapshot) -> bool:
        """True if the time since `before` cannot be judged: an error, no batch yet, a change just now, or a death."""
        # After an error the engine gets the same sizes again, those on trial included.
        if before.run != now.run or now.num_batches == 0 or now.now_s < self._settles_until_s:
            return True
        if now.tuning.processes != before.tuning.processes:
            self._settles_until_s = now.now_s + _JOINING_S
            return True
        processes = self._processes
        if processes is not None and now.tuning.processes not in (None, processes.value):
            return True  # those that are to join are starting
        is_restarting = now.waits_s.get(RESTART, 0.0) > before.waits_s.get(RESTART, 0.0)
        return is_restarting or now.num_restarts != before.num_restarts

    def _has_changed(self) -> bool:
        """True if the rate has changed, at some moment of this window, by far more than it usually varies: the loop
        needs more or less than it did. A window across the change would take long, and describe neither rate."""
        num, whole = len(self._rates), sum(self._rates)
        spread = sum((rate - whole / num) ** 2 for rate in self._rates)
        earlier = 0.0
        for place, rate in enumerate(self._rates[:-_LATEST], 1):
            earlier += rate
            later = whole - earlier
            change = later / (num - place) - earlier / place
            between = place * (num - place) / num * change**2  # of the spread, what that moment explains
            within = max((spread - between) / (num - 2), (_SHIFT * whole / num) ** 2)
            if later > 0 and between > _FAR**2 * within:
                return True
        return False

    def _restart(self, now: Snapshot) -> None:
        self._is_second = False
        self._begin = self._before = now
        self._left = None
        self._rates = []

    def _is_there(self, before: Snapshot, now: Snapshot) -> bool:
        """True if the loop came for a batch, or waited for one, since `before`. The time it stayed away counts as its step. A
        pause (a validation, a checkpoint) is cut out of the window instead: the workers are blocked in it.
        """
        stalled_s = sum(now.stall_s.values()) - sum(before.stall_s.values())
        num_batches = now.num_batches - before.num_batches
        if num_batches == 0 and stalled_s <= 0:
            if self._left is None:
                self._left, self._num_rates_then = before, len(self._rates) - 1
            return False
        left = self._left or before
        usual_s = median(self._steps) if self._steps else 0.0
        if before.now_s - left.now_s > max(_PAUSE_S, _PAUSE_STEPS * usual_s):
            assert self._begin is not None
            # The window so far, moved to end where the loop is back.
            self._begin = before.since(left.since(self._begin))
            del self._rates[self._num_rates_then : -1]
        if num_batches:
            self._steps.append((now.now_s - left.now_s - stalled_s) / num_batches)
        self._left = None
        return True

    def _is_enough(self, window: TunerWindow, passed: Snapshot) -> bool:
        wall_s = passed.wall_s
        if window.stalled > _CALM:
            num_workers = sum(setting.value for setting in self.settings if setting.stages)
            least = max(_LEAST_LANDED, _LEAST_ROUNDS * num_workers)
            if wall_s < _WINDOW_S or (window.rate * wall_s < least and wall_s < _PATIENT_WINDOW_S):
                return False
            is_clear = window.error <= _ROUGH if self._trial is None else self._is_clear(self._trial, window)
            return is_clear or wall_s >= (_LONG_WINDOW_S if window.error <= _FAIR else _LONGEST_WINDOW_S)
        # Batches that are ready keep the loop going for a while, whatever the workers do.
        return wall_s >= _WINDOW_S and passed.num_batches >= max(8, 2 * (passed.tuning.batches or 0))

    def _is_clear(self, trial: _Trial, window: TunerWindow) -> bool:
        """True if a longer window would hardly change the judgement of a trial."""
        gain, error = _gain(trial, window)
        return window.error <= _FINE or abs(gain - _GAIN) > 3 * error

    # ----------------------------------------------------------------------------------------------------- a trial

    def _choose(self, window: TunerWindow, now: Snapshot) -> Move | None:
        if self._is_another_workload(window):
            self._rests.clear()
            self._reach.clear()
        if (processes := self._processes) is not None:
            self._bound(processes, now)
        if window.is_in_turn:
            return self._speed_up(window, now) or self._give_workers_back(window, now)
        if window.stalled > _STALLED:
            return self._speed_up(window, now) or self._give_processes_back(window, now)
        if window.stalled < _CALM:
            return self._give_workers_back(window, now) or self._give_processes_back(window, now)
        return None

    def _bound(self, processes: TunedSetting, now: Snapshot) -> None:
        """Set how many processes there may be: as many as there is room for, with enough memory and batches to divide."""
        most = self.most_processes(processes.value)
        if batch_bytes := now.memory.get("batch_bytes", 0):
            most = min(most, now.memory["budget_bytes"] // (BATCHES_EACH * batch_bytes))
        if self._depth is None:
            most = min(most, now.tuning.batches or most)
        processes.most = max(most, processes.value)

    def _is_another_workload(self, window: TunerWindow) -> bool:
        usual = self._usual
        is_odd = usual is not None and usual > 0 and abs(window.rate / usual - 1) > _SHIFT
        if is_odd and self._num_odd == 0:
            self._num_odd = 1  # one such window may be chance
            return False
        self._num_odd = 0
        self._usual = window.rate if is_odd or usual is None else 0.8 * usual + 0.2 * window.rate
        return is_odd

    def _speed_up(self, window: TunerWindow, now: Snapshot) -> Move | None:
        waits = f"{window.stalled:.0%} of the time waiting, most of it for {window.cause}"
        processes = self._processes if window.is_in_turn or window.cause in {row.name for row in now.stages} else None
        if processes is not None and not (window.has_room and self._may(processes, up=True)):
            processes = None
        if processes is not None and window.is_in_turn:
            why = "one worker of each process is busy all the time, and one at a time is all that its stage allows"
            return self._try(processes, processes.rung(1), window, now, why)
        if window.is_in_turn:
            return None
        if processes is not None and (window.is_gil_held or window.cpus > _BUSY * processes.value):
            num_rungs = min(2, self._reach.get(processes.name, 2))
            why = f"{waits}; {'a worker holds the GIL' if window.is_gil_held else _busy(window, processes)}"
            return self._try(processes, processes.rung(num_rungs), window, now, why, num_rungs=num_rungs)
        return (
            self._deepen(window, now)
            or self._add_workers(window, now, waits)
            or self._add_process(processes, window, now, waits)
            or self._take_workers(window, now, waits)
        )

    def _deepen(self, window: TunerWindow, now: Snapshot) -> Move | None:
        depth, slab_bytes = self._depth, now.memory["slab_bytes"]
        if depth is None or window.cause == MEMORY:
            return None
        depth.most = max(depth.value, now.memory["budget_bytes"] // slab_bytes) if slab_bytes else depth.value
        # With every batch in work and workers without room, more workers would only find no room either.
        pool = self._awaited(window) or next((one for one in self.settings if one.stages), depth)
        if window.blocked[pool.name] <= _BURSTY or not self._may(depth, up=True):
            return None
        share = f"{window.blocked[pool.name]:.0%}"
        return self._try(depth, depth.rung(2), window, now, f"it waits while workers have no room {share} of the time")

    def _awaited(self, window: TunerWindow) -> TunedSetting | None:
        """The workers that the loop waits for, if they are tuned."""
        return next((setting for setting in self.settings if window.cause in setting.stages), None)

    def _add_workers(self, window: TunerWindow, now: Snapshot, waits: str) -> Move | None:
        setting = self._awaited(window)
        if setting is None or window.cpu_share >= CPUS_FULL or not self._may(setting, up=True):
            return None
        is_alone = any(row.alone for row in now.stages if row.name == window.cause)
        if is_alone and window.alone[setting.name] * setting.value >= 1:
            return None  # one of these is in that stage at any time, and no more may be
        is_waiting = window.computing[setting.name] < _WAITING
        num_rungs = min(4 if is_waiting else 2, self._reach.get(setting.name, 4))
        return self._try(setting, setting.rung(num_rungs), window, now, waits, num_rungs=num_rungs)

    def _add_process(
        self, processes: TunedSetting | None, window: TunerWindow, now: Snapshot, waits: str
    ) -> Move | None:
        """Add one process only, as there are other locks than the GIL."""
        if processes is None:
            return None
        return self._try(processes, processes.rung(1), window, now, f"{waits}; more workers did not help")

    def _take_workers(self, window: TunerWindow, now: Snapshot, waits: str) -> Move | None:
        """Take workers away; but not where every worker has a CPU and computes, as fewer would compute less."""
        setting = self._awaited(window)
        if setting is None or not self._may(setting, up=False):
            return None
        if window.computing[setting.name] >= _COMPUTING and setting.value <= self.num_cpus:
            return None
        return self._try(setting, setting.rung(-1), window, now, f"{waits}; fewer may hinder one another less")

    def _give_workers_back(self, window: TunerWindow, now: Snapshot) -> Move | None:
        for setting in self.settings:
            rest = self._rests.get((setting.name, False))
            if not setting.stages or not self._may(setting, up=False):
                continue
            target = setting.enough_for(_SPARE * window.busy[setting.name]) if rest is None else setting.rung(-1)
            if target < setting.value:
                reason = f"nothing waits; {window.busy[setting.name]:.1f} of {setting.value} workers are busy"
                return self._try(setting, target, window, now, reason, gives_back=True)
        return None

    def _give_processes_back(self, window: TunerWindow, now: Snapshot) -> Move | None:
        """Use fewer processes, if the CPUs that they use do not need as many."""
        processes = self._processes
        if processes is None or not self._may(processes, up=False):
            return None
        is_first = (processes.name, False) not in self._rests
        target = processes.enough_for(_SPARE * window.cpus) if is_first else processes.rung(-1)
        if target >= processes.value or target < _SPARE * window.cpus:
            return None
        return self._try(processes, target, window, now, _busy(window, processes), gives_back=True)

    def _may(self, setting: TunedSetting, *, up: bool) -> bool:
        rest = self._rests.get((setting.name, up))
        return setting.rung(1 if up else -1) != setting.value and (rest is None or self._number >= rest.until)

    def _try(
        self,
        setting: TunedSetting,
        value: int,
        window: TunerWindow,
        now: Snapshot,
        reason: str,
        *,
        num_rungs: int = 1,
        gives_back: bool = False,
    ) -> Move:
        decision = Decision(now.wall_s, setting.name, setting.value, value, reason, stages=[*setting.stages])
        self.decisions.append(decision)
        self._trial = _Trial(setting, setting.value, window, decision, num_rungs, gives_back)
        return self._turn(setting, value, now.now_s)

    def _turn(self, setting: TunedSetting, value: int, now_s: float) -> Move:
        move = Move(setting, setting.value, value)
        setting.value = value
        self._settles_until_s = now_s + _SETTLING_S
        return move

    def _judge(self, trial: _Trial, window: TunerWindow) -> Move | None:
        self._trial = None
        gain, error = _gain(trial, window)
        if trial.gives_back:
            kept = window.stalled < _STALLED or (trial.baseline.stalled >= _STALLED and gain > -max(_GAIN, error))
            effect = f"{window.stalled:.0%} of the time waiting"
        else:
            needed = min(_MOST_GAIN, max(_GAIN, 2 * error))
            kept = gain >= needed or (window.stalled < _CALM and gain >= 0)
            effect = f"{gain:+.0%} samples/s, {window.stalled:.0%} of the time waiting"
        trial.decision.kept, trial.decision.effect, trial.decision.gain = kept, effect, gain
        went_up = trial.setting.value > trial.before
        if kept:
            self._usual = window.rate
            if went_up:  # workers that were given back and had to be taken again are not given back soon
                self._leave_alone(trial.setting, up=False)
            return None
        nearer = 1 if trial.setting.kind == "processes" else 2
        if went_up and trial.num_rungs > nearer and gain > -_GAIN:
            self._reach[trial.setting.name] = nearer  # it was too far; half as far may not be
        else:
            self._leave_alone(trial.setting, up=went_up)
        assert self._before is not None
        return self._turn(trial.setting, trial.before, self._before.now_s)

    def _leave_alone(self, setting: TunedSetting, *, up: bool) -> None:
        rest = self._rests.setdefault((setting.name, up), _RestingChange())
        rest.until = self._number + rest.length
        rest.length = min(2 * rest.length, _MOST_PATIENCE)

    def _landed(self, stats: Snapshot) -> int:
        return next(row.num_items for row in stats.stages if row.name == self.landing)


def _gain(trial: _Trial, window: TunerWindow) -> tuple[float, float]:
    """The gain in throughput since before the trial, as a share, and its standard error."""
    before = trial.baseline.rate
    gain = window.rate / before - 1 if before > 0 else 0.0
    return gain, math.hypot(window.error, trial.baseline.error)


def _busy(window: TunerWindow, processes: TunedSetting) -> str:
    return f"{window.cpus:.1f} CPUs are busy in {processes.value} process{'es' if processes.value > 1 else ''}"
