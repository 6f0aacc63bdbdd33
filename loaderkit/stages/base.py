"""What every stage takes, and the values that samples hold between two stages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, PositiveInt

from loaderkit._internal.settings import Model
from loaderkit.engine.work import FieldSpec


class StageArgs(Model):
    """What every stage takes."""

    name: str | None = Field(
        None,
        min_length=1,
        pattern=r"^[A-Za-z_][\w-]*$",
        description="default: its kind; a second one of a kind is kind-2",
    )
    workers: PositiveInt | Literal["auto"] = Field(
        "auto", description="threads of its own, or auto: share the automatic pool with its neighbours"
    )


FieldNames = Annotated[
    Annotated[tuple[str, ...], Field(min_length=1)] | None,
    BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value),
]
"""Which fields a stage acts on; None: every field it fits."""


class Encoded(NamedTuple):
    """The bytes of one field before `decode`, and the extension that says what they are ("jpg", "cls", "seg.png")."""

    data: memoryview
    extension: str


class Image(NamedTuple):
    """A decoded image: uint8 [H, W, C], C = 3, or 1 when `mask` (labels: resized by nearest, never normalised).

    With `whole` = (height, width) it was not decoded in full: smaller, if `reduction` is N > 1, so that a pixel stands for
    N x N; and a piece only, whose first pixel is `origin` = (row, column) of the pixels there would be. `box` = (top, left,
    height, width) of the whole is what the piece was made for: the next stage will take that, and no more.
    """

    pixels: NDArray[np.uint8]
    mask: bool = False
    reduction: int = 1
    whole: tuple[int, int] | None = None
    origin: tuple[int, int] = (0, 0)
    box: tuple[int, int, int, int] | None = None

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) of the whole image."""
        return self.whole or (self.pixels.shape[0], self.pixels.shape[1])


class InPlace(NamedTuple):
    """A field whose value, of `num_bytes`, stands in its slot already: `read` wrote it there, and `batch` need not."""

    num_bytes: int


class GpuDecoded(NamedTuple):
    """An image that is a row of a tensor [n, C, H, W], of its whole chunk if it can be, by a stage that works on chunks."""

    tensor: torch.Tensor
    row: int


class FieldGroup(NamedTuple):
    """What one field's bytes hold when that is several fields: name -> `Encoded`, `InPlace` or value. `decode` opens it."""

    fields: dict[str, Any]


def image_fields(specs: Mapping[str, FieldSpec]) -> tuple[str, ...]:
    """The fields that are images to be normalised (masks are not)."""
    return tuple(name for name, spec in specs.items() if spec.image)
