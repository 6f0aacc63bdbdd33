"""`color_jitter`, `random_grayscale`, `gaussian_blur`, `random_erasing`: stages that change levels, not places.

Names, parameters, distributions and arithmetic (truncation to uint8 after every step of colour) are the same as in
torchvision.transforms.v2. A sample's images share all draws; masks are left alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import AfterValidator, BeforeValidator, Field, PositiveInt

from loaderkit._internal.config.settings import PositiveRange, around_zero, as_tuple, ordered
from loaderkit.samples.sample import Sample
from loaderkit.stages.base import FieldNames, StageArgs
from loaderkit.stages.context import StageKind
from loaderkit.stages.image.alignment import check_shapes
from loaderkit.stages.image.ops import LUMA, Adjust, ImageOps
from loaderkit.stages.values import image_fields, to_tensor


def _factor_range(value: Any) -> Any:
    """One number x means [max(0, 1 - x), 1 + x]."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if not value >= 0:
            raise ValueError(f"a number of at least 0, or [low, high], not {value!r}")
        return (max(0.0, 1.0 - value), 1.0 + value)
    return ordered(value, 0.0, float("inf"))


def _hue_range(value: Any) -> Any:
    """In turns of the colour circle."""
    return around_zero(value, 0.5)


def _sigma_range(value: Any) -> Any:
    """One number x means [x, x]."""
    return (value, value) if type(value) in (int, float) else value


def _share_range(value: Any) -> Any:
    return ordered(value, 0.0, 1.0)


def _odd(value: int) -> int:
    if value % 2 == 0:
        raise ValueError(f"an odd number, so that a pixel lies in the middle, not {value}")
    return value


Factor = Annotated[tuple[float, float], BeforeValidator(_factor_range)]
Level = Annotated[int, Field(ge=0, le=255)]
Hue = Annotated[tuple[float, float], BeforeValidator(_hue_range)]


class ColorJitterArgs(StageArgs):
    """Change brightness, contrast, saturation and hue by random factors, in random order."""

    brightness: Factor = Field((1.0, 1.0), description="bounds of the factor; x stands for [max(0, 1 - x), 1 + x]")
    contrast: Factor = Field((1.0, 1.0), description="likewise")
    saturation: Factor = Field((1.0, 1.0), description="likewise")
    hue: Hue = Field((0.0, 0.0), description="bounds of the shift, in turns of the colour circle; x stands for [-x, x]")
    fields: FieldNames = Field(None, description="images to act on; default: all of them")


class RandomGrayscaleArgs(StageArgs):
    """Take the colours away with probability `p`; the image keeps its three channels."""

    p: float = Field(0.1, ge=0, le=1, description="probability")
    fields: FieldNames = Field(None, description="images to act on; default: all of them")


class GaussianBlurArgs(StageArgs):
    """Blur with a Gaussian of random width."""

    kernel_size: Annotated[PositiveInt, AfterValidator(_odd)] = Field(
        description="height and width of the window in pixels, an odd number"
    )
    sigma: Annotated[PositiveRange, BeforeValidator(_sigma_range)] = Field(
        (0.1, 2.0), description="bounds of the standard deviation in pixels; x stands for [x, x]"
    )
    fields: FieldNames = Field(None, description="images to act on; default: all of them")


class RandomErasingArgs(StageArgs):
    """Overwrite a random rectangle with probability `p`."""

    p: float = Field(0.5, ge=0, le=1, description="probability")
    scale: Annotated[tuple[float, float], BeforeValidator(_share_range)] = Field(
        (0.02, 0.33), description="bounds of the rectangle's share of the image's area"
    )
    ratio: PositiveRange = Field((0.3, 3.3), description="bounds of height / width")
    value: Annotated[Level | tuple[Level, Level, Level] | Literal["random"], BeforeValidator(as_tuple)] = Field(
        0, description="the level, one for red, green and blue each, or `random`: another for every pixel and channel"
    )
    fields: FieldNames = Field(None, description="images to act on; default: all of them")


COLOR_JITTER_DRAWS = 8


def color_jitter(args: ColorJitterArgs) -> Callable[..., None]:
    """Eight draws: four factors, and four numbers whose order is the order of the steps."""
    steps = (adjust_brightness, adjust_contrast, adjust_saturation, adjust_hue)
    ranges = _ranges(args)

    def run(sample: Sample, draws: NDArray[np.float64], scratch: dict[str, Any] | None = None) -> None:
        for name, image in image_fields(sample, args.fields):
            if image.mask:
                continue
            pixels = to_tensor(image)
            for number, factor in _factors(ranges, draws):
                pixels = steps[number](pixels, factor)
            sample[name] = image._replace(pixels=pixels.permute(1, 2, 0).numpy())

    return run


