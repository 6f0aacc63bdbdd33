from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import loaderkit
from loaderkit.errors import LoaderkitError, StageError

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Pictures:
    """Images of one size with all levels in them, and a mask."""

    def __init__(self, num: int = 12, channels: int = 3) -> None:
        self.num = num
        self.channels = channels

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> dict[str, Any]:
        rng = np.random.default_rng(index)
        shape = (self.channels, 20, 24)
        return {
            "image": torch.from_numpy(rng.integers(0, 256, shape).astype(np.uint8)),
            "label": index,
        }


def nothing(batch: dict[str, Any]) -> None:
    """A call that does nothing: with it before, `normalize` works on the finished batch, not on slots."""


def pipeline(data: Pictures, *, late: bool = False, **args: Any) -> loaderkit.Pipeline:
    # `decode` with the field named turns what the data set gives into an image.
    made = loaderkit.Pipeline.dataset(data).shuffle("none").read().decode(fields=["image"]).batch(5)
    if late:
        made = made.call(nothing)
    return made.normalize(**args).prefetch(executor="inline")


def images_of(data: Pictures, **args: Any) -> torch.Tensor:
    with loaderkit.build(pipeline(data, **args)) as loader:
        return torch.cat([batch["image"] for batch in loader])


def pixels_of(data: Pictures) -> torch.Tensor:
    return torch.stack([data[i]["image"] for i in range(len(data))])


def reference(pixels: torch.Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> torch.Tensor:
    means, stds = (torch.tensor(v, dtype=torch.float64).reshape(1, -1, 1, 1) for v in (mean, std))
    return (pixels.double() / 255 - means) / stds


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("args", "mean", "std"),
    [
        ({}, MEAN, STD),
        ({"mean": "imagenet", "std": "imagenet"}, MEAN, STD),
        ({"mean": [0.5, 0.4, 0.3], "std": [0.1, 0.2, 1]}, (0.5, 0.4, 0.3), (0.1, 0.2, 1)),
        ({"mean": [0, 0, 0], "std": [1, 1, 1]}, (0, 0, 0), (1, 1, 1)),
        ({"mean": [0.5], "std": [0.5]}, (0.5,), (0.5,)),
    ],
)
def test_the_formula(args: dict[str, Any], mean: tuple[float, ...], std: tuple[float, ...], late: bool) -> None:
    data = Pictures()
    found = images_of(data, late=late, **args)
    assert found.dtype == torch.float32
    assert found.shape == (12, 3, 20, 24)
    error = (found.double() - reference(pixels_of(data), mean, std)).abs()
    # 1e-6 of what stands for the whole range of 255 levels in this scale.
    assert error.max() <= 1e-6 * max(1.0, 1 / min(std))


def test_in_slots_and_on_the_batch_are_equal_bit_for_bit() -> None:
    data = Pictures(40)
    for args in ({}, {"mean": [0.1, 0.7, 0.3], "std": [0.3, 0.9, 0.17]}):
        early, late = images_of(data, **args), images_of(data, late=True, **args)
        assert torch.equal(early.view(torch.int32), late.view(torch.int32))


@pytest.mark.parametrize("executor", ["inline", "thread"])
def test_every_level(executor: Any) -> None:
    class Levels(Pictures):
        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"image": torch.arange(256, dtype=torch.uint8).reshape(1, 16, 16).repeat(3, 1, 1)}

    made = pipeline(Levels(3)).prefetch(executor=executor)
    with loaderkit.build(made) as loader:
        (batch,) = loader
    expected = reference(pixels_of(Levels(3)), MEAN, STD)
    assert (batch["image"].double() - expected).abs().max() <= 5e-6


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [("float16", torch.float16, 2e-3), ("bfloat16", torch.bfloat16, 2e-2), ("float64", torch.float64, 5e-6)],
)
def test_other_dtypes(name: str, dtype: torch.dtype, tolerance: float, late: bool) -> None:
    data = Pictures()
    found = images_of(data, dtype=name, late=late)
    assert found.dtype == dtype
    assert (found.double() - reference(pixels_of(data), MEAN, STD)).abs().max() <= tolerance
    assert torch.equal(found, images_of(data, late=True).to(dtype))


