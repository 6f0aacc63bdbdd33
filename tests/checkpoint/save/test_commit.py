"""Who is running and who is dead, what is cleared and what is not, and what a checkpoint that is replaced looks like."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import HELPERS
from crashing import Clock, Mortal, made_store, names_in, number_in, save_to, state_of
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

import loaderkit
from loaderkit.checkpoint import StreamWriter, latest, write_manifest
from loaderkit.checkpoint.discovery.locate import save_target
from loaderkit.checkpoint.save import owner as owners
from loaderkit.checkpoint.save.commit import begin
from loaderkit.checkpoint.save.owner import MAX_SILENCE_S, Heartbeat, Owner, is_running, this_process
from loaderkit.checkpoint.save.placement import (
    Placement,
    find_placement,
    marker_key,
    put_marker,
    read_object,
    unfinished_saves,
)
from loaderkit.connectors.base import Connector, ConnectorLayer, Writes, writes_of
from loaderkit.connectors.file import FileConnector
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.connectors.writing import WritesLayer
from loaderkit.errors import AccessDeniedError, CheckpointError, ConnectorError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Undeletable(ConnectorLayer):
    """A store that refuses deletions while it `refuses`."""

    refuses = True

    def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        self.inner.read_into(key, start, buffer, etag=etag)

    def writes(self) -> Writes:
        outer = self

        class Refusing(WritesLayer):
            def delete(self, key: str) -> None:
                if outer.refuses and not key.endswith("probe"):
                    raise ConnectorError("deletions are forbidden")
                super().delete(key)

        return Refusing(writes_of(self.inner))


def begun(store: Connector, name: str = "step-9") -> Placement:
    target = save_target(f"given://{name}", {"given": store})
    return begin(target, writes_of(store))


def marked(store: Connector, name: str, placement: Placement, renewed_s: float | None = None) -> None:
    """Put a marker as that owner would have."""
    target, writes = save_target(f"given://{name}", {"given": store}), writes_of(store)
    put_marker(target, writes, placement)
    if renewed_s is not None:
        key = marker_key(target, placement)
        writes.put(key, json.dumps(json.loads(read_object(store, key)) | {"renewed_s": renewed_s}).encode())


def placement_of(owner: Owner, attempt: str = "0123456789abcdef", *, in_place: bool = False) -> Placement:
    folder = "step-9/" if in_place else f".saving-step-9.{attempt}/"
    return Placement(attempt, 1, owner, folder, 0, in_place)


def test_this_process_is_alive_and_a_dead_one_is_not() -> None:
    here = this_process()
    assert here.is_alive()
    assert here._replace(started=here.started + 1).is_alive() is False  # the number was given anew
    assert here._replace(machine="another").is_alive() is None
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        known = here._replace(pid=child.pid, started=owners._started(child.pid) or 0)
        assert known.is_alive()
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert known.is_alive() is False  # though nobody has asked for its exit status
    assert known.is_alive() is False


def test_a_process_that_proc_hides_counts_until_it_was_silent_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: str, **_: Any) -> Any:
        raise PermissionError(path)

    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        other = this_process()._replace(pid=child.pid, started=owners._started(child.pid) or 0)
        monkeypatch.setattr(owners, "open", refused, raising=False)
        assert other.is_alive() is None
        assert is_running(other, "a", time.time())
        assert not is_running(other, "a", time.time() - 2 * MAX_SILENCE_S)
        child.kill()
    assert other.is_alive() is False


def test_a_heartbeat_goes_on_until_it_is_stopped_or_forgotten() -> None:
    renewed = threading.Event()
    heartbeat = Heartbeat("a", renewed.set, every_s=0.001)
    assert renewed.wait(60)
    assert is_running(this_process(), "a", 0)
    assert not is_running(this_process(), "b", time.time())
    heartbeat.stop()
    assert not is_running(this_process(), "a", time.time())
    forgotten = Heartbeat("c", int)
    assert is_running(this_process(), "c", 0)
    del forgotten
    assert not is_running(this_process(), "c", time.time())


def test_a_heartbeat_of_another_machine_runs_out() -> None:
    other = this_process()._replace(machine="another")
    assert is_running(other, "a", time.time() - MAX_SILENCE_S / 2)
    assert not is_running(other, "a", time.time() - 2 * MAX_SILENCE_S)


@pytest.mark.parametrize("kind", ["file", "memory"])
@pytest.mark.parametrize("in_place", [False, True])
def test_only_what_the_dead_left_is_cleared(kind: str, in_place: bool) -> None:
    with made_store(kind) as store:
        other = this_process()._replace(machine="another")
        dead = this_process()._replace(started=1)
        for attempt, owner, renewed_s in (
            ("a" * 16, other, time.time()),
            ("b" * 16, other, time.time() - 2 * MAX_SILENCE_S),
            ("c" * 16, dead, time.time()),
        ):
            placement = placement_of(owner, attempt, in_place=in_place)._replace(generation=int(attempt[0], 16))
            marked(store, "step-9", placement, renewed_s)
            writes_of(store).put(placement.folder + placement.file_name(0), b"data")
        save_to(store, "step-1", 1)
        left = [name for name in names_in(store) if not name.startswith("step-1/")]
        folder = "step-9" if in_place else f".saving-step-9.{'a' * 16}"
        assert left == sorted([f".saving-step-9.{'a' * 16}.json", f"{folder}/__0_10.distcp"])


def test_a_directory_without_a_marker_is_cleared_and_one_of_another_version_is_not() -> None:
    store = MemoryConnector(
        {
            ".saving-s.0123456789abcdef/__1_0.distcp": b"late",
            ".saving-t.0123456789abcdef/__1_0.distcp": b"unknown",
            ".saving-t.0123456789abcdef.json": b'{"version": 99}',
            ".saving-mine/notes.txt": b"not ours",
            ".saving-notes": b"not ours",
        }
    )
    save_to(store, "step-1", 1)
    assert [name for name in names_in(store) if name.startswith(".saving-")] == [
        ".saving-mine/notes.txt",
        ".saving-notes",
        ".saving-t.0123456789abcdef.json",
        ".saving-t.0123456789abcdef/__1_0.distcp",
    ]


def test_a_save_that_failed_in_this_process_is_dead_and_one_that_runs_is_not() -> None:
    store = MemoryConnector()
    clock = Clock(5)
    with pytest.raises(CheckpointException):
        save_to(Mortal(store, clock), "step-1", 1)
    assert [save.is_running for save in unfinished_saves(save_target("given://x", {"given": store}))] == [False]
    running = begun(store)
    heartbeat = Heartbeat(running.attempt, int)
    save_to(store, "step-1", 1)
    assert [name for name in names_in(store) if not name.startswith("step-1/")] == [
        f".saving-step-9.{running.attempt}.json"
    ]
    heartbeat.stop()
    save_to(store, "step-2", 1)
    assert all(name.startswith("step-") for name in names_in(store))


def test_what_cannot_be_cleared_is_said_and_the_save_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryConnector({"step-9/.metadata": b"of another kind", "step-9/__0_0.distcp": b""})
    marked(store, "step-9", placement_of(this_process()._replace(started=1), in_place=True))
    with caplog.at_level(logging.WARNING, "loaderkit"):
        save_to(store, "step-1", 1)
    assert "step-9.0123456789abcdef is not cleared" in caplog.text
    assert number_in(store, "step-1", verify=True) == 1
    assert {"step-9/.metadata", "step-9/__0_0.distcp"} <= {*names_in(store)}


def test_whoever_may_not_list_uploads_saves_all_the_same() -> None:
    class Restricted(MemoryConnector):
        def clear(self, prefix: str, *, deep: bool = True) -> None:
            raise AccessDeniedError("ListMultipartUploads is not allowed")

    store = Restricted()
    with pytest.raises(CheckpointException):
        save_to(Mortal(store, Clock(5)), "step-1", 1)
    for number in (1, 2):
        save_to(store, "step-1", number)
        assert number_in(store, "step-1", verify=True) == number
    assert len(names_in(store)) == 3


def test_two_saves_of_the_same_checkpoint_at_once() -> None:
    store = MemoryConnector()
    save_to(store, "step-9", 1)
    first, second = begun(store), begun(store)  # without heartbeats: dead
    heartbeats = [Heartbeat(first.attempt, int), Heartbeat(second.attempt, int)]
    third = begun(store)
    assert first.in_place
    assert third.generation > second.generation >= first.generation
    assert find_placement(save_target("given://step-9", {"given": store}), this_process()) == third
    assert find_placement(save_target("given://step-9", {"given": store}), this_process()._replace(pid=1)) is None
    assert len(heartbeats) == 2


def test_the_number_of_files_grows_with_every_save_and_old_ones_go() -> None:
    store = MemoryConnector()
    for number in range(4):
        save_to(store, "step-1", number)
        assert names_in(store) == [
            f"step-1/{name}" for name in (".metadata", f"__0_{number}.distcp", "loaderkit-manifest.json")
        ]
        assert number_in(store, "step-1", verify=True) == number


def test_a_checkpoint_of_torch_is_replaced(tmp_path: Path) -> None:
    save(state_of(1), checkpoint_id=tmp_path / "step-1", no_dist=True)
    write_manifest(tmp_path / "step-1", block_bytes=4096)
    (tmp_path / "step-1/notes.txt").write_text("stays")
    save(state_of(2), storage_writer=StreamWriter(tmp_path / "step-1"), no_dist=True)
    assert sorted(path.name for path in (tmp_path / "step-1").iterdir()) == [
        ".metadata", "__0_1.distcp", "loaderkit-manifest.json", "notes.txt",
    ]  # fmt: skip
    assert loaderkit.restore(tmp_path / "step-1", verify=True)["step"] == 2


def test_a_checkpoint_of_another_format_is_not_mixed_with_one_of_ours(tmp_path: Path) -> None:
    torch.save(state_of(1), tmp_path / "model.pt")
    with pytest.raises(CheckpointException, match=r"model\.pt', a checkpoint of another format"):
        save(state_of(2), storage_writer=StreamWriter(tmp_path), no_dist=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]


def test_the_root_of_a_store_is_a_checkpoint_too() -> None:
    store = MemoryConnector({"notes.txt": b""})
    for number in (1, 2):
        save(state_of(number), storage_writer=StreamWriter("given://", connectors={"given": store}), no_dist=True)
        assert number_in(store, "", verify=True) == number
    assert names_in(store) == [".metadata", "__0_1.distcp", "loaderkit-manifest.json", "notes.txt"]


def test_a_directory_that_is_there_and_empty(tmp_path: Path) -> None:
    (tmp_path / "step-1/deep").mkdir(parents=True)
    save(state_of(1), storage_writer=StreamWriter(tmp_path / "step-1"), no_dist=True)
    assert (tmp_path / "step-1/__0_0.distcp").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_nothing_is_saved_inside_an_archive(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(b"")
    with pytest.raises(CheckpointException, match="nothing can be saved inside an archive"):
        save(state_of(1), storage_writer=StreamWriter(tmp_path / "a.tar/step-1"), no_dist=True)


def test_a_file_that_other_machines_do_not_see() -> None:
    store = MemoryConnector()

    class Elsewhere(Mortal):
        def list(self, prefix: str) -> Any:
            return (info for info in super().list(prefix) if not info.key.endswith(".distcp"))

    with pytest.raises(CheckpointException, match=r"'__0_0\.distcp' is not there.*same directory on all machines"):
        save_to(Elsewhere(store, Clock()), "step-1", 1)
    with pytest.raises(CheckpointError):
        latest("given://", connectors={"given": store})


def save_to_path(folder: Path, number: int) -> None:
    save(state_of(number), storage_writer=StreamWriter(folder / f"step-{number}"), no_dist=True)


def test_a_process_that_is_killed(tmp_path: Path) -> None:
    save_to_path(tmp_path, 1)
    program = [sys.executable, str(HELPERS / "save_and_wait.py"), str(tmp_path), "2"]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        save_to_path(tmp_path, 3)
        assert len(list(tmp_path.glob(".saving-step-2.*/*.tmp"))) == 1  # it is running
        process.kill()
        process.wait()
        assert latest(tmp_path) == f"{tmp_path}/step-3"
        save_to_path(tmp_path, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-3", "step-4"]


@pytest.mark.parametrize("again", [False, True], ids=["new", "again"])
def test_what_cannot_be_cleared_after_the_commit_is_the_next_save_s(
    again: bool, caplog: pytest.LogCaptureFixture
) -> None:
    inner = MemoryConnector()
    store = Undeletable(inner)
    if again:
        save_to(inner, "step-1", 1)
    save_to(store, "step-1", 2)
    assert number_in(inner, "step-1", verify=True) == 2
    assert "step-1 is committed; what it replaced is not cleared yet: deletions are forbidden" in caplog.text
    assert any(name.startswith(".saving-") for name in names_in(inner))
    store.refuses = False
    save_to(store, "step-2", 3)
    assert len(names_in(inner)) == 6
    assert number_in(inner, "step-1", verify=True) == 2


def test_a_marker_that_has_not_got_its_name(tmp_path: Path) -> None:
    """It is another process's that may be alive, or it goes."""
    store = FileConnector(tmp_path)
    dead, here = this_process()._replace(started=1), this_process()
    kept = []
    for attempt, owner, age_s in (
        ("a" * 16, dead, 0.0),
        ("b" * 16, here, 0.0),
        ("c" * 16, here, 2 * MAX_SILENCE_S),
        ("d" * 16, here._replace(machine="another"), 0.0),
        ("e" * 16, None, 0.0),
        ("f" * 16, None, 2 * MAX_SILENCE_S),
    ):
        path = tmp_path / f".saving-step-9.{attempt}.json"
        if owner is not None:
            marked(store, "step-9", placement_of(owner, attempt))
        else:
            path.touch()
        path = path.rename(f"{path}.0123456789abcdef.tmp")
        os.utime(path, (time.time() - age_s,) * 2)
        if owner is not dead and not age_s:
            kept.append(path.name)
    save_to(store, "step-1", 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [*kept, "step-1"]
