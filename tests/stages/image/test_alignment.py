"""Masks and images that share a stage are compared: in size for a crop, in shape for the others."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import loaderkit
from loaderkit import Pipeline
from loaderkit.errors import StageError

INLINE = {"prefetch.executor": "inline"}
STAGES: dict[str, dict[str, Any]] = {
    "resize": {"size": [8, 8]},
    "center_crop": {"size": 8},
    "random_crop": {"size": 8},
    "random_resized_crop": {"size": 8},
    "random_horizontal_flip": {},
    "random_vertical_flip": {},
    "random_rotation": {"degrees": 10},
}
CROPS = ("center_crop", "random_crop", "random_resized_crop")


def pairs(
    folder: Path, size: tuple[int, int], mask_size: tuple[int, int], orientation: int = 1, **decode: Any
) -> Pipeline:
    """A picture and its mask, of (width, height)."""
    for name in ("images", "masks"):
        (folder / name).mkdir(exist_ok=True)
    (exif := Image.Exif())[0x0112] = orientation
    Image.new("RGB", size).save(folder / "images/a.jpg", exif=exif)
    Image.new("L", mask_size).save(folder / "masks/a.png")
    fields = {"image": "images/*.jpg", "mask": "masks/*.png"}
    return Pipeline.files(str(folder), fields=fields).read().decode(masks=["mask"], **decode)


def shapes(made: Pipeline) -> list[tuple[int, ...]]:
    with loaderkit.build(made.batch(1), overrides=INLINE) as loader:
        batch = next(iter(loader))
    return [tuple(batch[name].shape[2:]) for name in ("image", "mask")]


@pytest.mark.parametrize("kind", [*STAGES, "batch"])
def test_a_mask_of_another_shape_is_refused(kind: str, tmp_path: Path, rng: random.Random) -> None:
    """As one that was drawn upright on a picture that lies on its side."""
    width, height = rng.randrange(40, 60), rng.randrange(16, 30)
    made = pairs(tmp_path, (width, height), (height, width), orientation=6)
    acted = made if kind == "batch" else getattr(made, kind)(**STAGES[kind])
    with pytest.raises(StageError, match=rf"{width} x {height}.*{height} x {width}.*exif_orientation: true"):
        shapes(acted)
    upright = pairs(tmp_path, (width, height), (height, width), orientation=6, exif_orientation=True)
    image, mask = shapes(upright if kind == "batch" else getattr(upright, kind)(**STAGES[kind]))
    assert image == mask


@pytest.mark.parametrize("kind", STAGES)
def test_a_mask_of_half_the_size_has_the_same_shape(kind: str, tmp_path: Path, rng: random.Random) -> None:
    width, height, step = rng.randrange(40, 90), rng.randrange(40, 90), rng.choice([2, 3, 4])
    made = pairs(tmp_path, (width, height), (-(-width // step), -(-height // step)))
    acted = getattr(made, kind)(**STAGES[kind])
    if kind in CROPS:
        with pytest.raises(StageError, match="cannot share a crop"):
            shapes(acted)
    else:
        shapes(acted)


def test_a_mask_that_a_stage_leaves_alone_may_have_any_size(tmp_path: Path) -> None:
    made = pairs(tmp_path, (40, 20), (20, 40)).resize([8, 8], fields=["image"])
    assert shapes(made) == [(8, 8), (40, 20)]


def test_pictures_of_any_shape_are_resized_side_by_side(tmp_path: Path, rng: random.Random) -> None:
    """A pair of photos needs no common shape where nothing is drawn for both."""
    items = [
        {name: np.zeros((rng.randrange(9, 40), rng.randrange(9, 40), 3), np.uint8) for name in "ab"} for _ in range(4)
    ]
    with loaderkit.build(Pipeline.dataset(items).read().decode().resize([8, 8]).batch(4), overrides=INLINE) as loader:
        assert next(iter(loader))["a"].shape == (4, 3, 8, 8)
