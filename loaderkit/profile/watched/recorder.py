"""Keeps the accounts of one watched loop: its waits, its batches, and what the processes that load do meanwhile.

    iter() ──> opened ──> [asked ──> came ──> gave]... ──> asked ──> ended   in the loop's own thread; no other thread
                             └── every quarter of a second or less often ──> look: /proc of the workers, a point of the series

A wait is charged to `handover` as far as the loop's own thread was on a CPU. For the rest: if all batches that had been
asked for were finished, it is charged to `wakeup` as far as no CPU was free, and else to `handover` or `pin_memory`; if
they were not, to `dataset`. Looking takes half a percent of the time at most. The time after the last batch that the
loop takes is not in `wall_s`: it may be a validation.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from loaderkit._internal.system.cgroups import num_cpus
from loaderkit._internal.system.processes import ProcessCounters, Program, busiest, programs
from loaderkit.diagnosis.watched.counters import LoaderArguments
from loaderkit.diagnosis.watched.lines import LineTimes
from loaderkit.diagnosis.watched.stats import WatchedStats
from loaderkit.engine.metrics.host import CpuWatch, HostStats, host_stats
from loaderkit.engine.metrics.snapshot import StageStats
from loaderkit.engine.metrics.stalls import START
from loaderkit.engine.metrics.tuning import PoolTuning, Tuning
from loaderkit.engine.monitor import TICK_S, Series
from loaderkit.profile.step_log import StepLog
from loaderkit.profile.watched.accounts import Accounts
from loaderkit.profile.watched.dataloader import LoaderView, WorkersView
from loaderkit.profile.watched.lines import LoaderLines
from loaderkit.profile.watched.rows import rows_of
from loaderkit.profile.watched.step_cpu import StepCpu
from loaderkit.profile.watched.worker_processes import WorkerProcesses

_LOOKING = 0.005  # share of the time
_NUM_PROGRAMS = 3
_ROOM = 0.25  # share of the shared memory that is free, above which it has room for a batch that is held
_SHARED_MEMORY = "/dev/shm"  # noqa: S108  # where torch puts tensors that pass between processes


class Recorder:
    """The accounts of one watched loop. One thread iterates; `stats` may be called from any."""

    def __init__(self, kind: str, clock: Callable[[], float] = time.perf_counter) -> None:
        self.log: StepLog | None = None  # of a profile that is under way
        self.clock = clock
        self.next_look_s = 0.0
        self.holds_batches = _may_hold()  # for one step more, for a profile
        self.lines: LoaderLines | None = None  # where they are sampled
        self.step_cpu: StepCpu | None = None  # where steps are to be imitated
        self._kind = kind
        self.accounts = Accounts()
        self._workers = WorkerProcesses()
        self._cpus, self._series = CpuWatch(), Series()
        self._programs: dict[int, Program] = {}
        self._arguments: LoaderArguments | None = None
        self._view: weakref.ref[LoaderView] | None = None
        self._began_s: float | None = None
        self._loop_s = 0.0  # of the loop itself: its waits, and its steps up to the next wait
        self._mark_s = 0.0
        self._is_in_step = False
        self._samples_here = False

    # -------------------------------------------------------------------------------------- the loop, in its own thread

    def opening(self) -> float:
        """The loop begins a pass over the data; the time."""
        if self._began_s is None:
            self._programs = programs()
            self._cpus.begin()
            self._began_s = self.clock()
        if self.log is not None:
            self.log.on_epoch()
        self._is_in_step, self._mark_s = False, self.clock()
        return self._mark_s

    def opened(self, begin_s: float, view: LoaderView | None) -> None:
        """It has begun, which took the time since `begin_s`."""
        if self.log is not None:
            self.log.on_opened()
        self._add_to_loop()
        self.accounts.opened(self.clock() - begin_s)
        if view is not None:
            self.see(view)

    def see(self, view: LoaderView) -> None:
        """It is known what is iterated over."""
        self._view, self._arguments = weakref.ref(view), view.arguments
        self.accounts.is_known()
        if isinstance(view, WorkersView):
            self._workers.begin(view.pids, view.pin_thread)
        self._samples_here = self.lines is not None and self._is_inline

    def asked(self) -> float:
        """The loop asks for a batch; the time."""
        if self.step_cpu is not None:
            self.step_cpu.end()
        if self.log is not None:
            self.log.on_request()
        now_s = self.clock()
        if self._is_in_step:
            self._loop_s += now_s - self._mark_s
        self._is_in_step, self._mark_s = False, now_s
        if self._samples_here:
            assert self.lines is not None
            self.lines.resume()
        return now_s

    def look(self, begin_s: float) -> None:
        """Read what processes do, and keep a point of the series."""
        self._series.add(self.snapshot())
        self.holds_batches = _may_hold()
        now_s = self.clock()
        self.next_look_s = now_s + max(TICK_S, (now_s - begin_s) / _LOOKING)

    def came(
        self, batch: Any, waited_s: float, cpu_s: float, delayed_s: float | None, *, is_first: bool, all_done: bool
    ) -> None:
        """A batch came: see `Accounts.waited`."""
        arguments = self._arguments
        self.accounts.waited(arguments, waited_s, cpu_s, delayed_s, is_first=is_first, all_done=all_done)
        self.accounts.holds(batch, None if arguments is None else arguments.batch_size)

    def gave(self, batch: Any) -> None:
        """The loop has the batch, and its step begins."""
        self._add_to_loop()
        self._is_in_step = True
        if self.log is not None:
            self.log.on_batch((batch,) if self.holds_batches and not self.accounts.is_on_gpu else ())
        if self.step_cpu is not None:
            self.step_cpu.begin()

    def ended(self, begin_s: float) -> None:
        """No batch came: the epoch is over, which took the time since `begin_s`."""
        self.accounts.ended(self.clock() - begin_s)
        self.failed()

    def failed(self) -> None:
        """No batch came."""
        self._add_to_loop()
        if self.log is not None:
            self.log.on_end()

    def worked(self, seconds: float, num_workers: int, busy: float, *, is_wait: bool, is_asking: bool) -> None:
        """Of `num_workers` workers, `busy` had batches to make for so long."""
        self.accounts.worked(seconds, num_workers, busy, is_wait=is_wait, is_asking=is_asking)

    def collated(self, seconds: float, cpu_s: float) -> None:
        """`collate_fn` ran in the loop's own thread."""
        self.accounts.collate_s += seconds
        self.accounts.collate_cpu_s += cpu_s

    def before_end(self) -> None:
        """Workers are about to end."""
        self._workers.read()

    def leaving(self, view: LoaderView | None) -> None:
        """The loop is about to drop an iterator before its end."""
        if isinstance(view, WorkersView):
            self.before_end()
        if self.log is not None:
            self.log.on_epoch()
        self._is_in_step, self._mark_s = False, self.clock()

    def left(self, begin_s: float) -> None:
        """It has, which took the time since `begin_s`."""
        self.accounts.ended(self.clock() - begin_s)
        self._add_to_loop()
        if self.log is not None:
            self.log.on_left()

    def _add_to_loop(self) -> None:
        now_s = self.clock()
        self._loop_s += now_s - self._mark_s
        self._mark_s = now_s

    # ------------------------------------------------------------------------------------------------ what it comes to

    def watch(self, log: StepLog | None) -> None:
        """Write steps to `log` from now on, or to no log if it is None."""
        self.log = log

    def stats(self, since: WatchedStats | None = None) -> WatchedStats:
        """The accounts up to now; with `since`, their rise after that moment."""
        now = self.with_programs(self.snapshot())
        return now if since is None else now.since(since)

    def with_programs(self, stats: WatchedStats) -> WatchedStats:
        """These stats with other programs named, as of now; takes milliseconds."""
        if not self._programs:
            return stats
        return replace(stats, programs=tuple(busiest(self._programs, programs(), os.getpid())[:_NUM_PROGRAMS]))

    def line_times(self) -> LineTimes | None:
        """Which lines made the batches; None where they are not sampled."""
        return None if self.lines is None else self.lines.times()

    def series(self) -> list[dict[str, Any]]:
        """The accounts over time, in at most 512 points."""
        return self._series.to_list()

    def snapshot(self) -> WatchedStats:
        """The accounts up to now, without the names of other programs."""
        self._workers.read()
        accounts, workers, arguments = self.accounts, self._workers.total(), self._arguments
        now_s, waits_s = self.clock(), self.accounts.waits_s.copy()
        counters = replace(
            accounts.counters(),
            kernel_s=workers.kernel_s,
            disk_wait_s=workers.disk_wait_s,
            num_disk_faults=workers.num_disk_faults,
            pin_cpu_s=self._workers.pin_cpu_s,
        )
        rows = rows_of(accounts, arguments, counters, workers, waits_s)
        started_s = 0.0 if self._is_inline else _charge_start(accounts.first_waits_s, waits_s)
        num_unfinished = self._num_unfinished()
        num_asked = 0 if arguments is None else arguments.num_ahead
        return WatchedStats(
            run=1,
            now_s=now_s,
            wall_s=self._loop_s,
            paused_s=0.0 if self._began_s is None else max(0.0, now_s - self._began_s - self._loop_s),
            num_batches=accounts.num_batches,
            num_samples=accounts.num_samples,
            waits_s=waits_s,
            started_s=started_s,
            stages=rows,
            num_ready=0 if num_unfinished is None else max(0, num_asked - num_unfinished),
            num_open=num_asked,
            memory={"batch_bytes": accounts.largest_bytes},
            host=self._host(workers),
            tuning=self._tuning(rows),
            arguments=arguments,
            watched=counters,
            shared_free_share=_shared_free_share(),
            kind=self._kind,
        )

    @property
    def _is_inline(self) -> bool:
        return self._arguments is not None and not self._arguments.num_workers

    def _num_unfinished(self) -> int | None:
        view = None if self._view is None else self._view()
        return view.num_unfinished() if isinstance(view, WorkersView) else None

    def _host(self, workers: ProcessCounters) -> HostStats:
        own = host_stats()
        if self._arguments is None or not self._arguments.num_workers:
            return self._cpus.added_to(own) if self._began_s is not None else own
        host = replace(
            own,
            rss_bytes=workers.rss_bytes,
            rss_peak_bytes=workers.rss_bytes,
            cpu_s=workers.cpu_s,
            read_bytes=workers.read_bytes,
            disk_bytes=workers.disk_bytes,
            native_s=0.0,
        )
        return self._cpus.added_to(host, children_s=workers.cpu_s)

    def _tuning(self, rows: list[StageStats]) -> Tuning:
        arguments, names = self._arguments, tuple(row.name for row in rows)
        if arguments is None:
            return Tuning(None, cpus=num_cpus(), pools=(PoolTuning(names, 1),))
        if self._is_inline:
            return Tuning("inline", cpus=num_cpus(), pools=(PoolTuning(names, 1),))
        own = [PoolTuning((name,), 1, is_trainers=True) for name in names[1:]]
        return Tuning(
            "dataloader",
            batches=arguments.num_ahead,
            processes=arguments.num_workers,
            cpus=num_cpus(),
            pools=(PoolTuning(names[:1], arguments.num_workers), *own),
            pids=self._workers.pids,
        )


def _charge_start(first_waits_s: dict[str, float], waits_s: dict[str, float]) -> float:
    """Charge the wait for the first of all batches to `start`, as nothing can be made ahead of it; its seconds."""
    total_s = 0.0
    for cause, seconds in first_waits_s.items():
        moved_s = min(seconds, waits_s.get(cause, 0.0))
        total_s += moved_s
        waits_s[cause] = waits_s.get(cause, 0.0) - moved_s
    if total_s:
        waits_s[START] = waits_s.get(START, 0.0) + total_s
    return total_s


def _may_hold() -> bool:
    free = _shared_free_share()
    return free is None or free > _ROOM


def _shared_free_share() -> float | None:
    """The share of the shared memory that is free; None where there is none."""
    try:
        found = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return None
    return found.f_bavail / found.f_blocks if found.f_blocks else None
