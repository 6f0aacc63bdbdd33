"""CheckpointManager on one rank: what is saved when, what is kept, what comes back, and what a failed save leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_states import same, save_dcp
from torch.distributed.checkpoint.state_dict_loader import load

import loaderkit
from loaderkit.checkpoint import RngState
from loaderkit.connectors.base import writes_of
from loaderkit.connectors.config import S3Args
from loaderkit.connectors.file import FileConnector
from loaderkit.connectors.file_writes import FileWrites
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.connectors.s3 import S3Connector
from loaderkit.errors import CheckpointError, ClosedError, ConfigError, ConnectorError, UnreachableError

pytestmark = pytest.mark.filterwarnings("ignore")
HELPERS = Path(__file__).parents[2] / "helpers"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith(".saving-job."))


def state_of(step: int) -> dict[str, Any]:
    return {"x": torch.arange(1000.0) + step, "n": step, "table": {3: "a", 5: [1, {"b": torch.ones(2) * step}]}}


def interrupted(thread: threading.Thread) -> None:
    raise KeyboardInterrupt


class Store(FileConnector):
    """Files whose writing stops at an open gate, or fails."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None

    def writes(self) -> Any:
        outer, inner = self, writes_of(FileConnector(self.describe("")))

        class Gated:
            def __getattr__(self, name: str) -> Any:
                return getattr(inner, name)

            def create(self, key: str, size: int) -> Any:
                outer.gate.wait(60)
                if outer.error is not None:
                    raise outer.error
                return inner.create(key, size)

        return Gated()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def manager_of(store: Store, **settings: Any) -> loaderkit.CheckpointManager:
    return loaderkit.CheckpointManager("store://", connectors={"store": store}, **settings)


