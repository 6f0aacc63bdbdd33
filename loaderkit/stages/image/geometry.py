"""`resize`, crops, flips and `random_rotation`.

Names, parameters and distributions are the same as in torchvision.transforms.v2. All image fields of a sample share one
crop, one flip and one angle, so a mask stays on its image; masks are resized and rotated by nearest. Boxes and
keypoints follow (`boxes.py`), by the stage's `ImageOps`. A resize is antialiased by default: the filter widens with the
scale, as Pillow's does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow
from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt

from loaderkit._internal.config.settings import PositiveRange, Range, around_zero, as_tuple
from loaderkit.samples.sample import Sample
from loaderkit.samples.values import Image
from loaderkit.stages.base import FieldNames, StageArgs
from loaderkit.stages.context import StageKind
from loaderkit.stages.image.alignment import check_masks, check_shapes, check_sizes
from loaderkit.stages.image.ops import Crop, Flip, ImageOps, Rotate, Scale, VerticalFlip
from loaderkit.stages.image.resize import Interpolation, ResampleJob, cut, resized
from loaderkit.stages.values import image_fields

Draws = NDArray[np.float64]
Scratch = dict[str, Any]
SampleFunction = Callable[..., list[ResampleJob] | None]
"""`(sample, draws, scratch) -> jobs`; `scratch` is memory to reuse, by field, or None to allocate. The targets of jobs are in
the sample already."""


Size = Annotated[PositiveInt | tuple[PositiveInt, PositiveInt], BeforeValidator(as_tuple)]


def _angle_range(value: Any) -> Any:
    return around_zero(value, 360)


class ResizeArgs(StageArgs):
    """Resize to [height, width], or the shorter edge to `size`, keeping the shape."""

    size: Size = Field(description="[height, width], or the length of the shorter edge")
    interpolation: Interpolation = Field("bilinear", description="the filter; masks always take the nearest pixel")
    antialias: bool = Field(True, description="widen the filter when shrinking, as Pillow does")
    fields: FieldNames = Field(None, description="images to act on; default: all of them")


class CenterCropArgs(StageArgs):
    """Cut the middle out; an image that is too small is padded with zeros."""

    size: Size = Field(description="[height, width], or one number for both")
    fields: FieldNames = Field(None, description="images to act on; default: all of them")


class RandomCropArgs(StageArgs):
    """Crop a random window."""

    size: Size = Field(description="[height, width], or one number for both")
    padding: NonNegativeInt = Field(0, description="pixels of `fill` added on every side first")
    pad_if_needed: bool = Field(False, description="pad an image that is smaller than `size` instead of refusing it")
    fill: int = Field(0, ge=0, le=255, description="the level of added pixels")
    fields: FieldNames = Field(None, description="images to act on; default: all of them")


class RandomResizedCropArgs(StageArgs):
    """Crop a window of random area and aspect ratio, and resize it."""

    size: Size = Field(description="[height, width], or one number for both")
    scale: Range = Field((0.08, 1.0), description="bounds of the crop's share of the image's area")
    ratio: PositiveRange = Field((3 / 4, 4 / 3), description="bounds of width / height")
    interpolation: Interpolation = Field("bilinear", description="the filter; masks always take the nearest pixel")
    antialias: bool = Field(True, description="widen the filter when shrinking, as Pillow does")
    fields: FieldNames = Field(None, description="images to act on; default: all of them")


class RandomHorizontalFlipArgs(StageArgs):
    """Mirror left and right with probability `p`."""

    p: float = Field(0.5, ge=0, le=1, description="probability")
    fields: FieldNames = Field(None, description="images to act on; default: all of them")


class RandomVerticalFlipArgs(RandomHorizontalFlipArgs):
    """Mirror top and bottom with probability `p`."""


class RandomRotationArgs(StageArgs):
    """Rotate about the middle by a random angle."""

    degrees: Annotated[tuple[float, float], BeforeValidator(_angle_range)] = Field(
        description="bounds of the angle, counter-clockwise; x stands for [-x, x]"
    )
    interpolation: Interpolation = Field("nearest", description="the filter; masks always take the nearest pixel")
    expand: bool = Field(False, description="enlarge the image so that nothing is cut off")
    fill: int = Field(0, ge=0, le=255, description="the level of pixels from outside the image, in masks as well")
    fields: FieldNames = Field(None, description="images to act on; default: all of them")


def resize(args: ResizeArgs) -> SampleFunction:
    """Size rule of torchvision: with one number the longer edge is int(size * longer / shorter)."""

    def run(sample: Sample, draws: Draws, scratch: Scratch | None = None) -> list[ResampleJob]:
        jobs: list[ResampleJob] = []
        images = image_fields(sample, args.fields)
        check_masks(images)
        for name, image in images:
            target = _resize_target(args.size, *image.size)
            sample[name] = resized(
                image,
                None,
                target,
                args.interpolation,
                antialias=args.antialias,
                jobs=jobs,
                scratch=scratch,
                field=name,
            )
        return jobs

    return run


def resize_steps(args: ResizeArgs) -> ImageOps:
    """The same, described."""
    return ImageOps(
        (Scale,),
        lambda height, width, draws: (Scale(*_resize_target(args.size, height, width)),),
        args.interpolation,
        args.antialias,
    )


def _resize_target(size: int | tuple[int, int], height: int, width: int) -> tuple[int, int]:
    if isinstance(size, tuple):
        return size
    return (size, int(size * width / height)) if height <= width else (int(size * height / width), size)


def center_crop(args: CenterCropArgs) -> SampleFunction:
    height, width = _pair(args.size)

    def run(sample: Sample, draws: Draws, scratch: Scratch | None = None) -> None:
        images = image_fields(sample, args.fields)
        check_sizes(images)
        for name, image in images:
            pixels = _pad_to(image.pixels, height, width)
            # int(round(.)), so halves go to the even side, as in torchvision.
            top = round((pixels.shape[0] - height) / 2)
            left = round((pixels.shape[1] - width) / 2)
            sample[name] = image._replace(pixels=pixels[top : top + height, left : left + width])

    return run


def center_crop_steps(args: CenterCropArgs) -> ImageOps:
    """The same, described."""
    height, width = _pair(args.size)

    def of(image_height: int, image_width: int, draws: Draws) -> tuple[Crop]:
        return (Crop(_middle(image_height, height), _middle(image_width, width), height, width),)

    return ImageOps((Crop,), of, is_inside=False)


def _middle(length: int, wanted: int) -> int:
    return round((length - wanted) / 2) if length >= wanted else -((wanted - length) // 2)


def _pad_to(pixels: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    missing_rows, missing_columns = max(0, height - pixels.shape[0]), max(0, width - pixels.shape[1])
    if not missing_rows and not missing_columns:
        return pixels
    top, left = missing_rows // 2, missing_columns // 2
    return np.pad(pixels, ((top, missing_rows - top), (left, missing_columns - left), (0, 0)))


def random_crop(args: RandomCropArgs) -> SampleFunction:
    """Two draws: the crop's top and left."""
    height, width = _pair(args.size)

    def run(sample: Sample, draws: Draws, scratch: Scratch | None = None) -> None:
        images = image_fields(sample, args.fields)
        check_sizes(images)
        for name, whole in images:
            image = whole
            rows = columns = args.padding
            if args.pad_if_needed:
                rows += max(0, height - image.size[0] - 2 * rows)
                columns += max(0, width - image.size[1] - 2 * columns)
            if rows or columns:
                around = ((rows, rows), (columns, columns), (0, 0))
                image = Image(np.pad(image.pixels, around, constant_values=args.fill), image.mask)
            if image.size[0] < height or image.size[1] < width:
                raise ValueError(
                    f"the image is {image.size[1]} x {image.size[0]}, smaller than the crop of {width} x {height}: "
                    "resize it first or set pad_if_needed: true"
                )
            top = int(draws[0] * (image.size[0] - height + 1))
            left = int(draws[1] * (image.size[1] - width + 1))
            pixels, _ = cut(image, (top, left, height, width))
            sample[name] = Image(pixels, image.mask)

    return run


