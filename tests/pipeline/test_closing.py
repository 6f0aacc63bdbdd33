"""How a loader ends: closed, dropped, forked or with the interpreter; and what importing loaderkit brings along."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from augmented_photos import (
    _reference,  # noqa: F401 - a fixture
    augmented,
    digest,
    nothing_left_running,  # noqa: F401 - a fixture for every test here
)
from conftest import make_photo

import loaderkit
from loaderkit import Pipeline
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.engine.base import Engine
from loaderkit.errors import ClosedError, ConfigError, LoaderkitError
from loaderkit.pipeline.delivery.bad_samples import BadSamples


@pytest.mark.parametrize("way", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_loader_is_not_copied(way: Callable[[Any], Any], photos: Path) -> None:
    with (
        loaderkit.build(augmented(photos)) as loader,
        pytest.raises(TypeError, match=r"send the Pipeline.*build there"),
    ):
        way(loader)


class Shared(MemoryConnector):
    """Notes whether it was closed."""

    was_closed = False

    def close(self) -> None:
        self.was_closed = True


class TestClosing:
    def test_a_connector_that_was_given_is_not_closed(self) -> None:
        """Other loaders may be reading from it."""
        shared = Shared({"a.jpg": make_photo(0), "b.jpg": make_photo(1)})
        pipeline: dict[str, Any] = {
            "source": {"kind": "files", "url": "memory://"},
            "stages": ["read", {"batch": {"size": 2}}],
        }
        with loaderkit.build(pipeline, connectors={"memory": shared}) as loader:
            assert len(list(loader)) == 1
        wanting = {"stages.batch.size": 3, "stages.batch.drop_last": True}
        with pytest.raises(ConfigError, match="no batch at all"):
            loaderkit.build(pipeline, connectors={"memory": shared}, overrides=wanting)
        assert not shared.was_closed

    @pytest.mark.parametrize("what", ["source", "batches", "loader"])
    def test_what_cannot_be_built_closes_what_it_opened(
        self, what: str, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        opened: list[Shared] = []

        def open_connector(*_: Any) -> Shared:
            opened.append(Shared({"a.jpg": make_photo(0)}))
            return opened[-1]

        monkeypatch.setattr("loaderkit.sources.base.open_connector", open_connector)
        changes: dict[str, Any] = {
            "source": {"source.include": "*.png"},
            "batches": {"stages.batch.size": 3, "stages.batch.drop_last": True},
            "loader": {"errors.on_bad_sample": "skip", "errors.quarantine": str(tmp_path / "nowhere" / "bad.jsonl")},
        }
        pipeline = Pipeline.files(photos).read().batch(1)
        with pytest.raises(LoaderkitError):
            loaderkit.build(pipeline, overrides=changes[what])
        assert [connector.was_closed for connector in opened] == [True]

    def test_close_is_idempotent_and_final(self, photos: Path) -> None:
        loader = loaderkit.build(augmented(photos))
        next(iter(loader))
        loader.close()
        loader.close()
        for use in (lambda: iter(loader), loader.start, lambda: loader.set_epoch(1), loader.__enter__):
            with pytest.raises(ClosedError):
                use()

    def test_batches_outlive_the_loader(self, photos: Path, reference: list[str]) -> None:
        loader = loaderkit.build(augmented(photos))
        batches = list(loader)
        loader.close()
        del loader
        gc.collect()
        assert [digest(batch) for batch in batches] == reference[:8]

    def test_a_dropped_loader_stops_its_threads(self, photos: Path) -> None:
        before = set(threading.enumerate())
        loader = loaderkit.build(augmented(photos))
        next(iter(loader))
        threads = set(threading.enumerate()) - before
        assert threads
        del loader
        gc.collect()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()

    def test_a_loader_in_a_cycle_freed_by_a_worker(self) -> None:
        """The collector runs where it likes, also in a worker that holds the engine's lock (here: in its clock)."""
        armed = False

        def clock() -> float:
            if armed and threading.current_thread() is not threading.main_thread():
                gc.collect()
            return time.perf_counter()

        def ours() -> list[threading.Thread]:
            return [thread for thread in threading.enumerate() if thread.name.startswith("loaderkit")]

        entered, go_on = threading.Event(), threading.Event()

        def hold(sample: dict[str, Any]) -> None:
            if sample["__key__"] == "9":
                entered.set()
                go_on.wait(60)

        pipeline = Pipeline.dataset(torch.arange(64)).shuffle("none").read().call(hold, thread_safe=True).batch(8)
        cycle: dict[str, Any] = {}
        cycle["self"] = cycle
        cycle["loader"] = loaderkit.build(pipeline, overrides={"prefetch.batches": 2}, clock=clock)
        stream = iter(cycle["loader"])
        next(stream)
        assert entered.wait(60)
        gc.disable()
        try:
            armed = True
            del cycle, stream
            go_on.set()  # a worker looks at the clock again
            for thread in ours():
                thread.join(120)
        finally:
            gc.enable()
        assert not ours()

    @pytest.mark.matrix(1)
    @pytest.mark.parametrize(("last", "code"), [("", 0), ("raise SystemExit(7)", 7), ("1 / 0", 1)])
    def test_an_interpreter_that_ends_with_the_loader_open(
        self, last: str, code: int, photos: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "p.yaml").write_text(augmented(photos).to_yaml())
        program = (
            f"import loaderkit\nloader = loaderkit.build({str(tmp_path / 'p.yaml')!r})\nnext(iter(loader))\n{last}"
        )
        ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
        assert ran.returncode == code
        assert "loaderkit" not in ran.stderr.replace("<string>", "") or last == "1 / 0"

    def test_use_after_a_fork_is_refused(self, photos: Path, tmp_path: Path) -> None:
        (tmp_path / "p.yaml").write_text(augmented(photos).to_yaml())
        program = (
            "import os, sys, warnings, loaderkit\n"
            "warnings.simplefilter('ignore')\n"  # of forks beside threads
            f"loader = loaderkit.build({str(tmp_path / 'p.yaml')!r})\n"
            "stream = iter(loader); next(stream)\n"
            "pid = os.fork()\n"
            "try:\n    next(stream)\n    code = 0\n"
            "except loaderkit.errors.ClosedError as error:\n    code = 5 if 'fork' in str(error) else 6\n"
            "if pid == 0: os._exit(code)\n"
            "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), code)\n"
        )
        ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
        assert ran.stdout.split() == ["5", "0"]


