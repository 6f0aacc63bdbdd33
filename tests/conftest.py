"""The small data set that tests share: photographs made of gradients and noise, as class folders and as tar shards."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

CLASSES = ("ant", "bee", "cat")
NUM_PHOTOS = 60  # 20 of each class
SHARD_SAMPLES = 20


def make_photo(index: int) -> bytes:
    """A JPEG between 48x40 and 160x144 pixels: a gradient of its own with noise on it; the same bytes every time."""
    rng = np.random.default_rng([7, index])
    width, height = 48 + 8 * int(rng.integers(15)), 40 + 8 * int(rng.integers(14))
    across, down = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    slopes = rng.uniform(-120, 120, (2, 3))
    pixels = 128 + across[..., None] * slopes[0] + down[..., None] * slopes[1] + rng.normal(0, 12, (height, width, 3))
    buffer = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def write_photos(folder: Path, num_photos: int = NUM_PHOTOS) -> Path:
    """Photographs as `folder`/<class>/NNN.jpg, photograph i being of class i mod 3."""
    for index in range(num_photos):
        place = folder / CLASSES[index % len(CLASSES)] / f"{index:03}.jpg"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(make_photo(index))
    return folder


def write_shards(folder: Path, num_photos: int = NUM_PHOTOS) -> Path:
    """The same photographs as `folder`/shard-00N.tar, members NNN.jpg and NNN.cls, in the order of their numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    for first in range(0, num_photos, SHARD_SAMPLES):
        with tarfile.open(folder / f"shard-{first // SHARD_SAMPLES:03}.tar", "w") as tar:
            for index in range(first, min(first + SHARD_SAMPLES, num_photos)):
                for name, data in (
                    (f"{index:03}.jpg", make_photo(index)),
                    (f"{index:03}.cls", str(index % len(CLASSES)).encode()),
                ):
                    member = tarfile.TarInfo(name)
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    return folder


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 60 small JPEGs of varying sizes, in three class folders. Shared: do not change it."""
    return write_photos(tmp_path_factory.mktemp("photos"))


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of three tar shards with the same 60 photographs, as jpg and cls. Shared: do not change it."""
    return write_shards(tmp_path_factory.mktemp("shards"))


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a text to pipeline.yaml, and gives its path."""

    def write_text(text: str) -> Path:
        path = tmp_path / "pipeline.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write_text
