"""NVIDIA DALI's CPU backend: 2 threads, readers that begin anew by themselves, 4 batches ahead, batches as torch tensors."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from profiles.peers.places import Places

dali: Any = importlib.import_module("nvidia.dali")  # it says nothing useful about its types
fn, types = dali.fn, dali.types

PACKAGE = "nvidia-dali-cuda130"
_SIZE = 224
_MEAN = [0.485 * 255, 0.456 * 255, 0.406 * 255]
_STD = [0.229 * 255, 0.224 * 255, 0.225 * 255]


def _normalised(images: Any) -> Any:
    return fn.crop_mirror_normalize(
        images,
        dtype=types.FLOAT,
        output_layout="CHW",
        mean=_MEAN,
        std=_STD,
        mirror=fn.random.coin_flip(probability=0.5),
    )


def _cropped(encoded: Any, way: str) -> Any:
    """`way`: "antialias", "no-antialias", or "fused", which decodes no more than the crop, as the documentation advises."""
    if way == "fused":
        pieces = fn.decoders.image_random_crop(
            encoded, device="cpu", output_type=types.RGB, random_area=[0.08, 1.0], random_aspect_ratio=[3 / 4, 4 / 3]
        )
        return fn.resize(pieces, size=[_SIZE, _SIZE], antialias=True)
    images = fn.decoders.image(encoded, device="cpu", output_type=types.RGB)
    return fn.random_resized_crop(
        images,
        size=[_SIZE, _SIZE],
        random_area=[0.08, 1.0],
        random_aspect_ratio=[3 / 4, 4 / 3],
        antialias=way == "antialias",
    )


def _from_files(folder: Path, way: str) -> Any:
    encoded, labels = fn.readers.file(file_root=str(folder), random_shuffle=True, initial_fill=1024, name="reader")
    return _normalised(_cropped(encoded, way)), labels


def _resized(folder: Path) -> Any:
    encoded, labels = fn.readers.file(file_root=str(folder), random_shuffle=True, name="reader")
    images = fn.resize(
        fn.decoders.image(encoded, device="cpu", output_type=types.RGB), size=[_SIZE, _SIZE], antialias=True
    )
    return fn.crop_mirror_normalize(images, dtype=types.FLOAT, output_layout="CHW", mean=_MEAN, std=_STD), labels


def _from_shards(folder: Path, way: str) -> Any:
    paths = sorted(str(path) for path in folder.glob("*.tar"))
    encoded, label = fn.readers.webdataset(
        paths=paths,
        ext=["jpg", "cls"],
        random_shuffle=True,
        initial_fill=1024,
        missing_component_behavior="error",
        name="reader",
    )
    # A class is stored as one digit: the text is the number.
    return _normalised(_cropped(encoded, way)), fn.cast(label, dtype=types.INT32) - 48


def _arrays(folder: Path) -> Any:
    return fn.readers.numpy(file_root=str(folder), file_filter="*.npy", random_shuffle=True, name="reader")


class _Batches:
    """DALI's iterator, endless, with the dict in its list of one taken out."""

    def __init__(self, pipeline: Any, names: list[str]) -> None:
        self._names = names
        plugin: Any = importlib.import_module("nvidia.dali.plugin.pytorch")
        self._iterator = plugin.DALIGenericIterator([pipeline], names)  # size -1: the reader begins anew by itself

    def __iter__(self) -> Iterator[Any]:
        for (batch,) in self._iterator:
            yield tuple(batch[name] for name in self._names)


def _pipeline(make: Any, batch: int, *arguments: Any) -> Any:
    return dali.pipeline_def(make)(
        *arguments, batch_size=batch, num_threads=2, device_id=None, prefetch_queue_depth=4, seed=1
    )


def _pictures(make: Any, folder: str, batch: int, places: Places, settings: dict[str, Any]) -> Iterable[Any]:
    """Setting `way`: see `_cropped`."""
    way = settings.get("way", "antialias")
    return _Batches(_pipeline(make, batch, getattr(places, folder), way), ["images", "labels"])


def _resize(places: Places, settings: dict[str, Any]) -> Iterable[Any]:
    return _Batches(_pipeline(_resized, 8, places.large_photos), ["images", "labels"])


def _numpy(places: Places, settings: dict[str, Any]) -> Iterable[Any]:
    return _Batches(_pipeline(_arrays, 2, places.npy), ["arrays"])


WORKS: dict[str, Callable[[Places, dict[str, Any]], Iterable[Any]]] = {
    "files": partial(_pictures, _from_files, "photos", 64),
    "files-no-antialias": partial(_pictures, _from_files, "photos", 64),
    "tar": partial(_pictures, _from_shards, "shards", 64),
    "photo-crop": partial(_pictures, _from_files, "large_photos", 8),
    "photo-resize": _resize,
    "large-npy": _numpy,
}
