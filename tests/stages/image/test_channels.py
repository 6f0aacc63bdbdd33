"""Pictures of one, four and more channels: against Pillow, and against each channel alone in every stage."""

from __future__ import annotations

import io
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from executors import EXECUTORS
from numpy.typing import NDArray
from PIL import Image as Pillow

import loaderkit
from loaderkit import Pipeline
from loaderkit.errors import ConfigError, StageError

Array = NDArray[Any]
INLINE = EXECUTORS["inline"]


@pytest.fixture
def rng(rng: random.Random) -> np.random.Generator:
    return np.random.default_rng(rng.getrandbits(64))


def picture(mode: str, rng: np.random.Generator, height: int = 11, width: int = 14) -> Pillow.Image:
    if mode == "P":
        return picture("RGB", rng).quantize(16)
    if mode == "I;16":
        return Pillow.fromarray(rng.integers(0, 65536, (height, width), np.uint16))
    num = len(Pillow.new(mode, (1, 1)).getbands())
    levels = rng.integers(0, 256, (height, width, num), np.uint8)
    return Pillow.frombytes(mode, (width, height), levels.tobytes())


def encoded(image: Pillow.Image, kind: str) -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def decoded(values: list[Any], **args: Any) -> torch.Tensor:
    rows = [{"image": value} for value in values]
    pipeline = Pipeline.dataset(rows).shuffle(False).epochs(1).read().decode(**args).batch(len(rows))
    with loaderkit.build(pipeline, overrides=INLINE) as loader:
        (batch,) = loader
    images: torch.Tensor = batch["image"]
    return images


PICTURES = [
    ("L", "PNG"),
    ("LA", "PNG"),
    ("RGB", "PNG"),
    ("RGBA", "PNG"),
    ("P", "PNG"),
    ("RGBA", "TIFF"),
    ("RGBA", "WEBP"),
    ("RGB", "JPEG"),
    ("CMYK", "JPEG"),
]


@pytest.mark.parametrize("num_channels", [1, 4])
@pytest.mark.parametrize(("mode", "kind"), PICTURES)
def test_pictures_equal_pillow(mode: str, kind: str, num_channels: int, rng: np.random.Generator) -> None:
    data = encoded(picture(mode, rng), kind)
    with Pillow.open(io.BytesIO(data)) as image:
        whole = image.convert("RGB") if mode == "CMYK" else image
        expected = np.asarray(whole.convert({1: "L", 4: "RGBA"}[num_channels])).reshape(11, 14, num_channels)
    for given in (data, Pillow.open(io.BytesIO(data))):
        found = decoded([given], channels=num_channels)[0]
        np.testing.assert_array_equal(found.permute(1, 2, 0), expected)


@pytest.mark.parametrize("num_channels", [1, 3, 4])
def test_grey_of_sixteen_bits(num_channels: int, rng: np.random.Generator) -> None:
    image = picture("I;16", rng)
    found = decoded([encoded(image, "PNG")], channels=num_channels, depth=16)[0].numpy()
    assert found.shape == (num_channels, 11, 14)
    assert (found[:3] == np.asarray(image)).all()
    assert (found[3:] == 65535).all()


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_arrays_in_files(dtype: Any, tmp_path: Path, rng: np.random.Generator) -> None:
    """[H, W, C] and [C, H, W] of any number of channels; a mask [H, W] of any integers goes with them."""
    images = rng.integers(0, 256, (4, 9, 20, 24)).astype(dtype)
    masks = rng.integers(0, 200, (4, 20, 24))
    for name in ("images", "masks"):
        (tmp_path / name).mkdir()
    for number, (image, mask) in enumerate(zip(images, masks, strict=True)):
        np.save(tmp_path / f"images/{number}.npy", image if number % 2 else image.transpose(1, 2, 0))
        np.save(tmp_path / f"masks/{number}.npy", mask)
    fields = {"image": "images/*.npy", "mask": "masks/*.npy"}
    files = Pipeline.files(tmp_path, fields=fields).shuffle(False).epochs(1)
    depth: Any = 8 if dtype == np.uint8 else 16
    begun = files.read().decode(channels=9, depth=depth, masks=["mask"])
    pipeline = begun.random_crop([10, 12]).random_vertical_flip().batch(4)
    for overrides in (INLINE, EXECUTORS["thread"]):
        with loaderkit.build(pipeline, overrides=overrides) as loader:
            (batch,) = loader
        assert batch["image"].shape == (4, 9, 10, 12)
        for image, mask, found, labels in zip(images, masks, batch["image"], batch["mask"], strict=True):
            windows = np.lib.stride_tricks.sliding_window_view(mask, (10, 12))
            wanted = labels[0].numpy()
            places = [
                (row, column, step)
                for step in (1, -1)
                for row, column in np.argwhere((windows == wanted[::step]).all((2, 3)))
            ]
            ((row, column, step),) = places
            np.testing.assert_array_equal(found, image[:, row : row + 10, column : column + 12][:, ::step])


