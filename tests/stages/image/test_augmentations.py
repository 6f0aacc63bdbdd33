"""Vertical flips, rotation, grayscale, blur and erasing, against NumPy, SciPy and Pillow."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from num_examples import num_examples
from numpy.typing import NDArray
from PIL import Image as Pillow
from pydantic import ValidationError
from scipy import ndimage

import loaderkit
from loaderkit import Pipeline
from loaderkit.errors import ConfigError, StageError
from loaderkit.pipeline.config.registry import STAGES
from loaderkit.samples.sample import Sample
from loaderkit.samples.values import Image
from loaderkit.sampling.random import uniforms
from loaderkit.stages.image.color import RANDOM_ERASING_DRAWS, erased_box

Pixels = NDArray[np.uint8]
Draws = NDArray[np.float64]
MOST_DRAWS = 24
ARGS: dict[str, dict[str, Any]] = {
    "random_vertical_flip": {},
    "random_rotation": {"degrees": 30},
    "random_grayscale": {"p": 0.5},
    "gaussian_blur": {"kernel_size": 5},
    "random_erasing": {"value": "random"},
}
KEEPS_MASKS = ("random_grayscale", "gaussian_blur", "random_erasing")


def noise(height: int, width: int, channels: int = 3, seed: int = 0) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), np.uint8)


def smooth(height: int, width: int) -> Pixels:
    y, x = np.mgrid[:height, :width]
    return np.stack([y * 200 / height, x * 200 / width, 127 + 100 * np.sin((x + y) / 9)], 2).astype(np.uint8)


def draws_of(number: int, key: int = 1) -> Draws:
    row: Draws = uniforms(key, np.array([number]), MOST_DRAWS)[0]
    return row


def run(kind: str, sample: Sample, draws: Draws, **args: Any) -> Sample:
    """The stage's result for one sample; the pixels that it was given must stay as they were."""
    before = {name: value.pixels.copy() for name, value in sample.items() if isinstance(value, Image)}
    found = dict(sample)
    make = STAGES[kind].make
    assert make is not None
    make(STAGES[kind].args.model_validate(args))(found, draws, None)
    for name, pixels in before.items():
        assert np.array_equal(sample[name].pixels, pixels), "the stage wrote into its input"
        assert found[name].pixels.dtype == np.uint8
        assert found[name].mask == sample[name].mask
    return found


def changed(kind: str, pixels: Pixels, draws: Draws | None = None, **args: Any) -> Pixels:
    found: Pixels = run(kind, {"image": Image(pixels)}, np.zeros(MOST_DRAWS) if draws is None else draws, **args)[
        "image"
    ].pixels
    return found


SIDES = st.integers(1, 40)
CHANNELS = st.sampled_from([1, 3])


# ------------------------------------------------------------------------------------------- random_vertical_flip


@given(SIDES, SIDES, CHANNELS)
@settings(max_examples=num_examples(30))
def test_a_flip_mirrors_and_twice_is_nothing(height: int, width: int, channels: int) -> None:
    pixels = noise(height, width, channels)
    once = changed("random_vertical_flip", pixels, p=1)
    assert np.array_equal(once, np.asarray([pixels[height - 1 - row] for row in range(height)]))
    assert np.array_equal(changed("random_vertical_flip", once, p=1), pixels)


# ------------------------------------------------------------------------------------------------ random_rotation


@given(SIDES, SIDES, CHANNELS, st.sampled_from(["nearest", "bilinear", "bicubic"]))
@settings(max_examples=num_examples(60))
@example(7, 7, 3, "bilinear")
def test_quarter_turns_are_exact(height: int, width: int, channels: int, interpolation: str) -> None:
    pixels = noise(height, width, channels)

    def turned(angle: float, **args: Any) -> Pixels:
        return changed("random_rotation", pixels, degrees=[angle, angle], interpolation=interpolation, **args)

    assert np.array_equal(turned(0), pixels)
    assert np.array_equal(turned(180), np.rot90(pixels, 2))
    assert np.array_equal(turned(90, expand=True), np.rot90(pixels))  # counter-clockwise, as NumPy's
    assert np.array_equal(turned(-90, expand=True), np.rot90(pixels, -1))
    if height == width:
        assert np.array_equal(turned(90), np.rot90(pixels))
    else:
        assert turned(90).shape == pixels.shape


