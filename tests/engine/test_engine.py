"""The engine under stress: interrupts, seeks while chunks are in flight, hanging stages, many workers."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from executors import executor_of
from waiting import join_threads, wait_for

import loaderkit
from loaderkit import Pipeline
from loaderkit._internal.system.cgroups import num_cpus
from loaderkit.engine.pools import plan_pools
from loaderkit.engine.threaded import ThreadEngine
from loaderkit.engine.work import Stage
from loaderkit.errors import ClosedError, StageError


class Numbers:
    """Sample i is the number i."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": index}


def numbers(size: int = 1000, batch: int = 16) -> Pipeline:
    return Pipeline.dataset(Numbers(size)).shuffle(seed=1).read().call(increment).batch(batch)


def increment(sample: dict[str, Any]) -> None:
    sample["x"] += 1


class TestSeeking:
    @pytest.mark.parametrize(
        "overrides",
        [
            {"prefetch.concurrency": 4},
            {"stages.call.workers": 3, "stages.batch.workers": 2},
            {"prefetch.executor": "inline"},
        ],
    )
    def test_random_breaks_resumes_and_epochs(self, overrides: dict[str, Any], rng: random.Random) -> None:
        """Whatever was in flight when the plan changed, what comes next is what the order says."""
        with loaderkit.build(numbers(), overrides={"prefetch.executor": "inline"}) as loader:
            expected = {epoch: [batch["x"].tolist() for batch in loader] for epoch in range(4)}
        with loaderkit.build(numbers(), overrides=overrides) as loader:
            for _ in range(60):
                epoch = rng.randrange(4)
                begin = rng.randrange(63)
                state = {**loader.state_dict(), "epoch": epoch, "position": begin * 16}
                loader.load_state_dict(state)
                length = rng.randrange(1, 8)
                seen = []
                for batch in loader:
                    seen.append(batch["x"].tolist())
                    if len(seen) == length:
                        break
                assert seen == expected[epoch][begin : begin + length]

    def test_seeks_give_all_memory_back(self) -> None:
        with loaderkit.build(numbers(), overrides={"prefetch.concurrency": 4}) as loader:
            for _ in range(50):
                next(iter(loader))
            gc.collect()
            memory = loader.stats().memory
            assert memory["allocated_bytes"] <= 7 * memory["slab_bytes"]
            assert memory["open_bytes"] <= 4 * memory["slab_bytes"]


class TestErrors:
    def test_batches_before_the_error_are_delivered(self) -> None:
        """The error comes at its place in the order, not when a worker happens to meet it."""
        with loaderkit.build(numbers()) as loader:
            order = [batch["x"].tolist() for batch in loader]
        bad = order[5][3] - 1

        def fail(sample: dict[str, Any]) -> None:
            if sample["__key__"] == str(bad):
                raise KeyError("a word")
            sample["x"] += 1

        broken = Pipeline.dataset(Numbers(1000)).shuffle(seed=1).read().call(fail).batch(16)
        with loaderkit.build(broken) as loader:
            seen: list[list[int]] = []
            with pytest.raises(StageError, match=f"call failed for sample '{bad}' in Numbers") as caught:
                seen.extend(batch["x"].tolist() for batch in loader)
            assert isinstance(caught.value.__cause__, KeyError)
            assert caught.value.key == str(bad)
            assert loader.state_dict()["position"] == 80
        # A generator inside extend() delivers what came before the error.
        assert seen in ([], order[:5])

    def test_after_an_error_the_loader_goes_on_with_the_next_epoch(self) -> None:
        calls = []

        def fail_once(sample: dict[str, Any]) -> None:
            calls.append(1)
            if len(calls) == 200:
                raise ValueError("once")

        pipeline = Pipeline.dataset(Numbers(100)).read().call(fail_once).batch(10)
        with loaderkit.build(pipeline) as loader:
            with pytest.raises(StageError, match="once"):
                for _ in range(3):
                    for _ in loader:
                        pass
            assert not [t for t in threading.enumerate() if t.name.startswith("loaderkit")]
            assert sum(len(batch["x"]) for batch in loader) == 100

    @pytest.mark.parametrize("place", ["sample", "batch"])
    @pytest.mark.parametrize("executor", ["inline", "thread"])
    def test_a_keyboard_interrupt_in_a_stage(self, place: str, executor: str) -> None:
        def interrupt(value: dict[str, Any]) -> None:
            if value["__key__"] in ("7", ["0", "1", "2", "3"]):
                raise KeyboardInterrupt

        pipeline = Pipeline.dataset(Numbers(40)).shuffle("none").read()
        pipeline = pipeline.call(interrupt).batch(4) if place == "sample" else pipeline.batch(4).call(interrupt)
        with loaderkit.build(pipeline, overrides={"prefetch.executor": executor}) as loader:
            with pytest.raises(KeyboardInterrupt):
                list(loader)
            assert not [t for t in threading.enumerate() if t.name.startswith("loaderkit")]

    def test_errors_survive_pickling(self) -> None:
        import copy
        import pickle

        error = StageError("decode failed", stage="decode", key="a", origin="b", epoch=2, position=3)
        for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
            assert (str(twin), twin.stage, twin.key, twin.origin, twin.epoch, twin.position) == (
                ("decode failed", "decode", "a", "b", 2, 3)
            )


