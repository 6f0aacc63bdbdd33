"""What stages do to an image, as arithmetic on the host: so that pixels may be worked on somewhere else.

A stage is a fixed sequence of steps; `ImageOps.of` gives their numbers for one image of known size, from the stage's draws.
The numbers are those that the stage itself works with on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray


class Crop(NamedTuple):
    """The window [top, top + height) x [left, left + width); what lies outside the image is filled."""

    top: int
    left: int
    height: int
    width: int


class Scale(NamedTuple):
    """Resize to this."""

    height: int
    width: int


class Flip(NamedTuple):
    """Mirror left and right, or not."""

    is_on: bool


LUMA = (0.2989, 0.587, 0.114)
"""Of red, green and blue."""


class Adjust(NamedTuple):
    """Every level x becomes `image` * x + `grey` * (the pixel's luma) + `mean` * (the mean of all luma), and then the hue is
    turned by `turn` of the colour circle if `probe`; within 0 and 255, and rounded down, as luma is."""

    image: float = 1.0
    grey: float = 0.0
    mean: float = 0.0
    turn: float = 0.0
    probe: bool = False


ImageOp = Crop | Scale | Flip | Adjust


@dataclass(frozen=True)
class ImageOps:
    """`kinds`: what every image goes through. `of(height, width, draws)`: the steps, one of each kind; ValueError for an image
    that the stage refuses. `is_inside`: crops never reach beyond the image. `is_shared`: a sample's images are cropped at one
    place, so they have to be of one size. `uses_luma`, `turns_hue`: whether any step does."""

    kinds: tuple[type[ImageOp], ...]
    of: Callable[[int, int, NDArray[np.float64]], tuple[ImageOp, ...]]
    interpolation: str = "bilinear"
    antialias: bool = True
    fill: int = 0
    is_inside: bool = True
    is_shared: bool = False
    uses_luma: bool = False
    turns_hue: bool = False

    @property
    def takes_a_piece(self) -> bool:
        """Whether the rest of an image does not matter."""
        return self.is_inside and self.kinds[:1] == (Crop,)


class DecodeNeed(NamedTuple):
    """What a stage looks at of an image: `box`, None for all of it, and no finer than decoded at 1/`step`."""

    box: Crop | None = None
    step: int = 1


EVERYTHING = DecodeNeed()
Needs = Callable[[int, int, NDArray[np.float64]], DecodeNeed]
"""`(height, width, draws) -> Need` of an image's size and the draws of the stage that will be given it."""


class DecodeHint(NamedTuple):
    """What a stage will need of each image, and whether that may be a piece of it."""

    of: Needs
    takes_a_piece: bool


def foresight(steps: ImageOps, *, is_next: bool, scaled: bool) -> DecodeHint | None:
    """What a stage will need of the image decoded for it; None if that is always everything.

    A piece will do for the stage that `is_next`; with `scaled`, fewer pixels where it shrinks them further.
    """
    takes_a_piece = is_next and steps.takes_a_piece
    if not takes_a_piece and not scaled:
        return None

    def of(height: int, width: int, draws: NDArray[np.float64]) -> DecodeNeed:
        try:
            found = steps.of(height, width, draws)
        except ValueError:
            return EVERYTHING  # the stage will say why it refuses the image
        first = found[0]
        crop = first if isinstance(first, Crop) else None
        if not scaled:
            return DecodeNeed(crop)
        shown = (height, width) if crop is None else (crop.height, crop.width)
        return DecodeNeed(crop if takes_a_piece else None, _reduction(*shown, found[-1]))

    return DecodeHint(of, takes_a_piece)


def _reduction(height: int, width: int, target: ImageOp) -> int:
    """The greatest of libjpeg's fast factors that leaves `height` x `width` pixels at least as large as `target`."""
    assert isinstance(target, Scale)
    return next((step for step in (8, 4, 2) if height >= step * target.height and width >= step * target.width), 1)


@dataclass(frozen=True)
class Finalizer:
    """What becomes of the pixels after geometry: (x * scale + shift) as float32, by channel, and then `dtype`."""

    mean: tuple[float, ...]  # in levels of 255
    std: tuple[float, ...]
    dtype: torch.dtype


def size_after(steps: tuple[ImageOp, ...], height: int, width: int) -> tuple[int, int]:
    """(height, width) of an image after the steps."""
    for step in steps:
        if isinstance(step, (Crop, Scale)):
            height, width = step.height, step.width
    return height, width