def rotated(pixels: Pixels, angle: float, order: Any, fill: int) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """SciPy's rotation by `angle` degrees about the middle, and the pixels that lie well inside the image."""
    cos, sin = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    inverse = np.array([[cos, sin], [-sin, cos]])  # of (row, column), rows pointing down
    middle = (np.array(pixels.shape[:2]) - 1) / 2
    offset = middle - inverse @ middle

    def plane(values: NDArray[Any], cval: float) -> NDArray[np.float64]:
        found: NDArray[np.float64] = ndimage.affine_transform(
            values.astype(np.float64), inverse, offset, order=order, mode="constant", cval=cval
        )
        return found

    inside = plane(np.pad(np.ones(np.array(pixels.shape[:2]) - 4), 2), 0) > 0.999
    return np.stack([plane(pixels[:, :, c], fill) for c in range(pixels.shape[2])], 2), inside


@pytest.mark.parametrize(("interpolation", "order"), [("nearest", 0), ("bilinear", 1), ("bicubic", 3)])
@pytest.mark.parametrize("angle", [10.0, -33.3, 77.7, 200.0])
def test_a_rotation_is_scipys(angle: float, interpolation: str, order: int) -> None:
    pixels = smooth(60, 81)
    expected, inside = rotated(pixels, angle, order, 0)
    found = changed("random_rotation", pixels, degrees=[angle, angle], interpolation=interpolation)
    difference = np.abs(found - expected)[inside]
    if order == 0:
        assert (difference > 0).mean() < 0.01  # a pixel that lies between two may be the other
    else:
        assert difference.max() <= (3 if order == 1 else 8)  # a spline is another cubic filter than Pillow's
        assert difference.mean() < 1


@given(st.floats(-360, 360), st.integers(0, 255), CHANNELS)
@settings(max_examples=num_examples(40))
def test_what_lies_outside_is_filled(angle: float, fill: int, channels: int) -> None:
    pixels = np.full((30, 44, channels), 200, np.uint8)
    found = changed("random_rotation", pixels, degrees=[angle, angle], fill=fill)
    assert set(np.unique(found)) <= {200, fill}
    _, inside = rotated(pixels, angle, 0, fill)
    assert (found[inside] == 200).all()
    large = changed("random_rotation", pixels, degrees=[angle, angle], fill=fill, expand=True)
    cos, sin = abs(math.cos(math.radians(angle))), abs(math.sin(math.radians(angle)))
    assert abs(large.shape[0] - (30 * cos + 44 * sin)) <= 2
    assert abs(large.shape[1] - (44 * cos + 30 * sin)) <= 2
    if fill != 200:
        assert abs((large[:, :, 0] == 200).sum() - 30 * 44) <= 3 * (30 + 44)  # nothing is cut off


@given(st.floats(-180, 180), st.floats(0, 180), st.integers(0, 10**6))
@settings(max_examples=num_examples(40))
def test_the_angle_is_uniform_between_its_bounds(low: float, span: float, number: int) -> None:
    pixels, draws = noise(20, 20), draws_of(number)
    angle = low + draws[0] * span
    found = changed("random_rotation", pixels, draws, degrees=[low, low + span])
    assert np.array_equal(found, np.asarray(Pillow.fromarray(pixels).rotate(angle)))
    assert np.array_equal(
        changed("random_rotation", pixels, draws, degrees=span),
        changed("random_rotation", pixels, draws, degrees=[-span, span]),
    )


