"""SPDL: its pipeline with 2 threads, tasks of 16 pictures (64 small items), 4 batches in the sink."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import spdl.io
import torch
from spdl.pipeline import PipelineBuilder
from torch.utils.data import default_collate

from profiles.peers.contestants import pixels
from profiles.peers.contestants.datasets import BATCH, plain
from profiles.peers.places import Places, labelled

PACKAGE = "spdl"
_TASK = 16


def _shuffled(length: int, step: int) -> Iterator[list[int]]:
    """Indexes in lists of `step`, pass after pass."""
    rest: list[int] = []
    while True:
        rest += torch.randperm(length).tolist()
        for first in range(0, len(rest) - step + 1, step):
            yield rest[first : first + step]
        rest = rest[len(rest) - len(rest) % step :]


def _decoded_by_spdl(path: Path) -> Any:
    """FFmpeg's frames, cropped, mirrored and scaled by its filters (its bilinear filter widens when it shrinks)."""
    packets = spdl.io.demux_image(path.read_bytes())
    width, height = _size_of(packets)
    left, top, w, h = pixels.box(width, height)
    mirror = "hflip," if random.random() < 0.5 else ""
    shape = f"crop={w}:{h}:{left}:{top},{mirror}scale={pixels.SIZE}:{pixels.SIZE}:flags=bilinear,format=pix_fmts=rgb24"
    return spdl.io.decode_packets(packets, filter_desc=shape)


def _size_of(packets: Any) -> tuple[int, int]:
    return packets.width, packets.height


class _Decode:
    """Indexes -> (float32 [16, 3, 224, 224], labels)."""

    def __init__(self, folder: Path, decoder: str) -> None:
        self._samples = labelled(folder)
        self._decoder = decoder

    def __call__(self, indexes: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        samples = [self._samples[index] for index in indexes]
        labels = torch.tensor([label for _, label in samples])
        if self._decoder == "simplejpeg":
            return torch.stack([pixels.by_simplejpeg(path) for path, _ in samples]), labels
        frames = [_decoded_by_spdl(path) for path, _ in samples]
        images = spdl.io.to_torch(spdl.io.convert_frames(frames)).permute(0, 3, 1, 2)
        return torch.empty(images.shape).copy_(images).sub_(pixels.MEAN).mul_(pixels.SCALE), labels


def _joined(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat([images for images, _ in parts]), torch.cat([labels for _, labels in parts])


class _Running:
    """A pipeline, started at the first batch."""

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline

    def __iter__(self) -> Iterator[Any]:
        with self._pipeline.auto_stop():
            yield from self._pipeline.get_iterator()


def _photos(places: Places, settings: dict[str, Any]) -> Iterable[Any]:
    """Setting `decoder`: "spdl" or "simplejpeg"."""
    torch.set_num_threads(1)  # the pipeline's threads are the threads
    decode = _Decode(places.photos, settings.get("decoder", "spdl"))
    builder = PipelineBuilder().add_source(_shuffled(len(labelled(places.photos)), _TASK))
    builder = builder.pipe(decode, concurrency=2).aggregate(64 // _TASK, drop_last=True).pipe(_joined).add_sink(4)
    return _Running(builder.build(num_threads=2, max_failures=0))


def _collated(items: list[Any]) -> Any:
    return torch.from_numpy(np.stack(items)) if isinstance(items[0], np.ndarray) else default_collate(items)


def _plain(work: str, places: Places, settings: dict[str, Any]) -> Iterable[Any]:
    """Setting `task`: "item", as its guide has it, or "batch", which spares it a hand-off a sample."""
    torch.set_num_threads(1)
    dataset = plain(work, places)
    if settings.get("task") == "item":
        single = PipelineBuilder().add_source(map(itemgetter(0), _shuffled(len(dataset), 1)))  # type: ignore[arg-type]
        fetched = single.pipe(dataset.__getitem__, concurrency=2).aggregate(BATCH[work], drop_last=True)
        return _Running(fetched.pipe(_collated).add_sink(4).build(num_threads=2, max_failures=0))

    def fetch(indexes: list[int]) -> Any:
        return _collated([dataset[index] for index in indexes])

    source = _shuffled(len(dataset), BATCH[work])  # type: ignore[arg-type]
    return _Running(
        PipelineBuilder().add_source(source).pipe(fetch, concurrency=2).add_sink(4).build(num_threads=2, max_failures=0)
    )


WORKS: dict[str, Callable[[Places, dict[str, Any]], Iterable[Any]]] = {
    "files": _photos,
    **{work: partial(_plain, work) for work in ("dataset", "dataset-records", "records")},
}
