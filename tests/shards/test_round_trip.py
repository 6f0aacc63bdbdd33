"""What is written is what there was, read by other programs and by training."""

from __future__ import annotations

import gc
import io
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import packed_shards
import pytest
import torch
from conftest import make_photo
from packed_shards import READERS, Things, members_in, packed, pixels_of, write_photos_with_odd_names
from PIL import Image
from token_files import random_documents, write_megatron

import loaderkit
from loaderkit import Pipeline
from loaderkit.shards.layout import clashing_keys, tar_key
from loaderkit.sources.formats.tar_index import parse_wds_index


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOADERKIT_CACHE_DIR", str(tmp_path / "cache"))


def samples_of(pipeline: Any) -> dict[str, dict[str, Any]]:
    """Every sample of an epoch by key."""
    with loaderkit.build(pipeline) as loader:
        batches = list(loader)
    return {
        key: {name: values[slot] for name, values in batch.items() if name != "__key__"}
        for batch in batches
        for slot, key in enumerate(batch["__key__"])
    }


def assert_equal(one: Any, other: Any) -> None:
    if isinstance(one, (torch.Tensor, np.ndarray)):
        one, other = torch.as_tensor(one), torch.as_tensor(other)
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    else:
        assert type(one) is type(other)
        assert one == other