# ----------------------------------------------------------------------------------------------- random_grayscale


def test_grey_is_luma_in_three_channels() -> None:
    pixels = noise(40, 50)
    grey = changed("random_grayscale", pixels, p=1)
    assert grey.shape == pixels.shape
    assert (grey == grey[:, :, :1]).all()
    luma = np.floor(pixels @ np.array([0.2989, 0.587, 0.114]))
    assert np.abs(grey[:, :, 0] - luma).max() <= 1  # float32 against float64
    assert (grey[:, :, 0] == luma).mean() > 0.99
    assert np.abs(grey[:, :, 0].astype(int) - np.asarray(Pillow.fromarray(pixels).convert("L"))).max() <= 1
    one = noise(40, 50, 1)
    assert np.array_equal(changed("random_grayscale", one, p=1), one)


# -------------------------------------------------------------------------------------------------- gaussian_blur


def reference_blur(pixels: Pixels, size: int, sigma: float) -> NDArray[np.float64]:
    """torchvision's: the outer product of two windows, over an image mirrored about its border pixels."""
    x = np.linspace(-(size - 1) / 2, (size - 1) / 2, size)
    window = np.exp(-0.5 * (x / sigma) ** 2)
    window = np.outer(window, window) / window.sum() ** 2
    half = size // 2
    padded = np.pad(pixels.astype(np.float64), ((half, half), (half, half), (0, 0)), mode="reflect")
    height, width = pixels.shape[:2]
    return sum(
        (
            window[row, column] * padded[row : row + height, column : column + width]
            for row, column in np.ndindex(size, size)
        ),
        np.zeros(pixels.shape),
    )


@given(SIDES, SIDES, CHANNELS, st.sampled_from([1, 3, 5, 9, 23]), st.floats(0.05, 6))
@settings(max_examples=num_examples(60))
@example(2, 3, 3, 23, 5.0)  # a window larger than the image
def test_a_blur_is_a_gaussian_window(height: int, width: int, channels: int, size: int, sigma: float) -> None:
    pixels = noise(height, width, channels)
    found = changed("gaussian_blur", pixels, kernel_size=size, sigma=sigma)
    assert np.abs(found - reference_blur(pixels, size, sigma)).max() <= 0.5 + 1e-3
    even = np.full_like(pixels, 200)
    assert np.array_equal(changed("gaussian_blur", even, kernel_size=size, sigma=sigma), even)


def test_sigma_is_uniform_between_its_bounds() -> None:
    pixels = noise(30, 30)
    for number in range(10):
        draws = draws_of(number)
        for bounds, (low, high) in (({}, (0.1, 2.0)), ({"sigma": [1, 4]}, (1, 4)), ({"sigma": 3}, (3, 3))):
            found = changed("gaussian_blur", pixels, draws, kernel_size=7, **bounds)
            expected = reference_blur(pixels, 7, low + draws[0] * (high - low))
            assert np.abs(found - expected).max() <= 0.5 + 1e-3


# ------------------------------------------------------------------------------------------------- random_erasing


def reference_erased(
    height: int, width: int, scale: tuple[float, float], ratio: tuple[float, float], draws: Draws
) -> tuple[int, int, int, int] | None:
    """torchvision.transforms.v2.RandomErasing.make_params, with its random numbers taken from `draws`."""
    log_ratio = np.log(np.array(ratio))
    for k in range(10):
        erase_area = height * width * (scale[0] + (scale[1] - scale[0]) * draws[k])
        aspect_ratio = math.exp(log_ratio[0] + (log_ratio[1] - log_ratio[0]) * draws[10 + k])
        h = int(round(math.sqrt(erase_area * aspect_ratio)))  # noqa: RUF046 - as torchvision writes it
        w = int(round(math.sqrt(erase_area / aspect_ratio)))  # noqa: RUF046
        if not (h < height and w < width):
            continue
        return math.floor(draws[20] * (height - h + 1)), math.floor(draws[21] * (width - w + 1)), h, w
    return None


