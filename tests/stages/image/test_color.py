from __future__ import annotations

import colorsys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from num_examples import num_examples
from numpy.typing import NDArray
from PIL import Image as Pillow
from PIL import ImageEnhance
from pydantic import ValidationError

from loaderkit.samples.sample import Sample
from loaderkit.samples.values import Image
from loaderkit.sampling.random import uniforms
from loaderkit.stages.image.color import (
    COLOR_JITTER_DRAWS,
    ColorJitterArgs,
    adjust_brightness,
    adjust_contrast,
    adjust_hue,
    adjust_saturation,
    color_jitter,
)

Pixels = NDArray[np.uint8]
FACTORS = [0.0, 0.3, 0.8, 1.0, 1.25, 1.9, 3.0]


def photo(height: int = 40, width: int = 56, seed: int = 0) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8)


def planes(pixels: Pixels) -> torch.Tensor:
    return torch.from_numpy(pixels.transpose(2, 0, 1).copy())


def packed(image: torch.Tensor) -> Pixels:
    assert image.dtype == torch.uint8
    found: Pixels = image.permute(1, 2, 0).numpy()
    return found


def jitter(pixels: Pixels, draws: NDArray[np.float64], **args: Any) -> Pixels:
    before = pixels.copy()
    sample: Sample = {"image": Image(pixels)}
    color_jitter(ColorJitterArgs(**args))(sample, draws, None)
    assert np.array_equal(pixels, before), "the stage wrote into its input"
    assert sample["image"].pixels.shape == pixels.shape
    found: Pixels = sample["image"].pixels
    return found


# ---------------------------------------------------------------------------------------------- one step at a time
# Pillow rounds grey with integer weights and blends in C floats; torchvision, whose arithmetic this is, truncates: the two
# differ by at most 1 level of grey times the blend's share, plus 1.


@pytest.mark.parametrize("factor", FACTORS)
def test_brightness_is_pillows(factor: float) -> None:
    pixels = photo()
    expected = np.asarray(ImageEnhance.Brightness(Pillow.fromarray(pixels)).enhance(factor))
    assert np.abs(packed(adjust_brightness(planes(pixels), factor)).astype(int) - expected).max() <= 1


@pytest.mark.parametrize("factor", FACTORS)
def test_contrast_is_pillows(factor: float) -> None:
    pixels = photo()
    expected = np.asarray(ImageEnhance.Contrast(Pillow.fromarray(pixels)).enhance(factor))
    found = packed(adjust_contrast(planes(pixels), factor))
    # Pillow rounds the mean to a whole level.
    assert np.abs(found.astype(int) - expected).max() <= 1 + abs(1 - factor)


@pytest.mark.parametrize("factor", FACTORS)
def test_saturation_is_pillows(factor: float) -> None:
    pixels = photo()
    expected = np.asarray(ImageEnhance.Color(Pillow.fromarray(pixels)).enhance(factor))
    found = packed(adjust_saturation(planes(pixels), factor))
    assert np.abs(found.astype(int) - expected).max() <= 1 + abs(1 - factor)


def reference_hue(pixels: Pixels, shift: float) -> NDArray[np.float64]:
    found = np.empty(pixels.shape)
    for place in np.ndindex(pixels.shape[:2]):
        hue, saturation, value = colorsys.rgb_to_hsv(*(pixels[place] / 255))
        found[place] = np.array(colorsys.hsv_to_rgb((hue + shift) % 1.0, saturation, value)) * 255
    return found


@pytest.mark.parametrize("shift", [-0.5, -0.2, 0.0, 0.07, 1 / 3, 0.5])
def test_hue_is_colorsys(shift: float) -> None:
    pixels = photo(20, 25)
    pixels[0, :5] = [(0, 0, 0), (255, 255, 255), (7, 7, 7), (255, 0, 0), (0, 0, 255)]
    found = packed(adjust_hue(planes(pixels), shift))
    difference = np.abs(found - reference_hue(pixels, shift))
    assert difference.max() <= 1.5
    assert np.array_equal(found[0, :3], pixels[0, :3])  # greys have no hue


@given(st.tuples(*[st.integers(0, 255)] * 3), st.floats(-0.5, 0.5))
@settings(max_examples=num_examples(200))
def test_hue_of_any_colour(colour: tuple[int, int, int], shift: float) -> None:
    pixels = np.array([[colour]], np.uint8)
    found = packed(adjust_hue(planes(pixels), shift))
    assert np.abs(found - reference_hue(pixels, shift)).max() <= 1.5


def test_neutral_factors_change_nothing() -> None:
    pixels = photo()
    image = planes(pixels)
    for adjust in (adjust_brightness, adjust_contrast, adjust_saturation):
        assert torch.equal(adjust(image, 1.0), image)
    assert (adjust_hue(image, 0.0).int() - image.int()).abs().max() <= 1
    assert torch.equal(image, planes(pixels))


def test_one_channel() -> None:
    grey = photo()[:, :, :1]
    image = planes(grey)
    assert torch.equal(adjust_saturation(image, 0.3), image)
    assert torch.equal(adjust_hue(image, 0.3), image)
    expected = np.asarray(ImageEnhance.Contrast(Pillow.fromarray(grey[:, :, 0])).enhance(0.5))
    assert np.abs(packed(adjust_contrast(image, 0.5))[:, :, 0].astype(int) - expected).max() <= 2


