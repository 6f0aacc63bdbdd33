"""`decode: {scaled: true}`: the same crops and nearly the same pixels, from images decoded smaller."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image as Pillow

import loaderkit
from loaderkit import Pipeline, native
from loaderkit.errors import ConfigError

NUM_EPOCHS = 2  # of six pictures and a crop each


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photograph-like JPEGs of odd sizes, from just the target's size up to more than eight times as large, and a PNG."""
    folder = tmp_path_factory.mktemp("large")
    rng = np.random.default_rng(5)
    for number, (height, width) in enumerate([(64, 64), (129, 140), (257, 301), (403, 517), (701, 650), (933, 1201)]):
        coarse = Pillow.fromarray(rng.integers(0, 256, (9, 11, 3), dtype=np.uint8))
        image = coarse.resize((width, height), Pillow.Resampling.BICUBIC)
        image.save(folder / f"{number}.jpg", quality=95, progressive=number % 2 == 1)
    image.save(folder / "plain.png")
    return folder


def batches(folder: Path, scaled: bool, shrink: dict[str, Any], *between: str) -> NDArray[np.uint8]:
    found = []
    stages = ["read", {"decode": {"scaled": scaled}}, *between, shrink, {"batch": {"size": 7}}]
    described = {
        "source": {"kind": "files", "url": str(folder), "fields": {"image": "jpg;png"}},
        "order": {"epochs": NUM_EPOCHS},
        "stages": stages,
    }
    with loaderkit.build(described) as loader:
        for _ in range(NUM_EPOCHS):
            for batch in loader:
                order = np.argsort(batch["__key__"])
                found.append(batch["image"].numpy()[order])
    return np.concatenate(found)


SHRINKS: list[dict[str, Any]] = [{"random_resized_crop": {"size": 32}}, {"resize": {"size": [48, 40]}}]


@pytest.mark.parametrize("with_c", [True, False])
@pytest.mark.parametrize("shrink", SHRINKS, ids=["crop", "resize"])
@pytest.mark.parametrize("between", [(), ("color_jitter",)])
def test_pixels_differ_by_a_few_levels(
    large: Path, shrink: dict[str, Any], between: tuple[str, ...], with_c: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not with_c:
        monkeypatch.setattr(native, "CAN_RESAMPLE", False)
    plain = batches(large, False, shrink, *between).astype(int)
    scaled = batches(large, True, shrink, *between).astype(int)
    difference = np.abs(plain - scaled)
    assert difference.mean(axis=(1, 2, 3)).max() <= 2, "a crop that lay elsewhere would differ by tens of levels"
    assert np.percentile(difference, 99) <= 8
    assert difference.max() > 0, "nothing was decoded smaller"


def test_as_large_as_wanted_is_decoded_in_full(large: Path) -> None:
    shrink = {"resize": {"size": [933, 1201]}}
    assert np.array_equal(batches(large, False, shrink), batches(large, True, shrink))


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([{"center_crop": {"size": 20}}], "`resize` or `random_resized_crop` has to come next, and `center_crop` does"),
        (["random_horizontal_flip", {"resize": {"size": 9}}], "and `random_horizontal_flip` does"),
        ([], "and `batch` does"),
        ([{"call": {"function": "os.path:join"}}, {"resize": {"size": 9}}], "and `call` does"),
        ([{"resize": {"size": 9, "antialias": False}}], "bilinear and antialiased"),
        ([{"resize": {"size": 9, "interpolation": "bicubic"}}], "bilinear and antialiased"),
        ([{"resize": {"size": 9, "fields": ["image"]}}], "has to act on all images"),
    ],
)
def test_what_would_show_the_smaller_image_is_refused(large: Path, stages: list[Any], message: str) -> None:
    described = {
        "source": {"kind": "files", "url": str(large)},
        "stages": ["read", {"decode": {"scaled": True}}, *stages, {"batch": {"size": 1}}],
    }
    with pytest.raises(ConfigError, match=re.escape(message)):
        loaderkit.build(described)


def test_from_python(large: Path) -> None:
    pipeline = Pipeline.files(large, include="*.jpg").read().decode(scaled=True).resize([20, 20]).batch(6)
    with loaderkit.build(pipeline) as loader:
        assert next(iter(loader))["image"].shape == (6, 3, 20, 20)