SCALES = st.tuples(st.floats(0, 1), st.floats(0, 1)).map(lambda s: (min(s), max(s)))
RATIOS = st.tuples(st.floats(0.2, 3), st.floats(1, 3)).map(lambda r: (r[0], r[0] * r[1]))
VALUES = st.integers(0, 255) | st.tuples(*[st.integers(0, 255)] * 3).map(list)


@given(SIDES, SIDES, SCALES, RATIOS, VALUES, st.integers(0, 10**6))
@settings(max_examples=num_examples(150))
@example(1, 30, (0.5, 0.5), (1.0, 1.0), 7, 0)  # nothing fits
def test_a_rectangle_is_erased_and_nothing_else(
    height: int, width: int, scale: tuple[float, float], ratio: tuple[float, float], value: Any, number: int
) -> None:
    pixels, draws = noise(height, width), draws_of(number)
    box = erased_box(height, width, scale, ratio, draws[1:23])
    assert box == reference_erased(height, width, scale, ratio, draws[1:23])
    expected = pixels.copy()
    if box is not None:
        top, left, h, w = box
        assert 0 <= top <= top + h <= height
        assert 0 <= left <= left + w <= width
        expected[top : top + h, left : left + w] = value
    args = {"scale": list(scale), "ratio": list(ratio), "value": value}
    assert np.array_equal(changed("random_erasing", pixels, draws, p=1, **args), expected)


def test_random_levels_are_uniform_and_the_samples_own() -> None:
    pixels = np.zeros((80, 80, 3), np.uint8)
    args: dict[str, Any] = {"p": 1, "scale": [0.5, 0.5], "ratio": [1, 1], "value": "random"}
    one, again, other = (changed("random_erasing", pixels, draws_of(number), **args) for number in (1, 1, 2))
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)
    top, left, h, w = erased_box(80, 80, (0.5, 0.5), (1, 1), draws_of(1)[1:23]) or (0, 0, 0, 0)
    inside = one[top : top + h, left : left + w]
    counts = np.bincount(inside.ravel(), minlength=256)
    mean = inside.size / 256
    assert abs(((counts - mean) ** 2 / mean).sum() - 255) < 5 * math.sqrt(2 * 255)
    assert np.count_nonzero(one) == np.count_nonzero(inside)


# -------------------------------------------------------------------------------------------------------- all five


@pytest.mark.parametrize("kind", ["random_vertical_flip", "random_grayscale", "random_erasing"])
def test_probabilities(kind: str) -> None:
    assert RANDOM_ERASING_DRAWS == MOST_DRAWS
    pixels = noise(12, 12)
    args: dict[str, Any] = {"scale": [0.2, 0.3]} if kind == "random_erasing" else {}
    rows = uniforms(4, np.arange(600), MOST_DRAWS)

    def share(**given: Any) -> float:
        return float(np.mean([not np.array_equal(changed(kind, pixels, row, **args, **given), pixels) for row in rows]))

    assert share(p=0) == 0
    assert share(p=1) == 1
    assert abs(share(p=0.3) - 0.3) < 5 * math.sqrt(0.21 / 600)
    default = 0.1 if kind == "random_grayscale" else 0.5
    assert abs(share() - default) < 5 * math.sqrt(0.25 / 600)


