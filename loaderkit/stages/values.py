"""The values of samples: decides which are images, and makes the tensor of each value.

Images between stages are uint8 [H, W, C] in NumPy, passed to users as torch uint8 [C, H, W]: decoders write and resizers read
rows of pixels, where a crop is a free view. Only `call` and `batch` use torch's layout.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from loaderkit._internal.dtypes import type_in_numpy
from loaderkit.native.pixels import packed
from loaderkit.samples.sample import Sample
from loaderkit.samples.values import Clip, GpuDecoded, Image, InPlace, Pictures
from loaderkit.stages.image.formats import converted

NUMBER_DTYPES = {int: "int64", float: "float64", bool: "bool"}
CHANNELS = (1, 3, 4)
_INT64 = np.iinfo(np.int64)


def as_image(value: Any) -> Image | None:
    """`value` as an image if it is one, else None.

    Taken for images: `Image`, Pillow's images, and uint8 arrays and tensors [H, W], [C, H, W] or [H, W, C] with C = 1 or 3; see
    `channels_last`. No pixel is copied unless Pillow's. Raises ValueError for one of Pillow's that is damaged, and for an array
    whose channels may be first or last.
    """
    if type(value) is Image:
        return value
    if is_pillow(value):
        return converted(value, keeps_grey=True)
    pixels = channels_last(value)
    return None if pixels is None or pixels.shape[2] == 4 else Image(pixels)


def channels_last(value: Any) -> NDArray[np.uint8] | None:
    """A uint8 array or tensor [H, W], [C, H, W] or [H, W, C] as [H, W, C], C = 1, 3 or 4; None if it is nothing of the kind.

    The end that is 1, 3 or 4 long is the channels. If both are, a tensor's are the first, as everywhere in torch, and for an
    array it raises ValueError.
    """
    is_tensor = isinstance(value, torch.Tensor)
    if is_tensor and value.dtype == torch.uint8 and value.device.type == "cpu" and value.layout is torch.strided:
        array: NDArray[np.uint8] = value.numpy()
    elif isinstance(value, np.ndarray) and value.dtype == np.uint8:
        array = value
    else:
        return None
    if array.ndim == 2:
        return array[:, :, None]
    if array.ndim != 3:
        return None
    is_first, is_last = array.shape[0] in CHANNELS, array.shape[2] in CHANNELS
    if is_first and is_last and not is_tensor:
        raise ValueError(
            f"its {describe(value)} may be [C, H, W] or [H, W, C]: give it as a tensor, which is [C, H, W], or name the images "
            "in `fields` if it is none"
        )
    if is_first:
        return array.transpose(1, 2, 0)
    return array if is_last else None


def is_pillow(value: Any) -> bool:
    """True for an image of Pillow's."""
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
        hint = (
            "is `decode` missing before this stage, or should this stage stand before a `call` that makes them float?"
        )
        if any(isinstance(value, (bytes, bytearray)) for value in sample.values()):
            hint += (
                " (It leaves bytes that do not begin as a picture does, unless `decode: {fields: [...]}` names them.)"
            )
        raise ValueError(f"it has no image, only {held}. Images are uint8 here: {hint}")
    return images


def to_tensor(image: Image | Clip) -> torch.Tensor:
    """The pixels as torch uint8 (or uint16) [C, H, W], a view where strides allow it; of a clip [T, C, H, W]."""
    if type(image) is Clip:
        return torch.stack([to_tensor(frame) for frame in image.frames])
    assert type(image) is Image
    pixels = packed(image.pixels)
    return torch.from_numpy(pixels if pixels.flags.writeable else pixels.copy()).permute(2, 0, 1)


def _stacked(pictures: Pictures) -> torch.Tensor:
    """Pictures of one size as a tensor [N, C, H, W]. Raises ValueError for others."""
    if len({image.pixels.shape for image in pictures.images}) != 1:
        raise ValueError(
            f"{describe(pictures)} are no tensor [N, C, H, W]: give them one size before `batch`, by `resize: [224, 224]`, or "
            "leave the field out of `ragged` and `pad_value`, and it comes as a list of tensors"
        )
    return torch.stack([to_tensor(image) for image in pictures.images])


def shape_and_dtype(value: Any) -> tuple[tuple[int, ...], str] | None:
    """The shape and dtype of the tensor made from an array or a number; None if only torch knows them."""
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
    if type(value) in (Image, Clip, Pictures):
        return _stacked(value) if type(value) is Pictures else to_tensor(value)
    if type(value) is GpuDecoded:
        return value.tensor[value.row]
    if isinstance(value, (np.ndarray, np.uint64)):  # `torch.as_tensor` takes all other numbers of NumPy's
        if type_in_numpy(value.dtype.name) is None:
            raise TypeError(f"torch has no type for an array of {value.dtype}")
        if not value.dtype.isnative:
            value = value.astype(value.dtype.newbyteorder("="))
        if not (value.flags.writeable and value.flags.aligned) or any(stride < 0 for stride in value.strides):
            value = np.array(value, order="C")
        return torch.from_numpy(value)
    if isinstance(value, (bool, int, np.generic)):
        return torch.as_tensor(value, device="cpu")
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float64, device="cpu")
    raise TypeError(
        "a list without items has no type: make it an array of one in a `call` before"
        if type(value) is list and not value
        else f"{type(value).__name__} is not a number, array or tensor"
    )


def describe(value: Any) -> str:  # noqa: PLR0911 - a kind of value each
    """A value's type and shape, for messages."""
    if type(value) is Image:
        height, width, channels = value.pixels.shape
        return f"image {value.pixels.dtype} [{channels}, {height}, {width}]"
    if type(value) is Clip:
        return f"clip {value.frames[0].pixels.dtype} {list(value.shape)}"
    if type(value) is Pictures:
        sizes = sorted({" x ".join(map(str, image.pixels.shape[1::-1])) for image in value.images})
        return f"{len(value.images)} pictures" + (
            f" ({', '.join(sizes[:3])}{', ...' * (len(sizes) > 3)})" if sizes else ""
        )
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
