from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from num_examples import num_examples
from numpy.typing import NDArray
from PIL import Image as Pillow
from pydantic import ValidationError

from loaderkit import native
from loaderkit.samples.sample import Sample
from loaderkit.samples.values import Image
from loaderkit.sampling.random import uniforms
from loaderkit.stages.image import geometry

Pixels = NDArray[np.uint8]
Draws = NDArray[np.float64]
NO_DRAWS = np.empty(0)


def photo(height: int, width: int, seed: int = 0) -> Pixels:
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    smooth = np.stack([y * 255 / max(1, height - 1), x * 255 / max(1, width - 1), 127 + 120 * np.sin((x + y) / 7)], 2)
    return (smooth + rng.normal(0, 15, smooth.shape)).clip(0, 255).astype(np.uint8)


def labels(height: int, width: int) -> Pixels:
    return np.random.default_rng(1).choice(np.array([0, 3, 17, 255], np.uint8), (height, width, 1))


def apply(stage: geometry.SampleFunction, sample: Sample, draws: Draws, scratch: Any = None) -> None:
    """Run a stage on one sample, and what it leaves to be resized."""
    jobs = stage(sample, draws, scratch)
    if jobs:
        native.resample(jobs)


def run(stage: geometry.SampleFunction, pixels: Pixels, draws: Draws = NO_DRAWS) -> Pixels:
    """The stage's result for one image; what it was given must stay as it was."""
    before = pixels.copy()
    sample: Sample = {"image": Image(pixels), "label": 3}
    apply(stage, sample, draws)
    assert np.array_equal(pixels, before), "the stage wrote into its input"
    assert sample["label"] == 3
    assert sample["image"].pixels.dtype == np.uint8
    found: Pixels = sample["image"].pixels
    return found


def draws_of(number: int, num_draws: int, key: int = 1) -> Draws:
    row: Draws = uniforms(key, np.array([number]), num_draws)[0]
    return row


# ------------------------------------------------------------------------------------------------------------ resize


def resized(pixels: Pixels, size: Any, **options: Any) -> Pixels:
    return run(geometry.resize(geometry.ResizeArgs(size=size, **options)), pixels)


@pytest.mark.parametrize("target", [(224, 224), (37, 61), (97, 131), (300, 40), (500, 700), (1, 1), (98, 130)])
@pytest.mark.parametrize("source", [(97, 131), (333, 500), (64, 48)])
def test_resize_is_pillows_antialiased_bilinear(source: tuple[int, int], target: tuple[int, int]) -> None:
    pixels = photo(*source)
    expected = np.asarray(Pillow.fromarray(pixels).resize(target[::-1], Pillow.Resampling.BILINEAR))
    found = resized(pixels, target)
    assert found.shape == (*target, 3)
    difference = np.abs(found.astype(int) - expected)
    assert difference.mean() <= 0.5
    assert difference.max() <= 2


@pytest.mark.parametrize("view", ["crop", "columns", "backwards", "transposed"])
def test_resize_of_views(view: str) -> None:
    whole = photo(120, 160)
    pixels = {
        "crop": whole[13:90, 21:121],
        "columns": whole[:, ::2],
        "backwards": whole[:, ::-1],
        "transposed": whole.transpose(1, 0, 2),
    }[view]
    expected = np.asarray(Pillow.fromarray(pixels.copy()).resize((64, 50), Pillow.Resampling.BILINEAR))
    assert np.abs(resized(pixels, (50, 64)).astype(int) - expected).mean() <= 0.5


def test_resize_of_memory_that_cannot_be_written() -> None:
    pixels = photo(40, 50)
    expected = resized(pixels, (20, 30))
    pixels.flags.writeable = False
    assert np.array_equal(resized(pixels, (20, 30)), expected)
    assert np.array_equal(resized(pixels, (40, 50)), pixels)


