"""A copy of a checkpoint is whole and equal, or nothing is left of it."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from checkpoint_states import pack, save_dcp, saved
from seaweed import Seaweed

import loaderkit
from loaderkit.checkpoint.discovery.manifest import NAME
from loaderkit.checkpoint.discovery.verify import verify_checkpoint
from loaderkit.checkpoint.save.copy import copy_checkpoint
from loaderkit.checkpoint.save.prune import find_debris, remove_debris
from loaderkit.connectors.base import ObjectInfo, writes_of
from loaderkit.connectors.file import FileConnector
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.connectors.s3 import S3Connector
from loaderkit.errors import CheckpointError, ConnectorError

pytestmark = pytest.mark.filterwarnings("ignore")


def files_below(folder: Path) -> dict[str, Any]:
    """The content of every file; of manifests what they say."""
    found: dict[str, Any] = {}
    for path in filter(Path.is_file, folder.rglob("*")):
        data = path.read_bytes()
        found[path.relative_to(folder).as_posix()] = json.loads(data) if path.name.endswith(NAME) else data
    return found


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """Of 20 MB, so that its file has several parts."""
    save_dcp({"a": torch.arange(5_000_000.0), "k": 3}, tmp_path / "run" / "step-7")
    loaderkit.checkpoint.write_manifest(tmp_path / "run" / "step-7")
    return tmp_path / "run" / "step-7"


class NoRename(FileConnector):
    """A file system on which directories cannot be renamed; notes the order in which objects become visible."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.committed: list[str] = []

    def writes(self) -> Any:
        outer, inner = self, writes_of(FileConnector(self.describe("")))

        class Refusing:
            def __getattr__(self, name: str) -> Any:
                return getattr(inner, name)

            def rename(self, prefix: str, new_prefix: str) -> bool:
                return False

            def put(self, key: str, data: bytes) -> ObjectInfo:
                outer.committed.append(key)
                return inner.put(key, data)

            def create(self, key: str, size: int) -> Any:
                writer = inner.create(key, size)
                commit = writer.commit

                def noting() -> ObjectInfo:
                    outer.committed.append(key)
                    return commit()

                writer.commit = noting  # type: ignore[method-assign]
                return writer

        return Refusing()


