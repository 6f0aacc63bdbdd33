"""torchdata.nodes: indexes in batches, each fetched and collated by one of 2 parallel mappers, 4 batches ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.utils.data import Dataset, default_collate
from torchdata.nodes import Batcher, Loader, Mapper, ParallelMapper, Prefetcher, SamplerWrapper

from profiles.peers.contestants import pixels
from profiles.peers.contestants.datasets import BATCH, Photographs, at_random, plain
from profiles.peers.places import Places

PACKAGE = "torchdata"


class _Fetch:
    """Indexes -> a collated batch."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self._dataset = dataset

    def __call__(self, indexes: list[int]) -> Any:
        return default_collate([self._dataset[index] for index in indexes])


def _nodes(dataset: Dataset[Any], batch: int, settings: dict[str, Any]) -> Iterable[Any]:
    """Settings: `method` ("thread" or "process"); `task`: "item", as its guide has it, or "batch", which spares a hand-off
    a sample."""
    method = settings.get("method", "thread")
    torch.set_num_threads(1)  # the mappers are the threads
    sampler = at_random(dataset)
    by_item = settings.get("task") == "item"
    indexes = SamplerWrapper(sampler) if by_item else Batcher(SamplerWrapper(sampler), batch, drop_last=True)
    fetched: Any = ParallelMapper(
        indexes,
        dataset.__getitem__ if by_item else _Fetch(dataset),
        num_workers=2,
        in_order=True,
        method=method,
        multiprocessing_context="fork" if method == "process" else None,
    )
    if by_item:
        fetched = Mapper(Batcher(fetched, batch, drop_last=True), default_collate)
    found: Iterable[Any] = Loader(Prefetcher(fetched, prefetch_factor=4))
    return found


def _photos(places: Places, settings: dict[str, Any]) -> Iterable[Any]:
    return _nodes(Photographs(places.photos, pixels.AUGMENTS[settings.get("decoder", "simplejpeg")]), 64, settings)


def _plain(work: str, places: Places, settings: dict[str, Any]) -> Iterable[Any]:
    return _nodes(plain(work, places), BATCH[work], settings)


WORKS: dict[str, Callable[[Places, dict[str, Any]], Iterable[Any]]] = {
    "files": _photos,
    **{work: partial(_plain, work) for work in ("dataset", "dataset-records", "records", "tokens")},
}
