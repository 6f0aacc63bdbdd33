"""What `profiles.ray` compares: `executor: process`, `executor: ray` and Ray Data, which do the same to the same samples.

images    JPEGs of 56 kB: decode, random resized crop to 224, flip, float32; batches of 64
uint8     the same in batches of 256 that are normalised by whoever takes them, as with `transfer` to a GPU before `normalize`
tar       the same from tar shards
raw       small samples of tar shards as bytes; batches of 64
sleep     nothing but a wait, as of a machine that one does not have
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import loaderkit
from loaderkit import Pipeline
from profiles.peers.contestants import pixels
from profiles.peers.places import Places, labelled

BATCH = 64
UINT8_BATCH = 256
SLEEP_BATCH = 16
SLEEP_S = 0.02
NUM_PATHS = 12_000  # of an execution of Ray Data, so that it does not end while it is measured


class Waiting:
    """Items that take `SLEEP_S` to make, and no CPU; those of `seconds` 0 take none."""

    def __init__(self, seconds: float = SLEEP_S) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.seconds:
            time.sleep(self.seconds)
        return {"x": np.full(1024, index, np.float32)}


def batches_of(work: str, contestant: str, places: Places, num_workers: int) -> Generator[int, None, None]:
    """The number of samples of each batch, without end, with `num_workers` CPUs of Ray, or processes."""
    if contestant in ("process", "ray"):
        return _ours(work, contestant, places, num_workers)
    import ray.data

    ray.data.DataContext.get_current().enable_progress_bars = False
    return _endless(RAY_DATA[work, contestant](places))


CONTESTANTS = {
    "images": ("ray", "process", "ray-data", "ray-data-simplejpeg"),
    "uint8": ("ray", "process"),
    "tar": ("ray", "process", "ray-data", "ray-data-simplejpeg"),
    "raw": ("ray", "process", "ray-data"),
}


def _ours(work: str, executor: str, places: Places, num_workers: int) -> Generator[int, None, None]:
    prefetch: dict[str, Any] = {"executor": executor, "processes": num_workers, "concurrency": 1}
    if executor == "ray":
        import ray

        prefetch["ray"] = {"address": ray.get_runtime_context().gcs_address, "num_cpus": 1, "strategy": "spread"}
    prefetch["batches"] = max(4, 2 * num_workers)
    with loaderkit.build(
        _pipeline(work, places), overrides={f"prefetch.{key}": value for key, value in prefetch.items()}
    ) as loader:
        for _ in itertools.repeat(None):
            for batch in loader:
                yield len(batch["__key__"])


def _pipeline(work: str, places: Places) -> Pipeline:
    if work in ("sleep", "free"):
        return Pipeline.dataset(Waiting(SLEEP_S if work == "sleep" else 0.0)).shuffle("none").read().batch(SLEEP_BATCH)
    if work == "raw":
        return Pipeline.tar(places.small_shards).shuffle("none").read().batch(BATCH)
    source = (
        Pipeline.tar(places.shards)
        if work == "tar"
        else Pipeline.files(places.photos, include="**/*.jpg", label="parent")
    )
    cropped = source.read().decode().random_resized_crop(pixels.SIZE).random_horizontal_flip()
    if work == "uint8":
        return cropped.batch(UINT8_BATCH, drop_last=True)
    return cropped.batch(BATCH, drop_last=True).normalize()


# ------------------------------------------------------------------------------------------------------- Ray Data


def _endless(make: Callable[[], Iterable[Any]]) -> Generator[int, None, None]:
    for _ in itertools.repeat(None):
        for batch in make():
            yield len(next(iter(batch.values())))


def _images(places: Places, *, by: str) -> Callable[[], Iterable[Any]]:
    """`pillow`: as its documentation does, `read_images`; `simplejpeg`: bytes, and a quicker decoder in `map_batches`."""
    import ray

    found = [str(path) for path, _ in labelled(places.photos)]
    paths = list(itertools.islice(itertools.cycle(found), NUM_PATHS))
    if by == "pillow":
        data = ray.data.read_images(paths, mode="RGB", include_paths=True).map_batches(_cropped, batch_size=BATCH)
    else:
        data = ray.data.read_binary_files(paths, include_paths=True)
        data = data.map_batches(partial(_decoded, field="bytes"), batch_size=BATCH)
    return lambda: data.iter_torch_batches(batch_size=BATCH, drop_last=True)


def _tar(places: Places, *, by: str) -> Callable[[], Iterable[Any]]:
    """`pillow`: decoded by `read_webdataset` itself; `simplejpeg`: by a quicker decoder in `map_batches`."""
    import ray

    shards = sorted(map(str, places.shards.glob("*.tar")))
    paths = list(itertools.islice(itertools.cycle(shards), NUM_PATHS // 250))
    data = ray.data.read_webdataset(paths, suffixes=["jpg", "cls"], decoder=by == "pillow" or None)
    work = partial(_cropped, field="jpg") if by == "pillow" else partial(_decoded, field="jpg")
    data = data.map_batches(work, batch_size=BATCH)
    return lambda: data.iter_torch_batches(batch_size=BATCH, drop_last=True)


def _raw(places: Places) -> Callable[[], Iterable[Any]]:
    import ray

    shards = sorted(map(str, places.small_shards.glob("*.tar")))
    paths = list(itertools.islice(itertools.cycle(shards), 10 * len(shards)))
    data = ray.data.read_webdataset(paths, suffixes=["txt", "cls"], decoder=None)
    return lambda: data.iter_batches(batch_size=BATCH, batch_format="numpy")


def _cropped(batch: dict[str, Any], field: str = "image") -> dict[str, Any]:
    """Pixels of pictures to `[B, 3, 224, 224]`, by Pillow."""
    return _with_labels(batch, [_crop(Image.fromarray(np.asarray(picture, np.uint8))) for picture in batch[field]])


def _crop(image: Image.Image) -> np.ndarray[Any, Any]:
    left, top, width, height = pixels.box(*image.size)
    size = (pixels.SIZE, pixels.SIZE)
    image = image.resize(size, Image.Resampling.BILINEAR, box=(left, top, left + width, top + height))
    if np.random.default_rng().random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return pixels.normalised(torch.from_numpy(np.array(image)).permute(2, 0, 1)).numpy()


def _decoded(batch: dict[str, Any], field: str) -> dict[str, Any]:
    """JPEGs to `[B, 3, 224, 224]`, by libjpeg-turbo and torch."""
    torch.set_num_threads(1)
    return _with_labels(batch, [pixels.by_simplejpeg(bytes(data)).numpy() for data in batch[field]])


def _with_labels(batch: dict[str, Any], images: list[Any]) -> dict[str, Any]:
    if "path" in batch:
        labels = np.array([len(Path(path).parent.name) for path in batch["path"]])  # of a class: what that costs
    else:
        labels = np.array([int(label) for label in batch["cls"]])
    return {"image": np.stack(images), "label": labels}


RAY_DATA: dict[tuple[str, str], Callable[[Places], Callable[[], Iterable[Any]]]] = {
    ("images", "ray-data"): partial(_images, by="pillow"),
    ("images", "ray-data-simplejpeg"): partial(_images, by="simplejpeg"),
    ("tar", "ray-data"): partial(_tar, by="pillow"),
    ("tar", "ray-data-simplejpeg"): partial(_tar, by="simplejpeg"),
    ("raw", "ray-data"): _raw,
}
