"""Every file in pipelines/ works as it stands, on data laid out as its comments say."""

from __future__ import annotations

import math
import runpy
import sys
from pathlib import Path

import pytest
import torch
from buckets import upload
from ray_clusters import RAY

import loaderkit
from loaderkit import Pipeline
from loaderkit.cli import main
from loaderkit.pipeline.config.parsing import parse
from loaderkit.shards.planning import Options, plan_shards
from loaderkit.shards.training import training_pipeline

FOLDER = Path(__file__).parent.parent / "pipelines"
OF_TEXT = {"gpt": "make_tokens.py", "sft": "make_chats.py"}  # by the example that makes their data
FILES = sorted(FOLDER.glob("imagenet-*.yaml"))  # the others have tests of their own


@pytest.fixture(autouse=True)
def _imagenet(photos: Path, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """IMAGENET with `train` and `shards`."""
    (tmp_path / "imagenet").mkdir()
    (tmp_path / "imagenet/train").symlink_to(photos)
    (tmp_path / "imagenet/shards").symlink_to(shards)
    monkeypatch.setenv("IMAGENET", str(tmp_path / "imagenet"))
    monkeypatch.setenv("DECODE", "dali-cpu")
    monkeypatch.setenv("LOADERKIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("IMAGENET_CACHE", str(tmp_path / "pieces"))
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, shards: Path, _imagenet: None) -> None:
    """For what reads a bucket, IMAGENET is one."""
    file = getattr(request.node, "callspec", None) and request.node.callspec.params.get("file")
    if file is not None and file.stem.endswith("-s3"):
        server = request.getfixturevalue("seaweed")
        request.getfixturevalue("s3_keys")
        upload(server, shards, "imagenet", "shards/")
        monkeypatch.setenv("IMAGENET", "s3://imagenet")
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)


