"""`executor: process`: what is sent over, what cannot be, and how errors and reports come back."""

from __future__ import annotations

import logging
import os
import pickle
import random
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from executors import executor_of
from leftovers import nothing_left, resources  # noqa: F401 - a fixture for every test here
from numbers_dataset import PROCESS, Numbers, build, hang, numbers, pid_of
from waiting import messages_with

import loaderkit
from loaderkit import Pipeline
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.engine.contracts import Executor
from loaderkit.engine.metrics.tuning import Tuning
from loaderkit.engine.process.connection import WorkerConnection
from loaderkit.errors import ClosedError, ConfigError, RemoteError, SourceError, StageError

pytestmark = pytest.mark.matrix(1)


def scale(batch: dict[str, Any]) -> None:
    batch["scaled"] = batch["filling"] * 2.0
    batch["half"] = batch["filling"][:, ::2]
    batch["array"] = np.arange(5000)
    batch["nested"] = {"captions": ["a" * 5000] * 100, "same": batch["scaled"]}


def unsendable(batch: dict[str, Any]) -> None:
    batch["lock"] = threading.Lock()


class WithTransform(Numbers):
    def __init__(self, transform: Any) -> None:
        super().__init__()
        self.transform = transform


class Locked(Numbers):
    """Cannot be sent, but made again."""

    def __init__(self, size: int = 64) -> None:
        super().__init__(size)
        self.lock = threading.Lock()


def different() -> Numbers:
    return Numbers(os.getpid())


def in_which_process(sample: dict[str, Any]) -> None:
    sample["pid"] = os.getpid()
    sample["heavy"] = sorted({"typer", "rich"} & set(sys.modules))
    sample["argv"] = sys.argv[0]


def of_main(sample: dict[str, Any]) -> None:
    """Made to look like a function of a script."""
    sample["item"] = OfMain(int(sample["x"]))


@dataclass
class OfMain:
    """Made to look like a class of a script."""

    number: int


class MainError(Exception):
    """Made to look like one of a script."""


def refuse_as_main(sample: dict[str, Any]) -> None:
    raise MainError(sample["__key__"])