def random_crop_steps(args: RandomCropArgs) -> ImageOps:
    """The same, described."""
    height, width = _pair(args.size)

    def of(image_height: int, image_width: int, draws: Draws) -> tuple[Crop]:
        rows = columns = args.padding
        if args.pad_if_needed:
            rows += max(0, height - image_height - 2 * rows)
            columns += max(0, width - image_width - 2 * columns)
        num_rows, num_columns = image_height + 2 * rows, image_width + 2 * columns
        if num_rows < height or num_columns < width:
            raise ValueError("smaller than the crop")
        top = int(draws[0] * (num_rows - height + 1)) - rows
        left = int(draws[1] * (num_columns - width + 1)) - columns
        return (Crop(top, left, height, width),)

    is_inside = not (args.padding or args.pad_if_needed)
    return ImageOps((Crop,), of, fill=args.fill, is_inside=is_inside, is_shared=True)


RANDOM_RESIZED_CROP_DRAWS = 22


def random_resized_crop(args: RandomResizedCropArgs) -> SampleFunction:
    """22 draws: areas and ratios of ten attempts, and the position of the first that fits."""
    target = _pair(args.size)

    def run(sample: Sample, draws: Draws, scratch: Scratch | None = None) -> list[ResampleJob]:
        jobs: list[ResampleJob] = []
        images = image_fields(sample, args.fields)
        check_sizes(images)
        first = images[0][1]
        box = first.box or crop_box(*first.size, args.scale, args.ratio, draws)
        for name, image in images:
            sample[name] = resized(
                image, box, target, args.interpolation, antialias=args.antialias, jobs=jobs, scratch=scratch, field=name
            )
        return jobs

    return run


