"""Image operations as data, computed on the host, so that DALI or the decoder can apply them.

A stage is a fixed sequence of operations; `ImageOps.of` computes their parameters for one image of known size from the stage's
draws. They equal the parameters that the stage itself uses on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray


class Crop(NamedTuple):
    """The window [top, top + height) x [left, left + width); pixels outside the image are filled."""

    top: int
    left: int
    height: int
    width: int


class Scale(NamedTuple):
    """Resize to (height, width)."""

    height: int
    width: int


class Flip(NamedTuple):
    """Mirror left and right if `is_on`."""

    is_on: bool


class VerticalFlip(NamedTuple):
    """Mirror top and bottom if `is_on`."""

    is_on: bool


class Rotate(NamedTuple):
    """Rotate about the middle, counter-clockwise. The size may change; see `random_rotation`."""

    degrees: float


LUMA = (0.2989, 0.587, 0.114)
"""The luma weights of red, green and blue."""


class Adjust(NamedTuple):
    """Every level x becomes `image` * x + `grey` * (the pixel's luma) + `mean` * (the mean luma), clamped to 0 to 255 and
    rounded down; then, if `probe`, the hue is turned by `turn` of the colour circle."""

    image: float = 1.0
    grey: float = 0.0
    mean: float = 0.0
    turn: float = 0.0
    probe: bool = False


ImageOp = Crop | Scale | Flip | VerticalFlip | Rotate | Adjust
MOVES_PIXELS: frozenset[type[ImageOp]] = frozenset({Crop, Scale, Flip, VerticalFlip, Rotate})


@dataclass(frozen=True)
class ImageOps:
    """`kinds` are the operations; `of(height, width, draws)` gives their parameters, one of each kind, and raises
    ValueError for an image that the stage refuses. `is_inside`: crops never exceed the image. `is_shared`: a sample's
    images share one crop, so they need one size. `uses_luma`, `turns_hue`: any operation does."""

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
        """True if the stage needs only a part of an image."""
        return self.is_inside and self.kinds[:1] == (Crop,)


class DecodeNeed(NamedTuple):
    """The part of an image that a stage needs: `box` (None means the whole image), decoded at 1/`step`."""

    box: Crop | None = None
    step: int = 1


EVERYTHING = DecodeNeed()
Needs = Callable[[int, int, NDArray[np.float64]], DecodeNeed]
"""`(height, width, draws) -> DecodeNeed`, from an image's size and the draws of the stage after `decode`."""


class DecodeHint(NamedTuple):
    """The needs of the stage after `decode`, and True if a part of an image may be enough."""

    of: Needs
    takes_a_piece: bool


def hint_for(steps: ImageOps, *, is_next: bool, scaled: bool) -> DecodeHint | None:
    """The hint for the `decode` before a stage; None if the stage always needs the whole image.

    A part is enough only for the stage that `is_next`; with `scaled`, fewer pixels are enough if it shrinks them further.
    """
    takes_a_piece = is_next and steps.takes_a_piece
    if not takes_a_piece and not scaled:
        return None

    def of(height: int, width: int, draws: NDArray[np.float64]) -> DecodeNeed:
        try:
            ops = steps.of(height, width, draws)
        except ValueError:
            return EVERYTHING  # the stage raises the error
        first = ops[0]
        crop = first if isinstance(first, Crop) else None
        if not scaled:
            return DecodeNeed(crop)
        shown = (height, width) if crop is None else (crop.height, crop.width)
        return DecodeNeed(crop if takes_a_piece else None, _reduction(*shown, ops[-1]))

    return DecodeHint(of, takes_a_piece)


def _reduction(height: int, width: int, target: ImageOp) -> int:
    """The greatest of libjpeg's fast factors that leaves `height` x `width` pixels at least as large as `target`."""
    assert isinstance(target, Scale)
    return next((step for step in (8, 4, 2) if height >= step * target.height and width >= step * target.width), 1)


@dataclass(frozen=True)
class Finalizer:
    """The last operation on pixels: (x - mean) / std per channel in float32, then a cast to `dtype`."""

    mean: tuple[float, ...]  # in levels of 255
    std: tuple[float, ...]
    dtype: torch.dtype


def size_after(steps: tuple[ImageOp, ...], height: int, width: int) -> tuple[int, int]:
    """(height, width) of an image after the operations."""
    for step in steps:
        if isinstance(step, (Crop, Scale)):
            height, width = step.height, step.width
    return height, width
