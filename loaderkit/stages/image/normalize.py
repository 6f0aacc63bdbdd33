"""`normalize`: (x / 255 - mean) / std of every channel, as float.

Directly after `batch` on the CPU it writes the pixels into their slots as floats; elsewhere it acts on the finished batch. Both
compute x * (1 / (255 std)) + (-mean / std) in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import BeforeValidator, Field, model_validator

from loaderkit import native
from loaderkit._internal.config.settings import as_tuple
from loaderkit.engine.work import Stage
from loaderkit.samples.chunk import BatchContext, SampleChunk, image_names
from loaderkit.samples.values import Clip, Image
from loaderkit.stages.base import FieldNames, StageArgs, StageConfig
from loaderkit.stages.context import CompileContext, StageKind, batch_error
from loaderkit.stages.image.ops import Finalizer
from loaderkit.stages.values import describe

_IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
_NO_IMAGE = (
    "the batch has no image field: put `decode` before `batch`, which also takes uint8 [C, H, W] for images, or name them in "
    "`fields`"
)

# More is surely of levels. Of numbers from 0 to 1 a mean is at most 1 and a std 0.5, and two steps made one have 2.
_MOST_MEAN, _MOST_STD = 3.0, 10.0

_LARGEST = {torch.uint8: 255.0, torch.uint16: 65535.0}

Channels = Annotated[
    Annotated[tuple[float, ...], Field(min_length=1)] | Literal["imagenet"],
    BeforeValidator(as_tuple),
]
PositiveChannels = Annotated[
    Annotated[tuple[Annotated[float, Field(gt=0)], ...], Field(min_length=1)] | Literal["imagenet"],
    BeforeValidator(as_tuple),
]


class NormalizeArgs(StageArgs):
    """Turn uint8 images into floats: (x / 255 - mean) / std per channel; images of `decode: {depth: 16}` are divided by
    65535."""

    mean: Channels = Field("imagenet", description="of x / 255: one number a channel, one for all, or imagenet")
    std: PositiveChannels = Field("imagenet", description="of x / 255: one number a channel, one for all, or imagenet")
    dtype: Literal["float32", "float16", "bfloat16", "float64"] = Field("float32", description="of the result")
    fields: FieldNames = Field(None, description="images to act on; default: all of them")

    @model_validator(mode="after")
    def _channels_agree(self) -> NormalizeArgs:
        lengths = {3 if values == "imagenet" else len(values) for values in (self.mean, self.std)} - {1}
        if len(lengths) > 1:
            raise ValueError("`mean` and `std` need the same number of channels")
        return self

    @model_validator(mode="after")
    def _are_of_unit_scale(self) -> NormalizeArgs:
        given = {name: values for name, values in (("mean", self.mean), ("std", self.std)) if values != "imagenet"}
        of_levels = [
            name for name, most in (("mean", _MOST_MEAN), ("std", _MOST_STD)) if max(given.get(name, (0,))) > most
        ]
        if of_levels:
            raise ValueError(
                f"`{of_levels[0]}` is that of levels, and has to be that of numbers from 0 to 1, which levels become first: "
                "divide it by 255, or by 65535 for images of 16 bits"
            )
        return self


def _factors(args: NormalizeArgs, num_channels: int, most: float = 255.0) -> tuple[list[float], list[float]]:
    """(scale, shift), C float32 numbers each, for levels up to `most`; one number is used for all channels. Raises ValueError
    for too few or many.

    Computed by NumPy, as torch's first operations in a process take up to 8 ms.
    """
    mean = _IMAGENET["mean"] if args.mean == "imagenet" else args.mean
    std = _IMAGENET["std"] if args.std == "imagenet" else args.std
    for name, values in (("mean", mean), ("std", std)):
        if len(values) not in (1, num_channels):
            raise ValueError(f"{name} has {len(values)} numbers, the images {num_channels} channels")
    means, stds = (np.broadcast_to(np.array(values, np.float64), num_channels) for values in (mean, std))
    return (1.0 / (most * stds)).astype(np.float32).tolist(), (-means / stds).astype(np.float32).tolist()


def finish_of(args: NormalizeArgs) -> Finalizer:
    """The arithmetic of `normalize` for three channels, as a `Finalizer`."""
    mean = _IMAGENET["mean"] if args.mean == "imagenet" else args.mean
    std = _IMAGENET["std"] if args.std == "imagenet" else args.std
    _factors(args, 3)
    return Finalizer(
        tuple(255 * value for value in (mean * 3 if len(mean) == 1 else mean)),
        tuple(255 * value for value in (std * 3 if len(std) == 1 else std)),
        getattr(torch, args.dtype),
    )


def normalize_slots(stage: str, args: NormalizeArgs) -> Callable[[SampleChunk], None]:
    """The chunk stage `stage` directly after `batch`: write the chunk's images into their slots, scaled and shifted, float32.
    Its errors name the batch."""

    factors = cache(lambda num_channels: [tuple(values) for values in _factors(args, num_channels)])
    scaled = partial(normalized, args)

    def run(chunk: SampleChunk) -> None:
        work_item = chunk.work_item
        names = image_names(work_item.specs)
        try:
            if not names:
                raise ValueError(_NO_IMAGE)
            for name in names:
                if work_item.specs[name].kind == "list":
                    _normalize_lists(chunk, name, scaled)
                    continue
                slots = work_item.fields[name].array
                assert slots is not None
                scale, shift = factors(slots.shape[-3])
                images = [None if sample is None else sample[name] for sample in chunk.samples]
                first, in_slots = chunk.in_slots(images)
                num_frames = slots.shape[1] if slots.ndim == 5 else 1
                frames = [pixels for image in in_slots for pixels in _frames_of(image, num_frames)]
                slots = slots.reshape(-1, *slots.shape[-3:])  # a view: of a clip each frame is an image
                native.write_normalized(slots, first * num_frames, frames, scale, shift)
        except (RuntimeError, ValueError) as error:
            raise batch_error(stage, chunk.epoch, work_item.step, str(error)) from error

    return run


def _frames_of(image: Image | Clip | None, num_frames: int) -> list[Any]:
    if image is None:
        return [None] * num_frames
    return [image.pixels] if type(image) is Image else [frame.pixels for frame in image.frames]  # type: ignore[union-attr]


def _normalize_lists(chunk: SampleChunk, name: str, scaled: Callable[[str, Any, int], torch.Tensor]) -> None:
    """The same for lists of pictures, which have no slots."""
    values = chunk.work_item.values[name]
    for row, sample in enumerate(chunk.samples):
        if sample is not None:
            slot = chunk.slot_of(row)
            values[slot] = [scaled(name, picture, 3) for picture in values[slot]]


def normalized(args: NormalizeArgs, name: str, images: Any, num_dims: int) -> torch.Tensor:
    """Images of the field `name` as floats; of a batch with `num_dims` 4, of one sample with 3. Raises ValueError."""
    if (
        not isinstance(images, torch.Tensor)
        or images.dtype not in _LARGEST
        or images.ndim not in (num_dims, num_dims + 1)
    ):
        raise ValueError(
            f"the field {name!r} is {describe(images)}: only uint8 images [B, C, H, W] or clips [B, T, C, H, W], or a "
            "list of [C, H, W] or [T, C, H, W], can be normalised"
        )
    floats = images.to(torch.float32)
    scale, shift = (
        torch.tensor(values, dtype=torch.float32, device=floats.device).reshape(-1, 1, 1)
        for values in _factors(args, floats.shape[-3], _LARGEST[images.dtype])
    )
    return floats.mul_(scale).add_(shift).to(getattr(torch, args.dtype))


def normalize(args: NormalizeArgs) -> Callable[[dict[str, Any], Iterable[str]], None]:
    """A batch stage `(batch, fields) -> None`; runs where the batch's tensors are."""
    scaled = partial(normalized, args)

    def run(batch: dict[str, Any], fields: Iterable[str]) -> None:
        for name in fields:
            if name not in batch:
                raise ValueError(f"the batch has no field {name!r}, only {', '.join(batch)}")
            images = batch[name]
            if isinstance(images, list):  # images of unequal shape
                batch[name] = [
                    [scaled(name, picture, 3) for picture in image] if type(image) is list else scaled(name, image, 3)
                    for image in images
                ]
            else:
                batch[name] = scaled(name, images, 4)

    return run


def _compile(stage: StageConfig, context: CompileContext) -> Stage:
    args = stage.args
    assert isinstance(args, NormalizeArgs)
    if stage == context.in_slots:
        return stage.ready("sample", normalize_slots(stage.name, args))
    scale, named = normalize(args), args.fields

    def run(batch: dict[str, Any], context: BatchContext) -> None:
        names = named or context.images
        if not names:
            raise ValueError(_NO_IMAGE)
        scale(batch, names)

    return stage.ready("batch", run)


NORMALIZE = StageKind(
    NormalizeArgs,
    "batch",
    compile=_compile,
    needs_images=True,
    takes_16_bits=True,
    slot_dtype=lambda args: "float32" if args.dtype == "float32" and args.fields is None else None,
    only_computes=True,
    is_contained=True,
)
