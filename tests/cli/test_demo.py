"""The demo, small: its data set, and the whole of it from end to end."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import loaderkit
from loaderkit.cli import main
from loaderkit.cli.demo import photos as demo_photos
from loaderkit.cli.demo.child import SAVED_BATCHES, digest
from loaderkit.cli.demo.photos import PHOTOGRAPHS, demo_data
from loaderkit.cli.demo.show import follow
from loaderkit.cli.demo.training import training_pipeline
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
def data(place: Path) -> Path:
    return demo_data(place, NUM_IMAGES)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class TestData:
    def test_images_are_like_those_of_imagenet(self, data: Path) -> None:
        files = sorted(data.rglob("*.jpg"))
        assert len(files) == NUM_IMAGES
        assert {file.parent.name for file in files} == set(PHOTOGRAPHS)
        assert {Image.open(io.BytesIO(file.read_bytes())).size for file in files} == {(500, 375)}
        assert 85_000 < sum(file.stat().st_size for file in files) / len(files) < 115_000

    def test_is_the_same_every_time(self, data: Path, tmp_path: Path) -> None:
        again = demo_data(tmp_path, NUM_IMAGES)
        assert contents(again) == contents(data)
        assert list(tmp_path.iterdir()) == [again.parent]

    def test_is_used_again(self, data: Path, place: Path) -> None:
        made_at = {path: path.stat().st_mtime_ns for path in data.rglob("*")}
        assert demo_data(place, NUM_IMAGES) == data
        assert {path: path.stat().st_mtime_ns for path in data.rglob("*")} == made_at

    def test_a_half_made_one_does_not_stay(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(demo_photos, "_SIZE", None)  # fails after the first folders are there
        with pytest.raises(TypeError):
            demo_data(tmp_path, NUM_IMAGES)
        assert list(tmp_path.iterdir()) == []

    def test_missing_extra_names_its_command(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(PHOTOGRAPHS, "cat", ("a_package_nobody_has", "data", "cat.png", 99))
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


def check_suggested(found: dict[str, Any]) -> None:
    """What the first report suggests is the change, and what the second pipeline has."""
    (setting,) = found["before"]["verdict"]["settings"]
    assert (setting["key"], setting["before"]) == ("prefetch.concurrency", 2)
    assert found["change"] == f"prefetch.concurrency: 2 -> {setting['value']}, as the report suggests"
    assert found["after"]["config"]["prefetch"]["concurrency"] == setting["value"] > 2


def test_the_demo_ends_in_one_screen(
    data: Path, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    arguments = ["demo", "--data", str(place), "--num-images", str(NUM_IMAGES), "--seconds", "8", "--json"]
    assert main(arguments) == 0
    captured = capsys.readouterr()
    found: dict[str, Any] = json.loads(captured.out)

    # The report blames the function that was left in, and what it suggests is done.
    before, after = found["before"], found["after"]
    assert before["verdict"]["stage"] == "ask_server"
    settings = before["verdict"]["settings"]
    if settings:  # beside busy programs there may be none that only one of two causes would ask for
        check_suggested(found)
    else:
        assert found["change"] == "ask_server removed, since the report has no setting for it"
        assert after["config"]["prefetch"] == before["config"]["prefetch"]

    # The new process repeats what the killed one did after its checkpoint.
    assert found["resumed_exactly"]
    assert found["killed"] == found["resumed"]  # the losses as well
    assert [one["batch"] for one in found["killed"]] == [SAVED_BATCHES + 1, SAVED_BATCHES + 2, SAVED_BATCHES + 3]
    assert len({one["digest"] for one in found["killed"]}) == 3

    lines = captured.err.splitlines()
    screen = lines[next(number for number, line in enumerate(lines) if line.startswith("4/4 ")) + 1 :]
    assert len(screen) < 24
    assert max(map(len, screen)) <= 80
    words = [line.split()[0] for line in screen if line[:1].strip()]
    assert words == ["cause", "change", "gain", "resume"]
    assert screen[-1].strip() == "the same, to the last byte"


@pytest.mark.prove
@pytest.mark.alone
def test_the_demo_follows_its_report(data: Path, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--data", str(place), "--num-images", str(NUM_IMAGES), "--seconds", "8", "--json"]) == 0
    check_suggested(json.loads(capsys.readouterr().out))


def test_where_the_report_has_no_setting_the_function_goes(data: Path) -> None:
    slow, fast = (training_pipeline(data, 2, slow=slow) for slow in (True, False))
    with loaderkit.build(fast) as loader, loader.profile() as profile:
        pass
    assert profile.result.verdict.settings == []
    assert follow(profile.result, slow, fast) == (fast, "ask_server removed, since the report has no setting for it")
    assert "ask_server" in slow.to_yaml()
    assert "ask_server" not in fast.to_yaml()


@pytest.mark.prove
def test_the_demo_claims_no_gain_that_it_has_not_seen(
    data: Path, place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--data", str(place), "--num-images", str(NUM_IMAGES), "--seconds", "0"]) == 0
    captured = capfd.readouterr()
    assert captured.err == ""
    assert "gain    too few steps to tell a difference from noise" in captured.out