class TestCopy:
    def test_a_copy_is_equal_to_the_last_byte(self, step: Path, tmp_path: Path) -> None:
        seen: list[int] = []
        copied = copy_checkpoint(step, tmp_path / "far", progress=seen.append)
        assert files_below(tmp_path / "far") == {f"step-7/{name}": data for name, data in files_below(step).items()}
        assert (copied.url, copied.was_there) == (f"{tmp_path}/far/step-7", False)
        assert (
            sum(seen) == copied.num_bytes == sum(len(data) for name, data in files_below(step).items() if name != NAME)
        )
        assert len(verify_checkpoint(copied.url).damage) == 0

    def test_what_has_no_manifest_gets_one(self, tmp_path: Path) -> None:
        """And files beside the tensors go with them, as a model's config and tokenizer."""
        folder = tmp_path / "model"
        folder.mkdir()
        safetensors.torch.save_file({"a": torch.ones(100_000)}, folder / "model.safetensors")
        (folder / "config.json").write_text("{}")
        (folder / "empty.txt").touch()
        copy_checkpoint(folder, tmp_path / "far")
        there = files_below(tmp_path / "far" / "model")
        manifest = there.pop(NAME)
        assert there == files_below(folder)
        assert [*manifest["objects"]] == ["model.safetensors"]
        assert verify_checkpoint(tmp_path / "far" / "model").num_blocks == 2
        assert copy_checkpoint(folder, tmp_path / "far").was_there
        safetensors.torch.save_file({"a": torch.zeros(100_000)}, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match="another checkpoint of this name"):
            copy_checkpoint(folder, tmp_path / "far")

    def test_blocks_that_do_not_divide_parts(self, tmp_path: Path) -> None:
        safetensors.torch.save_file({"a": torch.rand(5_000_000)}, tmp_path / "step-1.safetensors")
        loaderkit.checkpoint.write_manifest(tmp_path / "step-1.safetensors", block_bytes=99_991)
        copy_checkpoint(tmp_path / "step-1.safetensors", tmp_path / "far")
        there = files_below(tmp_path / "far")
        assert there.keys() == {"step-1.safetensors", f"step-1.safetensors.{NAME}"}
        assert there == {name: files_below(tmp_path)[name] for name in there}

    def test_out_of_a_tar_and_into_memory(self, step: Path, tmp_path: Path) -> None:
        pack([*step.iterdir()], step.parent, tmp_path / "step-7.tar")
        memory = MemoryConnector()
        copy_checkpoint(tmp_path / "step-7.tar", "memory://runs/a", connectors={"memory": memory})
        assert {info.key for info in memory.list("")} == {f"runs/a/step-7/{name}" for name in files_below(step)}
        restored = loaderkit.restore("memory://runs/a/step-7", connectors={"memory": memory}, verify=True)
        assert torch.equal(restored["a"], torch.arange(5_000_000.0))

    def test_an_equal_one_is_left_alone(self, step: Path, tmp_path: Path) -> None:
        copy_checkpoint(step, tmp_path / "far")
        before = {path: path.stat().st_mtime_ns for path in (tmp_path / "far").rglob("*")}
        assert copy_checkpoint(step, tmp_path / "far").was_there
        assert {path: path.stat().st_mtime_ns for path in (tmp_path / "far").rglob("*")} == before
        assert copy_checkpoint(step, step.parent).was_there  # onto itself

    def test_another_one_of_that_name_is_never_written_over(self, step: Path, tmp_path: Path) -> None:
        save_dcp({"a": torch.zeros(5_000_000), "k": 3}, tmp_path / "far" / "step-7")
        before = files_below(tmp_path / "far")
        (tmp_path / "far" / "step-7" / "notes.txt").write_text("mine")
        with pytest.raises(CheckpointError, match=r"step-7 is there, and not as a copy.*notes\.txt"):
            copy_checkpoint(step, tmp_path / "far")
        (tmp_path / "far" / "step-7" / "notes.txt").unlink()
        assert files_below(tmp_path / "far") == before
        loaderkit.checkpoint.write_manifest(tmp_path / "far" / "step-7")
        with pytest.raises(CheckpointError, match="another checkpoint of this name"):
            copy_checkpoint(step, tmp_path / "far")
        (tmp_path / "far" / "x.pt").write_bytes(b"mine")
        (tmp_path / "x.pt").write_bytes(saved({"a": torch.ones(2)}))
        with pytest.raises(CheckpointError, match="is there"):
            copy_checkpoint(tmp_path / "x.pt", tmp_path / "far")
        assert (tmp_path / "far" / "x.pt").read_bytes() == b"mine"

    def test_a_damaged_one_leaves_nothing(self, step: Path, tmp_path: Path) -> None:
        with open(step / "__0_0.distcp", "r+b") as file:
            file.seek(10_000_000)
            file.write(b"\1\2\3")
        with pytest.raises(
            CheckpointError, match=r"__0_0\.distcp is damaged, so nothing is copied: its bytes 9961472 to"
        ):
            copy_checkpoint(step, tmp_path / "far")
        assert files_below(tmp_path / "far") == {}
        assert [*(tmp_path / "far").iterdir()] == []

    @pytest.mark.parametrize("fails_at", range(6))
    @pytest.mark.parametrize("renames", [True, False])
    def test_a_failure_at_any_write_leaves_nothing(
        self, fails_at: int, renames: bool, step: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        connector = FileConnector(tmp_path / "far") if renames else NoRename(tmp_path / "far")
        count = itertools.count()
        inner = connector.writes()
        assert inner is not None

        def failing(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any) -> Any:
                if next(count) >= fails_at:
                    raise ConnectorError("the disk is full")
                return function(*arguments)

            return call

        class Failing:
            def __getattr__(self, name: str) -> Any:
                found = getattr(inner, name)
                return failing(found) if name in ("create", "put", "sync") else found

        monkeypatch.setattr(connector, "writes", Failing)
        with pytest.raises(ConnectorError, match="the disk is full"):
            copy_checkpoint(step, "store:///", connectors={"store": connector})
        assert not (tmp_path / "far" / "step-7").exists()
        if files_below(tmp_path / "far"):  # what could not be removed while the disk was full
            remove_debris(tmp_path / "far", find_debris(tmp_path / "far"))
        assert files_below(tmp_path / "far") == {}

    def test_where_nothing_can_be_renamed_the_manifest_comes_last(self, step: Path, tmp_path: Path) -> None:
        connector = NoRename(tmp_path / "far")
        (tmp_path / "far" / "step-7").mkdir(parents=True)
        (tmp_path / "far" / "step-7" / "__0_0.distcp").write_bytes(b"of a copy that was cut off")
        copy_checkpoint(step, "store:///", connectors={"store": connector})
        assert [key.rpartition("/")[2] for key in connector.committed[-3:]] == ["__0_0.distcp", ".metadata", NAME]
        assert files_below(tmp_path / "far" / "step-7") == files_below(step)
        assert [path.name for path in (tmp_path / "far").iterdir()] == ["step-7"]

    def test_to_a_bucket_and_back(self, step: Path, tmp_path: Path, seaweed: Seaweed, s3_keys: None) -> None:
        seaweed.boto().create_bucket(Bucket="copies")
        from loaderkit.connectors.config import S3Args

        bucket = S3Connector("s3://copies/a", S3Args(endpoint=seaweed.endpoint))
        copy_checkpoint(step, "s3://", connectors={"s3": bucket})
        copy_checkpoint("s3://step-7", tmp_path / "back", connectors={"s3": bucket})
        assert files_below(tmp_path / "back" / "step-7") == files_below(step)
        bucket.close()

    def test_memory_is_bounded(self, step: Path, tmp_path: Path) -> None:
        """No more threads than stores are read with: each holds one part."""
        before = threading.active_count()
        most = 0

        def note(num_bytes: int) -> None:
            nonlocal most
            most = max(most, threading.active_count() - before)

        copy_checkpoint(step, tmp_path / "far", progress=note)
        assert 1 <= most <= 16
        assert threading.active_count() == before
