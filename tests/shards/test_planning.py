"""Which stages run, which samples are in which shard, and what becomes of bad samples."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import packed_shards
import pytest
from packed_shards import files_in, members_in, packed

from loaderkit import Pipeline
from loaderkit.errors import ConfigError, ConnectorError, SourceError, StageError, TooManyBadSamplesError
from loaderkit.pipeline.config.builder import to_config
from loaderkit.shards.planning import cut
from loaderkit.shards.run import Workers
from loaderkit.shards.split import split_stages


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOADERKIT_CACHE_DIR", str(tmp_path / "cache"))


def test_cuts_are_even_and_none_is_empty(rng: random.Random) -> None:
    for _ in range(200):
        sizes = np.array([rng.choice([1, 10, 100, 5_000]) for _ in range(rng.randrange(1, 300))], np.int64)
        shard_bytes = rng.choice([1, 50, 1_000, 100_000, 10**9])
        bounds = cut(sizes, shard_bytes)
        assert bounds[0] == 0
        assert bounds[-1] == len(sizes)
        assert (np.diff(bounds) > 0).all()
        totals = np.add.reduceat(sizes, bounds[:-1])
        assert totals.max() <= shard_bytes + sizes.max()


def test_shards_have_the_size_that_is_wanted(tmp_path: Path, photos: Path) -> None:
    for number, stages in enumerate(
        (Pipeline.files(str(photos)).read(), Pipeline.files(str(photos)).read().decode().resize(40))
    ):
        packed(stages.batch(4), tmp_path / str(number), shard_bytes=40_000)
        sizes = [path.stat().st_size for path in sorted((tmp_path / str(number)).glob("*.tar"))]
        assert len(sizes) > 2
        assert max(sizes) < 40_000 + 10_240 + 8_000
        assert min(sizes) > 25_000


@pytest.mark.parametrize(
    ("stages", "run", "reason"),
    [
        (["decode", {"resize": {"size": 8}}], ["decode", "resize"], ""),
        (["decode"], [], "original bytes"),
        (["decode", "random_horizontal_flip"], [], "original bytes"),
        (
            ["decode", {"resize": {"size": 8}}, "random_grayscale", {"center_crop": {"size": 8}}],
            ["decode", "resize"],
            "random_grayscale draws",
        ),
        ([{"call": {"function": packed_shards.jittered}}, "decode"], [], "call draws"),
        (["decode", {"call": {"function": packed_shards.keep_most, "seeded": True}}], [], "original bytes"),
        ([{"call": {"function": packed_shards.keep_most}}, "decode"], ["call"], "original bytes"),
        ([{"filter": {"function": packed_shards.keep_most}}, {"pack": {"length": 8}}], ["filter"], "pack plans"),
    ],
)
def test_stages_run_up_to_the_first_random_one(photos: Path, stages: list[Any], run: list[str], reason: str) -> None:
    description = {
        "source": {"kind": "files", "url": str(photos)},
        "stages": ["read", *stages, {"batch": {"size": 4}}],
        "prefetch": {"executor": "inline"},
    }
    split = split_stages(to_config(description), keeps_encoded=True)
    assert [stage.name for stage in split.run] == run
    assert reason in split.reason
    assert bool(reason) == bool(split.left)


def test_sources_that_cannot_be_numbered_are_refused(tmp_path: Path) -> None:
    single = Pipeline.dataset([1, 2])
    for pipeline, said in (
        (Pipeline.iterable(lambda: iter([1])).read().batch(1), "iterable come in their own order"),
        (Pipeline.mix({"a": single, "b": single}).read().batch(1), "mixes 2 sources"),
        (Pipeline.checkpoint(str(tmp_path)).read(), "checkpoint"),
    ):
        with pytest.raises(ConfigError, match=said):
            packed(pipeline, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_function_that_would_see_bytes_in_training_is_refused(tmp_path: Path, photos: Path) -> None:
    pipeline = Pipeline.files(str(photos), label="parent").read().call(packed_shards.jittered).decode().batch(2)
    with pytest.raises(ConfigError, match="it would get 'label' as bytes"):
        packed(pipeline, tmp_path / "out")


def test_arrays_have_one_field_and_one_shape(tmp_path: Path, photos: Path) -> None:
    labelled = Pipeline.files(str(photos), label="parent").read().decode().batch(4)
    with pytest.raises(ConfigError, match="samples have image, label: name the one"):
        packed(labelled, tmp_path / "out", format="array")
    with pytest.raises(StageError, match="records of an array have one type and shape"):
        packed(labelled.output("image"), tmp_path / "out", format="array")


class TestBadSamples:
    @pytest.fixture
    def pipeline(self, photos: Path) -> Pipeline:
        """12 of 60 samples are bad."""
        return (
            Pipeline.files(str(photos)).shuffle("none").read()
            .call(packed_shards.refuse_some, args={"every": 5}).decode().random_crop(8).batch(4)
        )  # fmt: skip

    def of(self, pipeline: Pipeline, **errors: Any) -> Any:
        return pipeline.with_overrides({f"errors.{name}": value for name, value in errors.items()})

    @pytest.mark.parametrize("num_processes", [pytest.param(1, marks=pytest.mark.prove), 2])
    def test_raise_names_shard_and_sample(self, tmp_path: Path, pipeline: Pipeline, num_processes: int) -> None:
        limited = pipeline.with_overrides({"source.limit": 9})  # ant/000.jpg, 003, ... 024: the trial meets one
        with pytest.raises(StageError, match=r"call failed for sample '\w+/\d+.jpg' in .*: no such luck"):
            packed(limited, tmp_path / "out")
        one_bad = Pipeline.dataset([{"x": n} for n in range(100)]).shuffle("none").read()
        one_bad = one_bad.call(packed_shards.refuse_some, args={"every": 79}).batch(4)
        with pytest.raises(StageError, match=r"^shard 7 of 10: call failed for sample '78' in") as caught:
            packed(one_bad, tmp_path / "two", Workers(num_processes), shard_bytes=10_240)
        assert (caught.value.key, caught.value.stage) == ("78", "call")
        names = {path.name for path in (tmp_path / "two").iterdir()}
        assert "shard-000007.tar" not in names
        assert not [name for name in names if name.endswith(".tmp")]

    @pytest.mark.parametrize("policy", ["skip", "replace"])
    def test_skip_counts_and_names_them(self, tmp_path: Path, pipeline: Pipeline, policy: str) -> None:
        quarantine = tmp_path / "bad.jsonl"
        config = self.of(pipeline, on_bad_sample=policy, quarantine=str(quarantine))
        result = packed(config, tmp_path / "out", shard_bytes=50_000)
        manifest = json.loads((tmp_path / "out" / "loaderkit-shards.json").read_text())
        assert (manifest["num_samples"], manifest["num_bad"]) == (48, 12)
        keys = sorted(one["key"] for one in manifest["bad"])
        assert keys == sorted(key for key in (f"{['ant', 'bee', 'cat'][n % 3]}/{n:03}.jpg" for n in range(4, 60, 5)))
        assert len(members_in(tmp_path / "out")) == 48
        assert sorted(json.loads(line)["key"] for line in quarantine.read_text().splitlines()) == keys
        assert result.manifest["bad"][0]["stage"] == "call"

    def test_too_many_stop_it_also_when_it_is_run_again(self, tmp_path: Path, pipeline: Pipeline) -> None:
        few = self.of(pipeline, on_bad_sample="skip", max_bad_samples=11)
        for _ in range(2):
            with pytest.raises(TooManyBadSamplesError, match=r"errors\.max_bad_samples = 11"):
                packed(few, tmp_path / "out", shard_bytes=50_000)
            assert not (tmp_path / "out" / "loaderkit-shards.json").exists()
        more = packed(self.of(pipeline, on_bad_sample="skip", max_bad_samples=12), tmp_path / "out", shard_bytes=50_000)
        assert more.manifest["num_bad"] == 12

    def test_samples_that_differ_in_their_fields_are_bad(self, tmp_path: Path) -> None:
        items = [{"x": n} if n != 50 else {"x": n, "y": 0} for n in range(100)]
        pipeline = Pipeline.dataset(items).shuffle("none").read().batch(4)
        with pytest.raises(StageError, match=r"sample '50' .*its fields are x, y, those of sample '0' x"):
            packed(pipeline, tmp_path / "out")
        assert packed(self.of(pipeline, on_bad_sample="skip"), tmp_path / "out2").manifest["num_samples"] == 99

    @pytest.mark.parametrize("form", ["tar", "array"])
    def test_an_odd_sample_does_not_make_the_others_bad(self, tmp_path: Path, form: Any, rng: random.Random) -> None:
        """Wherever it is, also if it comes first."""
        odd = rng.choice([0, 0, 1, 19])
        items: list[Any] = [{"x": np.arange(3)} for _ in range(20)]
        items[odd] = {"x": np.arange(4)} if form == "array" else rng.choice([{}, {"y": 1}, {"x": np.arange(3), "y": 1}])
        pipeline = self.of(Pipeline.dataset(items).shuffle("none").read().batch(4), on_bad_sample="skip")
        result = packed(pipeline, tmp_path / "out", format=form, shard_bytes=3000)
        assert [one["sample"] for one in result.manifest["bad"]] == [odd]
        assert result.manifest["num_samples"] == 19

    def test_no_sample_left_is_an_error(self, tmp_path: Path, pipeline: Pipeline) -> None:
        none = pipeline.with_overrides({"stages.call.args": {"every": 1}, "errors.on_bad_sample": "skip"})
        with pytest.raises(SourceError, match=r"none of 16 samples that were tried .*no such luck"):
            packed(none, tmp_path / "out")


def test_a_shard_of_which_nothing_is_left_has_no_file(tmp_path: Path) -> None:
    pipeline = Pipeline.dataset([{"x": n} for n in range(100)]).shuffle("none").read().filter(first_half).batch(4)
    result = packed(pipeline, tmp_path / "out", shard_bytes=10_240)
    assert result.manifest["num_samples"] == 50
    assert len(result.manifest["shards"]) == 5
    assert len(files_in(tmp_path / "out")) == 11
    array = packed(pipeline, tmp_path / "array", format="array", shard_bytes=80)
    assert np.load(tmp_path / "array" / array.manifest["array"]).tolist() == list(range(50))


def first_half(sample: dict[str, Any]) -> bool:
    return bool(sample["x"] < 50)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, photos: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConnectorError, match="file/out"):
        packed(Pipeline.files(str(photos)).read().batch(4), tmp_path / "file" / "out")