# --------------------------------------------------------------------------------------------------------- the stage


def test_without_arguments_nothing_happens() -> None:
    pixels = photo()
    for row in uniforms(1, np.arange(20), COLOR_JITTER_DRAWS):
        assert np.array_equal(jitter(pixels, row), pixels)
        assert np.array_equal(jitter(pixels, row, brightness=0, contrast=0, saturation=0, hue=0), pixels)


def test_a_number_is_a_range_about_the_neutral_factor() -> None:
    args = ColorJitterArgs.model_validate({"brightness": 0.4, "contrast": 1.5, "saturation": [0.2, 3], "hue": 0.1})
    assert args.brightness == (0.6, 1.4)
    assert args.contrast == (0.0, 2.5)
    assert args.saturation == (0.2, 3.0)
    assert args.hue == (-0.1, 0.1)
    assert ColorJitterArgs().hue == (0.0, 0.0)
    assert ColorJitterArgs().brightness == (1.0, 1.0)


def test_factors_span_their_range() -> None:
    """A grey image of level 100 shows its brightness factor; factors are uniform over [0.5, 1.5]."""
    pixels = np.full((1, 1, 3), 100, np.uint8)
    levels = np.array(
        [jitter(pixels, row, brightness=0.5)[0, 0, 0] for row in uniforms(2, np.arange(2000), COLOR_JITTER_DRAWS)]
    )
    assert levels.min() in (50, 51)
    assert levels.max() in (148, 149)
    counts = np.bincount((levels - 50) // 10, minlength=10)
    assert ((counts - 200) ** 2 / 200).sum() < 9 + 4 * np.sqrt(18)


ADJUST = (adjust_brightness, adjust_contrast, adjust_saturation, adjust_hue)


def test_the_order_of_the_steps_is_random_and_every_order_occurs() -> None:
    pixels = photo(12, 12)
    ranges = ((0.5, 1.5), (0.5, 1.5), (0.5, 1.5), (-0.2, 0.2))
    orders = set()
    for row in uniforms(4, np.arange(300), COLOR_JITTER_DRAWS):
        order = tuple(np.argsort(row[4:8]).tolist())
        orders.add(order)
        image = planes(pixels)
        for step in order:
            low, high = ranges[step]
            image = ADJUST[step](image, low + float(row[step]) * (high - low))
        found = jitter(pixels, row, brightness=0.5, contrast=0.5, saturation=0.5, hue=0.2)
        assert np.array_equal(found, packed(image))
    assert len(orders) == 24


def test_masks_are_left_alone_and_images_share_the_factors() -> None:
    pixels, mask = photo(), photo()[:, :, :1]
    sample: Sample = {"a": Image(pixels), "mask": Image(mask, mask=True), "b": Image(pixels.copy()), "label": 3}
    draws = uniforms(1, np.array([7]), COLOR_JITTER_DRAWS)[0]
    color_jitter(ColorJitterArgs.model_validate({"brightness": 0.9, "hue": 0.3}))(sample, draws, None)
    assert sample["mask"].pixels is mask
    assert np.array_equal(sample["a"].pixels, sample["b"].pixels)
    assert not np.array_equal(sample["a"].pixels, pixels)
    assert sample["label"] == 3


def test_fields_chooses() -> None:
    pixels = photo()
    sample: Sample = {"a": Image(pixels), "b": Image(pixels)}
    args = ColorJitterArgs.model_validate({"brightness": [0.5, 0.5], "fields": ["b"]})
    color_jitter(args)(sample, np.zeros(COLOR_JITTER_DRAWS), None)
    assert sample["a"].pixels is pixels
    assert np.array_equal(sample["b"].pixels, pixels // 2)


def test_views_are_fine() -> None:
    base = photo(50, 60)
    for view in (base[3:40, 5:50], base[:, ::-1], base.transpose(1, 0, 2)):
        draws = uniforms(1, np.array([3]), COLOR_JITTER_DRAWS)[0]
        expected = jitter(view.copy(), draws, brightness=0.5, contrast=0.5, saturation=0.5, hue=0.2)
        assert np.array_equal(jitter(view, draws, brightness=0.5, contrast=0.5, saturation=0.5, hue=0.2), expected)


@pytest.mark.parametrize(
    "args",
    [
        {"brightness": -0.1},
        {"brightness": "0.4"},
        {"brightness": [0.5]},
        {"brightness": [1.5, 0.5]},
        {"brightness": [-1, 1]},
        {"contrast": [0.5, None]},
        {"contrast": [0.5, "1"]},
        {"contrast": [[0.5], 1]},
        {"saturation": None},
        {"saturation": float("nan")},
        {"hue": 0.6},
        {"hue": -0.1},
        {"hue": [-0.6, 0]},
        {"hue": [0.2, 0.1]},
        {"hue": True},
        {"gamma": 1},
    ],
)
def test_impossible_arguments(args: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ColorJitterArgs.model_validate(args)
