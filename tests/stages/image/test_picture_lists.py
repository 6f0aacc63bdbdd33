"""Lists of pictures: each is what it is alone, at every stage and from every executor; what is no picture is named."""

from __future__ import annotations

import io
import random
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from executors import EXECUTORS
from numpy.typing import NDArray
from PIL import Image as Pillow

import loaderkit
from loaderkit import Pipeline, native
from loaderkit.errors import StageError
from loaderkit.pipeline.config.registry import STAGES
from loaderkit.samples.values import Image, Pictures
from loaderkit.stages.media.clips import each_frame

STAGES_OF_IMAGES: dict[str, dict[str, Any]] = {
    "resize": {"size": [20, 30]},
    "center_crop": {"size": 12},
    "random_crop": {"size": [10, 14], "padding": 4},
    "random_resized_crop": {"size": 16},
    "random_horizontal_flip": {},
    "color_jitter": {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.2},
}


def draw_pixels(rng: random.Random) -> NDArray[np.uint8]:
    shape = (rng.randint(16, 40), rng.randint(16, 40), 3)
    return np.random.default_rng(rng.randrange(2**32)).integers(0, 256, shape, np.uint8)


def encoded(pixels: NDArray[np.uint8], kind: str) -> bytes:
    file = io.BytesIO()
    Pillow.fromarray(pixels).save(file, kind)
    return file.getvalue()


def decoded(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.array(Pillow.open(io.BytesIO(data)).convert("RGB"))).permute(2, 0, 1)


def draw_files(rng: random.Random, most: int = 4) -> list[bytes]:
    return [encoded(draw_pixels(rng), rng.choice(["PNG", "JPEG"])) for _ in range(rng.randint(0, most))]


def write_chats(path: Path, rows: Sequence[Sequence[bytes | None]], *, as_files: bool) -> Path:
    """Chats with their pictures, as bytes or as Hugging Face's datasets store them."""
    pictures: list[Any] = [list(row) for row in rows]
    kind = pa.list_(pa.binary())
    if as_files:
        pictures = [[{"bytes": data, "path": None} for data in row] for row in rows]
        kind = pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    messages = [[{"role": "user", "content": f"chat {number}"}] for number in range(len(rows))]
    pq.write_table(pa.table({"messages": messages, "images": pa.array(pictures, kind)}), path, row_group_size=3)
    return path


def batches(pipeline: Pipeline, **more: Any) -> list[dict[str, Any]]:
    with loaderkit.build(pipeline, **more) as loader:
        return list(loader)


def assert_same(found: Any, expected: Any) -> None:
    """Nested lists of tensors."""
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        return
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("as_files", [False, True])
def test_pictures_of_a_chat(rng: random.Random, tmp_path: Path, as_files: bool) -> None:
    """In batches, however many a chat has, and whatever their sizes."""
    rows = [draw_files(rng) for _ in range(12)]
    path = write_chats(tmp_path / "chats.parquet", rows, as_files=as_files)
    cases: list[dict[str, Any]] = [{}, {"fields": ["images"]}]
    for decode in cases:
        pipeline = Pipeline.parquet(str(path)).shuffle("none").read().decode(**decode).batch(5)
        found = [images for batch in batches(pipeline) for images in batch["images"]]
        assert_same(found, [list(map(decoded, row)) for row in rows])


