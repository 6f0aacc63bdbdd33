"""torchvision's transforms as stages: drawn chains have the same pixels, and what has no stage is named."""

from __future__ import annotations

import operator
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision_standins
from drawn_transforms import check_drawn_chain, transforms_of
from PIL import ImageOps

import loaderkit
from loaderkit.profile.port.recognise import CannotPort
from loaderkit.profile.port.transforms import Ported, _normalize, port_transforms

NUM_CHAINS = 12


@pytest.fixture
def torchvision(monkeypatch: pytest.MonkeyPatch) -> Any:
    return torchvision_standins.install(monkeypatch)


@pytest.mark.parametrize("number", range(NUM_CHAINS))
def test_drawn_chains_give_the_scripts_own_pixels(
    number: int, torchvision: Any, photos: Path, rng: random.Random
) -> None:
    check_drawn_chain(torchvision, torchvision.datasets, photos, rng)


def test_random_steps_have_the_arguments_that_were_drawn(torchvision: Any, rng: random.Random) -> None:
    module = transforms_of(torchvision, rng)
    scale, ratio = (
        sorted([rng.uniform(0.05, 0.5), rng.uniform(0.5, 1)]),
        sorted([rng.uniform(0.5, 1), rng.uniform(1, 2)]),
    )
    bounds = [sorted([rng.uniform(0.2, 1), rng.uniform(1, 2)]) for _ in range(3)]
    hue, degrees = [-rng.uniform(0, 0.5), rng.uniform(0, 0.5)], [-rng.uniform(0, 90), rng.uniform(0, 90)]
    p, padding, fill, sigma = (
        rng.random(),
        rng.randint(1, 9),
        rng.randint(0, 255),
        sorted([rng.random(), 1 + rng.random()]),
    )
    height, width = rng.randint(8, 64), rng.randint(65, 99)
    chain = [
        module.RandomRotation(degrees, expand=True, fill=fill, interpolation="bicubic"),
        module.RandomCrop((height, width), padding=padding, pad_if_needed=True, fill=fill),
        module.RandomResizedCrop((height, height), scale=scale, ratio=ratio),
        module.RandomVerticalFlip(p=p),
        module.ColorJitter(*map(tuple, bounds), hue),
        module.RandomGrayscale(p=p),
        module.GaussianBlur(kernel_size=(5, 5), sigma=sigma),
        module.ToTensor(),
        module.RandomErasing(p=p, scale=scale, ratio=ratio, value=fill / 255),
    ]
    ported = port_transforms(module.Compose(chain))
    filled = {"fill": fill} if fill else {}
    assert ported.is_random
    assert ported.stages == [
        {"random_rotation": {"degrees": degrees, "interpolation": "bicubic", "expand": True} | filled},
        {"random_crop": {"size": [height, width], "padding": padding, "pad_if_needed": True} | filled},
        {"random_resized_crop": {"size": height, "scale": scale, "ratio": ratio}},
        {"random_vertical_flip": {"p": p}},
        {"color_jitter": dict(zip(("brightness", "contrast", "saturation", "hue"), [*bounds, hue], strict=True))},
        {"random_grayscale": {"p": p}},
        {"gaussian_blur": {"kernel_size": 5, "sigma": sigma}},
        {"random_erasing": {"p": p, "scale": scale, "ratio": ratio, "value": fill}},
    ]  # fmt: skip
    stages = ["read", "decode", *ported.stages, {"batch": {"size": 2}}, {"normalize": ported.normalize}]
    config = loaderkit.Pipeline({"source": {"kind": "files", "url": "x"}, "stages": stages}).config
    assert len(config.stages) == len(stages)


