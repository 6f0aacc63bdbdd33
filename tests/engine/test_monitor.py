"""The monitor keeps a bounded history, and what it needs ends with the loader."""

from __future__ import annotations

import gc
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from executors import executor_of
from numbers_dataset import PROCESS, numbers
from waiting import wait_for
from workloads import Simulation, Workload

import loaderkit
from loaderkit._internal.config.yaml_text import from_yaml
from loaderkit._internal.system.cgroups import cgroup_folders
from loaderkit.engine.metrics.host import HostStats, host_stats
from loaderkit.engine.metrics.tuning import Tuning
from loaderkit.engine.monitor import Monitor, Series
from loaderkit.pipeline.executors.executor_lifecycle import abandon


def monitors() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "loaderkit-monitor"]


class TestSeries:
    @pytest.mark.parametrize("num_looks", [1, 2, 15, 16, 17, 100, 1000])
    def test_it_covers_everything_in_bounded_memory(self, num_looks: int) -> None:
        simulation = Simulation(Workload(lambda workers, _: 100.0))
        series = Series(num_points=16)
        first = None
        for _ in range(num_looks):
            simulation.look()
            series.add(simulation.stats)
            first = first or simulation.stats
        points = series.to_list()
        assert len(points) <= 15
        assert first is not None
        if points:
            assert points[0]["at_s"] - points[0]["seconds"] == pytest.approx(first.now_s)
            for before, after in itertools.pairwise(points):
                assert after["at_s"] - after["seconds"] == pytest.approx(before["at_s"])
            # What comes after the last point kept is less than two of its steps.
            assert simulation.stats.now_s - points[-1]["at_s"] < 2 * points[-1]["seconds"]
            assert all(point["samples_per_s"] == pytest.approx(100, abs=5) for point in points)

    def test_another_run_begins_anew(self) -> None:
        simulation = Simulation(Workload(lambda workers, _: 100.0))
        series = Series()
        for _ in range(5):
            simulation.look()
            series.add(simulation.stats)
        series.add(replace(simulation.stats, run=1))
        assert series.to_list() == []

    def test_another_run_begins_with_small_steps(self) -> None:
        simulation = Simulation(Workload(lambda workers, _: 100.0))
        series = Series(num_points=16)
        for _ in range(200):
            simulation.look()
            series.add(simulation.stats)
        for _ in range(5):
            simulation.look()
            series.add(replace(simulation.stats, run=1))
        assert len(series.to_list()) == 4

    def test_decisions_are_not_kept_with_every_point(self) -> None:
        class Decisions(list[dict[str, Any]]):
            pass

        simulation = Simulation(Workload(lambda workers, _: 100.0))
        series = Series()
        simulation.look()
        decisions = Decisions([{}])
        series.add(replace(simulation.stats, tuning=Tuning(batches=4, decisions=decisions)))
        kept = weakref.ref(decisions)
        del decisions
        assert kept() is None