@pytest.mark.parametrize("name", STAGES_OF_IMAGES)
def test_a_stage_does_to_each_what_it_does_to_one(rng: random.Random, name: str) -> None:
    """With the same draws, also where it asks for two lists of different lengths, and an image, by name."""
    kind = STAGES[name]
    for fields in (None, ("images", "more", "image"), ("images", "empty"), ("image", "empty")):
        assert kind.make is not None
        args: Any = kind.args.model_validate({**STAGES_OF_IMAGES[name], "fields": fields})
        alone = kind.make(args.model_copy(update={"fields": None}))
        draws = np.array([rng.random() for _ in range(kind.num_draws)])
        same = draw_pixels(rng)  # images beside one another share a crop, and so a size
        lists = {"images": 3, "more": 1, "empty": 0}
        given = {field: Pictures((Image(same),) * num) for field, num in lists.items()}
        sample: dict[str, Any] = {**given, "image": Image(same), "label": 3}
        run_jobs(each_frame(kind.make(args), fields)(sample, draws, {}))
        expected: dict[str, Any] = {"image": Image(same)}
        run_jobs(alone(expected, draws, {}))
        for field, num in lists.items():
            is_acted_on = fields is None or field in fields
            assert len(sample[field].images) == num
            for image in sample[field].images:
                assert np.array_equal(image.pixels, expected["image"].pixels if is_acted_on else same)


def test_an_empty_list_keeps_no_stage_from_an_image(rng: random.Random) -> None:
    """That may be an array, as of a data set that is not decoded; a list that is no list of pictures stays one."""
    pixels = draw_pixels(rng)
    cases: list[dict[str, Any]] = [{}, {"fields": ["image"]}]
    for more in cases:
        plain = Pipeline.dataset([{"image": pixels, "boxes": [], "words": ["a"]}]).read().center_crop(10, **more)
        (batch,) = batches(plain.batch(1))
        assert batch["image"].shape == (1, 3, 10, 10)
        assert batch["boxes"] == [[]]
    lists = Pipeline.dataset([{"images": [], "x": 1}]).read().decode().center_crop(10).batch(1)
    assert batches(lists)[0]["images"] == [[]]


@pytest.mark.parametrize("name", STAGES_OF_IMAGES)
def test_pictures_of_several_sizes(rng: random.Random, name: str) -> None:
    kind = STAGES[name]
    assert kind.make is not None
    function = kind.make(kind.args.model_validate(STAGES_OF_IMAGES[name]))
    draws = np.array([rng.random() for _ in range(kind.num_draws)])
    before = tuple(Image(draw_pixels(rng)) for _ in range(4))
    sample: dict[str, Any] = {"images": Pictures(before)}
    run_jobs(each_frame(function, None)(sample, draws, {}))
    for image, one in zip(sample["images"].images, before, strict=True):
        alone: dict[str, Any] = {"image": one}
        run_jobs(function(alone, draws, {}))
        assert np.array_equal(image.pixels, alone["image"].pixels)


def run_jobs(jobs: Any) -> None:
    if jobs:
        native.resample(jobs)


def augmented(path: Path) -> Pipeline:
    stages = Pipeline.parquet(str(path)).shuffle(seed=3).read().decode()
    return stages.random_resized_crop(16).random_horizontal_flip()


