"""A local directory beside the one that lasts: committed there first, uploaded behind training, restored from either."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from tiered import Two, flip, number_in, state_of, steps_in

import loaderkit
from loaderkit.checkpoint import latest
from loaderkit.checkpoint.discovery.manifest import NAME, parse_manifest
from loaderkit.connectors.base import writes_of
from loaderkit.connectors.config import S3Args
from loaderkit.connectors.file import FileConnector
from loaderkit.connectors.fsspec import FsspecConnector
from loaderkit.connectors.s3 import S3Connector
from loaderkit.errors import CheckpointError, ConfigError, ConnectorError, UnreachableError

pytestmark = pytest.mark.filterwarnings("ignore")


def files_below(folder: Path) -> dict[str, Any]:
    """The content of every file; of a manifest what it says."""
    found: dict[str, Any] = {}
    for path in filter(Path.is_file, folder.rglob("*")):
        data = path.read_bytes()
        found[path.relative_to(folder).as_posix()] = parse_manifest("", data) if path.name == NAME else data
    return found


class TestUpload:
    def test_the_copy_is_equal_to_the_last_byte(self, tmp_path: Path) -> None:
        near, far = tmp_path / "near", tmp_path / "far"
        with loaderkit.CheckpointManager(far, local={"path": near, "keep": 2}, keep={"last": 3}) as checkpoints:
            for step in range(1, 6):
                checkpoints.save(step, state_of(step))
                checkpoints.wait_until_finished()
        assert sorted(path.name for path in near.iterdir()) == [
            "loaderkit-local.json",
            *(f"step-{step:010}" for step in (4, 5)),
        ]
        assert sorted(path.name for path in far.iterdir()) == [f"step-{step:010}" for step in (3, 4, 5)]
        for step in (4, 5):
            name = f"step-{step:010}"
            assert files_below(near / name) == files_below(far / name)
        assert torch.equal(loaderkit.restore(latest(far, verify=True), verify=True)["x"], state_of(5)["x"])
        stats = checkpoints.stats()
        assert (stats["num_uploaded"], stats["num_superseded"], stats["num_failed_uploads"]) == (5, 0, 0)
        assert stats["uploaded_bytes"] > 5 * 4000

    def test_a_save_is_committed_when_the_local_one_is(self) -> None:
        two = Two()
        two.far.hold()
        checkpoints = two.manager()
        for step in (1, 2):
            saving = checkpoints.save(step, state_of(step), wait=True)  # waits for no upload
            assert saving is not None
            assert saving.is_committed
        assert two.far.begun.wait(60)
        assert (steps_in(two.near), steps_in(two.far)) == ([1, 2], [])
        assert checkpoints.all_steps() == [1, 2]
        assert number_in(checkpoints) == 2
        two.far.gate.set()
        checkpoints.wait_until_finished()
        assert (steps_in(two.near), steps_in(two.far)) == ([2], [1, 2])
        checkpoints.close()

    def test_the_newest_goes_first_and_what_is_superseded_not_at_all(self) -> None:
        two = Two()
        two.far.hold()
        with two.manager(keep={"last": 2, "every": 4}) as checkpoints:
            checkpoints.save(1, state_of(1), wait=True)
            assert two.far.begun.wait(60)  # it is being uploaded, and goes on
            for step in range(2, 10):
                checkpoints.save(step, state_of(step), wait=True)
            assert steps_in(two.near) == [1, 4, 8, 9]  # all that waits
            two.far.gate.set()
        order = [int(key.split("step-")[1][:10]) for key in two.far.created if key.endswith(".distcp")]
        assert order == [1, 9, 8, 4]
        assert (steps_in(two.near), steps_in(two.far)) == ([9], [4, 8, 9])
        assert checkpoints.stats()["num_superseded"] == 5
        assert checkpoints.stats()["num_uploaded"] == 4

    def test_without_rules_all_are_uploaded(self) -> None:
        two = Two()
        two.far.hold()
        with two.manager(local={"keep": 1}) as checkpoints:
            for step in range(1, 6):
                checkpoints.save(step, state_of(step), wait=True)
            assert steps_in(two.near) == [1, 2, 3, 4, 5]
            two.far.gate.set()
        assert (steps_in(two.near), steps_in(two.far)) == ([5], [1, 2, 3, 4, 5])

    @pytest.mark.parametrize("kind", ["dcp", "safetensors"])
    def test_a_step_that_is_saved_again_is_replaced(self, kind: str) -> None:
        """Also if it is no longer in the local directory, whose names of files then begin anew."""
        two = Two()
        with two.manager(format=kind) as checkpoints:
            for step, number in ((1, 1), (1, 11), (2, 2), (1, 21)):
                checkpoints.save(step, state_of(number), force=True)
                checkpoints.wait_until_finished()
                with loaderkit.CheckpointManager("far://", connectors=two.connectors) as other:
                    assert number_in(other, step) == number
            assert len(list(two.far.list("step-"))) == (6 if kind == "dcp" else 8)
        assert checkpoints.stats()["num_uploaded"] == 4

    def test_saved_again_while_it_is_uploaded(self) -> None:
        two = Two()
        two.far.hold()
        with two.manager() as checkpoints:
            checkpoints.save(1, state_of(1), wait=True)
            assert two.far.begun.wait(60)
            checkpoints.save(1, state_of(11), force=True, wait=True)
            two.far.gate.set()
        with loaderkit.CheckpointManager("far://", connectors=two.connectors) as other:
            assert number_in(other) == 11

    def test_an_earlier_run_s_uploads_go_on(self) -> None:
        two = Two()
        two.far.error = UnreachableError("no route")
        checkpoints = two.manager(keep={"last": 2})
        for step in range(1, 5):
            with suppress(UnreachableError):
                checkpoints.save(step, state_of(step), wait=True)
            with suppress(UnreachableError):  # raised by the save, if it was slow
                checkpoints.wait_until_finished()  # a step that is being uploaded when the next is saved would stay
        with suppress(UnreachableError):
            checkpoints.close()
        assert (steps_in(two.near), steps_in(two.far)) == ([3, 4], [])
        two.far.error = None
        with two.manager(keep={"last": 2}):
            pass
        assert (steps_in(two.near), steps_in(two.far)) == ([3, 4], [3, 4])

    def test_what_another_process_uploads_is_left_to_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        two = Two()
        two.far.hold()
        first = two.manager()
        first.save(1, state_of(1), wait=True)
        assert two.far.begun.wait(60)
        with two.manager() as second:  # its uploads end although the first one's does not
            assert number_in(second) == 1
        assert second.stats()["num_uploaded"] == 0
        two.far.gate.set()
        first.close()
        assert steps_in(two.far) == [1]

    def test_what_another_machine_has_saved_since_is_not_replaced(self) -> None:
        """The job goes to another machine, saves a step again there, and comes back to what it left on the first."""
        first = Two()
        with first.manager() as checkpoints:
            for step in (1, 2):
                checkpoints.save(step, state_of(step))
        second = Two(far=first.far.inner)
        with second.manager() as checkpoints:
            assert number_in(checkpoints, 1) == 1
            checkpoints.save(2, state_of(22), force=True)
        with first.manager() as checkpoints:
            assert number_in(checkpoints) == 22
        with second.manager() as checkpoints:
            assert number_in(checkpoints) == 22
            checkpoints.save(2, state_of(33), force=True)  # an older one of this run is
        with loaderkit.CheckpointManager("far://", connectors=first.connectors) as other:
            assert number_in(other) == 33


class TestFailure:
    def test_it_is_raised_once_and_tried_again(self) -> None:
        two = Two()
        two.far.error = UnreachableError("no route")
        checkpoints = two.manager()
        checkpoints.save(1, state_of(1))
        with pytest.raises(UnreachableError):
            checkpoints.wait_until_finished()
        with pytest.raises(UnreachableError):
            checkpoints.wait_until_finished()  # tried again
        assert steps_in(two.near) == [1]
        two.far.error = None
        checkpoints.wait_until_finished()
        assert steps_in(two.far) == [1]
        checkpoints.close()
        assert checkpoints.stats()["num_failed_uploads"] >= 2

    def test_a_save_raises_it_and_saves_all_the_same(self) -> None:
        two = Two()
        two.far.error = UnreachableError("no route")
        two.far.hold()
        with two.manager() as checkpoints:
            checkpoints.save(1, state_of(1), wait=True)
            two.far.gate.set()  # or this save may raise it, if it is slow
            with pytest.raises(UnreachableError):
                checkpoints.wait_until_finished()
            with pytest.raises(UnreachableError):
                for step in range(2, 100):
                    checkpoints.save(step, state_of(step), wait=True)
            two.far.error = None
            saved = checkpoints.latest_step()
            assert saved is not None
            assert number_in(checkpoints) == saved > 1
        assert steps_in(two.far) == [*range(1, saved + 1)]

    def test_one_that_heals_before_it_is_raised_is_none(self) -> None:
        two = Two()
        two.far.error = UnreachableError("no route")
        two.far.hold()
        with two.manager() as checkpoints:
            checkpoints.save(1, state_of(1), wait=True)
            assert two.far.begun.wait(60)
            for thread in threading.enumerate():
                if thread.name == "loaderkit-upload":
                    two.far.gate.set()
                    thread.join(60)
            two.far.error = None
        assert steps_in(two.far) == [1]

    def test_a_damaged_local_one_is_given_up(self) -> None:
        """It is raised once, and the others are uploaded."""
        two = Two()
        two.far.hold()
        checkpoints = two.manager()
        checkpoints.save(1, state_of(1), wait=True)
        assert two.far.begun.wait(60)
        for step in (2, 3, 4):
            checkpoints.save(step, state_of(step), wait=True)
        flip(two.near, 3)
        two.far.gate.set()
        with pytest.raises(CheckpointError, match="is damaged, so nothing is copied"):
            checkpoints.wait_until_finished()
        checkpoints.wait_until_finished()
        checkpoints.save(5, state_of(5))
        checkpoints.close()
        assert steps_in(two.far) == [1, 2, 4, 5]
        assert steps_in(two.near) == [3, 5]

    def test_an_error_of_the_loop_is_not_hidden(self, caplog: pytest.LogCaptureFixture) -> None:
        two = Two()
        two.far.error = UnreachableError("no route")
        with pytest.raises(ZeroDivisionError), two.manager() as checkpoints:
            checkpoints.save(1, state_of(1))
            _ = 1 / 0
        assert "the last checkpoint was not uploaded: no route" in caplog.text
        assert steps_in(two.near) == [1]


class TestRestore:
    def test_the_newest_of_both(self) -> None:
        two = Two()
        with two.manager(keep={"last": 2}) as checkpoints:
            for step in (1, 2, 3):
                checkpoints.save(step, state_of(step))
                checkpoints.wait_until_finished()
            assert checkpoints.all_steps() == [2, 3]
            assert number_in(checkpoints) == 3
            assert number_in(checkpoints, 2) == 2  # in the far one only
            with pytest.raises(CheckpointError):
                number_in(checkpoints, 1)
        for info in [*two.near.list("")]:  # another machine
            writes_of(two.near).delete(info.key)
        with two.manager() as checkpoints:
            assert number_in(checkpoints) == 3
            two.far.hold()
            checkpoints.save(4, state_of(4), wait=True)
            assert number_in(checkpoints) == 4
            assert checkpoints.all_steps() == [2, 3, 4]
            two.far.gate.set()

    @pytest.mark.parametrize("step", [None, 2])
    @pytest.mark.parametrize("how", ["a byte", "a file", "the description"])
    def test_of_a_damaged_local_one_the_far_one_is_taken(
        self, how: str, step: int | None, caplog: pytest.LogCaptureFixture
    ) -> None:
        two = Two()
        with two.manager() as checkpoints:
            for number in (1, 2):
                checkpoints.save(number, state_of(number))
        if how == "a byte":
            flip(two.near, 2)
        else:
            end = ".distcp" if how == "a file" else ".metadata"
            for info in [*two.near.list("")]:
                if info.key.endswith(end):
                    writes_of(two.near).put(info.key, b"nothing")
        with two.manager() as checkpoints:
            assert number_in(checkpoints, step) == 2
        assert "near://step-0000000002 is passed over" in caplog.text
        assert "far://step" not in caplog.text

    def test_what_is_damaged_in_both_is_passed_over(self, caplog: pytest.LogCaptureFixture) -> None:
        two = Two()
        with two.manager(local={"keep": 3}) as checkpoints:
            for number in (1, 2, 3):
                checkpoints.save(number, state_of(number))
        flip(two.near, 3)
        flip(two.far.inner, 3)
        flip(two.near, 2)
        with two.manager() as checkpoints:
            with pytest.raises(CheckpointError, match="is damaged"):
                number_in(checkpoints, 3)
            assert number_in(checkpoints) == 2
        for name in ("near://step-0000000003", "far://step-0000000003", "near://step-0000000002"):
            assert f"{name} is passed over: it is damaged: bytes" in caplog.text

    def test_of_one_directory_a_damaged_byte_is_passed_over_too(self) -> None:
        two = Two()
        with loaderkit.CheckpointManager("far://", connectors=two.connectors) as checkpoints:
            for number in (1, 2):
                checkpoints.save(number, state_of(number), wait=True)
            flip(two.far.inner, 2)
            assert number_in(checkpoints) == 1
            flip(two.far.inner, 1)
            with pytest.raises(CheckpointError, match="is damaged"):
                number_in(checkpoints)

    def test_a_state_that_does_not_fit_is_an_error_and_no_damage(self, caplog: pytest.LogCaptureFixture) -> None:
        two = Two()
        with two.manager(local={"keep": 3}) as checkpoints:
            for number in (1, 2):
                checkpoints.save(number, state_of(number))
            with pytest.raises(CheckpointError, match="does not fit the state; nothing was written"):
                checkpoints.restore({"x": torch.zeros(7), "n": 0})
        assert "passed over" not in caplog.text

    def test_a_far_store_that_cannot_be_reached_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What is local may not be the newest."""
        two = Two()
        with two.manager() as checkpoints:
            checkpoints.save(1, state_of(1))
            checkpoints.wait_until_finished()

            def fail(prefix: str) -> Any:
                raise UnreachableError("no route")

            monkeypatch.setattr(two.far.inner, "list", fail)
            with pytest.raises(UnreachableError):
                number_in(checkpoints)
            monkeypatch.undo()


