"""`prefetch.processes: auto`: what is refused, what it begins with, and a loader whose tuner adds processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from iterables import Counting
from leftovers import nothing_left  # noqa: F401 - a fixture for every test here
from numbers_dataset import numbers, pids_of
from waiting import wait_for

import loaderkit
from loaderkit import Pipeline
from loaderkit.engine.autotune.tuned_setting import TunedSetting
from loaderkit.engine.autotune.tuner import Tuner
from loaderkit.engine.metrics.snapshot import StageStats
from loaderkit.engine.metrics.tuning import PoolTuning, Tuning
from loaderkit.engine.process import worker_main
from loaderkit.engine.remote.contracts import WorkerSpec
from loaderkit.engine.remote.sizes import SharedSizes
from loaderkit.errors import ConfigError
from loaderkit.pipeline.config.builder import to_config
from loaderkit.pipeline.executors.live_settings import LiveSettings

pytestmark = pytest.mark.matrix(1)

AUTO = {"prefetch.executor": "process", "prefetch.processes": "auto"}


def compute(sample: dict[str, Any]) -> None:
    """A few milliseconds of Python."""
    sample["y"] = sum(i * i % 7 for i in range(40_000))


class TestConfig:
    def test_an_iterable_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"(?s)prefetch\.processes.*iterate over all .* give their number"):
            loaderkit.build(Pipeline.iterable(Counting(100)).read().batch(8), overrides=AUTO)

    def test_it_begins_with_one_and_says_what_is_tuned(self) -> None:
        with loaderkit.build(numbers(), overrides=AUTO) as loader:
            tuning = loader.stats().tuning
            assert (tuning.processes, tuning.batches) == (1, 4)
            assert tuning.auto == ("workers of read+batch", "batches", "processes")
            assert len(list(loader)) == 8
            assert loader.config.prefetch.batches == "auto"

    def test_batches_that_are_given_stay(self) -> None:
        with loaderkit.build(numbers(), overrides={**AUTO, "prefetch.batches": 6}) as loader:
            assert loader.stats().tuning.auto == ("workers of read+batch", "processes")
            loader.resize(batches=3)
            assert "processes" in (loader.stats().tuning.auto or ())

    def test_too_few_batches_for_the_most(self) -> None:
        given = {**AUTO, "prefetch.batches": 2, "prefetch.max_processes": 3}
        with pytest.raises(ConfigError, match=r"batches: 2 cannot be shared out to prefetch\.max_processes: 3"):
            loaderkit.build(numbers(), overrides=given)

    def test_a_bound_is_one_of_auto_only(self, caplog: pytest.LogCaptureFixture) -> None:
        """And does not let more processes pass than there are batches."""
        given = {**AUTO, "prefetch.processes": 2, "prefetch.max_processes": 8, "prefetch.batches": 2}
        with loaderkit.build(numbers(), overrides=given) as loader:
            assert loader.stats().tuning.processes == 2
        assert "prefetch.max_processes: 8 is of no effect with prefetch.processes: 2" in caplog.text
        with pytest.raises(ConfigError, match=r"batches: 2 cannot be shared out to prefetch\.processes: 3"):
            loaderkit.build(
                numbers(), overrides={**given, "prefetch.processes": 3, "prefetch.max_processes": 1}
            ).close()

    def test_of_another_executor_says_that_it_is_none(self, caplog: pytest.LogCaptureFixture) -> None:
        with loaderkit.build(numbers(), overrides={**AUTO, "prefetch.executor": "thread"}) as loader:
            assert len(list(loader)) == 8
            assert "processes" not in (loader.stats().tuning.auto or ())
        assert "prefetch.processes: auto is of no effect with prefetch.executor: thread" in caplog.text


class Engine:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []
        self.refused: Any = None

    def set_processes(self, num: int, refused: Any) -> None:
        self.told.append(("processes", num))
        self.refused = refused

    def resize(self, stage: str, num_workers: int) -> None:
        self.told.append((stage, num_workers))

    def set_depth(self, num_batches: int | None, memory_bytes: int | None) -> None:
        self.told.append(("batches", num_batches))


class Deciding(Tuner):
    """Makes the moves that it is given."""

    moves: list[Any]

    def look(self, now: Any) -> Any:
        return self._try(*self.moves.pop(0)) if self.moves else None

    def _try(self, setting: TunedSetting, value: int) -> Any:  # type: ignore[override]
        return self._turn(setting, value, 0.0)


def live(*moves: int) -> tuple[LiveSettings, Engine, Deciding]:
    """Settings whose tuner sets the processes to each of `moves`."""
    processes = TunedSetting("processes", (), 1, kind="processes", most=16)
    workers = TunedSetting("workers of read", ("read",), 3)
    batches = TunedSetting("batches", (), 4, kind="batches")
    tuner = Deciding([workers, batches, processes], "read", 8)
    tuner.moves = [(processes, move) for move in moves]
    settings, engine = (
        LiveSettings(Tuning("process", 4, processes=1, pools=(PoolTuning(("read",), 3),)), tuner),
        Engine(),
    )
    settings.attach(engine)  # type: ignore[arg-type]
    return settings, engine, tuner


class TestWhatTheyShare:
    def test_workers_and_batches_come_with_them(self) -> None:
        settings, engine, tuner = live(4, 2, 1)
        for processes, workers, batches in ((4, 4, 8), (2, 4, 4), (1, 3, 4)):
            settings.tune(None)  # type: ignore[arg-type]
            tuning = settings.tuning
            assert (tuning.processes, tuning.concurrency, tuning.batches) == (processes, workers, batches)
            assert [setting.value for setting in tuner.settings] == [workers, batches, processes]
            assert [setting.unit for setting in tuner.settings] == [processes, processes, 1]
        assert engine.told == [
            ("processes", 4),
            ("batches", 8),
            ("processes", 2),
            ("batches", 4),
            ("processes", 1),
            ("batches", 4),
        ]

    def test_the_tuner_knows_how_many_a_loader_begins_with(self) -> None:
        """As one does that has moved into processes: else it would wait for ever for the others to go."""
        settings, _, tuner = live()
        settings.begin_with(4)
        assert [setting.value for setting in tuner.settings] == [4, 8, 4]

    def test_workers_that_are_given_stay_as_many_where_processes_bring_cpus(self) -> None:
        """Those of `decode` are three in all, rounded up to the same number in each; of `read` each process has two."""
        stages, cpus = ("read", "decode"), 1.0
        processes = TunedSetting("processes", (), 1, kind="processes", most=16)
        tuner = Deciding([TunedSetting("workers of read", ("read",), 2), processes], "read", 8, cpus_each=cpus)
        tuner.moves = [(processes, 4), (processes, 1)]
        pools = (PoolTuning(("read",), 2), PoolTuning(("decode",), 3))
        settings = LiveSettings(Tuning("ray", 4, processes=1, pools=pools), tuner)
        settings.attach(Engine())  # type: ignore[arg-type]
        rows = [StageStats("read", 2), StageStats("decode", 3)]
        spec = WorkerSpec(None, "", rows, [[name] for name in stages], 8, 2**20, scaled_stages={"read"})
        sizes, process = SharedSizes(spec, 1), SimpleNamespace(number=0, num_cautious=0)
        for num, expected in ((4, [8, 4]), (1, [2, 3])):
            settings.tune(None)  # type: ignore[arg-type]
            assert [pool.workers for pool in settings.tuning.pools] == expected
            sizes.share_out((), num)
            _, shard, _, _, workers = sizes.order_for(process)  # type: ignore[arg-type]
            assert [shard.num_workers(workers[name]) * num for name in stages] == expected

    def test_a_new_engine_has_as_many(self) -> None:
        settings, _, _ = live(4)
        settings.tune(None)  # type: ignore[arg-type]
        other = Engine()
        settings.attach(other)  # type: ignore[arg-type]
        assert other.told == [("processes", 4), ("batches", 8)]

    def test_they_are_written_down(self) -> None:
        settings, _, _ = live(4)
        settings.tune(None)  # type: ignore[arg-type]
        written = settings.written_to(to_config(numbers(), {**AUTO, "prefetch.max_processes": 8})).prefetch
        assert (written.processes, written.max_processes, written.batches, written.concurrency) == (4, None, 8, 4)

    def test_a_refusal_that_comes_later(self, caplog: pytest.LogCaptureFixture) -> None:
        settings, engine, tuner = live(4)
        settings.tune(None)  # type: ignore[arg-type]
        settings.tune(None)  # type: ignore[arg-type]
        engine.refused("it was killed")
        settings.tune(None)  # type: ignore[arg-type]
        assert (settings.tuning.processes, settings.tuning.batches) == (1, 4)
        assert tuner.settings[2].value == 1
        assert engine.told[-2:] == [("processes", 1), ("batches", 4)]
        assert "could not set processes to 4: it was killed" in caplog.text


def test_a_loop_that_waits_for_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets another process while it runs, and an error does not take it back."""
    monkeypatch.setattr(
        "loaderkit.pipeline.executors.engine_factory.num_cpus", lambda: 64
    )  # others may need those that there are
    pipeline = Pipeline.dataset(list(range(100_000))).shuffle("none").read().call(compute).batch(4)
    with loaderkit.build(pipeline, overrides={**AUTO, "prefetch.max_processes": 2}) as loader:
        keys: list[str] = []
        stream = iter(loader)
        while len(pids_of(loader)) < 2 or loader.stats().tuning.processes != 2:
            for _ in range(
                16
            ):  # to look takes as long as a batch, and a loop that does so at each has nothing to wait for
                keys += next(stream)["__key__"]
        for _ in range(20):
            keys += next(stream)["__key__"]
        assert keys == [str(number) for number in range(len(keys))]
        decisions = loader.stats().to_dict()["tuning"]["decisions"]
        assert ("processes", 1, 2) in [(one["knob"], one["before"], one["after"]) for one in decisions]
        assert loader.series()[-1]["processes"] in (1, 2)
        state = loader.state_dict()
    with loaderkit.build(pipeline, overrides={"prefetch.executor": "inline"}) as loader:
        loader.load_state_dict(state)
        assert next(iter(loader))["__key__"] == [str(len(keys) + number) for number in range(4)]


def test_processes_that_cannot_start_leave_the_loop_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("loaderkit.pipeline.executors.engine_factory.num_cpus", lambda: 64)
    pipeline = Pipeline.dataset(list(range(100_000))).shuffle("none").read().call(compute).batch(4)
    with loaderkit.build(pipeline, overrides={**AUTO, "prefetch.max_processes": 2}) as loader:
        stream = iter(loader)
        next(stream)
        monkeypatch.setattr(worker_main, "BOOT", "import os; os.kill(os.getpid(), 9)")
        while "could not set processes to 2" not in caplog.text:
            next(stream)
        wait_for(lambda: loader.stats().tuning.processes == 1)
        effects = [str(one["effect"]) for one in loader.stats().tuning.decisions]
        assert any("refused: " in effect and "killed by SIGKILL" in effect for effect in effects)
        assert len(pids_of(loader)) == 1