class TestInterrupts:
    @pytest.mark.matrix(1)
    @pytest.mark.parametrize("moment", [0.0, 0.05, 0.2, 0.6])
    def test_ctrl_c_ends_a_loop_at_once(self, moment: float, tmp_path: Path) -> None:
        """SIGINT at some moment of a busy loop: the process ends by KeyboardInterrupt, without hanging."""
        (tmp_path / "busy.py").write_text(
            "import time\n"
            "class Busy:\n"
            "    def __len__(self): return 4096\n"
            "    def __getitem__(self, i):\n"
            "        time.sleep(0.001)\n"
            "        return {'x': i}\n"
        )
        program = (
            "import sys; sys.path.insert(0, sys.argv[1])\n"
            "import loaderkit, busy\n"
            "loader = loaderkit.build(loaderkit.Pipeline.dataset(busy.Busy()).read().batch(8))\n"
            "next(iter(loader)); print('ready', flush=True)\n"
            "while True:\n"
            "    for batch in loader: pass\n"
        )
        ran = subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            assert ran.stdout is not None
            assert ran.stdout.readline() == "ready\n"
            threading.Event().wait(moment)  # the moment is what is being varied
            ran.send_signal(signal.SIGINT)
            _, errors = ran.communicate(timeout=60)
        finally:
            ran.kill()  # or it would run for ever, beside all other tests
        assert ran.returncode in (-signal.SIGINT, 130, 1)
        assert errors.rstrip().endswith("KeyboardInterrupt")
        assert errors.count("Traceback") == 1


@pytest.mark.parametrize(
    ("wait", "ends_with"),
    [
        pytest.param(ThreadEngine.next, ClosedError, id="a loop"),
        pytest.param(lambda engine: engine.scheduler.ready.wait_until_ready(), None, id="who sends batches on"),
    ],
)
def test_who_waits_while_another_thread_closes_is_woken(
    wait: Callable[[ThreadEngine], object], ends_with: type[BaseException] | None
) -> None:
    goes_on = threading.Event()
    ends: list[type[BaseException] | None] = []

    def consume() -> None:
        try:
            wait(engine)
            ends.append(None)
        except BaseException as error:
            ends.append(type(error))

    pipeline = Pipeline.dataset(Numbers(8)).read().call(lambda sample: goes_on.wait() and None).batch(4)
    with executor_of(pipeline, **{"prefetch.executor": "thread", "prefetch.timeout": "1h"}) as engine:
        engine.start()
        consumer = threading.Thread(target=consume, daemon=True)
        consumer.start()
        wait_for(lambda: engine.scheduler.ready.is_asleep)
        closer = threading.Thread(target=engine.close)
        closer.start()
        consumer.join(10)
        ended = list(ends)
        goes_on.set()
        closer.join()
    assert ended == [ends_with]