def test_other_fields_stay_and_fields_chooses() -> None:
    class Pairs(Pictures):
        def __getitem__(self, index: int) -> dict[str, Any]:
            sample = super().__getitem__(index)
            return {**sample, "other": sample["image"], "raw": sample["image"]}

    made = (
        loaderkit.Pipeline.dataset(Pairs(5))
        .shuffle("none")
        .read()
        .decode(fields=["image", "other"])
        .batch(5)
        .normalize(fields=["other"])
        .prefetch(executor="inline")
    )
    with loaderkit.build(made) as loader:
        (batch,) = loader
    pixels = pixels_of(Pictures(5))
    assert torch.equal(batch["image"], pixels)
    assert torch.equal(batch["raw"], pixels)
    assert (batch["other"].double() - reference(pixels, MEAN, STD)).abs().max() <= 5e-6
    assert batch["label"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("channels", "args"),
    [
        (3, {"mean": [0.5, 0.5], "std": [0.5, 0.5]}),
        (3, {"mean": [0.5, 0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5, 0.5]}),
        (1, {}),
    ],
)
def test_the_wrong_number_of_channels(channels: int, args: dict[str, Any], late: bool) -> None:
    with pytest.raises(LoaderkitError, match=r"(?i)normalize.*channel"):
        images_of(Pictures(channels=channels), late=late, **args)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"std": [0.5, 0.0, 0.5]}, "std"),
        ({"std": [0.5, -1, 0.5]}, "std"),
        ({"mean": "coco"}, "mean"),
        ({"mean": ["a"]}, "mean"),
        ({"mean": []}, "mean"),
        ({"mean": [0.5, 0.5], "std": [0.5, 0.5, 0.5]}, "normalize"),
        ({"dtype": "int8"}, "dtype"),
    ],
)
def test_impossible_arguments(args: dict[str, Any], said: str) -> None:
    with pytest.raises(loaderkit.errors.ConfigError, match=said):
        _ = pipeline(Pictures(), **args).config


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ({"mean": [123.675, 116.28, 103.53], "std": [58.395, 57.12, 57.375]}, "mean"),
        ({"mean": [123.675, 116.28, 103.53], "std": [0.229, 0.224, 0.225]}, "mean"),
        ({"mean": [0.485, 0.456, 0.406], "std": [58.395, 57.12, 57.375]}, "std"),
        ({"mean": [0], "std": [255]}, "std"),
        ({"mean": [123.675, 116.28, 103.53]}, "mean"),
        ({"std": [58.395, 57.12, 57.375]}, "std"),
        ({"mean": [102, 0, 0], "std": [1, 1, 1]}, "mean"),
    ],
)
def test_mean_and_std_of_levels_are_refused(args: dict[str, Any], named: str) -> None:
    with pytest.raises(loaderkit.errors.ConfigError, match=f"`{named}` is that of levels, .* 255, or by 65535"):
        loaderkit.build(pipeline(Pictures(), **args))


@pytest.mark.parametrize(
    ("mean", "std"),
    [((1,), (1,)), ((0,), (1 / 255,)), ((-1,), (2,)), ((1.9,), (0.1,)), ((0.485 / 255,), (0.229 / 255,))],
)
def test_other_scales_that_may_be_meant_are_taken(mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    data = Pictures()
    expected = reference(pixels_of(data), mean, std).float()
    torch.testing.assert_close(images_of(data, mean=mean, std=std), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("late", [False, True])
def test_there_must_be_images(late: bool) -> None:
    class Numbers(Pictures):
        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"x": torch.zeros(3)}

    made = loaderkit.Pipeline.dataset(Numbers()).read().batch(5)
    made = (made.call(nothing) if late else made).normalize().prefetch(executor="inline")
    with loaderkit.build(made) as loader, pytest.raises(StageError, match=r"normalize.*no image"):
        next(iter(loader))


def test_named_fields_must_be_images() -> None:
    for field in ("label", "absent"):
        made = (
            loaderkit.Pipeline.dataset(Pictures())
            .read()
            .decode(fields=["image"])
            .batch(5)
            .normalize(fields=[field])
            .prefetch(executor="inline")
        )
        with loaderkit.build(made) as loader, pytest.raises(StageError, match=f"normalize.*'{field}'"):
            next(iter(loader))


def test_twice_is_an_error() -> None:
    made = pipeline(Pictures()).normalize()
    with (
        pytest.raises(LoaderkitError, match=r"normalize"),
        loaderkit.build(made) as loader,
    ):
        next(iter(loader))


def test_a_delivered_batch_can_be_changed_without_harm() -> None:
    data = Pictures(20)
    expected = reference(pixels_of(data), MEAN, STD)
    with loaderkit.build(pipeline(data)) as loader:
        place = 0
        for batch in loader:
            images = batch["image"]
            assert (images.double() - expected[place : place + len(images)]).abs().max() <= 5e-6
            place += len(images)
            images.fill_(float("nan"))
            del images, batch