@pytest.mark.parametrize("kind", ARGS)
def test_images_and_masks_of_a_sample_share_the_draws(kind: str) -> None:
    pixels, labels = noise(33, 44), np.random.default_rng(1).choice(np.array([1, 3, 17], np.uint8), (33, 44, 1))
    both = np.repeat(labels, 3, axis=2)
    for number in range(12):
        draws = draws_of(number)
        sample = {
            "a": Image(pixels),
            "mask": Image(labels, True),
            "b": Image(pixels.copy()),
            "c": Image(both),
            "label": 3,
        }
        found = run(kind, sample, draws, **ARGS[kind])
        assert np.array_equal(found["a"].pixels, found["b"].pixels)
        assert found["label"] == 3
        if kind in KEEPS_MASKS:
            assert np.array_equal(found["mask"].pixels, labels)
        else:  # with `nearest` the image of the labels shows where each went
            assert np.array_equal(found["mask"].pixels[:, :, 0], found["c"].pixels[:, :, 0])
    smoothed = run("random_rotation", {"mask": Image(labels, True)}, draws_of(3), degrees=40, interpolation="bicubic")
    assert set(np.unique(smoothed["mask"].pixels)) <= {0, 1, 3, 17}


@pytest.mark.parametrize("kind", ARGS)
def test_fields_views_and_what_is_no_image(kind: str) -> None:
    base = noise(50, 60)
    for number in range(6):
        for view in (base[3:40, 5:50], base[:, ::-1], base.transpose(1, 0, 2)):
            expected = changed(kind, view.copy(), draws_of(number), **ARGS[kind])
            assert np.array_equal(changed(kind, view, draws_of(number), **ARGS[kind]), expected)
    sample: Sample = {"a": Image(base), "b": torch.from_numpy(base).permute(2, 0, 1), "c": base.astype(np.float32)}
    found = run(kind, sample, np.zeros(MOST_DRAWS), fields=["b"], **ARGS[kind])
    assert found["a"].pixels is base
    assert np.array_equal(found["b"].pixels, changed(kind, base, **ARGS[kind]))
    for draws in (np.zeros(MOST_DRAWS), np.full(MOST_DRAWS, 0.999)):  # a mistake is told whatever is drawn
        with pytest.raises(ValueError, match=r"'c' is array float32 \[50, 60, 3\], not an image"):
            run(kind, sample, draws, fields=["c"], **ARGS[kind])
        with pytest.raises(ValueError, match=r"no image.*label \(int\).*decode"):
            run(kind, {"label": 3}, draws, **ARGS[kind])