def random_resized_crop_steps(args: RandomResizedCropArgs) -> ImageOps:
    """The same, described."""
    target, scale, ratio = Scale(*_pair(args.size)), args.scale, args.ratio

    def of(height: int, width: int, draws: Draws) -> tuple[Crop, Scale]:
        return Crop(*crop_box(height, width, scale, ratio, draws)), target

    return ImageOps((Crop, Scale), of, args.interpolation, args.antialias, is_shared=True)


def crop_box(
    height: int, width: int, scale: tuple[float, float], ratio: tuple[float, float], draws: Draws
) -> tuple[int, int, int, int]:
    """(top, left, height, width) of a random resized crop: torchvision's rule, from draws float64 [22].

    Ten attempts with a random area and a log-uniform aspect ratio; if none fits, the largest centred crop of an allowed ratio.
    """
    values = draws.tolist()
    log_low, log_high = math.log(ratio[0]), math.log(ratio[1])
    for area_draw, ratio_draw in zip(values[:10], values[10:20], strict=True):
        area = height * width * (scale[0] + area_draw * (scale[1] - scale[0]))
        aspect = math.exp(log_low + ratio_draw * (log_high - log_low))
        w = round(math.sqrt(area * aspect))
        h = round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return int(values[20] * (height - h + 1)), int(values[21] * (width - w + 1)), h, w
    w, h = width, height
    if width / height < ratio[0]:
        h = min(height, max(1, round(width / ratio[0])))
    elif width / height > ratio[1]:
        w = min(width, max(1, round(height * ratio[1])))
    return (height - h) // 2, (width - w) // 2, h, w


def random_horizontal_flip(args: RandomHorizontalFlipArgs) -> SampleFunction:
    """One draw: mirrored if it is below `p`, as a view that is read backwards when it is written into its slot."""
    return _flip(args, np.s_[:, ::-1])


def random_vertical_flip(args: RandomVerticalFlipArgs) -> SampleFunction:
    """The same from top to bottom."""
    return _flip(args, np.s_[::-1])


def _flip(args: RandomHorizontalFlipArgs, mirrored: Any) -> SampleFunction:
    def run(sample: Sample, draws: Draws, scratch: Scratch | None = None) -> None:
        images = image_fields(sample, args.fields)
        check_shapes(images)
        for name, image in images:
            sample[name] = Image(image.pixels[mirrored] if draws[0] < args.p else image.pixels, image.mask)

    return run


def random_horizontal_flip_steps(args: RandomHorizontalFlipArgs) -> ImageOps:
    """The same, described."""
    return ImageOps((Flip,), lambda height, width, draws: (Flip(bool(draws[0] < args.p)),))


def random_vertical_flip_steps(args: RandomVerticalFlipArgs) -> ImageOps:
    """The same, described."""
    return ImageOps((VerticalFlip,), lambda height, width, draws: (VerticalFlip(bool(draws[0] < args.p)),))


