"""The demo's data set: pieces cut at random out of real photographs, as class folders and as tar shards.

    DIR/photos-v1-2000/train/<photograph>/00042.jpg         500x375, about 100 kB, as ImageNet has them
    DIR/photos-v1-2000/shards/train-003.tar                 the same as 00042.jpg + 00042.cls, in mixed order

The photographs come with scikit-image and scikit-learn; nothing is downloaded. The same number of images gives the same
data set every time.
"""

from __future__ import annotations

import io
import os
import secrets
import shutil
import tarfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
from PIL import Image

from loaderkit.errors import MissingExtraError

_VERSION = 1  # to be raised when the pixels or the layout change, since a data set that is there is used again
_SIZE = (500, 375)
_TARGET_BYTES = 100_000
_SHARD_SAMPLES = 250
_NUM_THREADS = 2
_SEED = 1

# class: (package, folder in it, file)
PHOTOGRAPHS = {
    "astronaut": ("skimage", "data", "astronaut.png"),
    "cat": ("skimage", "data", "chelsea.png"),
    "china": ("sklearn", "datasets/images", "china.jpg"),
    "coffee": ("skimage", "data", "coffee.png"),
    "flower": ("sklearn", "datasets/images", "flower.jpg"),
    "galaxies": ("skimage", "data", "hubble_deep_field.jpg"),
    "motorcycle": ("skimage", "data", "motorcycle_left.png"),
    "retina": ("skimage", "data", "retina.jpg"),
    "rocket": ("skimage", "data", "rocket.jpg"),
    "tissue": ("skimage", "data", "ihc.png"),
}


@dataclass(frozen=True)
class DemoData:
    """A complete data set: `train` holds the class folders, `shards` the tar archives."""

    folder: Path
    num_images: int

    @property
    def train(self) -> Path:
        return self.folder / "train"

    @property
    def shards(self) -> Path:
        return self.folder / "shards"


def demo_data(place: Path, num_images: int, say: Callable[[str], None] = lambda line: None) -> DemoData:
    """The data set of `num_images` below `place`; made if it is not there, else used as it is.

    Raises MissingExtraError without scikit-image and scikit-learn, OSError if it cannot be written.
    """
    data = DemoData(place / f"photos-v{_VERSION}-{num_images}", num_images)
    if data.folder.is_dir():
        return data
    say(f"cutting {num_images} images out of {len(PHOTOGRAPHS)} photographs ...")
    photographs = [_Photograph(number, name) for number, name in enumerate(PHOTOGRAPHS)]
    place.mkdir(parents=True, exist_ok=True)
    # Under another name until it is whole, so that what a stopped demo left is never taken for a data set.
    temporary = DemoData(place / f".{data.folder.name}.{secrets.token_hex(4)}.tmp", num_images)
    try:
        _write_files(temporary, photographs)
        _write_shards(temporary)
        try:
            os.rename(temporary.folder, data.folder)
        except OSError:
            if not data.folder.is_dir():  # else another demo was faster, and made the same
                raise
    finally:
        shutil.rmtree(temporary.folder, ignore_errors=True)
    return data


class _Photograph:
    """One photograph, and the JPEG quality at which its pieces take about 100 kB."""

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.name = name
        self._pixels = _open_photograph(*PHOTOGRAPHS[name])

    def piece(self, number: int) -> Image.Image:
        """The image of that number: a 4:3 piece between 60 and 100 % as wide as fits, anywhere, sometimes mirrored."""
        rng = np.random.default_rng([_SEED, self.number, number])
        width, height = self._pixels.size
        across = min(width, height * _SIZE[0] / _SIZE[1]) * rng.uniform(0.6, 1.0)
        down = across * _SIZE[1] / _SIZE[0]
        left, top = rng.uniform(0, width - across), rng.uniform(0, height - down)
        image = self._pixels.resize(_SIZE, Image.Resampling.BICUBIC, box=(left, top, left + across, top + down))
        return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else image

    @cached_property
    def quality(self) -> int:
        """A smooth photograph needs a high one. Found by bisection on four pieces."""
        pieces = [self.piece(number) for number in range(4)]
        low, high = 70, 100
        while low < high:
            middle = (low + high) // 2
            num_bytes = sum(len(_encode(piece, middle)) for piece in pieces) / len(pieces)
            low, high = (middle + 1, high) if num_bytes < _TARGET_BYTES else (low, middle)
        return low

    def jpeg(self, number: int) -> bytes:
        return _encode(self.piece(number), self.quality)


def _open_photograph(package: str, folder: str, file: str) -> Image.Image:
    try:
        path = resources.files(package).joinpath(folder, file)
        with path.open("rb") as opened, Image.open(opened, formats=("JPEG", "PNG")) as image:
            return image.convert("RGB")
    except (ModuleNotFoundError, FileNotFoundError) as error:
        raise MissingExtraError(
            f"the demo cuts its images out of photographs that come with scikit-image and scikit-learn, and {file} of "
            f"{package} is not there: pip install 'loaderkit[demo]'"
        ) from error


def _encode(image: Image.Image, quality: int) -> bytes:
    encoded: bytes = simplejpeg.encode_jpeg(np.asarray(image), quality=quality, colorsubsampling="420")
    return encoded


def _write_files(data: DemoData, photographs: list[_Photograph]) -> None:
    """Image i is one of photograph i mod 10."""
    for photograph in photographs:
        (data.train / photograph.name).mkdir(parents=True)

    def write(number: int) -> None:
        photograph = photographs[number % len(photographs)]
        (data.train / photograph.name / f"{number:05}.jpg").write_bytes(photograph.jpeg(number))

    # Resizing and encoding leave the interpreter's lock to others, so threads do.
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        list(pool.map(lambda photograph: photograph.quality, photographs))
        list(pool.map(write, range(data.num_images)))


def _write_shards(data: DemoData) -> None:
    data.shards.mkdir()
    names = list(PHOTOGRAPHS)
    mixed = np.random.default_rng(_SEED).permutation(data.num_images).tolist()
    for first in range(0, data.num_images, _SHARD_SAMPLES):
        with tarfile.open(data.shards / f"train-{first // _SHARD_SAMPLES:03}.tar", "w") as tar:
            for number in mixed[first : first + _SHARD_SAMPLES]:
                label = number % len(names)
                image = (data.train / names[label] / f"{number:05}.jpg").read_bytes()
                for name, content in ((f"{number:05}.jpg", image), (f"{number:05}.cls", str(label).encode())):
                    _add(tar, name, content)


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member: Any = tarfile.TarInfo(name)  # its time and owner stay 0: the same archive every time
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))