@pytest.mark.parametrize("channels", [1, 3])
def test_bicubic_and_nearest_are_pillows(channels: int) -> None:
    pixels = np.ascontiguousarray(photo(97, 131)[:, :, :channels])
    source = Pillow.fromarray(pixels[:, :, 0] if channels == 1 else pixels)
    for name, method in (("bicubic", Pillow.Resampling.BICUBIC), ("nearest", Pillow.Resampling.NEAREST)):
        for target in ((50, 60), (200, 150)):
            expected = np.asarray(source.resize(target[::-1], method)).reshape(*target, channels)
            found = resized(pixels, target, interpolation=name)
            assert np.abs(found.astype(int) - expected).mean() <= (0.5 if name == "bicubic" else 0)


def bilinear_without_antialias(pixels: Pixels, height: int, width: int) -> NDArray[np.float64]:
    """Two neighbours in each direction, half-pixel centres, borders repeated."""
    values = pixels.astype(float)
    for axis, size in ((0, height), (1, width)):
        length = values.shape[axis]
        centre = ((np.arange(size) + 0.5) * length / size - 0.5).clip(0, length - 1)
        low = np.floor(centre).astype(int)
        high = np.minimum(low + 1, length - 1)
        share = (centre - low).reshape([-1 if a == axis else 1 for a in range(3)])
        values = np.take(values, low, axis) * (1 - share) + np.take(values, high, axis) * share
    return values


@pytest.mark.parametrize("target", [(40, 50), (200, 300)])
def test_without_antialias_two_neighbours_count(target: tuple[int, int]) -> None:
    pixels = photo(97, 131)
    found = resized(pixels, target, antialias=False)
    assert np.abs(found - bilinear_without_antialias(pixels, *target)).max() <= 1.5
    if target[0] < 97:
        assert np.abs(found.astype(int) - resized(pixels, target)).mean() > 1


@given(st.integers(1, 400), st.integers(1, 400), st.integers(1, 60))
@settings(max_examples=num_examples(60))
@example(5, 5, 7)
@example(500, 333, 60)
def test_one_number_is_the_shorter_edge(height: int, width: int, size: int) -> None:
    found = resized(np.zeros((height, width, 3), np.uint8), size)
    short, long = min(height, width), max(height, width)
    new_long = int(size * long / short)
    assert found.shape[:2] == ((size, new_long) if height <= width else (new_long, size))


def test_a_pair_is_height_and_width() -> None:
    assert resized(photo(50, 70), (20, 90)).shape == (20, 90, 3)
    assert resized(photo(50, 70), [20, 90]).shape == (20, 90, 3)


def test_memory_to_reuse_changes_no_pixel() -> None:
    stages = [
        geometry.resize(geometry.ResizeArgs(size=(40, 50))),
        geometry.random_resized_crop(geometry.RandomResizedCropArgs(size=32)),
        geometry.random_horizontal_flip(geometry.RandomHorizontalFlipArgs(p=1)),
    ]
    for stage in stages:
        scratch: dict[str, Any] = {}
        for number in range(5):
            pair = photo(60, 80, number), photo(60, 80, number + 50)
            fresh: Sample = {"a": Image(pair[0]), "b": Image(pair[1])}
            reused: Sample = {"a": Image(pair[0]), "b": Image(pair[1])}
            apply(stage, fresh, draws_of(number, 22))
            apply(stage, reused, draws_of(number, 22), scratch)
            for name in ("a", "b"):
                assert np.array_equal(fresh[name].pixels, reused[name].pixels)


