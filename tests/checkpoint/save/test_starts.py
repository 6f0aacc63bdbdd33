"""A checkpoint with which two starts have ended before their first step is passed over, and said."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import node_programs
import pytest
import rank_programs

import loaderkit
from loaderkit.checkpoint.discovery.listing import list_checkpoints
from loaderkit.checkpoint.save.starts import StartLog
from loaderkit.errors import CheckpointError, ConnectorError, PeerError

pytestmark = pytest.mark.filterwarnings("ignore")


def start(folder: Path, how: str, step: int | None = None) -> tuple[int, list[str]]:
    """The step that a start has restored, and its warnings."""
    (code,) = rank_programs.run_ranks(node_programs.start, 1, folder, how, step)
    assert code == {"killed": -signal.SIGKILL, "trains": -signal.SIGKILL, "steps": -signal.SIGKILL}.get(
        how, {"fails": 1, "exits": 3}.get(how, 0)
    )
    step, values, said = json.loads((folder / "started.json").read_text())
    assert how == "first" or values == [float(step)] * 10
    return step, said


def marks(folder: Path) -> list[str]:
    return sorted(path.name.split(".")[1] for path in (folder / "run").iterdir() if path.name.startswith(".starting-"))


def test_a_checkpoint_that_has_killed_two_starts_is_passed_over(tmp_path: Path) -> None:
    start(tmp_path, "first")
    assert start(tmp_path, "killed") == (2, [])
    assert marks(tmp_path) == ["starting-step-0000000002"]
    assert start(tmp_path, "fails") == (2, [])  # an error before the first step counts as well
    step, (said,) = start(tmp_path, "killed")
    assert step == 1
    assert "step-0000000002 is passed over: 2 starts that restored it ended before their first step" in said
    assert "restore(state, step=2), or remove .starting-step-0000000002.* beside it" in said
    assert start(tmp_path, "killed", 2) == (2, [])  # who insists gets it
    assert start(tmp_path, "noticed")[0] == 1
    assert marks(tmp_path).count("starting-step-0000000001") == 1
    assert start(tmp_path, "trains")[0] == 1  # saves step 2 anew
    assert marks(tmp_path) == ["starting-step-0000000001"]
    assert start(tmp_path, "noticed") == (2, [])


@pytest.mark.parametrize("how", ["noticed", "steps", "trains"])
def test_a_start_that_ends_in_order_or_comes_to_a_step_does_not_count(how: str, tmp_path: Path) -> None:
    start(tmp_path, "first")
    for _ in range(3):
        step, said = start(tmp_path, how)
        assert said == []
        assert marks(tmp_path) == []
    assert step == (4 if how == "trains" else 2)


def test_where_all_have_ended_starts_training_does_not_begin_anew(tmp_path: Path) -> None:
    start(tmp_path, "first")
    for expected in (2, 2, 1, 1):
        assert start(tmp_path, "killed")[0] == expected
    with (
        loaderkit.CheckpointManager(tmp_path / "run") as checkpoints,
        pytest.raises(CheckpointError, match="has ended 2 starts, the newest that of step 2"),
    ):
        checkpoints.restore({"x": 0})
    assert [item.name for item in list_checkpoints(tmp_path / "run")] == [
        "step-0000000001",
        "step-0000000002",
    ]


class Folder:
    """A directory in memory, which may fail."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.error: ConnectorError | None = None

    def names(self, prefix: str) -> list[str]:
        self._fail()
        return [name for name in self.files if name.startswith(prefix)]

    def read(self, name: str) -> bytes | None:
        return self.files.get(name)

    def put(self, name: str, data: bytes) -> None:
        self._fail()
        self.files[name] = data

    def remove(self, name: str) -> None:
        self._fail()
        self.files.pop(name, None)

    def _fail(self) -> None:
        if self.error is not None:
            raise self.error


def ended(folder: Folder, number: int) -> None:
    """A start on another machine has ended with a step."""
    starts = StartLog(folder)
    starts.begin(f"s3://bucket/step-{number:010d}")
    (name,) = {*folder.names("")} - {name for name in folder.files if b'"elsewhere"' in folder.files[name]}
    said = json.loads(folder.files[name])
    said["owner"]["machine"] = "elsewhere"
    folder.files[name] = json.dumps(said).encode()
    starts.end(ValueError())


class TestStarts:
    found = (3, "run/step-0000000003"), (3, "far/step-0000000003"), (2, "run/step-0000000002")

    def test_what_counts(self) -> None:
        folder = Folder()
        ended(folder, 3)
        assert [*StartLog(folder).passing(iter(self.found))] == [*self.found]
        ended(folder, 3)
        assert [*StartLog(folder).passing(iter(self.found))] == [self.found[2]]
        folder.files["other"] = folder.files[".starting-nothing"] = b"{"
        with pytest.raises(CheckpointError, match="has ended 2 starts"):
            list(StartLog(folder).passing(iter(self.found[:2])))
        StartLog(folder).forget(2)
        assert len(folder.files) == 4
        StartLog(folder).forget(3)
        assert set(folder.files) == {"other", ".starting-nothing"}

    def test_a_start_that_still_runs_does_not_count(self) -> None:
        folder = Folder()
        several = [StartLog(folder) for _ in range(3)]
        for starts in several:  # of this process, which is alive
            starts.begin("run/step-0000000003")
        assert len(folder.files) == 3
        assert [*StartLog(folder).passing(iter(self.found))] == [*self.found]
        for starts in several:
            starts.done()
        assert folder.files == {}

    @pytest.mark.parametrize(
        ("error", "counts"), [(CheckpointError("it does not fit"), False), (PeerError("rank 1 has died"), True)]
    )
    def test_errors_of_restoring(self, error: Exception, counts: bool) -> None:
        folder = Folder()
        starts = StartLog(folder)
        starts.begin("run/step-0000000003")
        with pytest.raises(type(error)), starts.told():
            raise error
        starts.end(error)
        assert len(folder.files) == counts

    def test_a_store_that_fails_holds_up_no_start(self, caplog: pytest.LogCaptureFixture) -> None:
        folder = Folder()
        ended(folder, 3)
        ended(folder, 3)
        folder.error = ConnectorError("no route")
        starts = StartLog(folder)
        assert [*starts.passing(iter(self.found))] == [*self.found]
        starts.begin("run/step-0000000003")
        starts.forget(3)
        starts.done()
        assert caplog.text.count("no route") == 2


@pytest.mark.prove
@pytest.mark.parametrize(("how", "counts"), [("ends", 0), ("fails", 1)])
def test_a_program_that_never_closes_its_manager(how: str, counts: int, tmp_path: Path) -> None:
    start(tmp_path, "first")
    program = [sys.executable, node_programs.__file__, str(tmp_path / "run"), how]
    done = subprocess.run(program, check=False, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("2\n", counts), done.stderr
    assert len(marks(tmp_path)) == counts
