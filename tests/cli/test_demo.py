"""The demo, small: its data set, and the whole of it from end to end."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest
import torch
from PIL import Image

from loaderkit.cli import main
from loaderkit.cli.demo import photos as demo_photos
from loaderkit.cli.demo.photos import PHOTOGRAPHS, DemoData, demo_data
from loaderkit.cli.demo.training import digest
from loaderkit.errors import MissingExtraError

NUM_IMAGES = 64


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOADERKIT_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("RANK", "WORLD_SIZE", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="session")
def data(place: Path) -> DemoData:
    return demo_data(place, NUM_IMAGES)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class TestData:
    def test_images_are_like_those_of_imagenet(self, data: DemoData) -> None:
        files = sorted(data.train.rglob("*.jpg"))
        assert len(files) == NUM_IMAGES
        assert {file.parent.name for file in files} == set(PHOTOGRAPHS)
        assert {Image.open(io.BytesIO(file.read_bytes())).size for file in files} == {(500, 375)}
        assert 85_000 < sum(file.stat().st_size for file in files) / len(files) < 115_000

    def test_shards_hold_the_same_images(self, data: DemoData) -> None:
        seen = {}
        for shard in sorted(data.shards.glob("*.tar")):
            with tarfile.open(shard) as tar:
                members = {member.name: tar.extractfile(member) for member in tar}
            for name in members:
                assert Path(name).suffix in (".jpg", ".cls")
            with tarfile.open(shard) as tar:
                for member in tar:
                    opened = tar.extractfile(member)
                    assert opened is not None
                    seen[member.name] = opened.read()
        assert len(seen) == 2 * NUM_IMAGES
        classes = sorted(PHOTOGRAPHS)
        for file in data.train.rglob("*.jpg"):
            assert seen[file.name] == file.read_bytes()
            assert classes[int(seen[f"{file.stem}.cls"])] == file.parent.name  # as `label: parent` numbers them

    def test_is_the_same_every_time(self, data: DemoData, tmp_path: Path) -> None:
        assert contents(demo_data(tmp_path, NUM_IMAGES).folder) == contents(data.folder)
        assert [path.name for path in tmp_path.iterdir()] == [data.folder.name]

    def test_is_used_again(self, data: DemoData, place: Path) -> None:
        said: list[str] = []
        assert demo_data(place, NUM_IMAGES, said.append) == data
        assert said == []

    def test_a_half_made_one_does_not_stay(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(demo_photos, "_TARGET_BYTES", None)  # fails after the first folders are there
        with pytest.raises(TypeError):
            demo_data(tmp_path, NUM_IMAGES)
        assert list(tmp_path.iterdir()) == []

    def test_missing_extra_names_its_command(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(PHOTOGRAPHS, "cat", ("a_package_nobody_has", "data", "cat.png"))
        with pytest.raises(MissingExtraError, match=r"pip install 'loaderkit\[demo\]'"):
            demo_data(tmp_path, NUM_IMAGES)
        assert list(tmp_path.iterdir()) == []


def test_digest_sees_every_part_of_a_batch() -> None:
    def batch() -> dict[str, object]:
        return {"image": torch.zeros(2, 3, 4, 4), "label": torch.tensor([1, 2]), "__key__": ["a", "b"]}

    others = [batch() for _ in range(3)]
    others[0]["image"] = torch.zeros(2, 3, 4, 4).index_fill_(3, torch.tensor([3]), 1e-30)
    others[1]["label"] = torch.tensor([1, 3])
    others[2]["__key__"] = ["a", "c"]
    assert digest(batch()) == digest(batch())
    assert len({digest(batch()), *map(digest, others)}) == 4


def test_the_whole_demo(data: DemoData, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["demo", "--data", str(place), "--num-images", str(NUM_IMAGES), "--seconds", "0.5"]
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert captured.out.count("the same, to the last byte") == 2
    assert captured.out.count("Waiting for batches") == 2
    assert captured.out.rstrip().endswith("Both pipelines resumed exactly.")
    assert captured.err == ""


@pytest.mark.prove
def test_the_demo_as_json_keeps_checkpoints(
    data: DemoData, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    arguments = ["demo", "--data", str(place), "--num-images", str(NUM_IMAGES), "--seconds", "0", "--keep", "--json"]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["resumed_exactly"]
    for name in ("files", "tar"):
        assert found[name]["digest"] == found[name]["resumed"]["digest"]
        assert 0 < found[name]["state"]["position"] < NUM_IMAGES  # in mid-epoch
    kept = next(tmp_path.glob("loaderkit-demo-*"))
    assert {path.name for path in (kept / "files").iterdir()} == {"pipeline.yaml", "model.pt", "loader.json"}