STAGES: dict[str, tuple[dict[str, Any], int]] = {
    "resize": ({"size": [17, 9]}, 1),
    "resize without antialias": ({"size": [17, 40], "antialias": False}, 1),
    "center_crop": ({"size": [12, 40]}, 0),
    "random_crop": ({"size": [12, 9], "padding": 3, "fill": 9}, 0),
    "random_resized_crop": ({"size": [8, 10], "interpolation": "bicubic"}, 1),
    "random_horizontal_flip": ({}, 0),
    "random_vertical_flip": ({}, 0),
    "random_rotation": ({"degrees": 40, "interpolation": "bilinear", "expand": False}, 0),
    "gaussian_blur": ({"kernel_size": 3}, 0),
    "random_erasing": ({"p": 1.0, "value": 7}, 0),
}
ONLY_8_BITS = {"gaussian_blur", "random_erasing"}


def moved(images: Array, stage: str, arguments: dict[str, Any]) -> Array:
    depth: Any = 8 if images.dtype == np.uint8 else 16
    rows = [{"image": torch.from_numpy(image)} for image in images]
    begun = Pipeline.dataset(rows).shuffle(seed=1).epochs(1).read()
    chain = getattr(begun.decode(channels=images.shape[1], depth=depth, fields=["image"]), stage.split(maxsplit=1)[0])(
        **arguments
    )
    with loaderkit.build(chain.batch(len(rows)), overrides=INLINE) as loader:
        (batch,) = loader
    found: Array = batch["image"].numpy()
    return found


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("num_channels", [2, 4, 6])
@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_treats_each_channel_as_one_alone(
    stage: str, num_channels: int, dtype: Any, rng: np.random.Generator
) -> None:
    """`color_jitter` and `random_grayscale` excepted, which are of colours."""
    if dtype == np.uint16 and stage in ONLY_8_BITS:
        return
    arguments, levels = STAGES[stage]
    most = np.iinfo(dtype).max
    images = rng.integers(0, most, (3, num_channels, 31, 33), dtype, endpoint=True)
    together = moved(images, stage, arguments).astype(int)
    for band in range(num_channels):
        alone = moved(images[:, band : band + 1], stage, arguments).astype(int)
        assert abs(together[:, band : band + 1] - alone).max() <= levels


def test_rotation_of_sixteen_bits_equals_that_of_floats(rng: np.random.Generator) -> None:
    images = rng.integers(0, 65535, (2, 5, 30, 30), np.uint16, endpoint=True)
    found = moved(images, "random_rotation", {"degrees": [20, 20], "interpolation": "bilinear"})
    for image, turned in zip(images, found, strict=True):
        for plane, other in zip(image, turned, strict=True):
            floats = Pillow.fromarray(plane.astype(np.float32)).rotate(20, Pillow.Resampling.BILINEAR)
            assert abs(np.asarray(floats) - other).max() <= 1