class TestSending:
    def test_results_of_batch_stages(self) -> None:
        with build(numbers().call(scale)) as loader, loaderkit.build(numbers().call(scale)) as plain:
            for found, expected in zip(loader, plain, strict=True):
                assert list(found) == list(expected)
                for name in ("scaled", "half", "array"):
                    assert type(found[name]) is type(expected[name])
                    assert (found[name] == expected[name]).all()
                assert found["nested"]["captions"] == expected["nested"]["captions"]
                assert found["nested"]["same"] is found["scaled"]

    def test_no_command_makes_the_thread_that_listens_import_anything(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # While the main thread imports, two threads in modules that import one another would wait for each other.
        packets: list[bytes] = []
        tell = WorkerConnection.tell

        def note(connection: WorkerConnection, name: str, *arguments: Any) -> None:
            packets.append(pickle.dumps((name, *arguments), 5))
            tell(connection, name, *arguments)

        monkeypatch.setattr(WorkerConnection, "tell", note)
        with build(numbers(200)) as loader:
            loader.start()
            loader.resize(batches=3)
            list(loader)
        assert {"spec", "taken"} <= {pickle.loads(packet)[0] for packet in packets}
        program = (  # in a fresh interpreter, which is what one with options begins in
            "import pickle, sys\n"
            "for packet in pickle.load(sys.stdin.buffer): pickle.loads(packet)\n"
            "print(*(name for name in sys.modules if name.partition('.')[0] in ('loaderkit', 'torch', 'numpy')))"
        )
        ran = subprocess.run(
            [sys.executable, "-s", "-c", program], input=pickle.dumps(packets), capture_output=True, check=True
        )
        assert ran.stdout.strip() == b""

    def test_where_functions_run(self) -> None:
        with build(Pipeline.dataset(Numbers()).read().call(in_which_process).batch(8)) as loader:
            batch = next(iter(loader))
            assert set(batch["pid"].tolist()) == {pid_of(loader)} != {os.getpid()}
        assert batch["heavy"] == [[]] * 8
        assert set(batch["argv"]) == {sys.argv[0]}

    def test_what_cannot_be_pickled_is_refused_where_it_stands(self) -> None:
        made, lock = Pipeline.dataset(Numbers()).read(), threading.Lock()
        with pytest.raises(
            ConfigError, match=r"stages\.late\.function.*lambda.*package\.module:name.*executor: thread"
        ):
            build(made.batch(8).call(lambda batch: {"is_free": lock.acquire()}, name="late"))
        with pytest.raises(ConfigError, match=r"source\.object.*Locked"):
            build(Pipeline.dataset(Locked()).read().batch(8))
        with pytest.raises(ConfigError, match=r"stages\.call\.args"):
            build(made.call(in_which_process, args={"key": max, "lock": threading.Lock()}).batch(8))

    def test_lambdas_and_closures_are_sent(self, rng: random.Random) -> None:
        factor, numbers = rng.randrange(2, 9), WithTransform(lambda x: x)

        def scaled(sample: dict[str, Any]) -> dict[str, Any]:
            return {"scaled": sample["x"] * factor, "pid": os.getpid()}

        pipeline = Pipeline.dataset(numbers).shuffle(seed=rng.randrange(99)).read().call(scaled).batch(8)
        with build(pipeline.call(lambda batch: {"late": batch["scaled"] + factor})) as loader:
            for batch in loader:
                assert batch["late"].tolist() == [x * factor + factor for x in batch["x"].tolist()]
        assert os.getpid() not in batch["pid"]

    def test_functions_and_classes_of_a_script(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for one in (of_main, OfMain, refuse_as_main, MainError):
            monkeypatch.setattr(one, "__module__", "__main__")
            monkeypatch.setattr(sys.modules["__main__"], one.__name__, one, raising=False)
        for function in (of_main, "__main__:of_main"):
            with build(Pipeline.dataset(Numbers()).read().call(function).batch(8)) as loader:
                batch = next(iter(loader))
            assert batch["item"] == [OfMain(x) for x in batch["x"].tolist()], "the class is known again"
        with (
            build(Pipeline.dataset(Numbers()).shuffle(False).read().call(refuse_as_main).batch(8)) as loader,
            pytest.raises(StageError) as caught,
        ):
            next(iter(loader))
        assert isinstance(caught.value.__cause__, MainError)
        assert caught.value.__cause__.args == ("0",)

    def test_a_module_the_other_process_cannot_find(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module = type(sys)("made_up")
        exec("def act(sample): pass", module.__dict__)
        monkeypatch.setitem(sys.modules, "made_up", module)
        with (
            pytest.raises(ConfigError, match=r"'made_up'.*executor: thread"),
            build(Pipeline.dataset(Numbers()).read().call(module.act).batch(8)) as loader,
        ):
            next(iter(loader))

    def test_a_data_set_by_name_is_made_again(self) -> None:
        here = f"{__name__}:Locked"
        with build(Pipeline.dataset(here, args={"size": 16}).read().batch(8)) as loader:
            assert sorted(int(x) for batch in loader for x in batch["x"]) == list(range(16))
        with pytest.raises(ConfigError, match=r"source\.object"):
            build(Pipeline.dataset(Locked()).read().batch(8))
        with (
            pytest.raises(SourceError, match="make it return the same items"),
            build(Pipeline.dataset(f"{__name__}:different").read().batch(8)) as loader,
        ):
            next(iter(loader))

    def test_tensors_of_a_data_set(self) -> None:
        items = torch.utils.data.TensorDataset(torch.randn(64, 500), torch.arange(64))
        pipeline = Pipeline.dataset(items, fields=["x", "y"]).shuffle(seed=1).read().batch(8)
        with build(pipeline) as loader:
            for batch in loader:
                assert torch.equal(batch["x"], items.tensors[0][batch["y"]])

    def test_objects_in_memory(self) -> None:
        connector = MemoryConnector({f"{n:02}.bin": bytes([n]) * 100 for n in range(16)})
        pipeline = Pipeline.files("memory://", include="*.bin").shuffle("none").read().batch(4)
        with loaderkit.build(pipeline, overrides=PROCESS, connectors={"memory": connector}) as loader:
            assert [data[0] for batch in loader for data in batch["bin"]] == list(range(16))

    def test_another_clock_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="clock"):
            loaderkit.build(numbers(), overrides=PROCESS, clock=time.monotonic)

    def test_a_batch_that_cannot_be_sent_names_the_field(self) -> None:
        with (
            pytest.raises(StageError, match=r"field 'lock', a lock, cannot be sent.*executor: thread"),
            build(numbers().call(unsendable)) as loader,
        ):
            next(iter(loader))


class RefusedError(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__("refused")
        self.code = code


def refuse(sample: dict[str, Any]) -> None:
    if sample["__key__"] == "20":
        raise RefusedError(code=4)


def refuse_locally(sample: dict[str, Any]) -> None:
    class LocalError(Exception):
        def __init__(self, text: str) -> None:
            super().__init__(text, threading.Lock())

    raise LocalError("here")


def interrupt(sample: dict[str, Any]) -> None:
    raise KeyboardInterrupt


def chat(sample: dict[str, Any]) -> None:
    if sample["__key__"] == "20":
        print("printed in the other process")
        logging.getLogger("loaderkit").warning("logged by %s", "it")


def consume(engine: Executor) -> None:
    with suppress(ClosedError):
        while True:
            engine.next()


class TestReports:
    def test_errors_keep_type_attributes_and_cause(self) -> None:
        with build(Pipeline.dataset(Numbers()).shuffle("none").read().call(refuse).batch(8)) as loader:
            stream = iter(loader)
            assert [next(stream)["x"][0], next(stream)["x"][0]] == [0, 8]
            with pytest.raises(StageError, match="call failed for sample '20' in Numbers") as caught:
                next(stream)
            error = caught.value
            assert (error.stage, error.key, error.origin, error.epoch, error.position) == (
                "call",
                "20",
                "Numbers",
                0,
                20,
            )
            assert isinstance(error.__cause__, RefusedError)
            assert error.__cause__.code == 4
            assert "raise RefusedError(code=4)" in error.__cause__.__notes__[-1]
        del caught, error

    def test_causes_that_cannot_be_sent(self) -> None:
        with build(Pipeline.dataset(Numbers()).read().call(refuse_locally).batch(8)) as loader:
            with pytest.raises(StageError, match="here") as caught:
                next(iter(loader))
            assert isinstance(caught.value.__cause__, RemoteError)
        del caught

    def test_an_interrupt_in_a_stage(self) -> None:
        with (
            build(Pipeline.dataset(Numbers()).read().call(interrupt).batch(8)) as loader,
            pytest.raises(KeyboardInterrupt),
        ):
            next(iter(loader))

    def test_prints_and_warnings(self, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
        with build(Pipeline.dataset(Numbers()).shuffle("none").read().call(chat).batch(8).epochs(1)) as loader:
            list(loader)
        assert "printed in the other process" in capfd.readouterr().out
        (record,) = [record for record in caplog.records if record.getMessage() == "logged by it"]
        assert record.process != os.getpid()

    def test_a_long_wait_shows_the_threads_of_the_process(self) -> None:
        pipeline = Pipeline.dataset(Numbers()).shuffle("none").read().call(hang, thread_safe=True).batch(8)
        with (
            executor_of(pipeline, **PROCESS, **{"prefetch.timeout": "200ms"}) as engine,
            messages_with("in call for") as said,
        ):
            consumer = threading.Thread(target=consume, args=(engine,))
            consumer.start()
            report = said.get(timeout=120)
            assert "in hang" in report
            assert "'20'" in report
            stall = engine.stats(Tuning(), 0).to_dict()["stall"]
            assert stall["by_stage"]["call"] > 0
            engine.close(join_s=0.1)
            consumer.join(30)

    def test_accounts_sum_to_the_wait(self) -> None:
        with build(numbers(512)) as loader:
            stream = iter(loader)
            next(stream)
            before = loader.stats()
            waited_s = 0.0
            for _ in range(60):
                begin = time.perf_counter()
                next(stream)
                waited_s += time.perf_counter() - begin
            since = loader.stats(since=before)
        total_s = since.to_dict()["stall"]["total_s"]
        assert 0 < total_s <= waited_s
        assert (since.num_batches, since.num_samples) == (60, 480)
        assert since.memory["process_rss_peak_bytes"] > 0
