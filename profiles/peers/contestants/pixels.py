"""The picture work that peers leave to the user's own function: by Pillow, or by libjpeg-turbo and torch."""

from __future__ import annotations

import io
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

SIZE = 224
MEAN = torch.tensor([0.485, 0.456, 0.406]).reshape(3, 1, 1) * 255
SCALE = 1 / (torch.tensor([0.229, 0.224, 0.225]).reshape(3, 1, 1) * 255)

Augment = Callable[[Any], torch.Tensor]


def box(width: int, height: int) -> tuple[int, int, int, int]:
    """(left, top, width, height) of a random resized crop, by torchvision's rule."""
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1.0)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return random.randint(0, width - w), random.randint(0, height - h), w, h
    side = min(width, height)
    return (width - side) // 2, (height - side) // 2, side, side


def opened(source: Path | bytes) -> Any:
    """Pillow's image, not decoded yet."""
    return Image.open(source if isinstance(source, Path) else io.BytesIO(source))


def by_pillow(source: Path | bytes) -> torch.Tensor:
    """Decode, random resized crop, flip, normalise: what most training programs do."""
    with opened(source) as file:
        image = file.convert("RGB")
    left, top, width, height = box(*image.size)
    image = image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=(left, top, left + width, top + height))
    if random.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return _normalised_image(image)


def by_simplejpeg(source: Path | bytes) -> torch.Tensor:
    """The same by libjpeg-turbo, and torch's antialiased resize of uint8, which has vector code for this layout."""
    import simplejpeg

    pixels = simplejpeg.decode_jpeg(source.read_bytes() if isinstance(source, Path) else source, "RGB")
    left, top, width, height = box(pixels.shape[1], pixels.shape[0])
    piece = torch.from_numpy(pixels)[top : top + height, left : left + width].permute(2, 0, 1).unsqueeze(0)
    image = torch.nn.functional.interpolate(piece, (SIZE, SIZE), mode="bilinear", antialias=True)[0]
    if random.random() < 0.5:
        image = image.flip(2)
    return normalised(image)


def cropped_draft(source: Path | bytes) -> torch.Tensor:
    """A large picture's random resized crop, decoded at the coarsest scale that still has the crop's pixels."""
    with opened(source) as file:
        whole = file.size
        left, top, width, height = box(*whole)
        file.draft("RGB", (SIZE * whole[0] // width, SIZE * whole[1] // height))
        image = file.convert("RGB")
    across, down = image.width / whole[0], image.height / whole[1]
    place = (left * across, top * down, (left + width) * across, (top + height) * down)
    image = image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=place)
    if random.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return _normalised_image(image)


def resized(source: Path | bytes) -> torch.Tensor:
    """A large picture as a whole, to 224 x 224."""
    with opened(source) as file:
        return _normalised_image(file.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BILINEAR))


def resized_draft(source: Path | bytes) -> torch.Tensor:
    """The same, decoded at the coarsest scale that is large enough."""
    with opened(source) as file:
        file.draft("RGB", (SIZE, SIZE))
        return _normalised_image(file.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BILINEAR))


def normalised(image: torch.Tensor) -> torch.Tensor:
    """uint8 [3, H, W] as float32, packed."""
    floats = torch.empty(image.shape, dtype=torch.float32)
    return floats.copy_(image).sub_(MEAN).mul_(SCALE)


def _normalised_image(image: Any) -> torch.Tensor:
    return normalised(torch.from_numpy(np.array(image)).permute(2, 0, 1))


AUGMENTS: dict[str, Augment] = {"pillow": by_pillow, "simplejpeg": by_simplejpeg}
"""By the name of the decoder."""

LARGE: dict[tuple[str, bool], Augment] = {
    ("photo-crop", False): by_pillow,
    ("photo-crop", True): cropped_draft,
    ("photo-resize", False): resized,
    ("photo-resize", True): resized_draft,
}
"""By work, and whether Image.draft is used."""