@pytest.mark.parametrize("executor", ["inline", "thread", "process"])
def test_every_executor(rng: random.Random, tmp_path: Path, executor: str) -> None:
    """Normalised in the workers, or behind a stage that keeps it from them."""
    path = write_chats(tmp_path / "chats.parquet", [draw_files(rng) for _ in range(9)], as_files=True)
    plain = batches(augmented(path).batch(4), overrides=EXECUTORS["inline"])
    mean, std = (torch.tensor(numbers).view(3, 1, 1) for numbers in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
    later = [augmented(path).batch(4).normalize(dtype="float64")] if executor == "inline" else []
    for last in (augmented(path).batch(4).normalize(), *later):
        found = batches(last, overrides=EXECUTORS[executor])
        assert [one["__key__"] for one in found] == [one["__key__"] for one in plain]
        for batch, levels in zip(found, plain, strict=True):
            assert list(map(len, batch["images"])) == list(map(len, levels["images"]))
            for picture, before in zip(chain(*batch["images"]), chain(*levels["images"]), strict=True):
                assert picture.shape == (3, 16, 16)
                expected = ((before / 255 - mean) / std).to(picture.dtype)
                torch.testing.assert_close(picture, expected, atol=1e-5, rtol=0)


def test_one_tensor_a_sample(rng: random.Random, tmp_path: Path) -> None:
    path = write_chats(tmp_path / "chats.parquet", [[], *(draw_files(rng, 3) for _ in range(8))], as_files=True)
    lists = [images for batch in batches(augmented(path).batch(3)) for images in batch["images"]]
    for form in ("list", "pad"):
        found = batches(augmented(path).batch(3, ragged={"images": form}))
        tensors = [
            tensor if form == "list" else tensor[:size]
            for batch in found
            for tensor, size in zip(
                batch["images"],
                batch["images_sizes"][:, 0].tolist() if form == "pad" else [None] * 3,
                strict=True,
            )
        ]
        assert_same([list(tensor) for tensor in tensors], lists)
    with pytest.raises(StageError, match=r"pictures \(.* are no tensor .*one size before `batch`"):
        batches(Pipeline.parquet(str(path)).read().decode().batch(3, ragged={"images": "list"}))


def doubled(sample: dict[str, Any]) -> None:
    assert all(type(picture) is torch.Tensor and picture.dtype is torch.uint8 for picture in sample["images"])
    sample["images"] = [*sample["images"], *(picture.flip(2) for picture in sample["images"])]


def test_a_call_gets_tensors_and_gives_pictures(rng: random.Random, tmp_path: Path) -> None:
    rows = [draw_files(rng) for _ in range(6)]
    path = write_chats(tmp_path / "chats.parquet", rows, as_files=True)
    before = Pipeline.parquet(str(path)).shuffle("none").read().decode()
    found = batches(before.call(f"{__name__}:doubled").center_crop(10).batch(6))[0]["images"]
    plain = batches(before.center_crop(10).batch(6))[0]["images"]
    for images, once in zip(found, plain, strict=True):
        assert_same(images[: len(once)], once)
        assert [picture.shape for picture in images] == [(3, 10, 10)] * (2 * len(once))


def test_pictures_of_a_data_set(rng: random.Random) -> None:
    """Of Pillow's, or encoded; lists of other things stay."""
    pixels = [draw_pixels(rng) for _ in range(3)]
    items = [{"images": list(map(Pillow.fromarray, pixels)), "files": [encoded(one, "PNG") for one in pixels],
              "names": ["a", "b"], "blobs": [b"x", b"y"], "boxes": [[1, 2], [3, 4]]}]  # fmt: skip
    (batch,) = batches(Pipeline.dataset(items).read().decode().batch(1))
    expected = [torch.from_numpy(one).permute(2, 0, 1).contiguous() for one in pixels]
    assert_same(batch["images"], [expected])
    assert_same(batch["files"], [expected])
    assert batch["names"] == [["a", "b"]]
    assert batch["blobs"] == [[b"x", b"y"]]


@pytest.mark.parametrize(("wrong", "said"), [
    (None, "picture 1 of the 2 in its list: it is null"),
    (b"", r"picture 1 of the 2 in its list: the file is empty"),
    (b"no picture", "picture 1 of the 2 in its list"),
    (encoded(np.zeros((90, 80, 3), np.uint8), "PNG")[:-30], "picture 1 of the 2 in its list"),
    (encoded(np.zeros((900, 800, 3), np.uint8), "PNG"), "max_pixels"),
])  # fmt: skip
def test_what_is_wrong_is_named(tmp_path: Path, rng: random.Random, wrong: bytes | None, said: str) -> None:
    good = encoded(draw_pixels(rng), "JPEG")
    path = write_chats(tmp_path / "chats.parquet", [[good, good], [good, wrong]], as_files=True)
    pipeline = Pipeline.parquet(str(path)).shuffle("none").read().decode(max_pixels=10000).batch(2)
    with pytest.raises(StageError, match=rf"chats.parquet/1.*field 'images'.*{said}"):
        batches(pipeline)
    (batch,) = batches(pipeline.errors(on_bad_sample="skip", max_bad_samples=1))
    assert_same(batch["images"], [[decoded(good)] * 2])