# ------------------------------------------------------------------------------------------------------- center_crop


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40), st.integers(1, 40))
@example(5, 5, 2, 2)
@example(7, 6, 4, 3)
@example(3, 9, 4, 4)
def test_center_crop(height: int, width: int, crop_height: int, crop_width: int) -> None:
    pixels = photo(height, width)
    found = run(geometry.center_crop(geometry.CenterCropArgs(size=(crop_height, crop_width))), pixels)
    assert found.shape == (crop_height, crop_width, 3)
    # torchvision's: pad with zeros, the larger half at the end; then cut at int(round(rest / 2)).
    above, before = max(0, crop_height - height) // 2, max(0, crop_width - width) // 2
    padded = np.zeros((max(height, crop_height), max(width, crop_width), 3), np.uint8)
    padded[above : above + height, before : before + width] = pixels
    top = int(round((padded.shape[0] - crop_height) / 2.0))  # noqa: RUF046 - as torchvision writes it
    left = int(round((padded.shape[1] - crop_width) / 2.0))  # noqa: RUF046
    assert np.array_equal(found, padded[top : top + crop_height, left : left + crop_width])


def test_center_crop_of_one_number() -> None:
    assert run(geometry.center_crop(geometry.CenterCropArgs(size=10)), photo(30, 40)).shape == (10, 10, 3)


# ------------------------------------------------------------------------------------------------------- random_crop


@given(
    st.integers(1, 20), st.integers(1, 20), st.integers(1, 20), st.integers(1, 20), st.integers(0, 5),
    st.booleans(), st.integers(0, 255), st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True),
)  # fmt: skip
def test_random_crop(
    height: int, width: int, crop_height: int, crop_width: int, padding: int, pad_if_needed: bool, fill: int,
    first: float, second: float,
) -> None:  # fmt: skip
    args = geometry.RandomCropArgs(
        size=(crop_height, crop_width), padding=padding, pad_if_needed=pad_if_needed, fill=fill
    )
    pixels = photo(height, width)
    rows, columns = padding, padding
    if pad_if_needed:
        rows += max(0, crop_height - height - 2 * padding)
        columns += max(0, crop_width - width - 2 * padding)
    padded = np.full((height + 2 * rows, width + 2 * columns, 3), fill, np.uint8)
    padded[rows : rows + height, columns : columns + width] = pixels
    stage = geometry.random_crop(args)
    draws = np.array([first, second])
    if padded.shape[0] < crop_height or padded.shape[1] < crop_width:
        with pytest.raises(ValueError, match=f"smaller than the crop of {crop_width} x {crop_height}"):
            run(stage, pixels, draws)
        return
    top = math.floor(first * (padded.shape[0] - crop_height + 1))
    left = math.floor(second * (padded.shape[1] - crop_width + 1))
    assert np.array_equal(run(stage, pixels, draws), padded[top : top + crop_height, left : left + crop_width])


def test_every_place_of_a_random_crop_is_as_likely() -> None:
    pixels = np.zeros((9, 12, 3), np.uint8)
    pixels[:, :, 0] = np.arange(9)[:, None]
    pixels[:, :, 1] = np.arange(12)[None, :]
    stage = geometry.random_crop(geometry.RandomCropArgs(size=(4, 5)))
    counts = np.zeros((6, 8), int)
    for row in uniforms(3, np.arange(4800), 2):
        corner = run(stage, pixels, row)[0, 0]
        counts[corner[0], corner[1]] += 1
    statistic = ((counts - 100) ** 2 / 100).sum()
    assert abs(statistic - 47) < 4 * math.sqrt(2 * 47)


# ----------------------------------------------------------------------------------------------- random_resized_crop


def reference_box(
    height: int, width: int, scale: tuple[float, float], ratio: tuple[float, float], draws: Draws
) -> tuple[int, int, int, int]:
    """torchvision.transforms.v2.RandomResizedCrop.make_params, with its random numbers taken from `draws`:
    area of try k from draw k, ratio of try k from draw 10 + k, place from draws 20 and 21."""
    area = height * width
    log_ratio = (math.log(ratio[0]), math.log(ratio[1]))
    for k in range(10):
        target_area = area * (scale[0] + (scale[1] - scale[0]) * draws[k])
        aspect_ratio = math.exp(log_ratio[0] + (log_ratio[1] - log_ratio[0]) * draws[10 + k])
        w = int(round(math.sqrt(target_area * aspect_ratio)))  # noqa: RUF046 - as torchvision writes it
        h = int(round(math.sqrt(target_area / aspect_ratio)))  # noqa: RUF046
        if 0 < w <= width and 0 < h <= height:
            return math.floor(draws[20] * (height - h + 1)), math.floor(draws[21] * (width - w + 1)), h, w
    in_ratio = float(width) / float(height)
    if in_ratio < min(ratio):
        w = width
        h = int(round(w / min(ratio)))  # noqa: RUF046
    elif in_ratio > max(ratio):
        h = height
        w = int(round(h * max(ratio)))  # noqa: RUF046
    else:
        w, h = width, height
    return (height - h) // 2, (width - w) // 2, h, w