def color_jitter_steps(args: ColorJitterArgs) -> ImageOps:
    """The same as `ImageOp`s."""
    ranges = _ranges(args)

    def of(height: int, width: int, draws: NDArray[np.float64]) -> tuple[Adjust, ...]:
        return tuple(_ADJUST[number](factor) for number, factor in _factors(ranges, draws))

    num_steps = sum(bounds is not None for bounds in ranges)
    uses_luma = ranges[1] is not None or ranges[2] is not None
    return ImageOps((Adjust,) * num_steps, of, uses_luma=uses_luma, turns_hue=ranges[3] is not None)


_ADJUST: tuple[Callable[[float], Adjust], ...] = (
    lambda factor: Adjust(image=factor),
    lambda factor: Adjust(image=factor, mean=1.0 - factor),
    lambda factor: Adjust(image=factor, grey=1.0 - factor),
    lambda shift: Adjust(turn=shift, probe=True),
)


def _ranges(args: ColorJitterArgs) -> list[tuple[float, float] | None]:
    """Bounds of the four factors; None for one that changes nothing."""
    ranges = ((args.brightness, 1.0), (args.contrast, 1.0), (args.saturation, 1.0), (args.hue, 0.0))
    return [None if bounds == (neutral, neutral) else bounds for bounds, neutral in ranges]


def _factors(ranges: Sequence[tuple[float, float] | None], draws: NDArray[np.float64]) -> Iterator[tuple[int, float]]:
    """The steps for one image, in order: (number of the step, factor)."""
    for number in np.argsort(draws[4:8], kind="stable").tolist():
        bounds = ranges[number]
        if bounds is not None:
            low, high = bounds
            yield number, low + float(draws[number]) * (high - low)


def adjust_brightness(image: torch.Tensor, factor: float) -> torch.Tensor:
    """uint8 [C, H, W] times `factor`, clamped."""
    return image.mul(factor).clamp_(0, 255).to(torch.uint8)


def adjust_contrast(image: torch.Tensor, factor: float) -> torch.Tensor:
    """Blend with the mean of the grey image."""
    return _blend(image, _grey(image).mean(), factor)


def adjust_saturation(image: torch.Tensor, factor: float) -> torch.Tensor:
    """Blend with the grey image."""
    return image if image.shape[0] == 1 else _blend(image, _grey(image), factor)


def adjust_hue(image: torch.Tensor, shift: float) -> torch.Tensor:
    """Turn the hue of RGB uint8 [3, H, W] by `shift` of a full circle, through HSV (Smith 1978)."""
    if image.shape[0] == 1:
        return image
    scaled = image.to(torch.float32).div_(255)
    red, green, blue = _colours(scaled)
    value, least = scaled.amax(0), scaled.amin(0)
    spread = value - least
    is_grey = spread == 0
    divisor = torch.where(is_grey, 1.0, spread)
    to_red, to_green, to_blue = (value - red) / divisor, (value - green) / divisor, (value - blue) / divisor
    hue = torch.where(
        value == red, to_blue - to_green, torch.where(value == green, 2.0 + to_red - to_blue, 4.0 + to_green - to_red)
    )
    hue = (hue / 6.0 + shift).remainder_(1.0).mul_(6.0)
    saturation = torch.where(is_grey, 0.0, spread / torch.where(value == 0, 1.0, value))
    # Channel n of HSV to RGB in closed form: value - value * saturation * max(0, min(k, 4 - k, 1)), k = (n + hue) mod 6.
    channels = []
    for n in (5.0, 3.0, 1.0):
        k = (hue + n).remainder_(6.0)
        channels.append(value - value * saturation * torch.minimum(k, 4.0 - k).clamp_(0, 1))
    # A value of exactly 1 must become 255, and every other an equal share, hence just below 256.
    return torch.stack(channels).mul_(255.0 + 1.0 - 1e-3).clamp_(0, 255).to(torch.uint8)


def _grey(image: torch.Tensor) -> torch.Tensor:
    """Luma, rounded down, float32 [1, H, W]."""
    if image.shape[0] == 1:
        return image.to(torch.float32)
    red, green, blue = _colours(image)
    return red.mul(LUMA[0]).add_(green, alpha=LUMA[1]).add_(blue, alpha=LUMA[2]).floor_().unsqueeze(0)


