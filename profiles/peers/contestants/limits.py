"""Limits: what two threads can do at most with the same means, without a framework. Memory is reused for everything.

Settings: `limit`, one of
    decode    libjpeg-turbo on bytes in memory, nothing else
    pool      loaderkit's own functions on tasks of 16 pictures: read, decode, crop, mirror, write normalised into slabs
    preadv    os.preadv of whole files
    import    a new interpreter imports torch and ends: the least that a process which loads takes before its first batch
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import accumulate, cycle
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
import torch

from loaderkit import native
from loaderkit.connectors.base import Ranges
from loaderkit.connectors.file import FileConnector
from loaderkit.stages.image.formats import jpeg_size
from loaderkit.stages.image.geometry import RANDOM_RESIZED_CROP_DRAWS, crop_box
from profiles.peers.places import Places, labelled

PACKAGE = "loaderkit"
_TASK = 16
_SCALE = tuple(1 / (255 * std) for std in (0.229, 0.224, 0.225))
_SHIFT = tuple(-mean / std for mean, std in zip((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), strict=True))


class _Memory(threading.local):
    """A thread's own buffers."""

    def __init__(self) -> None:
        self.encoded = bytearray(1 << 23)
        self.decoded = np.empty(1 << 22, np.uint8)
        self.resized = [np.empty((224, 224, 3), np.uint8) for _ in range(_TASK)]
        self.pictures: list[Any] = [np.empty(1 << 20, np.uint8) for _ in range(_TASK)]


class _Pool:
    """Tasks in two threads, `ahead` of them in flight, yielded in order in groups."""

    def __init__(self, tasks: Iterable[Callable[[], Any]], group: int, ahead: int) -> None:
        self._tasks = iter(tasks)
        self._group = group
        self._ahead = ahead

    def __iter__(self) -> Iterator[list[Any]]:
        with ThreadPoolExecutor(2) as pool:
            flying: list[Future[Any]] = []
            while True:
                while len(flying) < self._ahead + self._group:
                    flying.append(pool.submit(next(self._tasks)))
                yield [flying.pop(0).result() for _ in range(self._group)]


class _Counted:
    """Only how many samples there were."""

    def __init__(self, groups: Iterable[list[int]]) -> None:
        self._groups = groups

    def __iter__(self) -> Iterator[int]:
        return (sum(group) for group in self._groups)


