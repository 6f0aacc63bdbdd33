"""Pictures as people have them in a data set: encoded bytes, Pillow's images, Hugging Face's structs, arrays and tensors."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import loaderkit
from loaderkit import Pipeline
from loaderkit.errors import LoaderkitError, StageError

MODES = ["RGB", "L", "P", "RGBA", "CMYK", "I;16", "1", "LA"]
FORMATS = {"CMYK": "JPEG"}


def picture(mode: str, size: tuple[int, int] = (20, 10)) -> Image.Image:
    """(width, height) of smooth colours in this mode."""
    width, height = size
    ramp = np.linspace(0, 255, width * height).reshape(height, width)
    if mode == "I;16":
        return Image.fromarray((ramp * 256).astype(np.uint16))
    rgb = np.stack([ramp, ramp[::-1], np.full_like(ramp, 90)], axis=2).astype(np.uint8)
    return Image.fromarray(rgb).convert(mode)


def encoded(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, FORMATS.get(image.mode, "PNG"))
    return buffer.getvalue()


class HuggingFace:
    """What `datasets.Dataset` has for a loader: a length, items that are dicts, and several of them at once."""

    def __init__(self, images: list[Any], **columns: Any) -> None:
        self.columns = {"image": images, "label": list(range(len(images))), **columns}

    def __len__(self) -> int:
        return len(self.columns["label"])

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: values[index] for name, values in self.columns.items()}

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [self[index] for index in indices]


def decode(stages: Pipeline) -> Pipeline:
    return stages.decode()


def batch_of(dataset: Any, before: Any = decode, after: Any = lambda stages: stages, **args: Any) -> dict[str, Any]:
    """The only batch of a data set, in its order, through the stages before and after `batch`."""
    stages = before(Pipeline.dataset(dataset).shuffle(False).epochs(1).read())
    made = after(stages.batch(len(dataset), **args))
    with loaderkit.build(made.prefetch(executor="inline")) as loader:
        (batch,) = loader
    return batch  # type: ignore[no-any-return]


def from_files(folder: Path, images: list[Image.Image]) -> torch.Tensor:
    """The same pictures, read from files."""
    for number, image in enumerate(images):
        (folder / f"{number:02}.{'jpg' if image.mode == 'CMYK' else 'png'}").write_bytes(encoded(image))
    made = Pipeline.files(str(folder)).shuffle(False).epochs(1).read().decode().batch(len(images))
    with loaderkit.build(made.prefetch(executor="inline")) as loader:
        (batch,) = loader
    return batch["image"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["bytes", "bytearray", "struct", "path", "pillow", "opened"])
def test_any_mode_is_decoded_like_a_file(how: str, tmp_path: Path) -> None:
    images = [picture(mode) for mode in MODES]
    expected = from_files(tmp_path, images)
    given: dict[str, list[Any]] = {
        "bytes": [encoded(image) for image in images],
        "bytearray": [bytearray(encoded(image)) for image in images],
        "struct": [{"bytes": encoded(image), "path": f"{n}.png"} for n, image in enumerate(images)],
        "path": [{"bytes": None, "path": str(path)} for path in sorted(tmp_path.iterdir())],
        "pillow": [image if image.mode != "CMYK" else Image.open(io.BytesIO(encoded(image))) for image in images],
        "opened": [Image.open(io.BytesIO(encoded(image))) for image in images],
    }
    batch = batch_of(HuggingFace(given[how]))
    assert torch.equal(batch["image"], expected)
    assert batch["label"].tolist() == list(range(len(images)))


def test_16_bits_are_not_white() -> None:
    image = picture("I;16")
    for build in (lambda stages: stages.decode(), lambda stages: stages.resize([10, 20])):
        levels = batch_of(HuggingFace([image]), build)["image"]
        assert np.array_equal(levels[0, 0].numpy(), np.array(image) >> 8)


def test_masks_keep_their_class_numbers() -> None:
    labels = np.random.randint(0, 9, (10, 20), np.uint8)
    paletted = Image.fromarray(labels).convert("P")
    paletted.putdata(labels.ravel().tolist())
    for mask in (
        paletted,
        Image.fromarray(labels),
        encoded(Image.fromarray(labels)),
        labels,
        torch.from_numpy(labels)[None],
    ):
        batch = batch_of(
            HuggingFace([picture("RGB")], mask=[mask]), lambda s: s.decode(masks=["mask"]).resize([20, 40])
        )
        assert np.array_equal(batch["mask"][0, 0].numpy(), labels.repeat(2, 0).repeat(2, 1))
    with pytest.raises(StageError, match=r"mask.*one channel.*\[10, 20, 3\]"):
        colours = np.zeros((10, 20, 3), np.uint8)
        batch_of(HuggingFace([picture("RGB")], mask=[colours]), lambda s: s.decode(masks=["mask"]))


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("is_tensor", [False, True])
@pytest.mark.parametrize("is_first", [False, True])
def test_arrays_and_tensors_are_images_by_the_place_of_their_channels(
    channels: int, is_tensor: bool, is_first: bool
) -> None:
    pixels = np.random.randint(0, 256, (channels, 10, 20), np.uint8)
    given = pixels if is_first else np.ascontiguousarray(pixels.transpose(1, 2, 0))
    value = torch.from_numpy(given) if is_tensor else given
    batch = batch_of(
        HuggingFace([value, value]), lambda s: s.decode().center_crop(8), lambda s: s.normalize(mean=[0.5], std=[0.25])
    )
    expected = torch.from_numpy(pixels[:3, 1:9, 6:14]) / 255
    assert torch.allclose(batch["image"][1], (expected - 0.5) / 0.25, atol=1e-5)


def test_an_array_that_may_be_either_is_an_error_and_a_tensor_is_channels_first() -> None:
    either = np.zeros((3, 12, 4), np.uint8)
    with pytest.raises(StageError, match=r"'image'.*\[3, 12, 4\] may be \[C, H, W\] or \[H, W, C\].*tensor.*fields"):
        batch_of(HuggingFace([either]))
    assert batch_of(HuggingFace([torch.from_numpy(either)]))["image"].shape == (1, 3, 12, 4)


def test_what_is_no_image_stays() -> None:
    columns: dict[str, Any] = {
        "text": ["BMW"],
        "raw": [b"BMW, P1 and II"],
        "sound": [{"bytes": b"RIFF....WAVE", "path": "a.wav"}],
        "table": [np.arange(6, dtype=np.uint8).reshape(2, 3)],
        "numbers": [np.ones((3, 4, 5), np.float32)],
        "nothing": [None],
    }
    batch = batch_of(HuggingFace([encoded(picture("L"))], **columns))
    assert batch["image"].shape == (1, 3, 10, 20)
    assert batch["text"] == columns["text"]
    assert batch["raw"] == columns["raw"]
    assert batch["sound"] == columns["sound"]
    assert batch["nothing"] == [None]
    assert np.array_equal(batch["table"][0], columns["table"][0])
    assert np.array_equal(batch["numbers"][0], columns["numbers"][0])


@pytest.mark.parametrize(
    ("image", "said"),
    [
        ({"bytes": b"", "path": "a.jpg"}, "'image'.*empty"),
        ({"bytes": b"nothing", "path": "a.JPG"}, "'image'.*not an image"),
        ({"bytes": None, "path": None}, "cast_column"),
        ({"bytes": None, "path": "hf://pictures/a.jpg"}, "hf://pictures/a.jpg.*cast_column"),
        ({"bytes": None, "path": "/nowhere/a.jpg"}, "/nowhere/a.jpg"),
        (encoded(picture("RGB"))[:60], "'image'.*(damaged|truncated) PNG"),
        (Image.open(io.BytesIO(encoded(picture("CMYK", (200, 200)))[:900])), "'image'.*cannot be loaded.*truncated"),
        (b"\0\0\0\x18ftypheic", "'image'.*HEIC.*convert"),
    ],
)
def test_what_cannot_be_decoded_says_why(image: Any, said: str) -> None:
    with pytest.raises(LoaderkitError, match=f"(?s)decode failed for sample '0'.*{said}"):
        batch_of(HuggingFace([image]))


def test_a_crop_behind_decode_reads_only_its_part_of_encoded_bytes() -> None:
    buffer = io.BytesIO()
    picture("RGB", (300, 200)).save(buffer, "JPEG")
    jpeg = buffer.getvalue()
    both = [
        batch_of(HuggingFace([given]), lambda stages: stages.decode().random_resized_crop(32))["image"]
        for given in (jpeg, Image.open(io.BytesIO(jpeg)))
    ]
    assert (both[0].int() - both[1].int()).abs().max() <= 1


@pytest.mark.parametrize("kind", ["list", "pad"])
@pytest.mark.parametrize("args", [{}, {"fields": ["image"]}, {"dtype": "float16"}])
def test_images_of_unequal_shape_are_normalised(kind: Any, args: dict[str, Any]) -> None:
    images = [picture("RGB", (20, 10)), picture("L", (7, 30))]
    batch = batch_of(
        HuggingFace([encoded(image) for image in images]),
        after=lambda stages: stages.normalize(mean=[0.5], std=[0.5], **args),
        ragged={"image": kind},
    )
    for image, found in zip(images, batch["image"], strict=True):
        pixels = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
        expected = (pixels / 255 - 0.5) / 0.5
        _, height, width = pixels.shape
        assert found.dtype == (torch.float16 if args.get("dtype") else torch.float32)
        assert torch.allclose(found[:, :height, :width].float(), expected, atol=2e-3)
    if kind == "pad":
        assert batch["image"].shape == (2, 3, 30, 20)
        assert batch["image_sizes"].tolist() == [[3, 10, 20], [3, 30, 7]]
        assert (batch["image"][0, :, 10:] == -1).all()


def test_files_of_unequal_shape_are_normalised_where_other_fields_have_slots(tmp_path: Path) -> None:
    for number, size in enumerate([(20, 10), (7, 30)]):
        picture("RGB", size).save(tmp_path / f"{number}.png")
    made = Pipeline.files(str(tmp_path), include="*.png").shuffle(False).epochs(1).read().decode()
    with loaderkit.build(made.batch(2, ragged={"image": "list"}).normalize()) as loader:
        (batch,) = loader
    assert [tuple(image.shape) for image in batch["image"]] == [(3, 10, 20), (3, 30, 7)]
    assert {image.dtype for image in batch["image"]} == {torch.float32}


def test_normalize_without_images_says_what_to_write() -> None:
    tensors = [torch.zeros(3, 8, 8, dtype=torch.uint8)]
    with pytest.raises(StageError, match=r"no image field: put `decode` before `batch`.*`fields`"):
        batch_of(HuggingFace(tensors), lambda s: s, lambda s: s.normalize())
    decoded = batch_of(HuggingFace(tensors), decode, lambda s: s.normalize())
    named = batch_of(HuggingFace(tensors), lambda s: s, lambda s: s.normalize(fields=["image"]))
    assert torch.allclose(decoded["image"], named["image"], atol=1e-6)


def test_bytes_that_are_no_picture_are_said_to_stay_bytes() -> None:
    """Such as an empty one: `decode` without `fields` cannot know that it should be a picture."""
    with pytest.raises(
        StageError, match=r"no image, only image \(bytes\).*`decode: \{fields: \[\.\.\.\]\}` names them"
    ):
        batch_of([{"image": b""}], lambda s: s.decode().resize([4, 4]))
    with pytest.raises(StageError, match=r"the file is empty"):
        batch_of([{"image": b""}], lambda s: s.decode(fields=["image"]).resize([4, 4]))


def test_a_mask_that_is_not_named_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    picture, small = Image.new("RGB", (9, 7)), Image.new("L", (3, 3))
    for mode in ("P", "L", "1"):
        items = [{"image": picture, "labels": Image.new(mode, (9, 7)), "icon": small}]
        for pipeline, num in (
            (Pipeline.dataset(items).read().decode(), 1),
            (Pipeline.dataset(items).read().decode(masks=["labels"]), 0),
            (Pipeline.dataset(items).read().decode(fields=["image"]).call(_without_others), 0),
        ):
            caplog.clear()
            with loaderkit.build(pipeline.batch(1), overrides={"prefetch.executor": "inline"}) as loader:
                next(iter(loader))
            said = [record.getMessage() for record in caplog.records if "masks: [labels]" in record.getMessage()]
            assert len(said) == num
    assert not [record for record in caplog.records if "icon" in record.getMessage()]


def _without_others(sample: dict[str, Any]) -> dict[str, Any]:
    return {"image": sample["image"]}
