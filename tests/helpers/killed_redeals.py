"""A loop whose number of processes changes, and whose processes are killed meanwhile, at drawn moments."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from growing import digest

import loaderkit
from loaderkit import Pipeline
from loaderkit.engine.metrics.tuning import Tuning
from loaderkit.engine.remote.executor import RemoteEngine

BATCH = 8
DEPTH = 6
_MOST = 4  # processes
_STEP_S = 0.004  # the longest of the loop, so that thousands of batches do not come while a process starts
_PHASES = ("starting", "ahead", "behind")  # those that are to join start; a border is ahead; it is behind the loop
_JOINING = None


class Found(NamedTuple):
    epoch: int
    end: int
    what: str


class Kill(NamedTuple):
    """Of the process that has this number before the change, or of one that is to join, so many batches after a phase's
    begin; `delay_s` later it is done by another thread, if it is not 0: the loop waits by then, or not."""

    phase: str
    num_batches: int
    number: int | None
    delay_s: float


class KilledRedeals:
    """`live_pids` gives the processes of the engine, and perhaps others that are older."""

    def __init__(
        self, engine: RemoteEngine, size: int, live_pids: Callable[[], set[int]], rng: random.Random, most: int = _MOST
    ) -> None:
        self.engine = engine
        self.size = size
        self.live_pids = live_pids
        self.rng = rng
        self.most = most
        self.runs: list[list[Found]] = [[]]  # of batches, from seek to seek
        self.begins: list[tuple[int, int]] = [(0, 0)]
        self.num_killed = 0

    def take(self, num: int) -> int:
        """Take so many batches."""
        for _ in range(num):
            self._take()
        return num

    def set_processes(self, num: int) -> None:
        """As many as that, without deaths."""
        self.engine.set_processes(num)
        while self._num_now() != num:
            self._take()

    def change(self) -> None:
        """Another number of processes, with deaths, and perhaps a seek, until it is in force and all that died are replaced."""
        engine, rng = self.engine, self.rng
        before = [process.pid for process in engine.processes]
        num_before, older = len(before), self.live_pids()
        num = rng.choice([num for num in range(1, self.most + 1) if num != num_before])
        kills = self._drawn(num_before, num)
        seek_at = (rng.choice(_PHASES[num < num_before :]), rng.randrange(2 * DEPTH)) if rng.random() < 0.3 else None
        refusals: list[str] = []
        killed: set[int] = set()
        timers: list[threading.Timer] = []
        phase, num_in_phase = "starting", 0
        engine.set_processes(num, refusals.append)
        while phase != "behind" or kills or seek_at:
            for kill in [kill for kill in kills if _is_due(kill.phase, kill.num_batches, phase, num_in_phase)]:
                pid = self._pid_for(kill, before, older)
                if pid is not None:
                    killed.add(pid)
                    if kill.delay_s:
                        timers.append(threading.Timer(kill.delay_s, _kill, (pid,)))
                        timers[-1].start()
                    else:
                        _kill(pid)
                if pid is not None or kill.number is not _JOINING or phase == "behind":
                    kills.remove(kill)
            if seek_at is not None and _is_due(*seek_at, phase, num_in_phase):
                self._seek()
                seek_at = None
            self._take()
            if refusals and self._num_now() != num:  # one that was to join has died
                refusals.clear()
                engine.set_processes(num, refusals.append)
            phase, num_in_phase = self._phase(phase, num_in_phase, num_before, num)
        for timer in timers:
            timer.join()
        while any(process.pid in killed or process.num_cautious for process in engine.processes):
            self._take()
        self.num_killed += len(killed)

    def _drawn(self, num_before: int, num: int) -> list[Kill]:
        rng, phases = self.rng, _PHASES[num < num_before :]
        numbers: list[int | None] = list(rng.sample(range(num_before), rng.randint(0, min(2, num_before))))
        if num > num_before and (rng.random() < 0.7 or not numbers):
            numbers.append(_JOINING)
        return [
            Kill(rng.choice(phases), rng.randrange(2 * DEPTH), number, rng.choice([0.0, rng.uniform(1e-4, 0.05)]))
            for number in numbers
        ]

    def _pid_for(self, kill: Kill, before: list[int | None], older: set[int]) -> int | None:
        """The process that is to die; None if it is not there (yet, or any more)."""
        live = self.live_pids()
        if kill.number is not _JOINING:
            pid = before[kill.number]
            return pid if pid in live else None
        successors = {process.pid for process in self.engine.processes[: len(before)]}
        if None in successors:  # one of them starts, and could be taken for one that is to join
            return None
        joining = sorted(live - older - successors)
        return self.rng.choice(joining) if joining else None

    def _phase(self, phase: str, num_in_phase: int, num_before: int, num: int) -> tuple[str, int]:
        """The phase after a batch, and the batches in it."""
        now = phase
        if self._num_now() == num:
            now = "behind"
        elif num < num_before or len(self.engine.processes) == num:
            now = "ahead"
        return now, (num_in_phase + 1 if now == phase else 0)

    def _seek(self) -> None:
        """To an epoch that was not begun yet: a batch that ended a process would end the run the second time."""
        last = self.runs[-1][-1] if self.runs[-1] else Found(*self.begins[-1], "")
        place = last.epoch + 2, BATCH * self.rng.randrange(self.size // BATCH)
        self.engine.seek(*place)
        self.begins.append(place)
        self.runs.append([])

    def _take(self) -> None:
        batch = self.engine.next()
        assert batch.error is None
        self.runs[-1].append(Found(batch.epoch, batch.end, digest(batch.result)))
        threading.Event().wait(self.rng.uniform(0, _STEP_S))

    def _num_now(self) -> int | None:
        return self.engine.stats(Tuning(), 0).tuning.processes

    def check(self, pipeline: Pipeline, **overrides: object) -> None:
        """All batches were there, once, in order, and as one thread makes them."""
        wanted: dict[int, int] = {}  # by epoch: the last position that was taken
        for begin, run in zip(self.begins, self.runs, strict=True):
            place = begin
            for found in run:
                epoch, position = place if place[1] < self.size else (place[0] + 1, 0)
                place = epoch, position + BATCH
                assert (found.epoch, found.end) == place
                wanted[epoch] = max(found.end, wanted.get(epoch, 0))
        truth: dict[tuple[int, int], str] = {}
        with loaderkit.build(pipeline, overrides={**overrides, "prefetch.executor": "inline"}) as loader:
            for epoch, last in wanted.items():
                loader.set_epoch(epoch)
                for batch in loader:
                    end = loader.state_dict()["position"] or self.size
                    truth[epoch, end] = digest(batch)
                    if end >= last:
                        break
        for found in (found for run in self.runs for found in run):
            assert found.what == truth[found.epoch, found.end], (found.epoch, found.end)
        stats = self.engine.stats(Tuning(), 0)
        assert stats.num_batches == sum(map(len, self.runs))


def _is_due(phase: str, num_batches: int, now: str, num_in_phase: int) -> bool:
    gone = _PHASES.index(now) - _PHASES.index(phase)
    return gone > 0 or (not gone and num_in_phase >= num_batches)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