def test_normalized_and_called(rng: np.random.Generator) -> None:
    """What a function leaves is an image again, and each channel has a mean of its own."""
    images = rng.integers(0, 256, (4, 7, 12, 10), np.uint8)

    def halve(sample: dict[str, Any]) -> dict[str, Any]:
        assert sample["image"].shape == (7, 12, 10)
        return {"image": sample["image"] // 2}

    rows = [{"image": image.transpose(1, 2, 0)} for image in images]
    begun = Pipeline.dataset(rows).shuffle(False).epochs(1).read().decode(channels=7).call(halve)
    mean, std = [n / 10 for n in range(7)], [0.2 + n / 10 for n in range(7)]
    pipeline = begun.random_horizontal_flip(p=1).batch(4).normalize(mean=mean, std=std)
    with loaderkit.build(pipeline, overrides=INLINE) as loader:
        (batch,) = loader
    halved = torch.from_numpy(images // 2).flip(3).double() / 255
    expected = (halved - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    torch.testing.assert_close(batch["image"].double(), expected.double(), atol=1e-5, rtol=1e-5)


def refused(value: Any, message: str, **args: Any) -> None:
    with pytest.raises(StageError, match=message):
        decoded([value], **args)


def test_what_has_no_such_channels_is_refused(rng: np.random.Generator) -> None:
    png = encoded(picture("RGB", rng), "PNG")
    refused(png, "decoded to 1, 3 or 4 channels, and `channels` is 13", channels=13)
    refused(np.zeros((8, 9, 5), np.uint8), "5.*with 13 channels, as `channels` says", channels=13, fields=["image"])
    refused(np.zeros((13, 9, 13), np.uint8), r"may be \[C, H, W\] or \[H, W, C\]", channels=13)
    refused(np.zeros((8, 9, 13), np.uint16), "has 16 bits: `decode: {depth: 16}` keeps them", channels=13)
    mask = {"masks": ["image"], "channels": 1}
    refused(np.full((8, 9), 300), "from 0 to 255, this one has 300 to 300: `decode: {depth: 16}` keeps them", **mask)
    refused(np.full((8, 9), -1), "from 0 to 255, this one has -1 to -1", **mask)
    refused(np.zeros((8, 9)), "class numbers, this one is array float64", **mask)


def test_a_tiff_of_which_pillow_drops_a_band_is_refused(rng: np.random.Generator) -> None:
    """Three colours and one more that is no alpha, such as near infrared."""
    file = io.BytesIO()
    picture("RGBA", rng).save(file, "TIFF")
    alpha, unspecified = (struct.pack("<HHIHH", 338, 3, 1, kind, 0) for kind in (2, 0))
    assert file.getvalue().count(alpha) == 1
    data = file.getvalue().replace(alpha, unspecified)
    with Pillow.open(io.BytesIO(data)) as image:
        assert image.mode == "RGB"
    refused(data, "has 4 bands, of which Pillow reads 3", channels=4)
    assert decoded([data]).shape == (1, 3, 11, 14)


def test_colours_need_three(rng: np.random.Generator) -> None:
    rows = [{"image": rng.integers(0, 256, (9, 9, 4), np.uint8)}]
    begun = Pipeline.dataset(rows).shuffle(False).read().decode(channels=4)
    for stages in (begun.color_jitter(contrast=[0.5, 0.5]), begun.random_grayscale(1.0), begun.color_jitter(hue=0.1)):
        with (
            pytest.raises(StageError, match="the image has 4 channels: name other images in `fields`"),
            loaderkit.build(stages.batch(1), overrides=INLINE) as loader,
        ):
            next(iter(loader))
    with loaderkit.build(begun.color_jitter(brightness=[0.5, 0.5]).batch(1), overrides=INLINE) as loader:
        image = next(iter(loader))["image"][0]
    np.testing.assert_array_equal(image.permute(1, 2, 0), rows[0]["image"] // 2)


def test_not_inside_dali() -> None:
    with pytest.raises(ConfigError, match=r"decode\.channels: not with `device: dali-cpu`"):
        Pipeline.files("x").read().decode(device="dali-cpu", channels=4).batch(1).config  # noqa: B018