class TestLocalDirectory:
    def test_one_of_another_run_is_refused(self, tmp_path: Path) -> None:
        local = tmp_path / "near"
        with loaderkit.CheckpointManager(tmp_path / "a", local=local) as checkpoints:
            checkpoints.save(1, state_of(1))
        with pytest.raises(ConfigError, match=r"near holds checkpoints that belong to .*/a, not to .*/b: restoring"):
            loaderkit.CheckpointManager(tmp_path / "b", local=local)
        with loaderkit.CheckpointManager(tmp_path / "a", local=local) as checkpoints:
            assert number_in(checkpoints) == 1

    @pytest.mark.parametrize("kind", ["link", "url", "path"])
    def test_the_same_directory_by_another_name_is_refused(self, kind: str, tmp_path: Path) -> None:
        with loaderkit.CheckpointManager(tmp_path / "a") as checkpoints:
            for step in (1, 2):
                checkpoints.save(step, state_of(step))
        (tmp_path / "link").symlink_to(tmp_path / "a")
        local = {"link": f"{tmp_path}/link", "url": f"file://{tmp_path}/a", "path": f"{tmp_path}/b/../a"}[kind]
        with pytest.raises(ConfigError, match=r"is the same directory as|is `to` as well"):
            loaderkit.CheckpointManager(tmp_path / "a", local=local)
        assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["step-0000000001", "step-0000000002"]

    def test_so_is_that_of_a_copy(self, tmp_path: Path) -> None:
        copies = [{"to": f"file://{tmp_path}/a", "dtype": "bfloat16"}]
        with pytest.raises(ConfigError, match=r"copies: .* is the same directory as that of 'to'"):
            loaderkit.CheckpointManager(tmp_path / "a", copies=copies)

    def test_a_copy_never_takes_the_place_of_a_checkpoint(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        state = {"model": {"x": torch.randn(100)}}
        with loaderkit.CheckpointManager(tmp_path / "a", format="safetensors") as checkpoints:
            checkpoints.save(1, state)
        copies = [{"to": str(tmp_path / "a"), "dtype": "bfloat16"}]
        with loaderkit.CheckpointManager(
            tmp_path / "b", copies=copies, keep={"best": {"metric": "los"}}
        ) as checkpoints:
            for step in (1, 2, 2):
                checkpoints.save(step, state, force=True, metrics={"loss": 1.0})
        assert "step-0000000001 is a checkpoint, no export" in caplog.text
        assert "no metric 'los' (given: loss)" in caplog.text
        found = {"model": {"x": torch.zeros(100)}}
        with loaderkit.CheckpointManager(tmp_path / "a") as checkpoints:
            assert checkpoints.restore(found) == 1
            assert checkpoints.all_steps() == [1, 2]
        assert torch.equal(found["model"]["x"], state["model"]["x"])

    def test_a_directory_that_was_the_only_one_becomes_the_local_one(self, tmp_path: Path) -> None:
        with loaderkit.CheckpointManager(tmp_path / "a") as checkpoints:
            checkpoints.save(1, state_of(1))
        with loaderkit.CheckpointManager(tmp_path / "b", local=tmp_path / "a") as checkpoints:
            assert number_in(checkpoints) == 1
        with loaderkit.CheckpointManager(tmp_path / "b") as checkpoints:
            assert number_in(checkpoints) == 1

    def test_a_disk_that_is_full_is_a_failed_save(self, tmp_path: Path) -> None:
        class Full(FileConnector):
            def writes(self) -> Any:
                def full(*anything: Any) -> Any:
                    raise ConnectorError("No space left on device")

                writes: Any = super().writes()
                writes.put = writes.create = full
                return writes

        two = Two(near=Full(tmp_path))
        with two.manager() as checkpoints:
            checkpoints.save(1, state_of(1))
            with pytest.raises(ConnectorError, match="No space left"):
                checkpoints.wait_until_finished()
        assert steps_in(two.far) == []

    def test_tmpfs(self, tmp_path: Path) -> None:
        if not os.path.isdir("/dev/shm"):
            pytest.skip("there is no tmpfs at /dev/shm")
        import tempfile

        with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
            with loaderkit.CheckpointManager(tmp_path, local=memory) as checkpoints:
                checkpoints.save(1, state_of(1, 3_000_000))
            with loaderkit.CheckpointManager(tmp_path) as checkpoints:
                assert number_in(checkpoints, num=3_000_000) == 1


@pytest.mark.parametrize("kind", ["bucket", "fsspec"])
def test_stores_that_are_no_directories(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    far: Any = FsspecConnector("memory://tiers")
    if kind == "bucket":
        seaweed = request.getfixturevalue("seaweed")
        request.getfixturevalue("s3_keys")
        seaweed.boto().create_bucket(Bucket="tiers")
        far = S3Connector("s3://tiers/runs", S3Args(endpoint=seaweed.endpoint))
    local, num = {"path": tmp_path, "keep": 1, "upload": {"bandwidth": "1GB/s"}}, 3_000_000  # two parts
    for first in (1, 4):
        stores = {"far": far}
        with loaderkit.CheckpointManager("far://", local=local, keep={"last": 2}, connectors=stores) as checkpoints:
            assert number_in(checkpoints, num=num) == (first - 1 or -1)
            for step in range(first, first + 3):
                checkpoints.save(step, state_of(step, num))
                checkpoints.wait_until_finished()
            checkpoints.save(first + 2, state_of(first + 2, num), force=True)
    assert steps_in(far) == [5, 6]
    assert len([*far.list("")]) == 6
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["loaderkit-local.json", "step-0000000006"]
    with loaderkit.CheckpointManager("far://", connectors={"far": far}) as checkpoints:
        assert [number_in(checkpoints, step, num) for step in (5, 6)] == [5, 6]
    far.close()


def test_written_by_a_process_and_uploaded_by_a_thread(tmp_path: Path) -> None:
    with loaderkit.CheckpointManager(tmp_path / "far", local=tmp_path / "near", flush="process") as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state_of(step))
    with loaderkit.CheckpointManager(tmp_path / "far") as checkpoints:
        assert checkpoints.latest_step() == 2
        assert number_in(checkpoints) == 2
