"""Grain: a shuffled, endless MapDataset, read by 2 threads or by 2 worker processes, 4 batches ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import grain
import numpy as np
import torch

from profiles.peers.contestants import pixels
from profiles.peers.contestants.datasets import BATCH, plain
from profiles.peers.places import Places, labelled

PACKAGE = "grain"


class _Augment:
    """(path, label) -> (float32 [3, 224, 224], label); an object with a name, so that worker processes can have it."""

    def __init__(self, decoder: str) -> None:
        self._decoder = decoder

    def __call__(self, sample: tuple[Path, int]) -> tuple[Any, Any]:
        torch.set_num_threads(1)
        path, label = sample
        return pixels.AUGMENTS[self._decoder](path).numpy(), np.int64(label)


class _Source:
    """A torch data set as Grain's random access source, its items as NumPy arrays."""

    def __init__(self, work: str, places: Places) -> None:
        self._dataset: Any = plain(work, places)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return np.asarray(self._dataset[index])


def _started(dataset: Any, batch: int, settings: dict[str, Any]) -> Iterable[Any]:
    """Setting `workers`: "threads" or "processes"."""
    shuffled = dataset.shuffle(seed=1).repeat()
    if "decoder" in settings:
        shuffled = shuffled.map(_Augment(settings["decoder"]))
    batches = shuffled.batch(batch, drop_remainder=True)
    if settings.get("workers", "threads") == "threads":
        found: Iterable[Any] = batches.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=4))
        return found
    each = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
    options = grain.MultiprocessingOptions(num_workers=2, per_worker_buffer_size=2)
    several: Iterable[Any] = batches.to_iter_dataset(each).mp_prefetch(options)
    return several


def _photos(places: Places, settings: dict[str, Any]) -> Iterable[Any]:
    settings = {"decoder": "simplejpeg", **settings}
    return _started(grain.MapDataset.source(labelled(places.photos)), 64, settings)


def _plain(work: str, places: Places, settings: dict[str, Any]) -> Iterable[Any]:
    return _started(grain.MapDataset.source(_Source(work, places)), BATCH[work], settings)


WORKS: dict[str, Callable[[Places, dict[str, Any]], Iterable[Any]]] = {
    "files": _photos,
    **{work: partial(_plain, work) for work in ("dataset", "dataset-records", "records")},
}
