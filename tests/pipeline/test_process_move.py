"""`executor: auto`: what the loop waits for moves into processes, and nothing shows of it in the batches."""

from __future__ import annotations

import itertools
import logging
import os
import random
import re
import signal
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from leftovers import children, nothing_left, resources  # noqa: F401 - a fixture for every test here
from numbers_dataset import Numbers, pids_of
from waiting import wait_for

import loaderkit
from loaderkit import Pipeline
from loaderkit.diagnosis.stats import Stats
from loaderkit.engine.metrics.snapshot import StageStats
from loaderkit.engine.remote.executor import RemoteEngine
from loaderkit.errors import ClosedError, ConfigError
from loaderkit.pipeline.execution_plan import compile_pipeline
from loaderkit.pipeline.executors import process_move
from loaderkit.pipeline.executors.process_move import ProcessMove

FACTOR = 3
INLINE = {"prefetch.executor": "inline"}


def scaled(sample: dict[str, Any], rng: Any) -> dict[str, Any]:
    return {"scaled": FACTOR * sample["x"] + rng.integers(100)}


def where(sample: dict[str, Any]) -> dict[str, Any]:
    return {"pid": os.getpid()}


def only_with_four(sample: dict[str, Any]) -> None:
    if FACTOR != 4:
        raise RuntimeError("not here")


class Leveled(Numbers):
    """What the loop changes between epochs."""

    level = 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**super().__getitem__(index), "level": self.level}


class Drawing(Numbers):
    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(1)


class Locked(Numbers):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the accounts say it pays."""
    for name in ("_LOOK_S", "_WINDOW_S", "_PRICE_S", "_ALWAYS", "_GAIN"):
        monkeypatch.setattr(process_move, name, 0.0)
    monkeypatch.setattr(process_move, "_WAITED", -1.0)
    monkeypatch.setattr(process_move, "num_cpus_of_rank", lambda: 2)


def has_decided(loader: loaderkit.Loader) -> bool:
    return loader._executors._move is None and loader.stats().num_batches > 0


def taken_until_decided(loader: loaderkit.Loader, *names: str) -> list[list[Any]]:
    taken: list[list[Any]] = []
    while not has_decided(loader):
        for batch in loader:
            taken.append([batch[name].tolist() for name in names])
            if has_decided(loader):
                break
            threading.Event().wait(1e-3)  # processes start meanwhile
    return taken


def test_the_loop_has_waited_for_the_move(at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it takes is a wait, and not time that nothing accounts for."""
    takes_s, look = 0.2, ProcessMove.look

    def slowly(self: ProcessMove, *args: Any) -> Any:
        moved = look(self, *args)
        if moved is not None:
            threading.Event().wait(takes_s)
        return moved

    monkeypatch.setattr(ProcessMove, "look", slowly)
    with loaderkit.build(Pipeline.dataset(Numbers(200)).read().call(scaled).batch(8)) as loader:
        taken_until_decided(loader)
        assert loader.stats().tuning.executor == "process"
        assert sum(loader.stats().waits_s.values()) >= takes_s


