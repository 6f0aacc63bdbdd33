"""torch's DataLoader: 2 worker processes that stay, 4 batches prefetched by each (large arrays: 2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch.utils.data import DataLoader, Dataset

from profiles.peers.contestants import pixels
from profiles.peers.contestants.datasets import BATCH, Photographs, at_random, plain
from profiles.peers.places import Places

PACKAGE = "torch"


def loader(dataset: Dataset[Any], batch: int, settings: dict[str, Any]) -> Iterable[Any]:
    """Settings: `num_workers` (2), `prefetch_factor` (4)."""
    num_workers = settings.get("num_workers", 2)
    more = {"persistent_workers": True, "prefetch_factor": settings.get("prefetch_factor", 4)} if num_workers else {}
    return DataLoader(
        dataset, batch_size=batch, sampler=at_random(dataset), drop_last=True, num_workers=num_workers, **more
    )


def _photos(places: Places, settings: dict[str, Any]) -> Iterable[Any]:
    return loader(Photographs(places.photos, pixels.AUGMENTS[settings.get("decoder", "pillow")]), 64, settings)


def _large_photos(work: str, places: Places, settings: dict[str, Any]) -> Iterable[Any]:
    augment = pixels.LARGE[work, settings.get("draft", False)]
    return loader(Photographs(places.large_photos, augment), 8, settings)


def _plain(work: str, places: Places, settings: dict[str, Any]) -> Iterable[Any]:
    if work.startswith("large"):
        settings = {"prefetch_factor": 2, **settings}
    return loader(plain(work, places), BATCH[work], settings)


WORKS: dict[str, Callable[[Places, dict[str, Any]], Iterable[Any]]] = {
    **dict.fromkeys(("files", "first-batch", "busy-step", "memory"), _photos),
    **{work: partial(_large_photos, work) for work in ("photo-crop", "photo-resize")},
    **{work: partial(_plain, work) for work in BATCH},
}