class TestThread:
    @pytest.mark.parametrize("overrides", [{}, PROCESS], ids=["thread", "process"])
    def test_the_history_of_a_loader(self, overrides: dict[str, Any]) -> None:
        with loaderkit.build(numbers(), overrides=overrides) as loader:
            for _ in range(2):
                list(loader)
            wait_for(lambda: len(loader.series()) >= 2 and loader.series()[-1]["rss_bytes"] > 0)
            points = json.loads(json.dumps(loader.series()))
            late_s = loader.stats().to_dict()["host"]["late_p50_s"]
        assert monitors() == []
        assert {"at_s", "samples_per_s", "stall", "busy", "workers", "ready", "rss_bytes", "cpus"} <= set(points[0])
        assert points[-1]["batches"] == 4
        assert points[-1]["rss_bytes"] > 2**20
        assert late_s >= 0
        assert points[-1]["late_s"] >= 0

    @pytest.mark.parametrize("overrides", [{}, PROCESS], ids=["thread", "process"])
    def test_shares_are_shares_from_the_first_moment_on(self, overrides: dict[str, Any]) -> None:
        """Also before the loop asks for a batch, and while the process that loads is not there yet."""
        with loaderkit.build(numbers(80), overrides=overrides) as loader:
            first = loader.stats()
            loader.start()
            wait_for(lambda: loader.stats().num_ready > 0)
            wait_for(lambda: len(loader.series()) >= 2)
            list(loader)
            num_points = len(loader.series())
            wait_for(lambda: len(loader.series()) > num_points + 1)
            points = loader.series()
            passed = loader.stats(since=first).to_dict()["host"]
            num_ready = loader.stats().to_dict()["queue"]["ready"]
        for point in points:
            assert point["seconds"] > 0.1
            assert 0 <= point["cpus"] < 64
            assert all(0 <= share < 64 for share in point["busy"].values())
            assert sum(point["stall"].values()) < 1.05
        assert passed["cpu_s"] >= 0
        assert passed["read_bytes"] is None or passed["read_bytes"] >= 0
        assert num_ready > 0, "batches of the next epoch wait for the loop"

    def test_none_is_needed_inline(self) -> None:
        with loaderkit.build(numbers(), overrides={"prefetch.executor": "inline"}) as loader:
            list(loader)
            assert monitors() == []
            assert loader.series() == []

    @pytest.mark.parametrize("overrides", [{}, PROCESS], ids=["thread", "process"])
    def test_it_does_not_keep_a_loader_alive(self, overrides: dict[str, Any]) -> None:
        loader = loaderkit.build(numbers(), overrides=overrides)
        next(iter(loader))
        (monitor,) = monitors()
        del loader
        gc.collect()
        monitor.join(60)
        assert not monitor.is_alive()

    def test_the_sizes_that_were_found_can_be_written(self, tmp_path: Path) -> None:
        with loaderkit.build(numbers_by_name(), overrides={"prefetch.batches": "auto"}) as loader:
            next(iter(loader))
            tuning = loader.stats().to_dict()["tuning"]
            assert tuning["auto"] == ["workers of read+batch", "batches"]
            assert tuning["decisions"] == []
            loader.resize("read", workers=5)
            loader.resize(batches=7, memory="1GiB")
            assert loader.stats().to_dict()["tuning"]["auto"] == [], "what a user sets is the user's"
            (tmp_path / "tuned.yaml").write_text(loader.to_yaml())
        found = loaderkit.Pipeline.from_yaml(tmp_path / "tuned.yaml").config.prefetch
        assert (found.concurrency, found.batches, found.memory) == (5, 7, 2**30)

    def test_a_stage_with_workers_of_its_own_is_written_with_those_it_has(self) -> None:
        pipeline = loaderkit.Pipeline.dataset("numbers_dataset:Numbers").read().call("numbers_dataset:hang").batch(8)
        overrides = {"stages.call.workers": 2, "prefetch.concurrency": 4}
        with loaderkit.build(pipeline, overrides=overrides) as loader:
            loader.resize("call", workers=6)
            loader.resize("read", workers=3)
            tuned = loader.to_yaml()
            pools = loader.stats().tuning.pools
        with loaderkit.build(from_yaml(tuned)) as loader:
            again = loader.stats().tuning
        assert [pool.workers for pool in pools] == [3, 6, 1]
        assert again.pools[1] == pools[1]
        assert again.concurrency == 10


def numbers_by_name() -> loaderkit.Pipeline:
    return loaderkit.Pipeline.dataset("numbers_dataset:Numbers").read().batch(8)