class TestImport:
    @pytest.mark.fresh_interpreters
    def test_import_is_light(self) -> None:
        program = (
            "import sys, loaderkit, loaderkit.errors, loaderkit.cli\n"
            "heavy = {'torch', 'numpy', 'PIL', 'pydantic', 'ruamel', 'scipy', 'nvidia', 's3torchconnector', 'webdataset'}\n"
            "print(sorted(heavy & set(sys.modules)))"
        )
        ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert ran.stdout.strip() == "[]"

    def test_public_names(self) -> None:
        assert set(loaderkit.__all__) == {
            "CheckpointManager",
            "Loader",
            "Pipeline",
            "__version__",
            "build",
            "checkpoint",
            "errors",
            "extend",
            "metrics",
            "restore",
            "start",
            "watch",
        }
        for name in loaderkit.__all__:
            assert getattr(loaderkit, name) is not None


@pytest.mark.fresh_interpreters
def test_what_only_other_pipelines_need_is_not_imported(tmp_path: Path) -> None:
    np.save(tmp_path / "records.npy", np.zeros((1000, 4), np.uint8))
    program = (
        "import sys, loaderkit\n"
        "with loaderkit.build(loaderkit.Pipeline.array(sys.argv[1]).read().batch(10)) as loader: next(iter(loader))\n"
        "print(*(name for name in sys.modules if name.startswith('loaderkit')))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "records.npy")], capture_output=True, text=True, check=True
    )
    assert "loaderkit.engine.base" in done.stdout.split()
    for name in (
        "connectors.s3",
        "connectors.layers.cache",
        "engine.remote.executor",
        "profile",
        "checkpoint.restore",
    ):
        assert find_spec(f"loaderkit.{name}") is not None
        assert f"loaderkit.{name}" not in done.stdout.split()


@pytest.mark.parametrize("has_closed", [False, True])
@pytest.mark.parametrize("executor", ["inline", "thread"])
def test_a_second_ctrl_c_while_the_first_one_is_handled(
    executor: Any, has_closed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch that was taken is made again: it was lost, or `next` said that the loader was closed."""
    close = Engine.close

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    def interrupted_close(engine: Engine, join_s: float) -> None:
        if has_closed:
            close(engine, join_s)
        raise KeyboardInterrupt

    pipeline = Pipeline.dataset(range(12)).shuffle(False).read().batch(3).prefetch(executor=executor)
    with loaderkit.build(pipeline) as loader:
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(BadSamples, "note", interrupted)
            patch.setattr(Engine, "close", interrupted_close)
            next(batches)
        loader.load_state_dict(state)
        assert [batch["0"].tolist() for batch in loader] == [[3, 4, 5], [6, 7, 8], [9, 10, 11]]
