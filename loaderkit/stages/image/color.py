"""`color_jitter`: brightness, contrast, saturation and hue by random factors, in random order.

Parameters, distributions and arithmetic (truncation to uint8 after every step) are those of
torchvision.transforms.v2.ColorJitter. Masks are left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field

from loaderkit.sources.base import Sample
from loaderkit.stages.base import FieldNames, StageArgs, StageKind
from loaderkit.stages.image.ops import LUMA, Adjust, ImageOps
from loaderkit.stages.values import image_fields, to_tensor


def _factor_range(value: Any) -> Any:
    """One number x stands for [max(0, 1 - x), 1 + x]."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if not value >= 0:
            raise ValueError(f"a number of at least 0, or [low, high], not {value!r}")
        return (max(0.0, 1.0 - value), 1.0 + value)
    return _ordered(value, 0.0, float("inf"))


def _hue_range(value: Any) -> Any:
    """One number x stands for [-x, x]; a turn of the colour circle is 1."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if not 0 <= value <= 0.5:
            raise ValueError(f"a number from 0 to 0.5, or [low, high], not {value!r}")
        value = (-value, value)
    return _ordered(value, -0.5, 0.5)


def _ordered(value: Any, low: float, high: float) -> Any:
    if isinstance(value, (list, tuple)) and len(value) == 2 and all(type(item) in (int, float) for item in value):
        first, second = float(value[0]), float(value[1])
        if not low <= first <= second <= high:
            raise ValueError(f"[low, high] with {low:g} <= low <= high <= {high:g}, not {list(value)}")
        return (first, second)
    return tuple(value) if isinstance(value, list) else value


Factor = Annotated[tuple[float, float], BeforeValidator(_factor_range)]
Hue = Annotated[tuple[float, float], BeforeValidator(_hue_range)]


class ColorJitterArgs(StageArgs):
    """Change brightness, contrast, saturation and hue by random factors, in random order."""

    brightness: Factor = Field((1.0, 1.0), description="bounds of the factor; x stands for [max(0, 1 - x), 1 + x]")
    contrast: Factor = Field((1.0, 1.0), description="likewise")
    saturation: Factor = Field((1.0, 1.0), description="likewise")
    hue: Hue = Field((0.0, 0.0), description="bounds of the shift, in turns of the colour circle; x stands for [-x, x]")
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
    red, green, blue = scaled.unbind(0)
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
    red, green, blue = image.unbind(0)
    return red.mul(LUMA[0]).add_(green, alpha=LUMA[1]).add_(blue, alpha=LUMA[2]).floor_().unsqueeze(0)


def _blend(image: torch.Tensor, other: torch.Tensor, factor: float) -> torch.Tensor:
    return image.mul(factor).add_(other, alpha=1.0 - factor).clamp_(0, 255).to(torch.uint8)


COLOR_JITTER = StageKind(
    ColorJitterArgs,
    "sample",
    color_jitter,
    num_draws=COLOR_JITTER_DRAWS,
    ops=color_jitter_steps,
    needs_images=True,
    is_pointwise=True,
)