class TestHost:
    def test_it_counts_up(self, tmp_path: Path) -> None:
        before = host_stats()
        (tmp_path / "file").write_bytes(bytes(10**6))
        (tmp_path / "file").read_bytes()
        later = host_stats()
        assert later.rss_bytes > 2**20
        assert later.cpu_s >= before.cpu_s
        passed = later.minus(before)
        if passed.read_bytes is not None:
            assert passed.read_bytes >= 10**6
            assert passed.page_cache_hits is not None
            assert passed.page_cache_hits > 0.5, "it had just been written"

    @pytest.mark.skipif(
        not Path("/proc/self/status").exists(), reason="the kernel counts a parent's peak as its child's"
    )
    def test_the_peak_is_our_own(self) -> None:
        program = "from loaderkit.engine.metrics.host import host_stats; print(host_stats().rss_peak_bytes)"
        ballast = torch.ones(2**30, dtype=torch.uint8)
        ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert 2**20 < int(ran.stdout) < ballast.nbytes < host_stats().rss_peak_bytes

    @pytest.mark.parametrize(
        ("read_bytes", "disk_bytes", "share"), [(None, None, None), (0, 0, None), (100, 25, 0.75), (100, 300, 0.0)]
    )
    def test_hits_of_the_page_cache(self, read_bytes: int | None, disk_bytes: int | None, share: float | None) -> None:
        assert HostStats(0, 0, 0.0, None, read_bytes, disk_bytes).page_cache_hits == share

    def test_cgroups_are_named_from_the_innermost_out(self) -> None:
        folders = [folder for folder in cgroup_folders("cpu") if folder.is_relative_to("/sys/fs/cgroup")]
        assert folders == list(cgroup_folders("cpu"))


class TestStopping:
    """In a fork's child no thread will ever release a lock that was held: nothing there may wait for one."""

    def test_a_fork_while_sizes_are_changed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Then the locks of the settings and of the engine's pools are held."""
        start = threading.Thread.start
        pids: list[int] = []

        def fork_and_start(thread: threading.Thread) -> None:
            pids.append(os.fork())
            if pids[0] == 0:
                signal.alarm(60)
                loader.stats()
                loader.series()
                loader.close()
                os._exit(7)
            monkeypatch.setattr(threading.Thread, "start", start)
            start(thread)

        with loaderkit.build(numbers(), overrides={"prefetch.concurrency": 1}) as loader:
            next(iter(loader))
            monkeypatch.setattr(threading.Thread, "start", fork_and_start)
            loader.resize("read", workers=2)
            assert os.waitstatus_to_exitcode(os.waitpid(pids[0], 0)[1]) == 7

    def test_a_fork_while_the_scheduler_is_locked(self) -> None:
        with executor_of(numbers()) as engine:
            engine.next()
            engine.account.begin(0.0)  # as while the consumer waits
            with engine.scheduler.lock:
                pid = os.fork()
                if pid == 0:
                    signal.alarm(60)
                    engine.stats(Tuning(), 0)
                    engine.close()
                    os._exit(7)
            engine.account.begin(None)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7

    def test_a_loader_that_is_garbage_in_the_monitors_own_thread(self) -> None:
        """The collector may run there, while that thread holds a lock of the engine."""
        with executor_of(numbers()) as engine:
            engine.next()
            workers = [thread for thread in threading.enumerate() if thread.name.startswith("loaderkit")]

            def collect(stats: Any) -> None:
                with engine.scheduler.lock:
                    abandon(engine, monitor)

            monitor = Monitor(lambda: engine.stats(Tuning(), 0), Series(), collect)
            monitor.start()
            for thread in [*monitors(), *workers]:
                thread.join(60)
                assert not thread.is_alive()

    def test_what_goes_wrong_in_it_is_said_once_and_harms_nothing(self, caplog: pytest.LogCaptureFixture) -> None:
        simulation = Simulation(Workload(lambda workers, _: 100.0))
        simulation.look()
        has_failed_twice = threading.Event()
        failures = itertools.count(1)

        def fail(stats: Any) -> None:
            if next(failures) == 2:
                has_failed_twice.set()
            raise MemoryError

        monitor = Monitor(lambda: simulation.stats, Series(), fail)
        monitor.start()
        assert has_failed_twice.wait(60)
        monitor.stop()
        monitor.join()
        assert caplog.text.count("the time series and the tuner miss what happens now") == 1