@pytest.mark.parametrize(
    ("kind", "args", "said"),
    [
        ("random_vertical_flip", {"p": 1.5}, "less than or equal to 1"),
        ("random_rotation", {}, "required"),
        ("random_rotation", {"degrees": -3}, "a number from 0 to 360"),
        ("random_rotation", {"degrees": [30, 10]}, r"-360 <= low <= high <= 360"),
        ("random_rotation", {"degrees": True}, "tuple"),
        ("random_rotation", {"degrees": 3, "interpolation": "cubic"}, "bilinear"),
        ("random_rotation", {"degrees": 3, "fill": 256}, "255"),
        ("random_grayscale", {"p": -0.1}, "greater than or equal to 0"),
        ("gaussian_blur", {}, "required"),
        ("gaussian_blur", {"kernel_size": 4}, "an odd number, .*not 4"),
        ("gaussian_blur", {"kernel_size": 0}, "greater than 0"),
        ("gaussian_blur", {"kernel_size": [5, 9]}, "integer"),
        ("gaussian_blur", {"kernel_size": 3, "sigma": 0}, "low above 0"),
        ("gaussian_blur", {"kernel_size": 3, "sigma": [2, 1]}, "low <= high"),
        ("random_erasing", {"value": 256}, "255"),
        ("random_erasing", {"value": [1, 2]}, "value"),
        ("random_erasing", {"value": "noise"}, "random"),
        ("random_erasing", {"ratio": [0, 1]}, "low above 0"),
        ("random_erasing", {"scale": [0.5, 0.1]}, "low <= high"),
        ("random_erasing", {"scale": [1.5, 2]}, "high <= 1"),
    ],
)
def test_impossible_arguments(kind: str, args: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        STAGES[kind].args.model_validate(args)


# ---------------------------------------------------------------------------------------------------- in a pipeline


class Pictures:
    """Pictures of a few shapes, and where their pixels are from."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": noise(20, 24, seed=index), "number": index}


def pictures() -> Pipeline:
    return Pipeline.dataset(Pictures()).shuffle(seed=5).read()


def all_batches(pipeline: Pipeline, **overrides: Any) -> list[dict[str, Any]]:
    with loaderkit.build(pipeline, overrides=overrides) as loader:
        return [{**batch, "image": batch["image"].clone()} for _ in range(2) for batch in loader]


def test_a_flipped_picture_is_written_flipped() -> None:
    for batch in all_batches(pictures().random_vertical_flip(p=1).batch(5)):
        for image, number in zip(batch["image"], batch["number"], strict=True):
            assert np.array_equal(image.permute(1, 2, 0).numpy(), noise(20, 24, seed=int(number))[::-1])


class PillowPictures(Pictures):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": Pillow.fromarray(noise(20, 24, seed=index))}


@pytest.mark.parametrize(
    "kind", ["random_horizontal_flip", "random_vertical_flip", "random_grayscale", "random_erasing"]
)
def test_pillows_images_are_images_also_where_nothing_is_done_to_them(kind: str) -> None:
    pipeline = getattr(Pipeline.dataset(PillowPictures()).read(), kind)(p=0.5).batch(5)
    assert [tuple(batch["image"].shape[1:]) for batch in all_batches(pipeline)] == 6 * [(3, 20, 24)]


EACH: dict[str, Callable[[Pipeline], Pipeline]] = {
    kind: lambda pipeline, kind=kind, args=args: getattr(pipeline, kind)(**args)  # type: ignore[misc]
    for kind, args in ARGS.items()
}


@pytest.mark.parametrize("kind", EACH)
def test_the_same_bytes_whatever_the_executor_and_new_ones_each_epoch(kind: str) -> None:
    pipeline = EACH[kind](pictures()).batch(5)
    inline = all_batches(pipeline, **{"prefetch.executor": "inline"})
    for concurrency in (1, 3):
        threads = all_batches(pipeline, **{"prefetch.executor": "thread", "prefetch.concurrency": concurrency})
        assert all(torch.equal(a["image"], b["image"]) for a, b in zip(inline, threads, strict=True))
    both = [
        {int(n): i for batch in epoch for n, i in zip(batch["number"], batch["image"], strict=True)}
        for epoch in (inline[: len(inline) // 2], inline[len(inline) // 2 :])
    ]
    assert any(not torch.equal(both[0][number], both[1][number]) for number in range(12))


def test_three_levels_for_one_channel(photos: Path) -> None:
    with pytest.raises(ValueError, match=r"three levels, and the image 'image' one channel: give one level"):
        changed("random_erasing", noise(9, 9, 1), np.full(MOST_DRAWS, 0.9), value=[1, 2, 3])
    pipeline = Pipeline.files(photos, include="**/*.jpg").read().decode().gaussian_blur(3, fields=["mask"]).batch(4)
    with pytest.raises((StageError, ConfigError), match="mask"), loaderkit.build(pipeline) as loader:
        next(iter(loader))


@pytest.mark.parametrize("kind", [kind for kind in ARGS if kind != "random_grayscale"])
def test_a_stage_that_needs_all_pixels_says_so(kind: str, photos: Path) -> None:
    files = Pipeline.files(photos, include="**/*.jpg").read()
    with pytest.raises(ConfigError, match=rf"`random_resized_crop` has to come next, and `{kind}` does"):
        loaderkit.build(EACH[kind](files.decode(scaled=True)).random_resized_crop(8).batch(4))
    with pytest.raises(ConfigError, match=rf"`{kind}` cannot run inside DALI: use `decode: {{device: cpu}}`"):
        loaderkit.build(EACH[kind](files.decode(device="dali-cpu").resize([9, 9])).batch(4))
