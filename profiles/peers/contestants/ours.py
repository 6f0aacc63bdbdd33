"""loaderkit: 2 threads, 4 batches ahead, which is its default. Settings are overrides by dotted key."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from loaderkit import Pipeline, build
from profiles.peers.contestants.datasets import BATCH, plain
from profiles.peers.places import WINDOW, Places

PACKAGE = "loaderkit"


def _build(pipeline: Pipeline | dict[str, Any], settings: dict[str, Any]) -> Iterable[Any]:
    return build(pipeline, overrides={"prefetch.concurrency": 2, **settings})


def details(contestant: Any) -> dict[str, Any]:
    """What the memory work compares with: the bytes of a batch, and how many there may be."""
    stats = contestant.stats().to_dict()
    return {"slab_bytes": stats["memory"]["slab_bytes"], "batches": stats["tuning"]["batches"]}


def _pictures(source: Pipeline, *, antialias: bool = True) -> Pipeline:
    cropped = source.read().decode().random_resized_crop(224, antialias=antialias).random_horizontal_flip()
    return cropped.batch(64, drop_last=True).normalize().output("image", "label")


def _photos(places: Places) -> Pipeline:
    return Pipeline.files(places.photos, include="**/*.jpg", label="parent")


def _files(places: Places, settings: dict[str, Any], *, antialias: bool = True) -> Iterable[Any]:
    return _build(_pictures(_photos(places), antialias=antialias), settings)


def _tar(places: Places, settings: dict[str, Any]) -> Iterable[Any]:
    """Setting `source`: "files" for the same from files."""
    settings = dict(settings)
    source = _photos(places) if settings.pop("source", "tar") == "files" else Pipeline.tar(places.shards)
    return _build(_pictures(source), settings)


def _mds(places: Places, settings: dict[str, Any], *, raw: bool) -> Iterable[Any]:
    source = Pipeline.mds(places.mosaic)
    return _build(source.read().batch(64).output("image") if raw else _pictures(source), settings)


def _raw(places: Places, settings: dict[str, Any], *, photos: bool) -> Iterable[Any]:
    return _build(Pipeline.tar(places.shards if photos else places.small_shards).read().batch(64), settings)


def _large_photos(places: Places, settings: dict[str, Any], *, crop: bool) -> Iterable[Any]:
    """Setting `scaled`: decode at a coarser scale where that is fine enough."""
    settings = dict(settings)
    decode: Any = {"decode": {"scaled": True}} if settings.pop("scaled", False) else "decode"
    shaped = (
        [{"random_resized_crop": {"size": 224}}, "random_horizontal_flip"]
        if crop
        else [{"resize": {"size": [224, 224]}}]
    )
    description = {
        "source": {"kind": "files", "url": str(places.large_photos), "include": "**/*.jpg", "label": "parent"},
        "stages": ["read", decode, *shaped, {"batch": {"size": 8, "drop_last": True}}, "normalize"],
        "output": ["image", "label"],
    }
    return _build(description, settings)


def _dataset(work: str, places: Places, settings: dict[str, Any]) -> Iterable[Any]:
    pipeline = Pipeline.dataset(plain(work, places), fields=["data"]).read().batch(BATCH[work], drop_last=True)
    return _build(pipeline.output("data"), settings)


def _records(places: Places, settings: dict[str, Any]) -> Iterable[Any]:
    return _array({"url": str(places.records)}, 64, settings)


def _tokens(places: Places, settings: dict[str, Any]) -> Iterable[Any]:
    return _array({"url": str(places.tokens), "dtype": "uint16", "window": WINDOW}, 16, settings)


def _array(source: dict[str, Any], batch: int, settings: dict[str, Any]) -> Iterable[Any]:
    description = {
        "source": {"kind": "array", **source},
        "stages": ["read", {"batch": {"size": batch, "drop_last": True}}],
        "output": ["data"],
    }
    return _build(description, settings)


def _large_arrays(work: str, places: Places, settings: dict[str, Any]) -> Iterable[Any]:
    """The memory of 4 batches of 300 MB, and room for another."""
    folder = places.npy if work == "large-npy" else places.npz
    return _build(
        Pipeline.files(folder).read().decode().batch(2, drop_last=True), {"prefetch.memory": "2GiB", **settings}
    )


WORKS: dict[str, Callable[[Places, dict[str, Any]], Iterable[Any]]] = {
    **dict.fromkeys(("files", "first-batch", "busy-step", "memory"), _files),
    "files-no-antialias": partial(_files, antialias=False),
    "tar": _tar,
    "mds": partial(_mds, raw=False),
    "raw-mds": partial(_mds, raw=True),
    **dict.fromkeys(("raw-tar", "raw-tar-first"), partial(_raw, photos=False)),
    **dict.fromkeys(("raw-tar-photos", "raw-tar-photos-first"), partial(_raw, photos=True)),
    **{work: partial(_dataset, work) for work in ("dataset", "dataset-records")},
    "records": _records,
    "tokens": _tokens,
    **{work: partial(_large_arrays, work) for work in ("large-npy", "large-npz")},
    "photo-crop": partial(_large_photos, crop=True),
    "photo-resize": partial(_large_photos, crop=False),
}