@pytest.fixture(params=["gpt", pytest.param("sft", marks=pytest.mark.integration)])
def text_file(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pipeline of tokens, whose data its example has made."""
    name: str = request.param
    monkeypatch.setattr(sys, "argv", [OF_TEXT[name], str(tmp_path / "made")])
    runpy.run_path(str(FOLDER.parent / "examples" / OF_TEXT[name]), run_name="__main__")
    monkeypatch.setenv({"gpt": "TOKENS", "sft": "SFT"}[name], str(tmp_path / "made"))
    return FOLDER / f"{name}.yaml"


class TestPipelinesOfText:
    def test_runs_and_resumes(self, text_file: Path) -> None:
        overrides = {"stages.transfer.device": "cpu", "order.epochs": 1}
        with loaderkit.build(text_file, overrides=overrides) as loader:
            batches = list(loader)
            assert len(batches) == len(loader) > 10
        with loaderkit.build(text_file, overrides=overrides) as loader:
            _ = [batch for batch, _ in zip(loader, range(5), strict=False)]
            state = loader.state_dict()
        with loaderkit.build(text_file, overrides=overrides) as loader:
            loader.load_state_dict(state)
            rest = list(loader)
        for batch, other in zip(batches[-len(rest) :], rest, strict=True):
            assert all(torch.equal(batch[name], other[name]) for name in batch if isinstance(batch[name], torch.Tensor))
        for batch in batches:
            if text_file.stem == "gpt":
                assert batch["input_ids"].shape == (8, 2048)
                assert torch.equal(batch["source_ids"] >= 0, batch["document_ids"] >= 0)
                continue
            assert batch["input_ids"].shape[1] % 8 == 0
            assert torch.equal(batch["input_ids"] == 0, batch["attention_mask"] == 0)
            assert 0.2 < (batch["labels"] != -100).sum() / batch["attention_mask"].sum() < 0.9
        if text_file.stem == "gpt":
            shares = torch.stack(
                [torch.bincount(batch["source_ids"].flatten() + 1, minlength=3)[1:] for batch in batches]
            ).sum(0)
            assert abs(shares[0] / shares.sum() - 0.7) < 0.05

    def test_passes_check_and_explain(self, text_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
        for command in ("check", "explain"):
            assert main([command, str(text_file)]) == 0, capsys.readouterr().err

    def test_is_its_own_description(self, text_file: Path, tmp_path: Path) -> None:
        pipeline = loaderkit.Pipeline.from_yaml(text_file)
        (tmp_path / "again.yaml").write_text(pipeline.to_yaml())
        assert loaderkit.Pipeline.from_yaml(tmp_path / "again.yaml") == pipeline


def test_there_are_some() -> None:
    assert {"imagenet-files.yaml", "imagenet-tar.yaml", "imagenet-s3.yaml"} <= {file.name for file in FILES}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
class TestEveryPipeline:
    def test_runs(self, file: Path) -> None:
        overrides = {"stages.batch.size": 16, "stages.transfer.device": "cpu"}
        with loaderkit.build(file, overrides=overrides) as loader:
            batches = list(loader)
        assert len(batches) == len(loader) == 3  # 60 samples; the last 12 are dropped
        for batch in batches:
            assert batch["image"].shape == (16, 3, 224, 224)
            assert batch["image"].dtype == torch.float32
            assert math.isfinite(batch["image"].sum().item())
            assert set(batch["label"].tolist()) <= {0, 1, 2}

    @pytest.mark.integration
    @pytest.mark.prove
    @pytest.mark.usefixtures("ray_nodes")
    def test_in_actors(self, file: Path) -> None:
        """The bytes of `inline`, of a cluster whose nodes know nothing of this program's environment."""
        overrides = {"stages.batch.size": 16, "stages.transfer.device": "cpu"}
        with loaderkit.build(file, overrides={**overrides, "prefetch.executor": "inline"}) as loader:
            expected = list(loader)
        with loaderkit.build(file, overrides={**overrides, **RAY}) as loader:
            found = list(loader)
        assert len(found) == len(expected) == 3
        for batch, other in zip(found, expected, strict=True):
            assert batch.keys() == other.keys()
            assert batch["__key__"] == other["__key__"]
            assert all(torch.equal(batch[name], other[name]) for name in ("image", "label"))

    def test_is_its_own_description(self, file: Path, tmp_path: Path) -> None:
        pipeline = loaderkit.Pipeline.from_yaml(file)
        assert pipeline.config.name == file.stem
        (tmp_path / "again.yaml").write_text(pipeline.to_yaml())
        assert loaderkit.Pipeline.from_yaml(tmp_path / "again.yaml") == pipeline

    def test_passes_check_and_explain(self, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
        for command in ("check", "explain"):
            assert main([command, str(file), "--set", "stages.batch.size=16"]) == 0, capsys.readouterr().err
            assert file.stem in capsys.readouterr().out

    def test_trains_from_what_is_packed_of_it(self, file: Path, tmp_path: Path) -> None:
        out = tmp_path / "packed"
        assert main(["pack", str(file), "--out", str(out), "--shard", "100kB", "--processes", "1"]) == 0
        assert len(list(out.glob("*.tar"))) > 2
        overrides = {"stages.batch.size": 16, "stages.transfer.device": "cpu"}
        source = Pipeline.from_yaml(file).config
        plan = plan_shards(source, Options(str(out), shard_bytes=100_000))
        train = Pipeline.of(training_pipeline(plan, plan.extensions))
        plan.job.plan.close()
        with loaderkit.build(train, overrides=overrides) as loader:
            batches = list(loader)
        assert len(batches) == len(loader) == 3
        assert {*batches[0]} == {"image", "label", "__key__"}
        assert batches[0]["image"].shape == (16, 3, 224, 224)
        assert Pipeline.of(parse(train.config.to_dict(), expand=False)) == train

    def test_has_a_place_without_the_variable(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("IMAGENET")
        url = Path(getattr(loaderkit.Pipeline.from_yaml(file).config.source, "url", ""))
        if file.stem.endswith("-s3"):
            assert str(url) == "s3:/my-bucket/imagenet/shards"
            return
        assert url.parent == FOLDER.parent / "data" / "imagenet"
