"""What stages do to an image's geometry, as arithmetic on the host: so that pixels may be worked on somewhere else.

A stage is a fixed sequence of steps; `Steps.of` gives their numbers for one image of known size, from the stage's draws.
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


Step = Crop | Scale | Flip


@dataclass(frozen=True)
class Steps:
    """`kinds`: what every image goes through. `of(height, width, draws)`: the steps, one of each kind; ValueError for an image
    that the stage refuses. `is_inside`: crops never reach beyond the image. `is_shared`: a sample's images are cropped at one
    place, so they have to be of one size."""

    kinds: tuple[type[Step], ...]
    of: Callable[[int, int, NDArray[np.float64]], tuple[Step, ...]]
    interpolation: str = "bilinear"
    antialias: bool = True
    fill: int = 0
    is_inside: bool = True
    is_shared: bool = False


@dataclass(frozen=True)
class Finish:
    """What becomes of the pixels after geometry: (x * scale + shift) as float32, by channel, and then `dtype`."""

    mean: tuple[float, ...]  # in levels of 255
    std: tuple[float, ...]
    dtype: torch.dtype


def size_after(steps: tuple[Step, ...], height: int, width: int) -> tuple[int, int]:
    """(height, width) of an image after the steps."""
    for step in steps:
        if not isinstance(step, Flip):
            height, width = step.height, step.width
    return height, width
