"""The demo's data set: pieces cut at random out of real photographs, in class folders.

    DIR/photos-v1-320/train/<photograph>/00042.jpg         500x375, about 100 kB, as ImageNet has them

The photographs come with scikit-image and scikit-learn; nothing is downloaded. The same number of images gives the same
data set every time.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path

import numpy as np
import simplejpeg
from PIL import Image

from loaderkit._internal.temporary_files import remove_leftovers, temporary_folder
from loaderkit.errors import MissingExtraError

_VERSION = 1  # to be raised when the pixels or the layout change, since a data set that is there is used again
_SIZE = (500, 375)
_NUM_THREADS = 2
_SEED = 1

# class: (package, folder in it, file, JPEG quality at which pieces of it take about 100 kB)
PHOTOGRAPHS = {
    "astronaut": ("skimage", "data", "astronaut.png", 99),
    "cat": ("skimage", "data", "chelsea.png", 99),
    "china": ("sklearn", "datasets/images", "china.jpg", 96),
    "coffee": ("skimage", "data", "coffee.png", 99),
    "flower": ("sklearn", "datasets/images", "flower.jpg", 99),
    "galaxies": ("skimage", "data", "hubble_deep_field.jpg", 97),
    "motorcycle": ("skimage", "data", "motorcycle_left.png", 97),
    "retina": ("skimage", "data", "retina.jpg", 100),
    "rocket": ("skimage", "data", "rocket.jpg", 100),
    "tissue": ("skimage", "data", "ihc.png", 97),
}


def demo_data(place: Path, num_images: int) -> Path:
    """The folder of classes of a data set of `num_images` below `place`; made if it is not there, else used as it is.

    Raises MissingExtraError without scikit-image and scikit-learn, OSError if it cannot be written.
    """
    folder = place / f"photos-v{_VERSION}-{num_images}"
    if not folder.is_dir():
        photographs = [_open_photograph(*PHOTOGRAPHS[name][:3]) for name in PHOTOGRAPHS]
        # Under another name until it is whole, so that what a stopped demo left is never taken for a data set.
        remove_leftovers(place, re.compile(rf"\.{folder.name}\.[0-9a-f]{{8}}\.tmp"))
        temporary = place / f".{folder.name}.{secrets.token_hex(4)}.tmp"
        try:
            with temporary_folder(temporary):
                _write_images(temporary / "train", photographs, num_images)
                try:
                    os.rename(temporary, folder)
                except OSError:
                    if not folder.is_dir():  # else another demo was faster, and made the same
                        raise
        except OSError as error:  # of a full disk it names no file
            raise OSError(error.errno, error.strerror, str(place)) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder / "train"


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


def _write_images(train: Path, photographs: list[Image.Image], num_images: int) -> None:
    """Image i is a piece of photograph i mod 10."""
    for name in PHOTOGRAPHS:
        (train / name).mkdir(parents=True)

    def write(number: int) -> None:
        label = number % len(photographs)
        name, (*_, quality) = list(PHOTOGRAPHS.items())[label]
        pixels = np.asarray(_piece(photographs[label], [_SEED, label, number]))
        (train / name / f"{number:05}.jpg").write_bytes(
            simplejpeg.encode_jpeg(pixels, quality=quality, colorsubsampling="420")
        )

    # Resizing and encoding leave the interpreter's lock to others, so threads do.
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        list(pool.map(write, range(num_images)))


def _piece(photograph: Image.Image, seed: list[int]) -> Image.Image:
    """A 4:3 piece between 60 and 100 % as wide as fits, anywhere, sometimes mirrored."""
    rng = np.random.default_rng(seed)
    width, height = photograph.size
    across = min(width, height * _SIZE[0] / _SIZE[1]) * rng.uniform(0.6, 1.0)
    down = across * _SIZE[1] / _SIZE[0]
    left, top = rng.uniform(0, width - across), rng.uniform(0, height - down)
    image = photograph.resize(_SIZE, Image.Resampling.BICUBIC, box=(left, top, left + across, top + down))
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else image
