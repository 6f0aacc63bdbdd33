"""Chains of torchvision's transforms, drawn: of its stand-ins, or of torchvision itself."""

from __future__ import annotations

import functools
import operator
import random
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageOps
from torch.utils.data import DataLoader

import loaderkit
from loaderkit.profile.port.check import check_samples
from loaderkit.profile.port.loader import PortedPipeline, port_loader

_MOST_LEVELS = 5.01  # of four resizes, one on the other
_ENDS = ("ToTensor", "PILToTensor", "ToImage", "ToDtype", "ConvertImageDtype", "Normalize")


def transforms_of(torchvision: Any, rng: random.Random) -> Any:
    """Those of v1 or v2."""
    return rng.choice([torchvision.transforms, torchvision.transforms.v2])


def _size(rng: random.Random) -> Any:
    return rng.choice([rng.randint(12, 60), [rng.randint(12, 60), rng.randint(12, 60)]])


def _end(module: Any, rng: random.Random) -> list[Any]:
    """What makes a tensor of a picture, and maybe normalises it, once or twice."""
    ends = [[module.ToTensor()], [module.PILToTensor(), module.ConvertImageDtype(torch.float32)]]
    if hasattr(module, "ToImage"):
        ends = [[module.ToImage(), module.ToDtype(torch.float32, scale=scale)] for scale in (True, False)]
    if rng.random() < 0.2:
        return [module.PILToTensor()]
    count = rng.randint(0, 2)
    numbers = [[rng.uniform(0.1, 0.9) for _ in range(3)] for _ in range(2 * count)]
    return [*rng.choice(ends), *(module.Normalize(*numbers[2 * n : 2 * n + 2]) for n in range(count))]


def _chain(module: Any, modes: Any, rng: random.Random) -> list[Any]:
    """Steps without chance, so that pixels can be compared, and one at the end that makes all pictures alike in size."""
    mode = rng.choice([modes.BILINEAR, modes.BICUBIC])
    resize = functools.partial(Image.Image.resize, size=(rng.randint(12, 40), 31), resample=Image.Resampling.BILINEAR)
    steps: list[Any] = [
        lambda: module.Resize(rng.randint(20, 80), interpolation=mode),
        lambda: module.CenterCrop(_size(rng)),
        lambda: module.RandomHorizontalFlip(p=float(rng.random() < 0.5)),
        lambda: module.RandomVerticalFlip(p=float(rng.random() < 0.5)),
        lambda: module.Grayscale(3),
        lambda: module.Compose([module.RandomHorizontalFlip(p=1.0)]),
        lambda: operator.methodcaller("convert", "RGB"),
        lambda: ImageOps.mirror,
        lambda: resize,
    ]
    chosen = [rng.choice(steps)() for _ in range(rng.randint(0, 3))]
    return [*chosen, rng.choice([module.CenterCrop, module.Resize])([rng.randint(12, 50), rng.randint(12, 50)])]


def checked(loader: Any) -> PortedPipeline:
    """Ported, and found to have the same samples."""
    ported = port_loader(loader, "drawn")
    assert not ported.unported, ported.unported
    ported, check = check_samples(ported, loaderkit.build)
    assert not ported.unported, ported.unported
    assert check is not None
    assert check.num_samples > 0
    return ported


def _level(transform: Any) -> torch.Tensor:
    """What one level of 255 is in the numbers that a chain gives, by its own steps: [3, 1, 1]."""
    pictures: list[Any] = [Image.new("RGB", (8, 8), (level,) * 3) for level in (100, 101)]
    for end in (one for one in transform.transforms if type(one).__name__ in _ENDS):
        pictures = [end(picture) for picture in pictures]
    first, second = (picture.as_subclass(torch.Tensor).double()[:, :1, :1] for picture in pictures)
    level: torch.Tensor = (second - first).abs()
    return level


def check_drawn_chain(torchvision: Any, folders: Any, photos: Path, rng: random.Random) -> None:
    """The batches of a DataLoader with a drawn chain are those of its pipeline."""
    module = transforms_of(torchvision, rng)
    modes = torchvision.transforms.InterpolationMode
    transform = module.Compose([*_chain(module, modes, rng), *_end(module, rng)])
    dataset = folders.ImageFolder(str(photos), transform=transform)
    loader: Any = DataLoader(dataset, batch_size=rng.randint(3, 9), drop_last=rng.random() < 0.5)
    ported = checked(loader)
    assert ported.pipeline is not None
    num_compared, level = 0, _level(transform)
    with loaderkit.build(loaderkit.Pipeline(ported.pipeline)) as ours:
        assert len(ours) == len(loader)
        for (images, labels), (our_images, our_labels) in zip(loader, ours, strict=True):
            assert torch.equal(labels, our_labels)
            assert (images.dtype, images.shape) == (our_images.dtype, our_images.shape)
            differing = (images.as_subclass(torch.Tensor).double() - our_images.double()).abs() / level
            assert float(differing.max()) <= _MOST_LEVELS
            num_compared += 1
            if num_compared == 3:
                return