def random_rotation(args: RandomRotationArgs) -> SampleFunction:
    """One draw: the angle. The pixels are the same as Pillow's, which torchvision uses for Pillow's images."""

    def run(sample: Sample, draws: Draws, scratch: Scratch | None = None) -> None:
        angle = _angle(args, draws)
        images = image_fields(sample, args.fields)
        check_shapes(images)
        for name, image in images:
            method = Pillow.Resampling["NEAREST" if image.mask else args.interpolation.upper()]
            pixels = image.pixels
            if pixels.shape[2] == 3 and pixels.dtype == np.uint8:
                turned = np.array(
                    Pillow.fromarray(pixels).rotate(angle, method, args.expand, fillcolor=(args.fill,) * 3)
                )
            else:
                planes = [_rotated(pixels[:, :, band], angle, method, args) for band in range(pixels.shape[2])]
                turned = np.stack(planes, 2)
            sample[name] = Image(turned, image.mask)

    return run


def _rotated(plane: NDArray[Any], angle: float, method: Pillow.Resampling, args: RandomRotationArgs) -> NDArray[Any]:
    """One channel [H, W], rotated; levels of 16 bits by way of 32, which Pillow resamples in full."""
    is_deep = plane.dtype != np.uint8
    picture = Pillow.fromarray(plane.astype(np.int32) if is_deep else np.ascontiguousarray(plane))
    turned = np.asarray(picture.rotate(angle, method, args.expand, fillcolor=args.fill))
    return turned.clip(0, 65535).astype(np.uint16) if is_deep else turned


def random_rotation_steps(args: RandomRotationArgs) -> ImageOps:
    """The same, described."""
    return ImageOps((Rotate,), lambda height, width, draws: (Rotate(_angle(args, draws)),), args.interpolation)


def _angle(args: RandomRotationArgs, draws: Draws) -> float:
    low, high = args.degrees
    return low + float(draws[0]) * (high - low)


def _pair(size: int | tuple[int, int]) -> tuple[int, int]:
    return size if isinstance(size, tuple) else (size, size)


RESIZE = StageKind(
    ResizeArgs,
    "sample",
    resize,
    ops=resize_steps,
    needs_images=True,
    takes_16_bits=True,
    shrinks=True,
    only_computes=True,
    is_contained=True,
)
CENTER_CROP = StageKind(
    CenterCropArgs,
    "sample",
    center_crop,
    ops=center_crop_steps,
    needs_images=True,
    takes_16_bits=True,
    shrinks=True,
    only_computes=True,
    is_contained=True,
)
RANDOM_CROP = StageKind(
    RandomCropArgs,
    "sample",
    random_crop,
    num_draws=2,
    ops=random_crop_steps,
    needs_images=True,
    takes_16_bits=True,
    shrinks=True,
    only_computes=True,
    is_contained=True,
)
RANDOM_RESIZED_CROP = StageKind(
    RandomResizedCropArgs,
    "sample",
    random_resized_crop,
    num_draws=RANDOM_RESIZED_CROP_DRAWS,
    ops=random_resized_crop_steps,
    needs_images=True,
    takes_16_bits=True,
    shrinks=True,
    only_computes=True,
    is_contained=True,
)
RANDOM_HORIZONTAL_FLIP = StageKind(
    RandomHorizontalFlipArgs,
    "sample",
    random_horizontal_flip,
    num_draws=1,
    ops=random_horizontal_flip_steps,
    needs_images=True,
    takes_16_bits=True,
    only_computes=True,
    is_contained=True,
)
RANDOM_VERTICAL_FLIP = StageKind(
    RandomVerticalFlipArgs,
    "sample",
    random_vertical_flip,
    num_draws=1,
    ops=random_vertical_flip_steps,
    runs_in_dali=False,
    needs_images=True,
    takes_16_bits=True,
    only_computes=True,
    is_contained=True,
)
RANDOM_ROTATION = StageKind(
    RandomRotationArgs,
    "sample",
    random_rotation,
    num_draws=1,
    ops=random_rotation_steps,
    runs_in_dali=False,
    needs_images=True,
    takes_16_bits=True,
    only_computes=True,
    is_contained=True,
)