def _colours(image: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Red, green and blue. Raises ValueError for other channels."""
    if image.shape[0] != 3:
        raise ValueError(
            f"contrast, saturation, hue and grey are those of red, green and blue, or of one channel, and the image has "
            f"{image.shape[0]} channels: name other images in `fields`, or change brightness alone"
        )
    return image.unbind(0)


def _blend(image: torch.Tensor, other: torch.Tensor, factor: float) -> torch.Tensor:
    return image.mul(factor).add_(other, alpha=1.0 - factor).clamp_(0, 255).to(torch.uint8)


def random_grayscale(args: RandomGrayscaleArgs) -> Callable[..., None]:
    """One draw: grey if it is below `p`. Grey is the saturation 0."""

    def run(sample: Sample, draws: NDArray[np.float64], scratch: dict[str, Any] | None = None) -> None:
        for name, image in image_fields(sample, args.fields):
            sample[name] = image
            if draws[0] < args.p and not image.mask:
                pixels = adjust_saturation(to_tensor(image), 0.0)
                sample[name] = image._replace(pixels=pixels.permute(1, 2, 0).numpy())

    return run


def random_grayscale_steps(args: RandomGrayscaleArgs) -> ImageOps:
    """The same as an `ImageOp`."""
    return ImageOps(
        (Adjust,),
        lambda height, width, draws: (Adjust(image=0.0, grey=1.0) if draws[0] < args.p else Adjust(),),
        uses_luma=True,
    )


def gaussian_blur(args: GaussianBlurArgs) -> Callable[..., None]:
    """One draw: the standard deviation. Beyond its edges the image is mirrored, and levels are rounded."""
    from scipy.ndimage import gaussian_filter

    low, high = args.sigma

    def run(sample: Sample, draws: NDArray[np.float64], scratch: dict[str, Any] | None = None) -> None:
        sigma, radius = low + float(draws[0]) * (high - low), args.kernel_size // 2
        for name, image in image_fields(sample, args.fields):
            if not image.mask:
                levels = gaussian_filter(
                    image.pixels, sigma, output=np.float32, mode="mirror", radius=radius, axes=(0, 1)
                )
                sample[name] = image._replace(pixels=np.rint(levels).astype(np.uint8))

    return run


RANDOM_ERASING_DRAWS = 24


def random_erasing(args: RandomErasingArgs) -> Callable[..., None]:
    """24 draws: one for `p`, 22 for the rectangle, and the key of random levels."""

    def run(sample: Sample, draws: NDArray[np.float64], scratch: dict[str, Any] | None = None) -> None:
        is_on = draws[0] < args.p
        images = image_fields(sample, args.fields)
        check_shapes([named for named in images if not named[1].mask])
        for name, image in images:
            num_channels = image.pixels.shape[2]
            if isinstance(args.value, tuple) and not image.mask and num_channels != 3:
                has = "one channel" if num_channels == 1 else f"{num_channels} channels"
                raise ValueError(f"`value` has three levels, and the image {name!r} {has}: give one level")
            sample[name] = image
            box = None if image.mask or not is_on else erased_box(*image.size, args.scale, args.ratio, draws[1:23])
            if box is None:
                continue
            top, left, height, width = box
            pixels = image.pixels.copy()
            window = pixels[top : top + height, left : left + width]
            if args.value == "random":
                words = np.random.Philox(key=int(draws[23] * 2**53)).random_raw(-(-window.size // 8))
                window[:] = words.view(np.uint8)[: window.size].reshape(window.shape)
            else:
                window[:] = args.value
            sample[name] = image._replace(pixels=pixels)

    return run


def erased_box(
    height: int, width: int, scale: tuple[float, float], ratio: tuple[float, float], draws: NDArray[np.float64]
) -> tuple[int, int, int, int] | None:
    """(top, left, height, width) to erase: torchvision's rule, from draws float64 [22].

    Ten attempts with a random area and a log-uniform aspect ratio; None if none is smaller than the image both ways.
    """
    values = draws.tolist()
    log_low, log_high = math.log(ratio[0]), math.log(ratio[1])
    for area_draw, ratio_draw in zip(values[:10], values[10:20], strict=True):
        area = height * width * (scale[0] + area_draw * (scale[1] - scale[0]))
        aspect = math.exp(log_low + ratio_draw * (log_high - log_low))
        h, w = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if h < height and w < width:
            return int(values[20] * (height - h + 1)), int(values[21] * (width - w + 1)), h, w
    return None


COLOR_JITTER = StageKind(
    ColorJitterArgs,
    "sample",
    color_jitter,
    num_draws=COLOR_JITTER_DRAWS,
    ops=color_jitter_steps,
    needs_images=True,
    is_pointwise=True,
    only_computes=True,
    is_contained=True,
)
RANDOM_GRAYSCALE = StageKind(
    RandomGrayscaleArgs,
    "sample",
    random_grayscale,
    num_draws=1,
    ops=random_grayscale_steps,
    needs_images=True,
    is_pointwise=True,
    only_computes=True,
    is_contained=True,
)
GAUSSIAN_BLUR = StageKind(
    GaussianBlurArgs,
    "sample",
    gaussian_blur,
    num_draws=1,
    needs_images=True,
    only_computes=True,
    is_contained=True,
)
RANDOM_ERASING = StageKind(
    RandomErasingArgs,
    "sample",
    random_erasing,
    num_draws=RANDOM_ERASING_DRAWS,
    needs_images=True,
    only_computes=True,
    is_contained=True,
)