class TestSaveAndRestore:
    def test_there_and_back(self, tmp_path: Path) -> None:
        with loaderkit.CheckpointManager(tmp_path / "run") as checkpoints:
            assert checkpoints.restore(state_of(0)) is None
            assert checkpoints.latest_step() is None
            saving = checkpoints.save(7, state_of(7))
            assert saving is not None
            saving.wait()
            assert saving.is_committed
            assert (checkpoints.all_steps(), checkpoints.latest_step()) == ([7], 7)
            checkpoints.save(12, state_of(12), wait=True)
        assert names(tmp_path / "run") == ["step-0000000007", "step-0000000012"]
        with loaderkit.CheckpointManager(tmp_path / "run") as checkpoints:
            for step, chosen in ((None, 12), (7, 7)):
                state = state_of(0)
                x = state["x"]
                assert checkpoints.restore(state, step) == chosen
                assert state["x"] is x
                expected = state_of(chosen)
                assert same(state["x"], expected["x"])
                assert (state["n"], state["table"][3]) == (chosen, "a")
                assert same(state["table"][5][1]["b"], expected["table"][5][1]["b"])
            with pytest.raises(CheckpointError):
                checkpoints.restore(state_of(0), 8)

    def test_others_read_it(self, tmp_path: Path) -> None:
        with loaderkit.CheckpointManager(tmp_path) as checkpoints:
            checkpoints.save(3, state_of(3))
        url = loaderkit.checkpoint.latest(tmp_path, verify=True)
        assert url == str(tmp_path / "step-0000000003")
        assert same(loaderkit.restore(url)["x"], state_of(3)["x"])
        plain: dict[str, Any] = {"x": torch.zeros(1000), "n": 0}
        load(plain, checkpoint_id=url, no_dist=True)
        assert same(plain["x"], state_of(3)["x"])
        assert plain["n"] == 3

    def test_the_state_may_change_as_soon_as_save_returns(self, store: Store) -> None:
        store.gate.clear()
        checkpoints = manager_of(store)
        state = state_of(1)
        checkpoints.save(1, state)
        state["x"].zero_()
        state["table"][5][1]["b"].zero_()
        state["table"][3] = "changed"
        store.gate.set()
        checkpoints.close()
        with manager_of(store) as again:
            found = state_of(0)
            again.restore(found)
        assert same(found["x"], state_of(1)["x"])
        assert same(found["table"][5][1]["b"], torch.ones(2))
        assert found["table"][3] == "a"

    def test_a_step_may_be_saved_again(self, tmp_path: Path) -> None:
        with loaderkit.CheckpointManager(tmp_path) as checkpoints:
            checkpoints.save(1, state_of(1))
            checkpoints.save(1, state_of(9), force=True)
            found = state_of(0)
            assert checkpoints.restore(found) == 1
        assert found["n"] == 9

    def test_wrong_use(self, tmp_path: Path) -> None:
        checkpoints = loaderkit.CheckpointManager(tmp_path)
        with pytest.raises(ConfigError, match="'x' holds an object of pathlib"):
            checkpoints.save(1, {"x": Path("y")})
        with pytest.raises(ConfigError, match="the key 'loaderkit' is the manager's own"):
            checkpoints.save(1, {"loaderkit": 1})
        with pytest.raises(ConfigError, match="expected numbers by name"):
            checkpoints.save(1, state_of(1), metrics={"loss": "low"})
        for step in (-1, True, 1.0, "1", torch.ones(2)):
            with pytest.raises(ConfigError, match="a number of steps from 0 on"):
                checkpoints.save(step, state_of(0))  # type: ignore[arg-type]
        for metric in (True, None, torch.ones(2), [1.0], "1.0"):
            with pytest.raises(ConfigError, match="expected numbers by name"):
                checkpoints.save(1, state_of(1), metrics={"loss": metric})
        checkpoints.close()
        checkpoints.close()
        with pytest.raises(ClosedError):
            checkpoints.save(1, state_of(1))
        assert names(tmp_path) == []

    def test_numbers_of_numpy_and_torch(self, tmp_path: Path) -> None:
        with loaderkit.CheckpointManager(tmp_path, every=2, keep={"best": {"metric": "loss"}}) as checkpoints:
            assert checkpoints.should_save(np.int32(2))
            assert not checkpoints.should_save(torch.tensor(3))
            checkpoints.save(np.int64(2), state_of(2), metrics={"loss": torch.tensor(0.5)})
            checkpoints.save(torch.tensor(4), state_of(4), metrics={"loss": np.float32(0.75)})
            checkpoints.save(6, state_of(6), metrics={"loss": np.int8(3)})
            checkpoints.wait_until_finished()
            assert checkpoints.all_steps() == [2, 6]
            state = state_of(0)
            assert checkpoints.restore(state, step=np.int64(2)) == 2
            assert same(state["x"], state_of(2)["x"])
        assert loaderkit.restore(tmp_path / "step-0000000002")["loaderkit.metrics.loss"] == 0.5