SCALES = st.tuples(st.floats(0.01, 1), st.floats(0, 1)).map(lambda s: (s[0], min(2.0, s[0] + s[1])))
RATIOS = st.tuples(st.floats(0.2, 3), st.floats(1, 3)).map(lambda r: (r[0], r[0] * r[1]))


@given(st.integers(4, 600), st.integers(4, 600), SCALES, RATIOS, st.integers(0, 10**6))
@settings(max_examples=num_examples(300))
def test_crop_boxes_are_torchvisions_and_lie_inside(
    height: int, width: int, scale: tuple[float, float], ratio: tuple[float, float], number: int
) -> None:
    draws = draws_of(number, 22)
    top, left, h, w = geometry.crop_box(height, width, scale, ratio, draws)
    assert (top, left, h, w) == reference_box(height, width, scale, ratio, draws)
    assert 0 <= top <= top + h <= height
    assert 0 <= left <= left + w <= width
    assert h > 0
    assert w > 0


@given(st.integers(1, 4), st.integers(1, 60), RATIOS, st.booleans(), st.integers(0, 1000))
@example(1, 5, (3.0, 4.0), True, 0)
def test_even_a_strip_of_one_pixel_gives_a_piece(
    short: int, long: int, ratio: tuple[float, float], upright: bool, number: int
) -> None:
    height, width = (long, short) if upright else (short, long)
    draws = draws_of(number, 22)
    top, left, h, w = geometry.crop_box(height, width, (0.08, 1.0), ratio, draws)
    assert 0 <= top < top + h <= height
    assert 0 <= left < left + w <= width


def test_the_fallback_is_the_largest_centred_piece_of_an_allowed_ratio() -> None:
    tenths = np.full(22, 0.999)
    assert geometry.crop_box(100, 1000, (1.0, 1.0), (0.75, 4 / 3), tenths) == (0, 433, 100, 133)
    assert geometry.crop_box(1000, 90, (1.0, 1.0), (0.75, 4 / 3), tenths) == (440, 0, 120, 90)
    # A scale above what fits, and a ratio that is fine: the whole image.
    assert geometry.crop_box(100, 100, (4.0, 4.0), (1.0, 1.0), tenths) == (0, 0, 100, 100)


def test_areas_and_ratios_have_the_right_distributions() -> None:
    """A wide frame and small scales, so that the first try nearly always fits."""
    boxes = np.array(
        [geometry.crop_box(2000, 2000, (0.1, 0.5), (0.75, 4 / 3), row) for row in uniforms(5, np.arange(5000), 22)]
    )
    areas = boxes[:, 2] * boxes[:, 3] / 2000**2
    ratios = np.log(boxes[:, 3] / boxes[:, 2])
    for values, low, high in ((areas, 0.1, 0.5), (ratios, math.log(0.75), math.log(4 / 3))):
        assert values.min() > low - 0.01
        assert values.max() < high + 0.01
        counts = np.bincount(((values - low) / (high - low) * 10).astype(int).clip(0, 9), minlength=10)
        statistic = ((counts - 500) ** 2 / 500).sum()
        assert abs(statistic - 9) < 4 * math.sqrt(18)


