"""Partial and malformed directories of checkpoints are refused by the name of what is missing."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import tarfile
from pathlib import Path

import pytest
import safetensors.torch
import torch
from checkpoint_states import save_dcp
from malformed import LISTS, Evil

import loaderkit
from loaderkit.errors import CheckpointError, FormatError

pytestmark = pytest.mark.filterwarnings("ignore")


class TestDistributed:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        save_dcp({"a": torch.ones(2), "big": torch.ones(200_000), "k": 3}, tmp_path / "step-1")
        return tmp_path / "step-1"

    def refused(self, folder: Path, match: str) -> None:
        into = {"a": torch.zeros(2), "big": torch.zeros(200_000), "k": 0}
        for target in (None, into):
            with pytest.raises((CheckpointError, FormatError), match=match):
                loaderkit.restore(folder, target)
        assert not into["a"].any()  # type: ignore[attr-defined]
        assert into["k"] == 0

    def test_not_committed(self, folder: Path) -> None:
        (folder / ".metadata").unlink()
        self.refused(folder, "not committed")

    def test_metadata_whose_text_is_a_bomb(self, folder: Path) -> None:
        (folder / ".metadata").write_bytes(b"\x80\x02" + LISTS + b".")
        self.refused(folder, "no Metadata of torch.distributed.checkpoint, but a list")

    def test_a_missing_file(self, folder: Path) -> None:
        (folder / "__0_0.distcp").unlink()
        self.refused(folder, r"not whole.*__0_0\.distcp")

    def test_a_short_file(self, folder: Path) -> None:
        os.truncate(folder / "__0_0.distcp", 5000)
        self.refused(folder, r"not whole: __0_0\.distcp has 5000 bytes")

    def test_metadata_that_is_a_bomb(self, folder: Path, tmp_path: Path) -> None:
        (folder / ".metadata").write_bytes(pickle.dumps(Evil(os.system, f"touch {tmp_path}/mark")))
        self.refused(folder, "no Metadata")
        assert not (tmp_path / "mark").exists()

    def test_metadata_that_leads_out(self, folder: Path) -> None:
        data = (folder / ".metadata").read_bytes()
        assert b"__0_0.distcp" in data
        (folder / ".metadata").write_bytes(data.replace(b"__0_0.distcp", b"../../secret"))
        self.refused(folder, "leads out")

    def test_a_value_that_is_a_bomb(self, tmp_path: Path) -> None:
        save_dcp({"a": torch.ones(2), "k": Evil(os.system, f"touch {tmp_path}/mark")}, tmp_path / "step-2")
        with pytest.raises(CheckpointError, match=r"'k' holds an object of posix\.system"):
            loaderkit.restore(tmp_path / "step-2")
        assert loaderkit.restore(tmp_path / "step-2", keys="a")["a"].tolist() == [1, 1]
        assert not (tmp_path / "mark").exists()


class TestDirectories:
    def test_absolute_names_in_an_archive(self, tmp_path: Path) -> None:
        with tarfile.open(tmp_path / "x.tar", "w") as tar:
            for name in ("/abs/y.safetensors", "model.safetensors"):
                data = safetensors.torch.save({name[-5:]: torch.ones(2)})
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
        assert [*loaderkit.restore(tmp_path / "x.tar")] == ["nsors"]

    @pytest.mark.filterwarnings("default:.*links are left out")
    @pytest.mark.parametrize("root", ["../", "/abs/", "step-1/../../", ""])
    def test_members_of_an_archive_that_lead_out(self, tmp_path: Path, root: str) -> None:
        """What is restored are the archive's own bytes, whatever lies where the names lead; nothing is written there."""
        outside = safetensors.torch.save({"secret": torch.ones(2)})
        for place in (tmp_path / "x.safetensors", tmp_path / "link.safetensors"):
            place.write_bytes(outside)
        inside = safetensors.torch.save({"w": torch.zeros(2)})
        (tmp_path / "runs").mkdir()
        with tarfile.open(tmp_path / "runs/x.tar", "w") as tar:
            member = tarfile.TarInfo(f"{root}x.safetensors")
            member.size = len(inside)
            tar.addfile(member, io.BytesIO(inside))
            for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
                link = tarfile.TarInfo(f"{root}link.safetensors")
                link.type, link.linkname = kind, str(tmp_path / "link.safetensors")
                tar.addfile(link)
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        assert loaderkit.restore(tmp_path / "runs/x.tar")["w"].tolist() == [0, 0]
        with pytest.raises(CheckpointError, match="no manifest can be written there"):
            loaderkit.checkpoint.write_manifest(tmp_path / "runs/x.tar")
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before

    def test_two_formats(self, tmp_path: Path) -> None:
        safetensors.torch.save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
        torch.save({"a": torch.ones(2)}, tmp_path / "second.pt")
        with pytest.raises(CheckpointError, match=r"two formats.*safetensors.*torch\.save"):
            loaderkit.restore(tmp_path)
        assert loaderkit.restore(tmp_path / "second.pt")["a"].tolist() == [1, 1]

    def test_a_name_in_two_files(self, tmp_path: Path) -> None:
        for name in ("a", "b"):
            safetensors.torch.save_file({"w": torch.ones(2)}, tmp_path / f"{name}.safetensors")
        with pytest.raises(CheckpointError, match="'w' is in another file"):
            loaderkit.restore(tmp_path)

    @pytest.mark.parametrize("file", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", ""])
    def test_an_index_that_leads_out(self, tmp_path: Path, file: str) -> None:
        safetensors.torch.save_file({"a": torch.ones(2)}, tmp_path / "m.safetensors")
        (tmp_path / "m.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
        with pytest.raises(FormatError, match="no such file beside it"):
            loaderkit.restore(tmp_path)

    def test_an_index_that_names_nothing(self, tmp_path: Path) -> None:
        safetensors.torch.save_file({"a": torch.ones(2)}, tmp_path / "m.safetensors")
        (tmp_path / "m.safetensors.index.json").write_text(json.dumps({"weight_map": {}}))
        with pytest.raises(FormatError, match=r"m\.safetensors\.index\.json: .*its weight_map is empty"):
            loaderkit.restore(tmp_path)

    def test_an_index_without_its_files(self, tmp_path: Path) -> None:
        safetensors.torch.save_file({"a": torch.ones(2)}, tmp_path / "m-1.safetensors")
        names = {"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}
        (tmp_path / "m.safetensors.index.json").write_text(json.dumps(names))
        with pytest.raises(CheckpointError, match=r"1 of 2 shards are missing, such as 'm-2\.safetensors'"):
            loaderkit.restore(tmp_path)
        (tmp_path / "m-1.safetensors").unlink()
        with pytest.raises(CheckpointError, match="none of its files"):
            loaderkit.restore(tmp_path)

    @pytest.mark.parametrize("there", [(1, 2, 3), (2, 3, 4, 5), (1, 2, 4, 5), (0, 1, 2, 3), (5,)])
    def test_shards_without_their_index(self, tmp_path: Path, there: tuple[int, ...]) -> None:
        for n in there:
            safetensors.torch.save_file({f"w{n}": torch.ones(2)}, tmp_path / f"model-0000{n}-of-00005.safetensors")
        missing = next(n for n in range(0 if 0 in there else 1, 6) if n not in there)
        with pytest.raises(
            CheckpointError, match=rf"not whole.*{len(there)} of 5 shards; 'model-0000{missing}-of-00005"
        ):
            loaderkit.restore(tmp_path)
        file = tmp_path / f"model-0000{there[0]}-of-00005.safetensors"
        assert [*loaderkit.restore(file)] == [f"w{there[0]}"]  # this one was asked for

    @pytest.mark.parametrize("first", [0, 1])
    def test_all_shards_without_their_index(self, tmp_path: Path, first: int) -> None:
        for n in range(first, first + 3):
            safetensors.torch.save_file({f"w{n}": torch.ones(2)}, tmp_path / f"model-{n}-of-3.safetensors")
        assert len(loaderkit.restore(tmp_path)) == 3

    def test_one_torch_save_file_of_two(self, tmp_path: Path) -> None:
        torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model-00001-of-00002.bin")
        with pytest.raises(CheckpointError, match=r"'pytorch_model-00002-of-00002\.bin' is missing"):
            loaderkit.restore(tmp_path)

    def test_an_index_that_names_a_tensor_there_is_not(self, tmp_path: Path) -> None:
        safetensors.torch.save_file({"a": torch.ones(2)}, tmp_path / "m-1.safetensors")
        names = {"weight_map": {"a": "m-1.safetensors", "b": "m-1.safetensors"}}
        (tmp_path / "m.safetensors.index.json").write_text(json.dumps(names))
        with pytest.raises(CheckpointError, match="no tensor 'b'"):
            loaderkit.restore(tmp_path)

    def test_nothing_there(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="no such file"):
            loaderkit.restore(tmp_path / "none")
        (tmp_path / "notes").write_text("hello")
        with pytest.raises(CheckpointError, match="no checkpoint"):
            loaderkit.restore(tmp_path)


class TestLatest:
    def test_is_the_newest_that_is_whole(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        for step in (9, 10, 100):
            save_dcp({"a": torch.full((2,), float(step))}, tmp_path / f"step-{step}")
        (tmp_path / "log.txt").write_text("x")
        assert loaderkit.checkpoint.latest(tmp_path) == f"{tmp_path}/step-100"
        (tmp_path / "step-100/.metadata").unlink()
        assert loaderkit.checkpoint.latest(tmp_path) == f"{tmp_path}/step-10"
        assert "step-100 is skipped" in caplog.text
        assert "not committed" in caplog.text
        (tmp_path / "step-101").mkdir()
        safetensors.torch.save_file({"a": torch.ones(2)}, tmp_path / "step-101/model-00001-of-00002.safetensors")
        assert loaderkit.checkpoint.latest(tmp_path) == f"{tmp_path}/step-10"
        shutil.rmtree(tmp_path / "step-101")
        shutil.rmtree(tmp_path / "step-10")
        shutil.rmtree(tmp_path / "step-9")
        with pytest.raises(CheckpointError, match=r"no complete checkpoint.*\n.*not committed"):
            loaderkit.checkpoint.latest(tmp_path)
