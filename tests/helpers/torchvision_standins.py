"""Stand-ins for torchvision: its modules' and classes' names, their attributes, and what they do to Pillow's pictures.

They do it beside any torch, and in milliseconds. `make integration` takes torchvision itself: test_with_torchvision.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


class InterpolationMode(Enum):
    NEAREST = "nearest"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    LANCZOS = "lanczos"


_PILLOWS = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
}


# ------------------------------------------------------------------------------------------------ datasets/folder.py


def pil_loader(path: str) -> Image.Image:
    with open(path, "rb") as file:
        return Image.open(file).convert("RGB")


def default_loader(path: str) -> Image.Image:
    return pil_loader(path)


class DatasetFolder:
    def __init__(
        self,
        root: str | Path,
        loader: Callable[[str], Any],
        extensions: tuple[str, ...] | None = None,
        transform: Any = None,
        target_transform: Any = None,
        is_valid_file: Callable[[str], bool] | None = None,
    ) -> None:
        self.root = os.path.expanduser(root)
        self.transform, self.target_transform, self.loader = transform, target_transform, loader
        self.extensions = extensions
        self.classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
        self.class_to_idx = {name: number for number, name in enumerate(self.classes)}
        is_valid = is_valid_file or (lambda path: path.lower().endswith(extensions or ()))
        self.samples = [
            (path, number)
            for name, number in self.class_to_idx.items()
            for folder, _, files in sorted(os.walk(os.path.join(self.root, name), followlinks=True))
            for path in (os.path.join(folder, file) for file in sorted(files))
            if is_valid(path)
        ]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        path, target = self.samples[index]
        sample = self.loader(path)
        sample = sample if self.transform is None else self.transform(sample)
        return sample, target if self.target_transform is None else self.target_transform(target)


class ImageFolder(DatasetFolder):
    def __init__(self, root: str | Path, transform: Any = None, loader: Any = default_loader, **more: Any) -> None:
        extensions = None if "is_valid_file" in more else _EXTENSIONS
        super().__init__(root, loader, extensions, transform, **more)


# ------------------------------------------------------------------------------------------ transforms/transforms.py


class Compose:
    def __init__(self, transforms: list[Any]) -> None:
        self.transforms = transforms

    def __call__(self, image: Any) -> Any:
        for transform in self.transforms:
            image = transform(image)
        return image


class Step:
    """A transform whose attributes are the arguments of its constructor."""

    defaults: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, *values: Any, **named: Any) -> None:
        names = [*self.defaults]
        self.__dict__.update({**self.defaults, **dict(zip(names, values, strict=False)), **named})

    def __call__(self, image: Any) -> Any:
        return image


def _both(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[-1])


class Resize(Step):
    size: Any
    interpolation: Any
    defaults = {"size": 0, "interpolation": InterpolationMode.BILINEAR, "max_size": None, "antialias": True}  # noqa: RUF012

    def __call__(self, image: Image.Image) -> Image.Image:
        size = [self.size] if isinstance(self.size, int) else [*self.size]
        if len(size) == 1:
            width, height = image.size
            short = size[0]
            size = [short, int(short * width / height)] if height <= width else [int(short * height / width), short]
        name = getattr(self.interpolation, "value", self.interpolation)
        return image.resize((size[1], size[0]), _PILLOWS[name])


class CenterCrop(Step):
    size: Any
    defaults = {"size": 0}  # noqa: RUF012

    def __call__(self, image: Image.Image) -> Image.Image:
        height, width = _both(self.size)
        padded = Image.new("RGB", (max(width, image.width), max(height, image.height)))
        padded.paste(image, ((padded.width - image.width) // 2, (padded.height - image.height) // 2))
        left, top = round((padded.width - width) / 2), round((padded.height - height) / 2)
        return padded.crop((left, top, left + width, top + height))


class RandomResizedCrop(Resize):
    defaults = {  # noqa: RUF012
        "size": 0,
        "scale": (0.08, 1.0),
        "ratio": (3.0 / 4.0, 4.0 / 3.0),
        "interpolation": InterpolationMode.BILINEAR,
        "antialias": True,
    }

    def __call__(self, image: Image.Image) -> Image.Image:
        height, width = _both(self.size)
        top, left = (int(torch.randint(0, length // 3, ())) for length in (image.height, image.width))
        return image.crop((left, top, image.width, image.height)).resize((width, height), Image.Resampling.BILINEAR)


class RandomCrop(Step):
    defaults = {"size": 0, "padding": None, "pad_if_needed": False, "fill": 0, "padding_mode": "constant"}  # noqa: RUF012


class _Flip(Step):
    p: float
    defaults = {"p": 0.5}  # noqa: RUF012
    turn = Image.Transpose.FLIP_LEFT_RIGHT

    def __call__(self, image: Image.Image) -> Image.Image:
        return image.transpose(self.turn) if torch.rand(1) < self.p else image


class RandomHorizontalFlip(_Flip):
    pass


class RandomVerticalFlip(_Flip):
    turn = Image.Transpose.FLIP_TOP_BOTTOM


class ColorJitter(Step):
    defaults = {"brightness": None, "contrast": None, "saturation": None, "hue": None}  # noqa: RUF012


class RandomRotation(Step):
    defaults = {  # noqa: RUF012
        "degrees": None,
        "interpolation": InterpolationMode.NEAREST,
        "expand": False,
        "center": None,
        "fill": 0,
    }


class Grayscale(Step):
    defaults = {"num_output_channels": 1}  # noqa: RUF012

    def __call__(self, image: Image.Image) -> Image.Image:
        return image.convert("L").convert("RGB")


class RandomGrayscale(Step):
    defaults = {"p": 0.1}  # noqa: RUF012


class GaussianBlur(Step):
    defaults = {"kernel_size": (3, 3), "sigma": (0.1, 2.0)}  # noqa: RUF012


class RandomErasing(Step):
    defaults = {"p": 0.5, "scale": (0.02, 0.33), "ratio": (0.3, 3.3), "value": 0, "inplace": False}  # noqa: RUF012


class RandAugment(Step):
    defaults = {"num_ops": 2}  # noqa: RUF012


class Lambda(Step):
    lambd: Callable[[Any], Any]
    defaults = {"lambd": None}  # noqa: RUF012

    def __call__(self, image: Any) -> Any:
        return self.lambd(image)


class PILToTensor(Step):
    def __call__(self, image: Image.Image) -> torch.Tensor:
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)


class ToImage(PILToTensor):
    pass


class ToTensor(PILToTensor):
    def __call__(self, image: Image.Image) -> torch.Tensor:
        return super().__call__(image).to(torch.float32).div(255)


class ToPureTensor(Step):
    pass


class ToDtype(Step):
    dtype: torch.dtype
    scale: bool
    defaults = {"dtype": torch.float32, "scale": False}  # noqa: RUF012

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        is_scaled = self.scale and image.dtype == torch.uint8 and self.dtype != torch.uint8
        return image.to(self.dtype).div(255) if is_scaled else image.to(self.dtype)


class ConvertImageDtype(ToDtype):
    defaults = {"dtype": torch.float32, "scale": True}  # noqa: RUF012


class Normalize(Step):
    mean: list[float]
    std: list[float]
    defaults = {"mean": None, "std": None, "inplace": False}  # noqa: RUF012

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        mean, std = (torch.tensor(values, dtype=image.dtype).reshape(-1, 1, 1) for values in (self.mean, self.std))
        return (image - mean) / std


_HOMES: dict[str, tuple[Any, ...]] = {
    "torchvision.datasets.folder": (DatasetFolder, ImageFolder, default_loader, pil_loader),
    "torchvision.transforms.functional": (InterpolationMode,),
}
_V2 = {
    "_container": ("Compose",),
    "_geometry": (
        "Resize", "CenterCrop", "RandomResizedCrop", "RandomCrop", "RandomHorizontalFlip", "RandomVerticalFlip",
        "RandomRotation",
    ),
    "_color": ("ColorJitter", "Grayscale", "RandomGrayscale"),
    "_misc": ("Normalize", "GaussianBlur", "ToDtype", "ConvertImageDtype", "Lambda"),
    "_type_conversion": ("PILToTensor", "ToImage", "ToPureTensor"),
    "_deprecated": ("ToTensor",),
    "_augment": ("RandomErasing",),
    "_auto_augment": ("RandAugment",),
}  # fmt: skip
_OF_V2_ALONE = ("ToImage", "ToDtype", "ToPureTensor")


def _classes() -> Iterator[tuple[str, Any]]:
    """(module, class) of all stand-ins, each class made for its module."""
    for home, members in _HOMES.items():
        for member in members:
            member.__module__ = home
            yield home, member
    for module, names in _V2.items():
        for name in names:
            homes = [f"torchvision.transforms.v2.{module}"]
            homes += [] if name in _OF_V2_ALONE else ["torchvision.transforms.transforms"]
            yield from ((home, type(name, (globals()[name],), {"__module__": home})) for home in homes)


def install(patch: pytest.MonkeyPatch) -> ModuleType:
    """`import torchvision` gives the stand-ins from now on."""
    modules: dict[str, ModuleType] = {}

    def module_of(name: str) -> ModuleType:
        if name not in modules:
            modules[name] = ModuleType(name)
            patch.setitem(sys.modules, name, modules[name])
            parent, _, last = name.rpartition(".")
            if parent:
                setattr(module_of(parent), last, modules[name])
        return modules[name]

    for home, member in _classes():
        package = home.rpartition(".")[0]
        for place in (home, package):
            setattr(module_of(place), member.__name__, member)
    return modules["torchvision"]