@pytest.mark.parametrize("size", [32, (20, 41)])
def test_random_resized_crop_cuts_then_resizes(size: int | tuple[int, int]) -> None:
    pixels = photo(90, 120)
    stage = geometry.random_resized_crop(geometry.RandomResizedCropArgs(size=size))
    target = (size, size) if isinstance(size, int) else size
    for number in range(10):
        draws = draws_of(number, geometry.RANDOM_RESIZED_CROP_DRAWS)
        top, left, h, w = reference_box(90, 120, (0.08, 1.0), (3 / 4, 4 / 3), draws)
        piece = Pillow.fromarray(pixels[top : top + h, left : left + w].copy())
        expected = np.asarray(piece.resize(target[::-1], Pillow.Resampling.BILINEAR))
        difference = np.abs(run(stage, pixels, draws).astype(int) - expected)
        assert difference.mean() <= 0.5
        assert difference.max() <= 2


# -------------------------------------------------------------------------------------------------------------- flip


def test_a_flip_is_the_exact_mirror() -> None:
    pixels = photo(31, 47)
    stage = geometry.random_horizontal_flip(geometry.RandomHorizontalFlipArgs(p=0.3))
    assert np.array_equal(run(stage, pixels, np.array([0.299])), pixels[:, ::-1])
    assert np.array_equal(run(stage, pixels, np.array([0.3])), pixels)
    assert np.array_equal(run(stage, pixels[:, ::-1], np.array([0.0])), pixels)
    assert np.array_equal(run(stage, pixels[5:20, 3:30], np.array([0.0])), pixels[5:20, 3:30][:, ::-1])


@pytest.mark.parametrize(("p", "low", "high"), [(0.0, 0, 0), (1.0, 2000, 2000), (0.5, 900, 1100), (0.1, 150, 250)])
def test_flips_come_with_their_probability(p: float, low: int, high: int) -> None:
    pixels = np.array([[[1], [2]]], np.uint8)
    stage = geometry.random_horizontal_flip(geometry.RandomHorizontalFlipArgs(p=p))
    num_flipped = sum(int(run(stage, pixels, row)[0, 0, 0]) == 2 for row in uniforms(11, np.arange(2000), 1))
    assert low <= num_flipped <= high


# ------------------------------------------------------------------------------------------------------------- masks

STAGES: dict[str, geometry.SampleFunction] = {
    "resize": geometry.resize(geometry.ResizeArgs(size=40)),
    "center_crop": geometry.center_crop(geometry.CenterCropArgs(size=40)),
    "random_crop": geometry.random_crop(geometry.RandomCropArgs(size=40)),
    "random_resized_crop": geometry.random_resized_crop(geometry.RandomResizedCropArgs(size=40)),
    "random_horizontal_flip": geometry.random_horizontal_flip(geometry.RandomHorizontalFlipArgs(p=0.5)),
}


@pytest.mark.parametrize("name", STAGES)
def test_a_mask_stays_on_its_image(name: str) -> None:
    """The image is drawn from the mask, in blocks: after any stage its labels must still be where the colours are."""
    classes = np.kron(np.random.default_rng(0).integers(0, 2, (6, 8)), np.ones((15, 15))).astype(np.uint8)
    image = np.repeat(classes[:, :, None] * 255, 3, axis=2).astype(np.uint8)
    mask = np.where(classes[:, :, None] == 1, 17, 3).astype(np.uint8)
    for number in range(20):
        sample: Sample = {"image": Image(image), "mask": Image(mask, mask=True)}
        apply(STAGES[name], sample, draws_of(number, 22))
        assert sample["mask"].mask
        assert set(np.unique(sample["mask"].pixels)) <= {3, 17}
        assert sample["mask"].pixels.shape[2] == 1
        assert sample["mask"].pixels.shape[:2] == sample["image"].pixels.shape[:2]
        bright = sample["image"].pixels[:, :, 0] > 127
        agree = bright == (sample["mask"].pixels[:, :, 0] == 17)
        # Only pixels on the border of two blocks may disagree, by interpolation.
        assert agree.mean() > 0.93


