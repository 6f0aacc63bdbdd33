"""`normalize`: (x / 255 - mean) / std of every channel, as float.

Right behind `batch` on the CPU it is what writes the pixels into their slots, once, as floats; anywhere else it acts on the
finished batch. Both do the same arithmetic: x * (1 / (255 std)) + (-mean / std) in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, Field

from loaderkit.images import describe
from loaderkit.kernels import write_normalized
from loaderkit.schema import FieldNames, StageArgs
from loaderkit.types import Chunk

_IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}

Channels = Annotated[
    tuple[float, ...] | Literal["imagenet"],
    BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value),
]
PositiveChannels = Annotated[
    tuple[Annotated[float, Field(gt=0)], ...] | Literal["imagenet"],
    BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value),
]


class NormalizeArgs(StageArgs):
    """Turn uint8 images into floats: (x / 255 - mean) / std per channel."""

    mean: Channels = Field("imagenet", description="one number a channel, or imagenet")
    std: PositiveChannels = Field("imagenet", description="one number a channel, or imagenet")
    dtype: Literal["float32", "float16", "bfloat16", "float64"] = Field("float32", description="of the result")
    fields: FieldNames = Field(None, description="images to act on; default: all of them")


def _factors(args: NormalizeArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale, shift), float32 [C, 1, 1] each."""
    mean = torch.tensor(_IMAGENET["mean"] if args.mean == "imagenet" else args.mean, dtype=torch.float64)
    std = torch.tensor(_IMAGENET["std"] if args.std == "imagenet" else args.std, dtype=torch.float64)
    scale, shift = 1.0 / (255.0 * std), -mean / std
    return scale.float().reshape(-1, 1, 1), shift.float().reshape(-1, 1, 1)


def normalize_slots(args: NormalizeArgs, image_fields: Callable[[], Iterable[str]]) -> Callable[[Chunk], None]:
    """A chunk stage right behind `batch`: write the chunk's images into their slots, scaled and shifted, float32."""
    scale, shift = (tuple(factors.flatten().tolist()) for factors in _factors(args))

    def run(chunk: Chunk) -> None:
        for name in image_fields():
            slots = chunk.destination.fields[name]
            if slots.shape[1] != len(scale):
                raise ValueError(
                    f"mean and std have {len(scale)} numbers, the images of {name!r} {slots.shape[1]} channels"
                )
            for place, sample in enumerate(chunk.samples):
                if sample is not None:
                    write_normalized(slots, chunk.lo + place, sample[name].pixels, scale, shift)

    return run


def normalize(args: NormalizeArgs) -> Callable[[dict[str, Any], Iterable[str]], None]:
    """A batch stage `(batch, image_fields) -> None`; runs where the batch's tensors are."""
    scale, shift = _factors(args)
    dtype = _DTYPES[args.dtype]

    def run(batch: dict[str, Any], image_fields: Iterable[str]) -> None:
        for name in args.fields or image_fields:
            images = batch.get(name)
            if not isinstance(images, torch.Tensor) or images.dtype != torch.uint8 or images.ndim != 4:
                what = describe(images) if name in batch else "missing"
                raise ValueError(f"the field {name!r} is {what}: only uint8 images [B, C, H, W] can be normalised")
            floats = images.to(torch.float32)
            floats.mul_(scale.to(floats.device)).add_(shift.to(floats.device))
            batch[name] = floats.to(dtype)

    return run