def test_nothing_waits_for_a_move_in_start(at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    look, may_move = ProcessMove.look, threading.Event()
    monkeypatch.setattr(
        ProcessMove,
        "look",
        lambda self, *args: None if self.started is not None and not may_move.is_set() else look(self, *args),
    )
    with loaderkit.build(Pipeline.dataset(Numbers(200)).read().call(scaled).batch(8)) as loader:
        move: Any = None
        for _ in loader:
            move = loader._executors._move
            if move.started is not None and move._made_here is not None:
                break
        wait_for(move.started.engine.has_begun)
        may_move.set()
        loader.start()
        assert loader.stats().tuning.executor == "process"
        assert not loader.stats().waits_s


def test_the_same_batches_before_and_behind(at_once: None, rng: random.Random) -> None:
    pipeline = Pipeline.dataset(Numbers(200)).shuffle(seed=rng.randrange(99)).read().call(scaled).batch(8)
    with loaderkit.build(pipeline.call(lambda batch: {"late": batch["scaled"] + 1})) as loader:
        assert loader.stats().tuning.executor == "thread"
        taken = taken_until_decided(loader, "x", "scaled", "late")
        num_then = len(taken)
        state = loader.state_dict()
        taken += [[batch[name].tolist() for name in ("x", "scaled", "late")] for batch in loader]
        tuning = loader.stats().tuning
        assert (tuning.executor, tuning.processes) == ("process", 2)
        assert "processes" in (tuning.auto or ())
        assert len(set(pids_of(loader))) == 2
        assert loader.config.prefetch.executor == "auto"
    with loaderkit.build(pipeline, overrides=INLINE) as inline:
        expected: list[list[Any]] = []
        while len(expected) < num_then:
            for batch in inline:
                expected.append([batch["x"].tolist(), batch["scaled"].tolist(), (batch["scaled"] + 1).tolist()])
                if len(expected) == num_then:
                    break
        assert taken[:num_then] == expected
        assert inline.state_dict() == state | {"fingerprint": inline.state_dict()["fingerprint"]}


def test_it_moves_in_the_middle_of_an_epoch(at_once: None) -> None:
    with loaderkit.build(Pipeline.dataset(Numbers(10**6)).read().call(scaled).batch(8)) as loader:
        executors = []
        for _ in loader:
            executors.append(loader.stats().tuning.executor)
            if has_decided(loader):
                break
            threading.Event().wait(1e-3)
        assert set(executors[:-1]) == {"thread"}
        assert executors[-1] == "process"


@pytest.mark.parametrize(
    ("pipeline", "said"),
    [
        (Pipeline.dataset(Locked()).read().batch(8), r"source\.object.*Locked.*thread_safe: true"),
        (Pipeline.dataset(Numbers()).read().call(only_with_four).batch(8), "they failed .*not here"),
        (Pipeline.dataset(Numbers()).read().call(scaled).batch(8), "their first batch had other values in scaled"),
        (
            Pipeline.dataset([bytes(2**10 + n) for n in range(200)]).read().call(only_with_four).batch(8),
            "its own copy, of more",
        ),
        (Pipeline.dataset(Drawing()).read().call(scaled).batch(8), "a random generator of its own .*Generator"),
    ],
)
def test_what_stays_and_why(
    pipeline: Pipeline, said: str, at_once: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "FACTOR", 4)  # which the module is not in another process
    monkeypatch.setattr(process_move, "_MOST_BYTES", 2**17)
    with caplog.at_level(logging.WARNING), loaderkit.build(pipeline) as loader:
        taken_until_decided(loader)
        assert loader.stats().tuning.executor == "thread"
        assert len(list(loader)) > 0
    (record,) = [record for record in caplog.records if "stays in this process" in record.getMessage()]
    assert re.search(said, record.getMessage())


def test_what_the_loop_changes_between_epochs_is_seen(at_once: None) -> None:
    data = Leveled(64)
    with loaderkit.build(Pipeline.dataset(data).shuffle(seed=3).read().batch(8)) as loader:
        taken_until_decided(loader)
        assert loader.stats().tuning.executor == "process"
        for epoch in range(3):
            list(loader)  # to its end
            first = set(pids_of(loader))
            if epoch % 2:
                data.level = epoch
            batches = list(loader)
            assert {n for batch in batches for n in batch["level"].tolist()} == {data.level}
            assert sorted(n for batch in batches for n in batch["x"].tolist()) == list(range(64))
            assert (set(pids_of(loader)) == first) == (epoch % 2 == 0)


def test_those_that_start_later_get_what_the_first_ones_got(at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the loop does to its objects meanwhile, as with a DataLoader, whose workers see it in the next epoch."""
    monkeypatch.setattr(process_move, "_MOST_AT_FIRST", 1)
    data = Leveled(10**6)
    with loaderkit.build(Pipeline.dataset(data).shuffle("none").read().batch(4)) as loader:
        numbers: list[int] = []
        killed: int | None = None
        for batch in loader:
            numbers += batch["x"].tolist()
            assert set(batch["level"].tolist()) == {0}
            if not has_decided(loader):
                continue
            tuning = loader.stats().tuning
            assert tuning.executor == "process"
            if data.level == 0:
                data.level = 1
                settings = loader._executors.settings
                monkeypatch.setattr(settings._tuner, "look", lambda stats: None)
                settings._set_processes(2)  # as when the tuner says so
            elif killed is None and tuning.processes == 2:
                killed = pids_of(loader)[0]
                os.kill(killed, signal.SIGKILL)  # nor does one see it that takes another's place
                last = len(numbers) + 400
            elif killed is not None and len(numbers) > last and loader.stats().num_restarts:
                break
        assert numbers == list(range(len(numbers)))
        assert len({*pids_of(loader)} - {killed}) == loader.stats().tuning.processes == 2


def test_there_are_no_more_than_there_is_memory_for(at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_move, "free_memory", lambda: (2**21, ""))
    config = Pipeline.dataset([bytes(2**10 + n) for n in range(100)]).read().call(scaled).batch(8).config
    plan = compile_pipeline(config, rank=0, world_size=1)
    move = ProcessMove(plan)
    assert move._most_that_fit(plan, 2) == 4
    with pytest.raises(ConfigError, match="each of 5 processes would have its own copy"):
        move._most_that_fit(plan, 5)
    plan.close()


def test_what_changes_each_time_processes_start_stays(
    at_once: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In loops whose epochs are shorter than that takes."""
    data, asked = Leveled(16), RemoteEngine.has_begun
    numbers = itertools.count(1)
    monkeypatch.setattr(RemoteEngine, "has_begun", lambda engine: next(numbers) % 5 == 0 and asked(engine))
    with caplog.at_level(logging.WARNING), loaderkit.build(Pipeline.dataset(data).read().batch(8)) as loader:
        while not has_decided(loader):
            data.level += 1
            assert len(list(loader)) == 2
        assert loader.stats().tuning.executor == "thread"
    assert "changed between epochs" in caplog.text


def test_a_collected_loader_leaves_no_processes_that_start_beside_it(at_once: None) -> None:
    """`nothing_left` of this module looks for them."""
    loader = loaderkit.build(Pipeline.dataset(Numbers(10**6)).read().call(scaled).batch(8))
    for _ in loader:
        if loader._executors._move is None or loader._executors._move.started is not None:
            break
    assert children()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ClosedError])