def test_masks_are_resized_by_the_nearest_pixel() -> None:
    mask = labels(60, 80)
    for target in ((32, 48), (120, 96)):  # no pixel lies exactly between two
        sample: Sample = {"image": Image(photo(60, 80)), "mask": Image(mask, mask=True)}
        apply(geometry.resize(geometry.ResizeArgs(size=target)), sample, NO_DRAWS)
        expected = np.asarray(Pillow.fromarray(mask[:, :, 0]).resize(target[::-1], Pillow.Resampling.NEAREST))
        assert np.array_equal(sample["mask"].pixels[:, :, 0], expected)


@pytest.mark.parametrize("name", ["random_crop", "random_resized_crop"])
def test_images_of_differing_size_cannot_share_a_crop(name: str) -> None:
    sample: Sample = {"left": Image(photo(60, 80)), "right": Image(photo(61, 80))}
    with pytest.raises(ValueError, match=r"differ in size.*left 80 x 60.*right 80 x 61"):
        apply(STAGES[name], sample, draws_of(0, 22))


def test_fields_chooses_and_names_what_is_wrong() -> None:
    left, right = photo(60, 80), photo(50, 80)
    stage = geometry.random_crop(geometry.RandomCropArgs(size=10, fields=("left",)))
    sample: Sample = {"left": Image(left), "right": Image(right), "text": "x"}
    apply(stage, sample, draws_of(0, 2))
    assert sample["left"].pixels.shape == (10, 10, 3)
    assert sample["right"].pixels is right
    with pytest.raises(ValueError, match=r"no field 'left', only right, text"):
        stage({"right": Image(right), "text": "x"}, draws_of(0, 2), None)
    with pytest.raises(ValueError, match="'left' is text"):
        stage({"left": "x"}, draws_of(0, 2), None)


@pytest.mark.parametrize("name", STAGES)
def test_a_sample_without_images(name: str) -> None:
    with pytest.raises(ValueError, match=r"no image.*label \(int\).*decode"):
        apply(STAGES[name], {"label": 3}, np.zeros(22))


@pytest.mark.parametrize("name", STAGES)
def test_nothing_is_written_into_what_came_in(name: str) -> None:
    base = photo(90, 110)
    view = base[5:85, 5:105]
    for number in range(8):
        run(STAGES[name], view, draws_of(number, 22))
    assert np.array_equal(base, photo(90, 110))


@pytest.mark.parametrize(
    ("args", "values"),
    [
        (geometry.ResizeArgs, {"size": 0}),
        (geometry.ResizeArgs, {"size": (3,)}),
        (geometry.ResizeArgs, {"size": (3, 4, 5)}),
        (geometry.ResizeArgs, {"size": 2.5}),
        (geometry.ResizeArgs, {"size": "224"}),
        (geometry.ResizeArgs, {"size": 224, "interpolation": "cubic"}),
        (geometry.CenterCropArgs, {}),
        (geometry.RandomCropArgs, {"size": 3, "padding": -1}),
        (geometry.RandomCropArgs, {"size": 3, "fill": 256}),
        (geometry.RandomResizedCropArgs, {"size": 3, "scale": (0.1,)}),
        (geometry.RandomResizedCropArgs, {"size": 3, "scale": (1.0, 0.08)}),
        (geometry.RandomResizedCropArgs, {"size": 3, "scale": (-0.1, 1.0)}),
        (geometry.RandomResizedCropArgs, {"size": 3, "ratio": (0.0, 1.0)}),
        (geometry.RandomResizedCropArgs, {"size": 3, "ratio": (4 / 3, 3 / 4)}),
        (geometry.RandomResizedCropArgs, {"size": 3, "ratio": (-1.0, 1.0)}),
        (geometry.RandomHorizontalFlipArgs, {"p": 1.5}),
        (geometry.RandomHorizontalFlipArgs, {"p": -0.1}),
        (geometry.RandomHorizontalFlipArgs, {"fields": ()}),
    ],
)
def test_impossible_arguments(args: type[Any], values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        args(**values)
