"""Photographs as people have them: formats, cases of extensions, modes and orientations in one folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from conftest import CLASSES
from numpy.typing import NDArray
from PIL import Image, ImageOps

_EXTENSIONS = ("jpg", "JPG", "jpeg", "png")
_MODES = {"png": ("RGB", "L", "RGBA", "P", "1", "LA"), "jpeg": ("RGB", "L", "CMYK")}
_ORIENTATION = 0x0112


def write_mixed(folder: Path, num_photos: int, seed: int) -> Path:
    """Photographs as `folder`/<class>/NNN.<extension>, photograph i being of class i mod 3."""
    rng = np.random.default_rng(seed)
    for index in range(num_photos):
        extension = _EXTENSIONS[index % 4]
        modes = _MODES["png" if extension == "png" else "jpeg"]
        height, width = (int(length) for length in rng.integers(16, 40, 2))
        image = Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8)).convert(
            modes[index // 4 % len(modes)]
        )
        exif = Image.Exif()
        if index % 5 < 3:  # as phones held upright, upside down and in a mirror write it
            exif[_ORIENTATION] = int(rng.integers(1, 9))
        path = folder / CLASSES[index % len(CLASSES)] / f"{index:03}.{extension}"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path, exif=exif)
    return folder


def upright(path: Path) -> NDArray[np.uint8]:
    """The picture [3, H, W] by Pillow alone."""
    with Image.open(path) as image:
        return np.asarray(ImageOps.exif_transpose(image).convert("RGB")).transpose(2, 0, 1)
