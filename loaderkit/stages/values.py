"""The values of samples: which are images, and the tensor of each value.

Images between stages are uint8 [H, W, C] in NumPy, passed to users as torch uint8 [C, H, W]: decoders write and resizers read
rows of pixels, where a crop is a free view. Only `call` and `batch` use torch's layout.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from loaderkit._internal.dtypes import type_in_numpy
from loaderkit.native.fallback import packed
from loaderkit.sources.base import Sample
from loaderkit.stages.base import GpuDecoded, Image, InPlace

NUMBER_DTYPES = {int: "int64", float: "float64", bool: "bool"}
_INT64 = np.iinfo(np.int64)


def as_image(value: Any) -> Image | None:
    """`value` as an image if it is one, else None.

    Taken for images: `Image`, torch uint8 [C, H, W] or [H, W], NumPy uint8 [H, W, C] or [H, W] (C = 1 or 3), and
    Pillow's images. No pixel is copied unless Pillow's. Raises ValueError for one of Pillow's that is damaged.
    """
    if type(value) is Image:
        return value
    if isinstance(value, torch.Tensor):
        if value.dtype != torch.uint8 or value.ndim not in (2, 3) or value.is_cuda:
            return None
        value = (value.unsqueeze(0) if value.ndim == 2 else value).permute(1, 2, 0).numpy()
    elif not isinstance(value, np.ndarray):
        if not _is_pillow(value):
            return None
        try:  # decodes an image that was opened lazily
            value = np.asarray(value if value.mode in ("L", "RGB") else value.convert("RGB"))
        except Exception as error:
            raise ValueError(f"Pillow's image cannot be loaded: {error!r:.200}") from error
    if value.dtype != np.uint8 or value.ndim not in (2, 3):
        return None
    pixels = value[:, :, None] if value.ndim == 2 else value
    return Image(pixels) if pixels.shape[2] in (1, 3) else None


def _is_pillow(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "PIL" and hasattr(value, "convert")


def image_fields(sample: Sample, fields: Iterable[str] | None) -> list[tuple[str, Image]]:
    """The images of a sample: those named by `fields` (anything `as_image` takes), or all `Image`s and image tensors.

    Raises ValueError if a named field is missing or no image, or if there is none at all.
    """
    if fields is not None:
        images = []
        for name in fields:
            if name not in sample:
                raise ValueError(f"it has no field {name!r}, only {', '.join(sample)}")
            image = as_image(sample[name])
            if image is None:
                raise ValueError(f"its field {name!r} is {describe(sample[name])}, not an image")
            images.append((name, image))
        return images
    images = []
    for name, value in sample.items():
        if type(value) is Image:
            images.append((name, value))
    if not images:
        images = [(name, image) for name, value in sample.items() if (image := as_image(value)) is not None]
    if not images:
        held = ", ".join(f"{name} ({describe(value)})" for name, value in sample.items()) or "nothing"
        raise ValueError(f"it has no image, only {held}: is `decode` missing before this stage?")
    return images


def to_tensor(image: Image) -> torch.Tensor:
    """The pixels as torch uint8 [C, H, W]; a view where strides allow it."""
    pixels = packed(image.pixels)
    return torch.from_numpy(pixels if pixels.flags.writeable else pixels.copy()).permute(2, 0, 1)


def shape_and_dtype(value: Any) -> tuple[tuple[int, ...], str] | None:
    """The shape and dtype of the tensor of an array or a number; None if only torch can tell."""
    if isinstance(value, np.ndarray) and type_in_numpy(value.dtype.name) is not None:
        return value.shape, value.dtype.name
    dtype = NUMBER_DTYPES.get(type(value))
    return None if dtype is None or (dtype == "int64" and not _INT64.min <= value <= _INT64.max) else ((), dtype)


def dtype_of(tensor: torch.Tensor) -> str:
    """Torch's name of a tensor's dtype."""
    return str(tensor.dtype).removeprefix("torch.")


def as_tensor(value: Any) -> torch.Tensor:
    """A number, array, tensor or image as a tensor; int64 for int and float64 for float, as in torch's default_collate.
    Raises TypeError."""
    if type(value) is InPlace and value.tensor is not None:
        value = value.tensor
    if isinstance(value, torch.Tensor):
        return value
    if type(value) is Image:
        return to_tensor(value)
    if type(value) is GpuDecoded:
        return value.tensor[value.row]
    if isinstance(value, np.ndarray):
        if type_in_numpy(value.dtype.name) is None:
            raise TypeError(f"torch has no type for an array of {value.dtype}")
        if not value.dtype.isnative:
            value = value.astype(value.dtype.newbyteorder("="))
        if not (value.flags.writeable and value.flags.aligned) or any(stride < 0 for stride in value.strides):
            value = value.copy()
        return torch.from_numpy(value)
    if isinstance(value, (bool, int, np.generic)):
        return torch.as_tensor(value, device="cpu")
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float64, device="cpu")
    raise TypeError(f"{type(value).__name__} is not a number, array or tensor")


def describe(value: Any) -> str:
    """A value's type and shape, for messages."""
    if type(value) is Image:
        height, width, channels = value.pixels.shape
        return f"image uint8 [{channels}, {height}, {width}]"
    if isinstance(value, (GpuDecoded, torch.Tensor)):
        noun, value = ("image", value.tensor[value.row]) if isinstance(value, GpuDecoded) else ("tensor", value)
        return f"{noun} {dtype_of(value)} {list(value.shape)}"
    if isinstance(value, np.ndarray):
        return f"array {value.dtype} {list(value.shape)}"
    if isinstance(value, str):
        return "text"
    if value is None:
        return "None"
    return type(value).__name__