class TestBeginning:
    @pytest.mark.parametrize("timeout_s", ["5", 0, -1.0, True, float("nan")])
    def test_a_timeout_that_is_none(self, timeout_s: Any, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"timeout_s .*: expected a number of seconds above 0"):
            loaderkit.CheckpointManager(tmp_path, timeout_s=timeout_s)

    def test_a_store_that_is_only_read_is_refused_at_once(self) -> None:
        with pytest.raises(ConfigError, match=r"to: checkpoints cannot be saved to https.*only reads"):
            loaderkit.CheckpointManager("https://example.com/a")

    def test_so_is_a_directory_that_cannot_be(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("x")
        with pytest.raises(ConfigError, match=r"to: checkpoints cannot be saved .*is a file, not a directory"):
            loaderkit.CheckpointManager(tmp_path / "file" / "run")
        with pytest.raises(ConfigError, match=r"local: checkpoints cannot be saved .*is a file, not a directory"):
            loaderkit.CheckpointManager(tmp_path / "run", local=tmp_path / "file")
        assert names(tmp_path / "run") == []

    def test_a_store_that_does_not_answer_now_is_a_warning(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def put(*anything: Any) -> Any:
            raise UnreachableError("no route")

        with monkeypatch.context() as broken:
            broken.setattr(FileWrites, "put", put)
            checkpoints = loaderkit.CheckpointManager("store://", connectors={"store": FileConnector(tmp_path)})
        assert "cannot be written to now, and saving will fail if that lasts: no route" in caplog.text
        checkpoints.save(1, state_of(1))
        checkpoints.close()
        assert names(tmp_path) == ["step-0000000001"]

    def test_what_is_tried_is_cleared_if_the_process_dies(self, tmp_path: Path) -> None:
        program = (
            "import os, loaderkit.connectors.file_writes as writes, loaderkit; "
            "writes.FileWrites.delete = lambda *key: os._exit(7); loaderkit.CheckpointManager('run')"
        )
        assert subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=False).returncode == 7
        assert len(names(tmp_path / "run")) == 1
        with loaderkit.CheckpointManager(tmp_path / "run") as checkpoints:
            assert checkpoints.all_steps() == []
            checkpoints.save(1, state_of(1))
        assert names(tmp_path / "run") == ["step-0000000001"]


class TestWhen:
    def test_every_number_of_steps(self, tmp_path: Path) -> None:
        with loaderkit.CheckpointManager(tmp_path, every=3) as checkpoints:
            saved = [step for step in range(1, 8) if checkpoints.save(step, state_of(step)) is not None]
            assert saved == [3, 6]
            assert checkpoints.save(7, state_of(7), force=True) is not None
            assert [checkpoints.should_save(step) for step in (8, 9)] == [False, True]
        assert checkpoints.stats()["num_saved"] == 3

    def test_every_so_often(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        now_s = 1000.0
        monkeypatch.setattr("loaderkit.checkpoint.manager.manager.monotonic", lambda: now_s)
        with loaderkit.CheckpointManager(tmp_path, every="10min") as checkpoints:
            saved = []
            for step in range(1, 10):
                now_s += 250
                saved += [step] if checkpoints.save(step, state_of(step)) is not None else []
        assert saved == [3, 6, 9]

    def test_a_busy_manager_waits_or_skips(self, store: Store) -> None:
        store.gate.clear()
        with manager_of(store, when_busy="skip") as checkpoints:
            assert checkpoints.save(1, state_of(1)) is not None
            assert checkpoints.save(2, state_of(2)) is None
            store.gate.set()
            checkpoints.wait_until_finished()
            assert checkpoints.save(3, state_of(3)) is not None
            store.gate.set()
            assert checkpoints.save(4, state_of(4), force=True) is not None  # waits
        assert checkpoints.all_steps() == [1, 3, 4]
        assert checkpoints.stats()["num_skipped"] == 1

    def test_a_notice_is_saved_once_and_ends_the_loop(self, tmp_path: Path) -> None:
        before = signal.getsignal(signal.SIGUSR1)
        steps = []
        with loaderkit.CheckpointManager(tmp_path, every=100, notice={"signals": ["SIGUSR1"]}) as checkpoints:
            for step in range(1, 20):
                if step == 5:
                    os.kill(os.getpid(), signal.SIGUSR1)
                checkpoints.save(step, state_of(step))
                steps.append(step)
                if checkpoints.reached_preemption(step):
                    break
        assert steps[-1] == 5
        assert names(tmp_path) == ["step-0000000005"]
        assert signal.getsignal(signal.SIGUSR1) == before


class TestFailure:
    def test_it_is_raised_at_the_next_save_once_and_the_previous_stands(self, store: Store, tmp_path: Path) -> None:
        with manager_of(store) as checkpoints:
            checkpoints.save(1, state_of(1), wait=True)
            store.error = ConnectorError("No space left on device")
            saving = checkpoints.save(2, state_of(2))
            assert saving is not None
            with pytest.raises(ConnectorError, match="No space left"):
                checkpoints.save(3, state_of(3))
            assert isinstance(saving.error, ConnectorError)
            assert checkpoints.all_steps() == [1]
            found = state_of(0)
            assert checkpoints.restore(found) == 1
            store.error = None
            checkpoints.save(4, state_of(4))
        assert names(tmp_path) == ["step-0000000001", "step-0000000004"]  # and nothing of step 2

    def test_it_is_raised_by_wait_and_close(self, store: Store) -> None:
        store.error = ConnectorError("No space left on device")
        checkpoints = manager_of(store)
        saving = checkpoints.save(1, state_of(1))
        assert saving is not None
        with pytest.raises(ConnectorError):
            saving.wait()
        with pytest.raises(ConnectorError):
            checkpoints.wait_until_finished()
        checkpoints.save(2, state_of(2))
        with pytest.raises(ConnectorError):
            checkpoints.close()

    def test_the_same_step_may_be_saved_again(self, store: Store, tmp_path: Path) -> None:
        with manager_of(store) as checkpoints:
            store.error = ConnectorError("no space")
            with pytest.raises(ConnectorError):
                checkpoints.save(1, state_of(1), wait=True)
            store.error = None
            assert checkpoints.should_save(1)
            saving = checkpoints.save(1, state_of(1), wait=True)
            assert saving is not None
            assert saving.is_committed
            assert checkpoints.save(1, state_of(1)) is None  # it is there
            store.error = ConnectorError("no space")
            failed = checkpoints.save(2, state_of(2))
            assert failed is not None
            with pytest.raises(ConnectorError):
                failed.wait()
            with pytest.raises(ConnectorError):  # and not None, as if it were there
                checkpoints.save(2, state_of(2))
        assert "step-0000000002" not in names(tmp_path)

    def test_an_error_of_the_loop_is_not_hidden(self, store: Store, caplog: pytest.LogCaptureFixture) -> None:
        store.error = ConnectorError("No space left on device")
        with pytest.raises(ZeroDivisionError), manager_of(store) as checkpoints:
            checkpoints.save(1, state_of(1))
            _ = 1 / 0
        assert "the last checkpoint was not saved: No space left" in caplog.text

    def test_an_interrupt_before_writing_begins(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with loaderkit.CheckpointManager(tmp_path) as checkpoints:
            checkpoints.save(1, state_of(1), wait=True)
            with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
                patched.setattr(threading.Thread, "start", interrupted)
                checkpoints.save(2, state_of(2))
            with pytest.raises(CheckpointError, match="step 2 was interrupted before writing began"):
                checkpoints.save(3, state_of(3))
            checkpoints.save(4, state_of(4), wait=True)
            assert checkpoints.all_steps() == [1, 4]

    def test_a_wait_that_takes_too_long(self, store: Store) -> None:
        store.gate.clear()
        with manager_of(store) as checkpoints:
            saving = checkpoints.save(1, state_of(1))
            assert saving is not None
            with pytest.raises(TimeoutError, match="step 1 is not committed within"):
                saving.wait(0.01)
            assert repr(saving) == "Saving(step=1, being written)"
            store.gate.set()
            saving.wait()
            assert repr(saving) == "Saving(step=1, committed)"


class TestRetention:
    def test_last_every_and_best(self, tmp_path: Path) -> None:
        keep = {"last": 2, "every": 4, "best": {"metric": "loss"}}
        losses = dict(zip(range(1, 11), (9, 8, 1, 7, 6, 5, 4, 3, 3, 3), strict=True))
        for steps in (range(1, 6), range(6, 11)):  # the metrics of an earlier run count
            with loaderkit.CheckpointManager(tmp_path, keep=keep) as checkpoints:
                for step in steps:
                    checkpoints.save(step, state_of(step), metrics={"loss": losses[step]})
        assert checkpoints.all_steps() == [3, 4, 8, 9, 10]
        assert names(tmp_path) == [f"step-{step:010}" for step in (3, 4, 8, 9, 10)]

    @pytest.mark.parametrize("error", [ConnectorError("gone"), RuntimeError("gone")])
    def test_if_it_fails_the_save_is_committed_all_the_same(
        self, error: Exception, store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """And the next one removes what is to go."""

        def fail(*_: Any) -> None:
            raise error

        with manager_of(store, keep={"last": 1}) as checkpoints:
            checkpoints.save(1, state_of(1), wait=True)
            with monkeypatch.context() as patched:
                patched.setattr("loaderkit.checkpoint.manager.directory.steps_to_keep", fail)
                saving = checkpoints.save(2, state_of(2), wait=True)
            assert saving is not None
            assert saving.is_committed
            assert saving.error is None
            assert checkpoints.all_steps() == [1, 2]
            checkpoints.save(3, state_of(3))
        assert checkpoints.all_steps() == [3]
        assert "gone" in caplog.text
        assert checkpoints.stats()["num_saved"] == 3

    def test_what_is_not_the_manager_s_stays(self, tmp_path: Path) -> None:
        (tmp_path / "step-0000000001").mkdir()
        (tmp_path / "step-0000000001" / "notes.txt").write_text("mine")
        (tmp_path / "best").mkdir()
        (tmp_path / "best" / "loaderkit-manifest.json").write_text("{}")
        save_dcp({"x": torch.ones(3)}, tmp_path / "step-0000000000")  # by torch itself
        with loaderkit.CheckpointManager(tmp_path, keep={"last": 1}) as checkpoints:
            for step in (2, 3):
                checkpoints.save(step, state_of(step))
        assert names(tmp_path) == ["best", "step-0000000000", "step-0000000001", "step-0000000003"]


@pytest.mark.parametrize("kind", ["bucket", "memory"])
def test_stores_that_are_no_directories(kind: str, request: pytest.FixtureRequest) -> None:
    connector: Any = MemoryConnector()
    if kind == "bucket":
        seaweed = request.getfixturevalue("seaweed")
        request.getfixturevalue("s3_keys")
        seaweed.boto().create_bucket(Bucket="checkpoints")
        connector = S3Connector("s3://checkpoints/runs", S3Args(endpoint=seaweed.endpoint))
    for first in (1, 4):
        with loaderkit.CheckpointManager("store://a", keep={"last": 2}, connectors={"store": connector}) as checkpoints:
            found = state_of(0)
            assert checkpoints.restore(found) == (first - 1 or None)
            assert found["n"] == first - 1
            for step in range(first, first + 3):
                checkpoints.save(step, state_of(step))
    assert checkpoints.all_steps() == [5, 6]
    assert {info.key.partition("/")[2].partition("/")[0] for info in connector.list("")} == {
        "step-0000000005",
        "step-0000000006",
    }
    connector.close()


class TestKilled:
    @pytest.mark.prove
    @pytest.mark.parametrize("kill_at", [1, 3, 6])
    def test_training_goes_on_with_the_same_losses(self, kill_at: int, tmp_path: Path) -> None:
        """Model, optimizer, loader, dropout: killed with -9 and begun again, the losses are those of a run that was not."""
        program = [sys.executable, str(HELPERS / "training_with_checkpoints.py")]
        whole = subprocess.run([*program, tmp_path / "whole", "0"], capture_output=True, text=True, check=True)
        expected = json.loads(whole.stdout)
        assert len(expected) == 12
        killed = subprocess.run([*program, tmp_path / "run", str(kill_at)], capture_output=True, text=True, check=False)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        resumed = subprocess.run([*program, tmp_path / "run", "0"], capture_output=True, text=True, check=True)
        found = json.loads(resumed.stdout)
        assert found
        assert {step: loss for step, loss in expected.items() if step in found} == found
        assert len(found) >= 12 - kill_at
        assert max(map(int, found)) == 12


def test_the_pause_and_the_rest_are_counted(tmp_path: Path) -> None:
    with loaderkit.CheckpointManager(tmp_path) as checkpoints:
        for step in (1, 2):
            saving = checkpoints.save(step, {"x": torch.ones(1000), "rng": RngState()})
            assert saving is not None
            saving.wait()
            assert saving.stats["staging_s"] > 0
            assert saving.stats["flush_s"] > 0
            assert saving.stats["ranks"]
    stats = checkpoints.stats()
    assert stats["num_saved"] == 2
    assert all(stats[name] > 0 for name in ("staging_s", "flush_s"))


def test_nothing_is_left_of_many_saves(tmp_path: Path) -> None:
    """Descriptors and threads stay as they are."""
    num_files, num_threads = [], []
    with loaderkit.CheckpointManager(tmp_path, keep={"last": 2}) as checkpoints:
        for step in range(30):
            checkpoints.save(step, state_of(step), wait=True)
            num_files.append(len(os.listdir("/proc/self/fd")))
            num_threads.append(threading.active_count())
    assert max(num_files[5:]) <= num_files[5] + 2  # what other tests left may be closed meanwhile
    assert max(num_threads[5:]) <= num_threads[5] + 1
    assert len(names(tmp_path)) == 2
