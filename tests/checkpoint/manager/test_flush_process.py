"""`flush: process`: what is written, how the process or its parent dies, and what is left."""

from __future__ import annotations

import itertools
import logging
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flush_stores
import pytest
import torch
from checkpoint_states import flat_states, same
from conftest import HELPERS, ROOT
from crashing import Mortal
from flush_stores import Killing, children, manager_of, state_of
from hypothesis import given, settings
from leftovers import nothing_left  # noqa: F401 - a fixture for every test here
from num_examples import num_examples
from numbers_dataset import is_running
from waiting import wait_for

import loaderkit
from loaderkit.connectors.file import FileConnector
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.errors import CheckpointError, ConfigError, ConnectorError

pytestmark = pytest.mark.filterwarnings("ignore")
MOST_OPERATIONS = 16


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def number_in(folder: Path, step: int | None = None) -> int:
    """The number of the state that is restored, which is whole."""
    found: dict[str, Any] = {
        "model": {name: torch.zeros_like(one) for name, one in state_of(0)["model"].items()},
        "step": -1,
        "names": None,
    }
    with loaderkit.CheckpointManager(folder / "run") as checkpoints:
        assert checkpoints.restore(found, step) is not None
    wanted = state_of(found["step"])
    assert found["names"] == wanted["names"]
    assert all(same(found["model"][name], tensor) for name, tensor in wanted["model"].items())
    return int(found["step"])


