"""`decode` applied to one field."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow

from loaderkit.samples.sample import Sample
from loaderkit.samples.values import Encoded, Image
from loaderkit.stages.image.decode import DecodeArgs, decode

Pixels = NDArray[np.uint8]
NO_DRAWS = np.empty(0)


def picture(height: int = 97, width: int = 131, seed: int = 0) -> Pillow.Image:
    """Smooth colours with edges and some noise: odd sizes, so that chroma planes do not divide evenly."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width].astype(float)
    pixels = np.stack([128 + 100 * np.sin(x / 9 + y / 31), 255 * y / height, 255 * x / width], axis=2)
    pixels[20:50, 30:80] = (250, 20, 60)
    pixels += rng.normal(0, 8, pixels.shape)
    return Pillow.fromarray(pixels.clip(0, 255).astype(np.uint8))


def encoded(image: Pillow.Image, kind: str = "JPEG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def decode_field(data: bytes, extension: str, **args: Any) -> Any:
    sample: Sample = {"image": Encoded(memoryview(data), extension)}
    decode(DecodeArgs.model_validate(args))(sample, NO_DRAWS, None)
    return sample["image"]


def pixels_of(data: bytes, extension: str = "jpg", **args: Any) -> Pixels:
    image = decode_field(data, extension, **args)
    assert type(image) is Image
    assert image.pixels.dtype == np.uint8
    assert image.pixels.ndim == 3
    return image.pixels