def test_processes_end_if_the_threads_end_otherwise(
    error: type[BaseException], at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Ctrl-C, or a `close` in another thread, just then."""
    with loaderkit.build(Pipeline.dataset(Numbers(10**6)).read().call(scaled).batch(8)) as loader:
        executors, stop, before = loader._executors, loader._executors.stop, children()

        def interrupted(join_s: float = 10.0) -> None:
            monkeypatch.setattr(executors, "stop", stop)
            stop(join_s)
            if error is KeyboardInterrupt:
                raise KeyboardInterrupt
            executors.lifetime.is_closed = True

        monkeypatch.setattr(executors, "stop", interrupted)
        with pytest.raises(error):
            for _ in loader:
                threading.Event().wait(1e-3)
        wait_for(lambda: children() <= before)


def accounts(now_s: float, stage_s: dict[str, tuple[float, float]], waited_s: float) -> Stats:
    rows = [StageStats(name, 2, busy_s=busy_s, cpu_s=cpu_s, kind=name) for name, (busy_s, cpu_s) in stage_s.items()]
    empty = Stats.empty(rows, 0)
    return replace(empty, now_s=now_s, wall_s=now_s, num_batches=int(now_s), waits_s={"call": waited_s})


@pytest.mark.parametrize(
    ("call_s", "other_s", "other_cpu_s", "waited", "pays"),
    [
        (0.95, 0.1, 0.1, 0.5, True),  # of a second: one thread is in user code all the time
        (0.95, 0.1, 0.1, 0.01, False),  # and the loop does not wait for it
        (0.3, 1.6, 1.6, 0.5, False),  # other stages fill the CPUs
        (0.9, 1.0, 1.0, 0.5, False),  # two processes could do no more
        (0.9, 1.0, 0.1, 0.5, True),  # the others wait for the GIL, which user code holds
    ],
)
def test_when_it_pays(
    call_s: float, other_s: float, other_cpu_s: float, waited: float, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_move, "num_cpus_of_rank", lambda: 2)
    plan = compile_pipeline(Pipeline.dataset(Numbers()).read().call(scaled).batch(8).config)
    move = ProcessMove(plan)
    looks = []
    for now in range(1, 12):
        stages = {"read": (0.0, 0.0), "call": (call_s * now,) * 2, "batch": (other_s * now, other_cpu_s * now)}
        looks.append(move._pays(accounts(now, stages, waited * now)))
    assert any(looks) == pays
    assert not any(looks[:3]), "a start takes longer than has been lost by then"


@pytest.mark.parametrize(
    ("pipeline", "may"),
    [
        (Pipeline.dataset(Numbers()).read().batch(8), True),
        (Pipeline.dataset(Numbers(), thread_safe=True).read().batch(8), False),
        (Pipeline.dataset([1, 2, 3]).read().batch(2), False),
        (Pipeline.dataset([1, 2, 3]).read().batch(2).call(where), True),
        (Pipeline.dataset([1, 2, 3]).read().batch(2).call(where, thread_safe=True), False),
        (Pipeline.iterable([1, 2, 3]).read().call(where).batch(2), False),
        (Pipeline.dataset(Numbers()).read().batch(8).prefetch(executor="thread"), False),
    ],
)
def test_what_may_move(pipeline: Pipeline, may: bool) -> None:
    assert compile_pipeline(pipeline.config).may_move == may


def test_seeded_functions_begin_in_processes_or_inline(caplog: pytest.LogCaptureFixture) -> None:
    made = Pipeline.dataset(Numbers()).read()
    assert compile_pipeline(made.call(where, seeded=True).batch(8).config).executor == "process"
    lock = threading.Lock()
    with caplog.at_level(logging.WARNING):
        plan = compile_pipeline(made.call(lambda sample: {"l": lock.locked()}, seeded=True).batch(8).config)
    assert plan.executor == "inline"
    assert "a seeded function runs in next()" in caplog.text