UNKNOWN: dict[str, Any] = {
    "another transform": lambda module, rng: module.RandAugment(rng.randint(1, 5)),
    "a function": lambda module, rng: own_function,
    "a lambda of torchvision's": lambda module, rng: module.Lambda(own_function),
    "a method of a picture": lambda module, rng: operator.methodcaller("effect_spread", rng.randint(1, 5)),
    "max_size": lambda module, rng: module.Resize(20, max_size=rng.randint(21, 40)),
    "lanczos": lambda module, rng: module.Resize(20, interpolation=rng.choice(["lanczos", "nearest", 1])),
    "one channel": lambda module, rng: module.Grayscale(1),
    "mirrored padding": lambda module, rng: module.RandomCrop(20, padding=rng.randint(1, 5), padding_mode="reflect"),
    "a turn about a corner": lambda module, rng: module.RandomRotation([-9, 9], center=(0, 0)),
    "a subclass of torchvision's": lambda module, rng: type("Own", (module.Resize,), {})(20),
}
UNKNOWN_FOR_TENSORS: dict[str, Any] = {
    "nearest of tensors": lambda module, rng: module.Resize(20, interpolation="nearest"),
    "bicubic of floats": lambda module, rng: module.Resize(20, interpolation="bicubic"),
    "a turn of tensors": lambda module, rng: module.RandomRotation([-9, 9]),
    "half precision": lambda module, rng: module.ConvertImageDtype(torch.float16),
    "random values": lambda module, rng: module.RandomErasing(value="random"),
    "no level": lambda module, rng: module.RandomErasing(value=rng.choice([0.3, 0.77, 1.5])),
    "a function of tensors": lambda module, rng: torch.abs,
}
UNKNOWN_BEHIND_NORMALIZE: dict[str, Any] = {
    "colours": lambda module, rng: module.ColorJitter((0.5, 1.5)),
    "zeros around it": lambda module, rng: module.CenterCrop(rng.randint(10, 300)),
    "padding": lambda module, rng: module.RandomCrop(20, padding=rng.randint(1, 5)),
    "another value": lambda module, rng: module.RandomErasing(value=rng.uniform(0.1, 1)),
}


def own_function(image: Any) -> Any:
    return image


def known(module: Any, rng: random.Random) -> list[Any]:
    return [module.RandomHorizontalFlip() for _ in range(rng.randint(0, 2))]


def test_all_that_has_no_stage_is_named(torchvision: Any, rng: random.Random) -> None:
    """Some of each kind among others that have one: every one is named, no other, and there are no stages at all."""
    for _ in range(10):
        module = transforms_of(torchvision, rng)
        parts = []
        for makers in (UNKNOWN, UNKNOWN_FOR_TENSORS, UNKNOWN_BEHIND_NORMALIZE):
            names = rng.sample([*makers], rng.randint(0, 2))
            parts.append([makers[name](module, rng) for name in names])
        if not any(parts):
            continue
        first, second, third = parts
        chain = [
            *known(module, rng),
            *first,
            *known(module, rng),
            module.ToTensor(),
            *second,
            module.Normalize([0.5] * 3, [0.5] * 3),
            *third,
            *known(module, rng),
        ]
        with pytest.raises(ExceptionGroup) as raised:
            port_transforms(module.Compose(chain))
        assert [error.subject for error in raised.value.exceptions if isinstance(error, CannotPort)] == [
            getattr(one, "lambd", one)  # the function, which has a place in the script
            for one in (*first, *second, *third)
        ]


def test_a_picture_that_no_batch_can_hold_is_refused(torchvision: Any) -> None:
    with pytest.raises(ExceptionGroup, match="without a stage"):
        port_transforms(torchvision.transforms.Compose([torchvision.transforms.Resize(8)]))
    with pytest.raises(ExceptionGroup, match="without a stage"):
        port_transforms(None)


def test_upright_pictures_are_decode_s(torchvision: Any) -> None:
    module = torchvision.transforms
    assert port_transforms(module.Compose([ImageOps.exif_transpose, module.ToTensor()])).upright
    with pytest.raises(ExceptionGroup):  # turned when it was cut already
        port_transforms(module.Compose([module.CenterCrop(8), ImageOps.exif_transpose, module.ToTensor()]))


def test_normalised_numbers_are_composed(rng: random.Random) -> None:
    ported, levels = Ported(form="unit"), torch.arange(256).double()
    expected = levels / 255
    for _ in range(rng.randint(1, 4)):
        mean, std = rng.uniform(-1, 1), rng.uniform(0.1, 3)
        one = torchvision_standins.Normalize([mean] * 3, [std] * 3)
        _normalize(one, ported)
        expected = (expected - mean) / std
    assert torch.allclose((levels / 255 - ported.mean[0]) / ported.std[0], expected, rtol=1e-12)
