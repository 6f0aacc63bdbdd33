"""webdataset: WebLoader with 2 workers over shards in random order, with a buffer of 1,000 samples to shuffle in."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import webdataset

from profiles.peers.contestants import pixels
from profiles.peers.places import Places

PACKAGE = "webdataset"
_BUFFER = 1000


def _shards(folder: Any) -> list[str]:
    return sorted(str(path) for path in folder.glob("*.tar"))


def _photos(places: Places, settings: dict[str, Any]) -> Iterable[Any]:
    """Settings: `decoder`. Batches are made in the workers, as the documentation advises."""
    augment = pixels.AUGMENTS[settings.get("decoder", "pillow")]
    dataset = (
        webdataset.WebDataset(_shards(places.shards), shardshuffle=100, repeat=True)
        .shuffle(_BUFFER)
        .to_tuple("jpg", "cls")
        .map_tuple(augment, int)
        .batched(64, partial=False, collation_fn=torch.utils.data.default_collate)
    )
    return _loader(dataset, num_workers=2)


def _raw(places: Places, settings: dict[str, Any], *, photos: bool, repeat: bool) -> Iterable[Any]:
    """Settings: `num_workers` (2), `shuffle` (false). Without `repeat` an iteration is one epoch."""
    shuffle = settings.get("shuffle", False)
    urls = _shards(places.shards if photos else places.small_shards)
    dataset = webdataset.WebDataset(urls, shardshuffle=100 if shuffle else False, repeat=repeat)
    if shuffle:
        dataset = dataset.shuffle(_BUFFER)
    dataset = dataset.to_tuple("jpg" if photos else "txt", "cls").batched(64, collation_fn=_transposed)
    return _loader(dataset, num_workers=settings.get("num_workers", 2))


def _loader(dataset: Any, num_workers: int) -> Iterable[Any]:
    more = {"persistent_workers": True, "prefetch_factor": 4} if num_workers else {}
    found: Iterable[Any] = webdataset.WebLoader(dataset, batch_size=None, num_workers=num_workers, **more)
    return found


def _transposed(samples: list[Any]) -> list[list[Any]]:
    return [list(field) for field in zip(*samples, strict=True)]


WORKS: dict[str, Callable[[Places, dict[str, Any]], Iterable[Any]]] = {
    "tar": _photos,
    "raw-tar": partial(_raw, photos=False, repeat=True),
    "raw-tar-first": partial(_raw, photos=False, repeat=False),
    "raw-tar-photos": partial(_raw, photos=True, repeat=True),
    "raw-tar-photos-first": partial(_raw, photos=True, repeat=False),
}