class TestStarting:
    def test_no_more_threads_to_be_had(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Those that started end at once, and every later use says what was wrong instead of waiting."""
        real = threading.Thread.start

        def start(thread: threading.Thread) -> None:
            if thread.name.startswith("loaderkit-read") and thread.name.endswith("-2"):
                raise RuntimeError("can't start new thread")
            real(thread)

        monkeypatch.setattr(threading.Thread, "start", start)
        loader = loaderkit.build(numbers(), overrides={"prefetch.concurrency": 4})
        with pytest.raises(RuntimeError, match="can't start"):
            loader.start()
        with pytest.raises(RuntimeError, match="can't start"):
            next(iter(loader))
        monkeypatch.undo()
        assert len(list(loader)) == 63
        loader.close()

    def test_counters_of_another_run_are_not_subtracted(self) -> None:
        def fail(sample: dict[str, Any]) -> None:
            if sample["__key__"] == "40" and not failed:
                failed.append(1)
                raise ValueError("once")

        failed: list[int] = []
        with loaderkit.build(Pipeline.dataset(Numbers(60)).shuffle("none").read().call(fail).batch(4)) as loader:
            before = loader.stats()
            with pytest.raises(StageError):
                list(loader)
            assert loader.stats(since=before).num_batches <= 10
            list(loader)
            with pytest.raises(ValueError, match="started from 0"):
                loader.stats(since=before)


class TestPools:
    def stages(self, *workers: int | None, batch: int = 0) -> list[Stage]:
        scopes = ["sample"] * (len(workers) - batch) + ["batch"] * batch
        return [Stage(str(n), "x", scope, print, w) for n, (scope, w) in enumerate(zip(scopes, workers, strict=True))]  # type: ignore[arg-type]

    def test_everything_automatic_is_one_pool(self) -> None:
        pools = plan_pools(self.stages(None, None, None, None, batch=1), 6)
        assert [(p.sample_stages, p.batch_stages, p.num_workers, p.lands) for p in pools] == [
            ((0, 1, 2), (3,), 6, True)
        ]

    def test_a_stage_with_workers_has_a_pool_of_its_own(self) -> None:
        pools = plan_pools(self.stages(None, 3, None, None, batch=1), 8)
        assert [(p.sample_stages, p.batch_stages, p.num_workers, p.lands) for p in pools] == [
            ((0,), (), 3, False),
            ((1,), (), 3, False),
            ((2,), (3,), 2, True),
        ]

    def test_there_is_always_a_worker(self) -> None:
        pools = plan_pools(self.stages(None, 9, None, 2, None, batch=2), 2)
        assert [p.num_workers for p in pools] == [1, 9, 1, 2, 1]
        assert [p.lands for p in pools] == [False, False, True, False, False]

    def test_cpus_are_what_the_process_may_use(self) -> None:
        allowed = os.sched_getaffinity(0)
        assert 1 <= num_cpus() <= len(allowed)
        os.sched_setaffinity(0, {min(allowed)})
        try:
            assert num_cpus() == 1
        finally:
            os.sched_setaffinity(0, allowed)


class TestTorchThreads:
    def test_the_training_threads_are_left_alone(self) -> None:
        before = torch.get_num_threads()
        with loaderkit.build(numbers()) as loader:
            list(loader)
            assert torch.get_num_threads() == before
            inside: list[int] = []
            thread = threading.Thread(target=lambda: inside.append(torch.get_num_threads()))
            thread.start()
            thread.join()
            assert inside == [before]

    def test_also_in_a_program_that_has_computed_nothing_yet(self) -> None:
        """torch gives a thread its number when that is first asked for: it must not be the workers'."""
        load = (
            "with loaderkit.build(loaderkit.Pipeline.dataset([{'x': n} for n in range(9)]).read().batch(3)) as loader:\n"
            "    list(loader)\n"
        )
        found = []
        for between in ("", load):
            program = f"import loaderkit, torch\n{between}print(torch.get_num_threads())"
            ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
            found.append(ran.stdout)
        assert found[0] == found[1]


@pytest.mark.prove
def test_a_million_trivial_samples_leave_memory_flat() -> None:
    program = (
        "import os, loaderkit, json\n"
        "class N:\n"
        "    def __len__(self): return 100_000\n"
        "    def __getitem__(self, i): return {'x': i}\n"
        "def resident(): return int(open('/proc/self/statm').read().split()[1]) * os.sysconf('SC_PAGE_SIZE')\n"
        "seen = []\n"
        "with loaderkit.build(loaderkit.Pipeline.dataset(N()).read().batch(64)) as loader:\n"
        "    for epoch in range(10):\n"
        "        for batch in loader: pass\n"
        "        seen.append(resident())\n"
        "print(json.dumps(seen))\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    seen = json.loads(ran.stdout)
    assert seen[-1] - seen[1] < 8 * 2**20


@pytest.fixture(autouse=True)
def nothing_left_running() -> Iterator[None]:
    yield
    gc.collect()
    join_threads("loaderkit")
