"""litdata: its own chunks holding the JPEGs' bytes, StreamingDataLoader with 2 workers and 4 batches prefetched by each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from litdata import StreamingDataLoader, StreamingDataset, optimize

from profiles.peers.contestants import pixels
from profiles.peers.places import Places, labelled

PACKAGE = "litdata"


class _Photographs(StreamingDataset):  # type: ignore[misc]
    """Samples are (bytes, label); what becomes of them is the user's function."""

    def __init__(self, folder: Path, decoder: str) -> None:
        super().__init__(str(folder), shuffle=True, drop_last=True)
        self._augment = pixels.AUGMENTS[decoder]

    def __getitem__(self, index: Any) -> tuple[torch.Tensor, int]:
        data, label = super().__getitem__(index)
        return self._augment(data), label


def _files(places: Places, settings: dict[str, Any]) -> Iterable[Any]:
    """Setting `decoder`."""
    dataset = _Photographs(places.litdata, settings.get("decoder", "simplejpeg"))
    found: Iterable[Any] = StreamingDataLoader(
        dataset, batch_size=64, num_workers=2, prefetch_factor=4, persistent_workers=True, drop_last=True
    )
    return found


def _sample(item: tuple[str, int]) -> tuple[bytes, int]:
    return Path(item[0]).read_bytes(), item[1]


def make(places: Places, target: Path) -> None:
    """Write the photos as chunks of 8 MB."""
    inputs = [(str(path), label) for path, label in labelled(places.photos)]
    optimize(_sample, inputs, str(target), chunk_bytes="8MB", num_workers=2, reorder_files=False)


WORKS: dict[str, Callable[[Places, dict[str, Any]], Iterable[Any]]] = {"files": _files}