def _decode(places: Places) -> Iterable[int]:
    encoded = [path.read_bytes() for path, _ in labelled(places.photos)]
    memory = _Memory()

    def task(first: int) -> int:
        for number in range(first, first + _TASK):
            data = encoded[number % len(encoded)]
            height, width, _, _ = simplejpeg.decode_jpeg_header(data)
            buffer = memory.decoded[: height * width * 3].reshape(height, width, 3)
            simplejpeg.decode_jpeg(data, "RGB", buffer=buffer)
        return _TASK

    tasks = (partial(task, first) for first in cycle(range(0, len(encoded), _TASK)))
    return _Counted(_Pool(tasks, 64 // _TASK, ahead=16))


class _Pictures:
    """The whole work of `files` into eight slabs, over and over."""

    _NUM_SLABS = 8

    def __init__(self, places: Places) -> None:
        self._samples = labelled(places.photos)
        self._sizes = [path.stat().st_size for path, _ in self._samples]
        self._connector = FileConnector(places.photos)
        self._keys = [path.relative_to(places.photos).as_posix() for path, _ in self._samples]
        self._memory = _Memory()
        self._slabs = [torch.empty(64, 3, 224, 224) for _ in range(self._NUM_SLABS)]
        self._arrays = [slab.numpy() for slab in self._slabs]
        self._labels = [torch.empty(64, dtype=torch.int64) for _ in range(self._NUM_SLABS)]
        self._rng = np.random.default_rng(1)

    def __iter__(self) -> Iterator[Any]:
        for parts in _Pool(self._tasks(), 64 // _TASK, ahead=16):
            slab = parts[0]
            yield self._slabs[slab], self._labels[slab]

    def _tasks(self) -> Iterator[Callable[[], int]]:
        for slab in cycle(range(self._NUM_SLABS)):
            for first in range(0, 64, _TASK):
                chosen = self._rng.integers(len(self._samples), size=_TASK).tolist()
                draws = self._rng.random((_TASK, RANDOM_RESIZED_CROP_DRAWS + 1))
                yield partial(self._task, slab, first, chosen, draws)

    def _task(self, slab: int, first: int, chosen: list[int], draws: Any) -> int:
        """Each kernel once for all pictures of the task, as loaderkit calls them."""
        memory = self._memory
        sizes = [self._sizes[sample] for sample in chosen]
        offsets = [0, *accumulate(sizes)][:_TASK]
        ranges = Ranges([self._keys[sample] for sample in chosen], [0] * _TASK, sizes, [None] * _TASK)
        assert not self._connector.read_many(ranges, offsets, memoryview(memory.encoded))
        data = [memoryview(memory.encoded)[offset : offset + size] for offset, size in zip(offsets, sizes, strict=True)]
        pieces = _pieces(memory, data, draws)
        native.resample([(target, piece, None, True) for target, piece in zip(memory.resized, pieces, strict=True)])
        is_mirrored = (draws[:, -1] < 0.5).tolist()
        images: list[Any] = [
            target[:, ::-1] if mirrored else target
            for target, mirrored in zip(memory.resized, is_mirrored, strict=True)
        ]
        native.write_normalized(self._arrays[slab], first, images, _SCALE, _SHIFT)
        self._labels[slab][first : first + _TASK] = torch.tensor([self._samples[sample][1] for sample in chosen])
        return slab


def _pieces(memory: _Memory, files: list[memoryview], draws: Any) -> list[Any]:
    """The pixels of random resized crops."""
    jobs = []
    for place, data in enumerate(files):
        rows, columns = jpeg_size(data) or (0, 0)
        if memory.pictures[place].size < rows * columns * 3:
            memory.pictures[place] = np.empty(rows * columns * 3, np.uint8)
        box = crop_box(rows, columns, (0.08, 1.0), (3 / 4, 4 / 3), draws[place, :-1])
        jobs.append((data, 1, box, memory.pictures[place]))
    if not native.HAS_JPEG:
        return [_of_whole(*job) for job in jobs]
    pieces = []
    for (_, _, (_, left, height, width), pixels), (first, num_columns, _) in zip(
        jobs, native.decode_pieces(jobs), strict=True
    ):
        there = pixels[: height * num_columns * 3].reshape(height, num_columns, 3)
        pieces.append(there[:, left - first : left - first + width])
    return pieces


def _of_whole(data: memoryview, _: int, box: tuple[int, int, int, int], pixels: Any) -> Any:
    top, left, height, width = box
    rows, columns = jpeg_size(data) or (0, 0)
    whole = pixels[: rows * columns * 3].reshape(rows, columns, 3)
    return simplejpeg.decode_jpeg(data, "RGB", buffer=whole)[top : top + height, left : left + width]


def _preadv(folder: Path) -> Iterable[int]:
    paths = sorted(folder.iterdir())
    buffers = threading.local()

    def task(path: Path) -> int:
        size = path.stat().st_size
        if getattr(buffers, "size", 0) < size:
            buffers.memory, buffers.size = memoryview(bytearray(size)), size
        fd = os.open(path, os.O_RDONLY)
        try:
            done = 0
            while done < size:
                done += os.preadv(fd, [buffers.memory[done:size]], done)
        finally:
            os.close(fd)
        return 1

    return _Counted(_Pool((partial(task, path) for path in cycle(paths)), group=2, ahead=8))


def _import() -> Iterator[int]:
    """As `executor: process` does it: without collecting garbage, and without plugins for other devices."""
    while True:
        environ = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        command = [sys.executable, "-P", "-c", "import gc, os; gc.disable(); import torch; os._exit(0)"]
        subprocess.run(command, check=True, env=environ)
        yield 1


def _files(places: Places, settings: dict[str, Any]) -> Iterable[Any]:
    return _decode(places) if settings["limit"] == "decode" else _Pictures(places)


WORKS: dict[str, Callable[[Places, dict[str, Any]], Iterable[Any]]] = {
    "files": _files,
    "large-npy": lambda places, settings: _preadv(places.npy),
    "large-npz": lambda places, settings: _preadv(places.npz),
    "first-batch": lambda places, settings: _import(),
}