class TestSaved:
    def test_the_same_bytes(self, tmp_path: Path) -> None:
        steps = itertools.count()

        def saved(checkpoints: loaderkit.CheckpointManager, step: int, state: dict[str, Any]) -> list[Any]:
            """What was written, after it was restored."""
            saving = checkpoints.save(step, {"state": state, "values": {"a": (2.5, "x"), "b": b"y"}}, wait=True)
            assert saving is not None
            blank = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
            assert checkpoints.restore({"state": blank, "values": {"a": 0, "b": 0}}) == step
            assert all(same(blank[name], tensor) for name, tensor in state.items())
            folder = Path(checkpoints.settings.to) / f"step-{step:010d}"
            return [(name, (folder / name).read_bytes()) for files in saving.stats["ranks"].values() for name in files]

        with (
            loaderkit.CheckpointManager(tmp_path / "thread", keep={"last": 1}) as one,
            loaderkit.CheckpointManager(tmp_path / "process", keep={"last": 1}, flush="process") as other,
        ):

            @settings(max_examples=num_examples(40), deadline=None)
            @given(flat_states())
            def compare(state: dict[str, torch.Tensor]) -> None:
                step = next(steps)
                assert saved(one, step, state) == saved(other, step, state)

            compare()

    def test_the_state_may_change_as_soon_as_save_returns(self, tmp_path: Path) -> None:
        with manager_of(tmp_path) as checkpoints:
            os.mkfifo(tmp_path / "gate")
            state = state_of(1)
            checkpoints.save(1, state)
            state["model"]["w3"].zero_()
            state["names"][0] = "changed"
            (tmp_path / "gate").write_text("go on")
        assert number_in(tmp_path) == 1

    def test_an_error_there_is_raised_here(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        with manager_of(tmp_path) as checkpoints:
            checkpoints.save(1, state_of(1), wait=True)
            (pid,) = children()
            (tmp_path / "fails").write_text("the disk is full")
            with caplog.at_level(logging.WARNING, "loaderkit"):
                checkpoints.save(2, state_of(2))
                with pytest.raises(ConnectorError) as caught:
                    checkpoints.wait_until_finished()
            assert str(caught.value) == "the disk is full"
            assert any("process that writes checkpoints" in note for note in caught.value.__notes__)
            assert "it is said there that the disk is full" in caplog.messages
            assert checkpoints.all_steps() == [1]
            checkpoints.save(3, state_of(3), wait=True)
            assert children() == [pid]
        assert names(tmp_path / "run") == ["step-0000000001", "step-0000000003"]
        assert number_in(tmp_path) == 3

    def test_ctrl_c_while_it_closes_completes_the_last_one(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupt(*args: Any) -> None:
            raise KeyboardInterrupt

        checkpoints = manager_of(tmp_path)
        os.mkfifo(tmp_path / "gate")
        saving = checkpoints.save(1, state_of(1))
        assert saving is not None
        with (tmp_path / "gate").open("w"):
            with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
                patched.setattr(type(saving), "join", interrupt)
                checkpoints.close()
            assert not saving.is_done
        saving.wait()
        assert number_in(tmp_path) == 1

    def test_what_could_not_be_removed_is_by_the_next_save(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Training's process removes; while it lives, the one that writes does not take what it has left for a dead save's."""
        with manager_of(tmp_path, keep={"last": 1}) as checkpoints:
            checkpoints.save(1, state_of(1), wait=True)
            (tmp_path / "stuck").touch()
            checkpoints.save(2, state_of(2), wait=True)
            assert any("are not removed: it is stuck" in message for message in caplog.messages)
            assert len(names(tmp_path / "run")) > 1
            (tmp_path / "stuck").unlink()
            checkpoints.save(3, state_of(3))
        assert names(tmp_path / "run") == ["step-0000000003"]
        assert number_in(tmp_path) == 3

    def test_flat_over_forty_saves(self, tmp_path: Path) -> None:
        state: dict[str, Any] = {"w": torch.randn(2_000_000), "n": 0}
        with loaderkit.CheckpointManager(tmp_path, flush="process", keep={"last": 2}) as checkpoints:
            seen: list[list[int]] = []
            for step in range(40):
                state["w"] += 1
                state["n"] = step
                checkpoints.save(step, state, wait=True)
                (pid,) = children()
                seen.append([pid, *held("self"), *held(str(pid))])
        early, late = seen[9], seen[39]
        assert late[0] == early[0]
        # A thread that has ended is counted for a moment; what each save leaves would be thirty.
        assert max(late[n] - early[n] for n in (1, 2, 3, 5, 6, 7)) < 3
        assert max(late[4] - early[4], late[8] - early[8]) < 4 << 20


def held(pid: str) -> list[int]:
    """Descriptors, mappings of copies, threads, and bytes in memory of a process."""
    folder = Path("/proc", pid)
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    num_copies = (folder / "maps").read_text().count("memfd:loaderkit-copy")
    num_bytes = sum(int(status[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))
    return [len(os.listdir(folder / "fd")), num_copies, int(status["Threads"]), num_bytes]


class TestDeaths:
    @pytest.mark.matrix(2)
    @pytest.mark.parametrize("is_before", [True, False])
    @pytest.mark.parametrize("operation", range(MOST_OPERATIONS))
    def test_of_the_process_at_any_operation(self, operation: int, is_before: bool, tmp_path: Path) -> None:
        flag = tmp_path / "flag"
        with loaderkit.CheckpointManager(tmp_path / "run") as checkpoints:
            checkpoints.save(1, state_of(1))
        store = Mortal(FileConnector(tmp_path / "run"), Killing(operation, flag, is_before=is_before))
        with manager_of(tmp_path, connectors={"store": store}) as checkpoints:
            flag.touch()  # from here on: this process has tried the store
            checkpoints.save(2, state_of(2))
            message = message_of(checkpoints.wait_until_finished)
            is_alive = flag.exists()
            assert bool(children()) == is_alive
            if is_alive:
                assert (message, checkpoints.all_steps()) == ("", [1, 2])
                flag.unlink()
            else:
                assert "was killed by SIGKILL: unless another program did that, the system was out of memory" in message
            steps = checkpoints.all_steps()
            assert steps in ([1], [1, 2])
            assert all(number_in(tmp_path, step) == step for step in steps)
            checkpoints.save(3, state_of(3), wait=True)
        assert names(tmp_path / "run") == [f"step-{step:010d}" for step in (*steps, 3)]
        assert number_in(tmp_path) == 3

    def test_of_the_process_between_saves(self, tmp_path: Path) -> None:
        with manager_of(tmp_path) as checkpoints:
            checkpoints.save(1, state_of(1), wait=True)
            (pid,) = children()
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda: not Path("/proc", str(pid)).exists())  # it has ended, and that has been seen
            checkpoints.save(2, state_of(2), wait=True)
            assert children() not in ([], [pid])
        assert number_in(tmp_path) == 2

    def test_of_a_process_that_could_not_start(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with manager_of(tmp_path) as checkpoints:
            monkeypatch.setattr("loaderkit.checkpoint.flush.child.BOOT", "raise SystemExit(7)")
            checkpoints.save(1, state_of(1))
            with pytest.raises(CheckpointError, match="could not start: it left with exit code 7 before it was ready"):
                checkpoints.wait_until_finished()
            monkeypatch.undo()
            checkpoints.save(2, state_of(2), wait=True)
        assert number_in(tmp_path) == 2

    def test_of_the_parent(self, tmp_path: Path) -> None:
        """Nothing is left: no process, no memory; and what it was writing is cleared by the next save."""
        with program(tmp_path) as (parent, pid), (tmp_path / "gate").open("w"):  # it is at the gate now
            parent.kill()
            parent.wait()
            wait_for(lambda: not is_running(pid))
        theirs = {str(parent.pid), str(pid)}  # other programs have names there, too
        assert not [name for name in names(Path("/dev/shm")) if theirs & set(re.findall(r"\d+", name))]
        (tmp_path / "gate").unlink()
        with manager_of(tmp_path) as checkpoints:
            assert checkpoints.all_steps() == [1]
            checkpoints.save(3, state_of(3))
        assert names(tmp_path / "run") == ["step-0000000001", "step-0000000003"]
        assert number_in(tmp_path) == 3

    @pytest.mark.matrix(1)
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_what_is_sent_to_all_leaves_the_process_alone(self, number: signal.Signals, tmp_path: Path) -> None:
        """Ctrl-C reaches parent and child: the checkpoint that is being written is completed. SIGTERM ends the parent."""
        with program(tmp_path) as (parent, pid):
            with (tmp_path / "gate").open("w"):
                if number == signal.SIGINT:
                    os.killpg(parent.pid, number)
                else:
                    os.kill(pid, number)
                assert is_running(pid)
            if number == signal.SIGTERM:
                wait_for(lambda: number_of_steps(tmp_path) == 2)
                parent.kill()
            assert parent.wait() == -(signal.SIGINT if number == signal.SIGINT else signal.SIGKILL)
            wait_for(lambda: not is_running(pid))
        assert number_in(tmp_path) == 2


def message_of(call: Callable[[], None]) -> str:
    """The text of the CheckpointError that a call raises; "" for none."""
    try:
        call()
    except CheckpointError as error:
        return str(error)
    return ""


def number_of_steps(folder: Path) -> int:
    return len([name for name in names(folder / "run") if name.startswith("step-")])


class program:  # noqa: N801 - used as a function
    """Runs `flush_stores` in a session of its own: (the process, the pid of the one that writes)."""

    def __init__(self, folder: Path) -> None:
        code = f"import pathlib, flush_stores; flush_stores.main(pathlib.Path({str(folder)!r}))"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": f"{HELPERS}:{ROOT}"},
        )

    def __enter__(self) -> tuple[subprocess.Popen[str], int]:
        assert self._process.stdout is not None
        (pid,) = map(int, self._process.stdout.readline().split())
        return self._process, pid

    def __exit__(self, *args: Any) -> None:
        self._process.kill()
        self._process.communicate()


def test_a_connector_whose_class_has_no_name_in_a_module(tmp_path: Path, rng: random.Random) -> None:
    class Local(FileConnector):
        pass

    state = {"x": torch.tensor([rng.random() for _ in range(5000)])}
    with loaderkit.CheckpointManager(
        "mine://run", flush="process", connectors={"mine": Local(tmp_path)}
    ) as checkpoints:
        assert checkpoints.save(1, state) is not None
    there = {"x": torch.zeros(5000)}
    with loaderkit.CheckpointManager(tmp_path / "run") as checkpoints:
        checkpoints.restore(there)
    assert there["x"].equal(state["x"])


class TestRefused:
    def test_a_connector_that_cannot_be_sent(self, tmp_path: Path) -> None:
        connector = FileConnector(tmp_path)
        connector.lock = threading.Lock()  # type: ignore[attr-defined]
        with pytest.raises(ConfigError, match=r"connectors: 'mine': .*File.* cannot be sent .*use flush: thread"):
            loaderkit.CheckpointManager("mine://run", flush="process", connectors={"mine": connector})

    def test_a_store_in_memory(self) -> None:
        with pytest.raises(ConfigError, match=r"in its own memory is not seen here: use flush: thread"):
            loaderkit.CheckpointManager("mine://run", flush="process", connectors={"mine": MemoryConnector()})

    def test_another_word(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="flush"):
            loaderkit.CheckpointManager(tmp_path, flush="fork")


def test_the_gate_is_one(tmp_path: Path, rng: random.Random) -> None:
    """The tests above hold on to this: a save is not done before the gate is opened."""
    with manager_of(tmp_path) as checkpoints:
        os.mkfifo(tmp_path / "gate")
        saving = checkpoints.save(1, state_of(1))
        assert saving is not None
        with (tmp_path / "gate").open("w"):
            assert not saving.is_done
        saving.wait()
    assert flush_stores.children() == []