class TestValues:
    def test_every_kind_of_value_is_there_for_tarfile_and_for_training(
        self, tmp_path: Path, rng: random.Random
    ) -> None:
        things = Things(rng.randrange(1, 60), rng.randrange(2**32))
        names: dict[str, Any] = {"array": "list"}
        pipeline = Pipeline.dataset(things).shuffle("global", seed=rng.randrange(99)).read().batch(7, ragged=names)
        result = packed(pipeline, tmp_path / "out", shard_bytes=rng.choice([1, 30_000, 10**9]))
        assert result.manifest["num_samples"] == len(things)
        members = members_in(tmp_path / "out")
        extensions = {name: listed[0] for name, listed in result.manifest["fields"].items()}
        assert extensions["label"] == "cls"
        assert len(members) == len(things) * len(extensions)
        for index in range(len(things)):
            for name, value in things[index].items():
                extension = extensions[name]
                read = READERS[extension.rpartition(".")[2]](members[f"{index}.{extension}"])
                assert_equal(read, value.numpy() if isinstance(value, torch.Tensor) else _native(value))
        source, shards = samples_of(pipeline), samples_of(result.pipeline.to_dict())
        assert source.keys() == shards.keys()
        for key, sample in source.items():
            assert sample.keys() == shards[key].keys()
            for name, value in sample.items():
                assert_equal(shards[key][name], value)

    @pytest.mark.parametrize(
        ("value", "said"),
        [
            (object(), "object"),
            ((1, 2), "would not come back"),
            (torch.zeros(2, dtype=torch.bfloat16), "bfloat16"),
            (np.array(["a"]), "no numbers"),
            ("\udce9", "UTF-8"),
        ],
    )
    def test_what_no_member_can_hold_is_an_error_that_names_sample_and_field(
        self, tmp_path: Path, value: Any, said: str
    ) -> None:
        pipeline = Pipeline.dataset([{"good": 1, "odd": value}]).read().batch(1)
        with pytest.raises(loaderkit.errors.StageError, match=f"sample '0' .*field 'odd'.*{said}"):
            packed(pipeline, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_pictures_of_one_channel_are_refused(self, tmp_path: Path) -> None:
        items = [{"image": np.zeros((1, 8, 9), np.uint8)}]
        with pytest.raises(loaderkit.errors.StageError, match="three channels"):
            packed(Pipeline.dataset(items).read().decode().batch(1), tmp_path / "out")

    def test_documents_of_tokens(self, tmp_path: Path, rng: random.Random) -> None:
        documents = random_documents(np.random.default_rng(rng.randrange(2**32)), 70, 30.0)
        path = write_megatron(tmp_path / "corpus", documents, "uint16")
        pipeline = Pipeline.tokens(str(path)).shuffle("none").read().pack(64).batch(2)
        result = packed(pipeline, tmp_path / "out", shard_bytes=20_000)
        assert [stage.kind for stage in result.pipeline.stages] == ["read", "decode", "pack", "batch"]
        members = members_in(tmp_path / "out")
        assert [READERS["npy"](data).tolist() for data in members.values()] == [each.tolist() for each in documents]

    def test_records_become_arrays_and_arrays_become_records(self, tmp_path: Path, rng: random.Random) -> None:
        numbers = np.random.default_rng(rng.randrange(2**32)).integers(0, 2**16, (200, 3, 2), np.uint16)
        np.save(tmp_path / "numbers.npy", numbers)
        pipeline = Pipeline.array(str(tmp_path / "numbers.npy")).shuffle("none").read().batch(8)
        shards = packed(pipeline, tmp_path / "tar", shard_bytes=20_000)
        assert len(shards.manifest["shards"]) > 5
        again = packed(Pipeline.of(shards.pipeline), tmp_path / "array", format="array", shard_bytes=400)
        assert (np.load(tmp_path / "array" / "data.npy") == numbers).all()
        batches = [batch["data"] for batch in loaderkit.build(again.pipeline.to_dict())]
        assert torch.equal(torch.cat(batches), torch.from_numpy(numbers))


def _native(value: Any) -> Any:
    return value.astype(value.dtype.newbyteorder("=")) if isinstance(value, np.ndarray) else value


class TestPictures:
    def test_pictures_that_no_stage_changes_keep_their_bytes(self, tmp_path: Path, rng: random.Random) -> None:
        photos = write_photos_with_odd_names(tmp_path / "photos", make_photo, rng)
        pipeline = Pipeline.files(str(tmp_path / "photos")).shuffle("none").read().decode().random_crop(16).batch(4)
        result = packed(pipeline, tmp_path / "out")
        members = members_in(tmp_path / "out")
        assert sorted(members.values()) == sorted(photos.values())
        assert [*members.values()] == [
            photos[key] for key in sorted(photos, key=lambda key: key.encode("utf-8", "surrogateescape"))
        ]
        plain = {name.rpartition(".")[0] for name in members}
        assert {"a/b/c/one", "Größe/日本_語", "plain"} <= plain
        assert not any(sign in name.rpartition("/")[2] for name in plain for sign in ". \t")
        with loaderkit.build(result.pipeline.to_dict()) as loader:
            assert loader.num_samples == len(photos)
            assert sum(len(batch["__key__"]) for batch in loader) == len(photos)

    def test_the_index_is_that_of_the_archive(self, tmp_path: Path, photos: Path) -> None:
        packed(Pipeline.files(str(photos), label="parent").read().decode().batch(4), tmp_path / "out")
        members = members_in(tmp_path / "out")
        index = parse_wds_index((tmp_path / "out" / "shard-000000.idx").read_text(), "here")
        assert index is not None
        data = (tmp_path / "out" / "shard-000000.tar").read_bytes()
        assert {member.name: data[member.start : member.start + member.size] for member in index} == members

    def test_webdataset_reads_them(self, tmp_path: Path, photos: Path) -> None:
        wds = pytest.importorskip("webdataset")
        packed(
            Pipeline.files(str(photos), label="parent").read().decode().batch(4), tmp_path / "out", shard_bytes=60_000
        )
        urls = sorted(map(str, (tmp_path / "out").glob("*.tar")))
        assert len(urls) > 3
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # it leaves its files for the garbage collector to close
            found = {
                sample["__key__"]: sample for sample in wds.WebDataset(urls, shardshuffle=False, empty_check=False)
            }
            gc.collect(1)
        assert len(found) == 60
        for path in photos.glob("*/*.jpg"):
            sample = found[f"{path.parent.name}/{path.stem}"]
            assert sample["jpg"] == path.read_bytes()
            assert int(sample["cls"]) == ["ant", "bee", "cat"].index(path.parent.name)

    def test_training_gets_the_same_pixels_and_labels(self, tmp_path: Path, photos: Path) -> None:
        pipeline = (
            Pipeline.files(str(photos), label="parent").shuffle("none").read().decode()
            .random_resized_crop(24).random_horizontal_flip().batch(8).normalize()
        )  # fmt: skip
        result = packed(pipeline, tmp_path / "out", shard_bytes=60_000)
        with loaderkit.build(pipeline) as source, loaderkit.build(result.pipeline.to_dict()) as shards:
            for one, other in zip(source, shards, strict=True):
                assert torch.equal(one["image"], other["image"])
                assert torch.equal(one["label"].long(), other["label"])
            assert shards.classes == source.classes == ["ant", "bee", "cat"]

    @pytest.mark.parametrize("quality", [60, 95])
    def test_pictures_that_stages_change_are_encoded_anew(self, tmp_path: Path, photos: Path, quality: int) -> None:
        resized = Pipeline.files(str(photos)).shuffle("none").read().decode().resize([40, 48])
        result = packed(resized.random_horizontal_flip(0.0).batch(1), tmp_path / "out", quality=quality)
        members = members_in(tmp_path / "out")
        tables = {_table_of(data) for data in members.values()}
        expected = io.BytesIO()
        Image.new("RGB", (8, 8)).save(expected, "JPEG", quality=quality)
        assert tables == {_table_of(expected.getvalue())}
        errors = []
        with loaderkit.build(resized.batch(1)) as source, loaderkit.build(result.pipeline.to_dict()) as shards:
            for one, other, data in zip(source, shards, members.values(), strict=True):
                assert (pixels_of(data).transpose(2, 0, 1) == other["image"][0].numpy()).all()
                errors.append((one["image"].float() - other["image"].float()).abs().mean().item())
        assert max(errors) < (14 if quality == 60 else 6)  # the photographs are noise of 12 levels

    def test_an_array_holds_the_pixels_themselves(self, tmp_path: Path, photos: Path) -> None:
        pipeline = (
            Pipeline.files(str(photos)).shuffle("none").read().decode().resize([20, 30])
            .random_horizontal_flip().batch(8).normalize()
        )  # fmt: skip
        result = packed(pipeline, tmp_path / "out", format="array", shard_bytes=10_000)
        assert np.load(tmp_path / "out" / "image.npy").shape == (60, 3, 20, 30)
        assert {path.name for path in (tmp_path / "out").iterdir()} == {"image.npy", "loaderkit-shards.json"}
        with loaderkit.build(pipeline) as source, loaderkit.build(result.pipeline.to_dict()) as shards:
            for one, other in zip(source, shards, strict=True):
                assert torch.equal(one["image"], other["image"])

    @pytest.mark.parametrize("field", ["npy", "Npy", "x.npy", "a/b", "label"])
    def test_an_array_of_a_field_of_any_name(self, tmp_path: Path, field: str) -> None:
        pipeline = Pipeline.dataset([{field: np.arange(3) + n} for n in range(9)]).shuffle("none").read().batch(9)
        result = packed(pipeline, tmp_path / "out", format="array")
        assert np.load(tmp_path / "out" / result.manifest["array"]).shape == (9, 3)
        with loaderkit.build(result.pipeline.to_dict()) as loader:
            (batch,) = loader
        assert batch.keys() == {field, "__key__"}
        assert batch[field][8].tolist() == [8, 9, 10]

    def test_masks_stay_what_they_are_and_unchanged_pictures_are_not_encoded_again(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(5)
        for name in ("images", "masks"):
            (tmp_path / "scenes" / name).mkdir(parents=True)
        for number in range(12):
            size = (40, 40) if number % 2 else (50, 60)  # half of them have the size that is wanted
            (tmp_path / "scenes" / "images" / f"{number}.jpg").write_bytes(make_photo(number))
            Image.open(tmp_path / "scenes" / "images" / f"{number}.jpg").resize(size[::-1]).save(
                tmp_path / "scenes" / "images" / f"{number}.jpg"
            )
            Image.fromarray(rng.integers(0, 8, size, np.uint8)).save(tmp_path / "scenes" / "masks" / f"{number}.png")
        fields = {"image": "images/*.jpg", "mask": "masks/*.png"}
        resized = (
            Pipeline.files(str(tmp_path / "scenes"), fields=fields)
            .shuffle("none")
            .read()
            .decode(masks=["mask"])
            .resize([40, 40])
        )
        result = packed(resized.random_vertical_flip().batch(3), tmp_path / "out")
        members = members_in(tmp_path / "out")
        for number in range(1, 12, 2):
            assert members[f"images/{number}.jpg"] == (tmp_path / "scenes" / "images" / f"{number}.jpg").read_bytes()
            assert (
                members[f"images/{number}.mask.png"] == (tmp_path / "scenes" / "masks" / f"{number}.png").read_bytes()
            )
        plain = Pipeline.of(result.pipeline).to_yaml().replace("- random_vertical_flip\n", "")
        (tmp_path / "train.yaml").write_text(plain)
        with loaderkit.build(resized.batch(3)) as source, loaderkit.build(tmp_path / "train.yaml") as shards:
            for one, other in zip(source, shards, strict=True):
                assert torch.equal(one["mask"], other["mask"])
                assert one["image"].shape == other["image"].shape

    def test_encoded_pictures_of_a_data_set_keep_their_bytes(self, tmp_path: Path) -> None:
        items = [{"image": {"bytes": make_photo(number), "path": None}, "label": number} for number in range(5)]
        pipeline = Pipeline.dataset(items).shuffle("none").read().decode().random_crop(16).batch(2)
        result = packed(pipeline, tmp_path / "out")
        members = members_in(tmp_path / "out")
        assert [members[f"{number}.jpg"] for number in range(5)] == [make_photo(number) for number in range(5)]
        assert samples_of(result.pipeline.to_dict())["3"]["label"] == 3

    def test_boxes_follow_their_picture(self, tmp_path: Path) -> None:
        items = [
            {"image": {"bytes": make_photo(n), "path": None}, "boxes": [[2.0, 3.0, 20.0 + n, 30.0]], "label": n}
            for n in range(6)
        ]
        resized = Pipeline.dataset(items).shuffle("none").read().decode(boxes={"boxes": "xyxy"}).resize([30, 30])
        result = packed(resized.random_horizontal_flip(1.0).batch(2), tmp_path / "out")
        with (
            loaderkit.build(resized.random_horizontal_flip(1.0).batch(2)) as source,
            loaderkit.build(result.pipeline.to_dict()) as shards,
        ):
            for one, other in zip(source, shards, strict=True):
                assert torch.equal(one["boxes"], other["boxes"])


def _table_of(jpeg: bytes) -> tuple[int, ...]:
    """By which the luma is quantized."""
    with Image.open(io.BytesIO(jpeg)) as image:
        return tuple(image.quantization[0])  # type: ignore[attr-defined]


class TestStages:
    def test_functions_and_filters_run_and_what_takes_rng_is_left(self, tmp_path: Path, photos: Path) -> None:
        pipeline = (
            Pipeline.files(str(photos)).shuffle("none").read()
            .filter(packed_shards.keep_most).decode().call(packed_shards.jittered).batch(4)
        )  # fmt: skip
        result = packed(pipeline, tmp_path / "out")
        assert result.manifest["stages"] == ["filter"]
        assert (result.manifest["num_samples"], result.manifest["num_dropped"]) == (48, 12)
        with loaderkit.build(result.pipeline.to_dict(), overrides={"stages.batch.ragged": {"image": "list"}}) as loader:
            batches = list(loader)
        assert sum(len(batch["image"]) for batch in batches) == 48
        assert all("shift" in batch for batch in batches)

    def test_shards_of_shards(self, tmp_path: Path, shards: Path) -> None:
        pipeline = Pipeline.tar(str(shards)).shuffle("none").read().decode().random_crop(8).batch(4)
        packed(pipeline, tmp_path / "once", shard_bytes=100_000)
        assert members_in(tmp_path / "once") == members_in(shards)

    def test_stages_that_are_left_keep_their_names_and_so_their_numbers(self, tmp_path: Path, photos: Path) -> None:
        pipeline = (
            Pipeline.files(str(photos)).shuffle("none").read()
            .call(packed_shards.signal_at, args={"path": str(tmp_path / "calls"), "at": -1, "name": "SIGINT"})
            .call(packed_shards.jittered).batch(4)
        )  # fmt: skip
        result = packed(pipeline, tmp_path / "out")
        assert [stage.name for stage in result.pipeline.stages] == ["read", "call-2", "batch"]
        found = [samples_of(one) for one in (pipeline, result.pipeline.to_dict())]
        assert [each["shift"] for each in found[0].values()] == [each["shift"] for each in found[1].values()]


def names_of(keys: list[str]) -> list[str]:
    clashing = clashing_keys(lambda numbers: [keys[number] for number in numbers], len(keys))
    return [clashing.get(number) or tar_key(key) for number, key in enumerate(keys)]


def test_no_two_samples_have_one_name_in_whichever_shard(tmp_path: Path, rng: random.Random) -> None:
    """And names do not depend on the size of shards, or the order."""
    for name in ("ant/x.jpg", "ant/x.png", "ant/x_jpg.jpg", "bee/x.jpg", *(f"bee/{n}.jpg" for n in range(20))):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (9, 9)).save(path)
    pipeline = Pipeline.files(str(tmp_path / "photos")).shuffle("global", seed=rng.randrange(99)).read().decode()
    found = []
    for number, size in enumerate((1500, 10**9)):
        packed(pipeline.batch(1, ragged={"image": "list"}), tmp_path / str(number), shard_bytes=size)
        found.append({name.rpartition(".")[0] for name in members_in(tmp_path / str(number))})
    assert found[0] == found[1]
    assert len(found[0]) == 24
    assert {"ant/x_png", "bee/x", "bee/7"} <= found[0]
    assert "ant/x" not in found[0]


def test_what_names_are_made_of(rng: random.Random) -> None:
    letters = ["a", ".", "/", "_", " ", "é", "__", "..", "\n", "\udce9"]
    keys = ["".join(rng.choice(letters) for _ in range(rng.randrange(1, 7))) for _ in range(500)]
    names = names_of(keys)
    assert len(set(names)) == 500
    for name in names:
        assert not name.startswith("/")
        assert name.rpartition("/")[2].strip()
        assert "." not in name.rpartition("/")[2]
        assert not any(part in ("", ".", "..") for part in name.split("/"))
    assert names_of(["b/000.jpg", "c/1"]) == ["b/000", "c/1"]
    assert names_of(["x.jpg", "x.png", "x_jpg", "y.png", "z", "z"]) == ["x_jpg-0", "x_png", "x_jpg", "y", "z-4", "z-5"]
