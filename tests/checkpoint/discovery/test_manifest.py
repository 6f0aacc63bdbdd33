"""A manifest finds damaged, replaced and missing files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from checkpoint_states import pack

import loaderkit
from loaderkit.connectors.base import ObjectInfo
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.errors import AccessDeniedError, CheckpointError, ExpiredCredentialsError, FormatError

pytestmark = pytest.mark.filterwarnings("ignore")


class TestManifest:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        state = {"a": torch.ones(2), "big": torch.arange(400_000.0)}
        safetensors.torch.save_file(state, tmp_path / "m.safetensors")
        loaderkit.checkpoint.write_manifest(tmp_path)
        return tmp_path / "m.safetensors"

    def test_a_flipped_byte_is_named_with_its_tensor_and_range(self, path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[1_000_000] ^= 1
        path.write_bytes(data)
        with pytest.raises(
            CheckpointError, match=r"'big' is damaged: bytes 786432 to 1048576 of .*m\.safetensors.*read twice"
        ):
            loaderkit.restore(path.parent)
        into = {"a": torch.zeros(2), "big": torch.zeros(400_000)}
        with pytest.raises(CheckpointError) as caught:
            loaderkit.restore(path.parent, into)
        assert {name for name, tensor in into.items() if tensor.any()} <= set(caught.value.touched)
        assert loaderkit.restore(path.parent, verify=False)["big"].shape == (400_000,)

    def test_what_was_written_to_is_named(self, tmp_path: Path) -> None:
        safetensors.torch.save_file({"a": torch.ones(2), "z": torch.ones(5_000_000)}, tmp_path / "m.safetensors")
        loaderkit.checkpoint.write_manifest(tmp_path)
        with open(tmp_path / "m.safetensors", "r+b") as file:
            file.seek(15_000_000)
            file.write(b"\1")
        into = {"a": torch.zeros(2), "z": torch.zeros(5_000_000)}
        with pytest.raises(CheckpointError, match="'z' is damaged") as caught:
            loaderkit.restore(tmp_path, into)
        assert "z" in caught.value.touched
        assert "written to already" in caught.value.__notes__[0]

    def test_a_flipped_byte_of_the_header(self, path: Path) -> None:
        data = path.read_bytes()
        path.write_bytes(data.replace(b'"big"', b'"bag"'))
        with pytest.raises(CheckpointError, match="description"):
            loaderkit.restore(path.parent)

    def test_a_file_replaced_or_cut(self, path: Path) -> None:
        safetensors.torch.save_file({"a": torch.ones(2)}, path)
        with pytest.raises(CheckpointError, match="cut short, or was replaced"):
            loaderkit.restore(path.parent)

    def test_is_demanded(self, path: Path) -> None:
        assert loaderkit.restore(path.parent, verify=True)["a"].tolist() == [1, 1]
        (path.parent / "loaderkit-manifest.json").unlink()
        with pytest.raises(CheckpointError, match="has no manifest"):
            loaderkit.restore(path.parent, verify=True)

    @pytest.mark.parametrize("state", [{"step": 12}, {"step": 12, "none": torch.ones(0)}, {}])
    @pytest.mark.parametrize("verify", ["auto", True])
    def test_covers_a_file_without_tensors(self, tmp_path: Path, state: Any, verify: Any) -> None:
        torch.save(state, tmp_path / "state.pt")
        manifest = loaderkit.checkpoint.write_manifest(tmp_path / "state.pt")
        assert [len(item["hashes"]) for item in manifest["objects"].values()] == [1]
        assert loaderkit.restore(tmp_path / "state.pt", verify=verify).keys() == state.keys()
        data = bytearray((tmp_path / "state.pt").read_bytes())
        data[60] ^= 1  # padding behind the header of the first record: no reader looks at it
        (tmp_path / "state.pt").write_bytes(data)
        with pytest.raises(CheckpointError, match=r"state\.pt is damaged"):
            loaderkit.restore(tmp_path / "state.pt", verify=verify)

    @pytest.mark.parametrize("verify", ["auto", True])
    def test_names_a_file_that_is_gone(self, tmp_path: Path, verify: Any) -> None:
        for name in ("a", "b"):
            safetensors.torch.save_file({name: torch.ones(3)}, tmp_path / f"{name}.safetensors")
        loaderkit.checkpoint.write_manifest(tmp_path)
        (tmp_path / "b.safetensors").unlink()
        with pytest.raises(
            CheckpointError, match=r"not whole: its manifest has '.*b\.safetensors', and there is no such file"
        ):
            loaderkit.restore(tmp_path, verify=verify)
        assert set(loaderkit.restore(tmp_path, verify=False)) == {"a"}

    def test_that_is_empty_covers_nothing(self, tmp_path: Path) -> None:
        torch.save({"step": 12}, tmp_path / "state.pt")
        manifest = loaderkit.checkpoint.write_manifest(tmp_path / "state.pt") | {"objects": {}}
        (tmp_path / "state.pt.loaderkit-manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(CheckpointError, match="the manifest does not have it"):
            loaderkit.restore(tmp_path / "state.pt", verify=True)

    def test_where_one_may_read_and_not_list(self, caplog: pytest.LogCaptureFixture) -> None:
        """S3 answers 403 for what does not exist to who has s3:GetObject alone."""

        class Closed(MemoryConnector):
            error: type[Exception] = AccessDeniedError

            def stat(self, key: str) -> ObjectInfo:
                if "manifest" in key:
                    raise self.error(f"{key}: 403")
                return super().stat(key)

        data = safetensors.torch.save({"a": torch.ones(2)})
        closed = Closed({"m": data, "s/m": data, "s/loaderkit-manifest.json": b"{}"})
        assert loaderkit.restore("memory://m", connectors={"memory": closed})["a"].tolist() == [1, 1]
        assert [record.getMessage() for record in caplog.records if record.name == "loaderkit"] == [
            "memory://m is taken to have no manifest, so nothing is compared: m.loaderkit-manifest.json: 403"
        ]
        with pytest.raises(AccessDeniedError):
            loaderkit.restore("memory://m", verify=True, connectors={"memory": closed})
        with pytest.raises(AccessDeniedError):  # here it is known to exist
            loaderkit.restore("memory://s", connectors={"memory": closed})
        closed.error = ExpiredCredentialsError
        with pytest.raises(ExpiredCredentialsError):
            loaderkit.restore("memory://m", connectors={"memory": closed})

    def test_goes_with_the_checkpoint_into_a_tar(self, path: Path, tmp_path: Path) -> None:
        pack(sorted(path.parent.iterdir()), path.parent, tmp_path / "all.tar")
        assert loaderkit.restore(tmp_path / "all.tar", verify=True)["a"].tolist() == [1, 1]

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 1, "hash": "md5"}', '{"version": 1}'])
    def test_that_is_none(self, path: Path, text: str) -> None:
        (path.parent / "loaderkit-manifest.json").write_text(text)
        with pytest.raises(FormatError, match="no manifest of loaderkit"):
            loaderkit.restore(path.parent)
