"""`decode: {device: gpu}` and `{device: dali-cpu}`: the run of stages from `decode` through `normalize` as one DALI pipeline.

    encoded bytes ─┐
    crop boxes ────┼─ external sources ─> decode the crop ─> resize ─> mirror, normalise ─> tensor [n, C, H, W] ─DLPack─> torch
    sizes, flips ──┘  (host arithmetic: steps.py, with loaderkit's own draws)

A chunk goes through at once, and is a whole batch: its tensor is the batch's, without a copy. What is no JPEG that DALI takes
goes through the CPU's own stages instead, in the same batch: other formats, four-channel and damaged files. So a damaged
image costs one sample, and its error is the one the CPU gives.
"""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.dlpack import from_dlpack

from loaderkit.errors import ConfigError
from loaderkit.images import jpeg_size, to_tensor
from loaderkit.steps import Crop, Finish, Flip, Scale, Step, Steps, size_after
from loaderkit.types import Chunk, Encoded, Image, Rendered

_JPEG_EXTENSIONS = frozenset({"jpg", "jpeg", "jfif"})


@dataclass(frozen=True)
class Graph:
    """A DALI pipeline to be. `device`: None for its CPU backend, else the number of the CUDA device."""

    stages: tuple[tuple[str, Steps], ...]
    finish: Finish | None
    batch_size: int
    device: int | None

    def lines(self) -> list[str]:
        """One line an operator, for people."""
        where = "cpu" if self.device is None else f"gpu {self.device}"
        first = "decoders.image_slice (only the crop)" if self.decodes_crops else "decoders.image"
        found = [f"{first} on {'cpu' if self.device is None else 'mixed'}"]
        for name, steps in self.stages:
            for kind in steps.kinds:
                if not (found[1:] == [] and self.decodes_crops and kind is Crop):
                    found.append(f"{_OPERATORS[kind]} on {where}: {name}")
        if self.finish is not None:
            found.append(f"crop_mirror_normalize on {where}")
        return found

    @property
    def decodes_crops(self) -> bool:
        """Whether the first thing that is done is to cut out a piece, so that only that need be decoded."""
        first = self.stages[0][1] if self.stages else None
        return first is not None and first.kinds[:1] == (Crop,) and first.is_inside


_OPERATORS = {Crop: "slice", Scale: "resize", Flip: "flip"}


class _Job(NamedTuple):
    """An image that DALI is to render: its place in the chunk, its bytes, and what it goes through."""

    place: int
    data: NDArray[np.uint8]
    steps: list[Step]


class Renderer:
    """Runs a graph over chunks, for the images of `fields` (None: all) of at most `max_pixels`.

    `draws(name, chunk)` gives a stage's uniform numbers, float64 [n, num_draws]. On the CPU `decode(chunk)` decodes what is
    left, `plain(chunk)` does the stages between `decode` and `batch`, and `finish` those after it, on [n, C, H, W].
    """

    def __init__(
        self,
        graph: Graph,
        *,
        fields: tuple[str, ...] | None,
        max_pixels: int,
        draws: Callable[[str, Chunk], NDArray[np.float64]],
        decode: Callable[[Chunk], Any],
        plain: Callable[[Chunk], None],
        finish: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._dali = _import_dali()
        self._graph = graph
        self._fields = fields
        self._max_pixels = max_pixels
        self._draws = draws
        self._decode = decode
        self._plain = plain
        self._finish = finish
        self._idle: deque[Any] = deque()  # pipelines that nobody works with: one thread at a time may

    def __call__(self, chunk: Chunk) -> None:
        """A chunk stage: every image of every sample becomes a row of a tensor, or the sample fails."""
        chunk.place = None
        draws = [self._draws(name, chunk) for name, _ in self._graph.stages]
        for field in self._image_fields(chunk):
            self._render_field(chunk, field, draws)
        self._decode(chunk)
        for place, sample in enumerate(chunk.samples):
            if sample is not None and any(type(value) is Image for value in sample.values()):
                self._on_the_cpu(chunk, place)

    def close(self) -> None:
        """Let go of the pipelines."""
        self._idle.clear()

    def _image_fields(self, chunk: Chunk) -> list[str]:
        names = dict.fromkeys(name for sample in chunk.samples if sample is not None for name in sample)
        return [name for name in names if self._fields is None or name in self._fields]

    def _render_field(self, chunk: Chunk, field: str, draws: list[NDArray[np.float64]]) -> None:
        jobs = []
        for place, sample in enumerate(chunk.samples):
            value = None if sample is None else sample.get(field)
            if type(value) is Encoded and value.extension.rpartition(".")[2] in _JPEG_EXTENSIONS:
                steps = self._steps(value.data, [numbers[place] for numbers in draws])
                if steps is not None:
                    jobs.append(_Job(place, np.frombuffer(value.data, np.uint8), steps))
        tensor = self._run(jobs) if jobs else None
        if tensor is None:
            # One that is damaged fails them all, and nobody says which it is: our decoder does.
            jobs = [job for job in jobs if self._is_whole(chunk, job.place, field)]
            tensor = self._run(jobs) if jobs else None
        if tensor is not None:
            for row, job in enumerate(jobs):
                sample = chunk.samples[job.place]
                assert sample is not None
                sample[field] = Rendered(tensor, row)

    def _is_whole(self, chunk: Chunk, place: int, field: str) -> bool:
        """Whether our decoder takes an image."""
        sample = chunk.samples[place]
        assert sample is not None
        attempt = _alone(chunk, place)
        attempt.samples[0] = {field: sample[field]}
        self._decode(attempt)
        return attempt.samples[0] is not None

    def _steps(self, data: memoryview, draws: Sequence[NDArray[np.float64]]) -> list[Step] | None:
        """What an image goes through; None where the CPU has to look at it."""
        size = jpeg_size(data)
        if size is None or size[0] * size[1] > self._max_pixels or not _is_well_formed(data):
            return None
        height, width = size
        found: list[Step] = []
        for (_, stage), numbers in zip(self._graph.stages, draws, strict=True):
            try:
                steps = stage.of(height, width, numbers)
            except ValueError:  # which the CPU says better
                return None
            found += steps
            height, width = size_after(steps, height, width)
        return found

    def _run(self, jobs: Sequence[_Job]) -> torch.Tensor | None:
        """[n, C, H, W], or None if DALI fails on one of them."""
        try:
            pipeline = self._idle.pop()
        except IndexError:
            pipeline = _build(self._dali, self._graph)
        pipeline.feed_input("encoded", [job.data for job in jobs])
        for number, column in enumerate(zip(*(job.steps for job in jobs), strict=True)):
            for name, values in _arguments(column).items():
                pipeline.feed_input(f"{name}-{number}", values)
        try:
            (output,) = pipeline.run()
        except RuntimeError:
            return None
        finally:
            self._idle.append(pipeline)  # after an error it takes the next batch as well
        # The tensor sees DALI's memory, which is not used again before the tensor is gone.
        tensor = from_dlpack(output.as_tensor())
        if self._graph.device is not None:
            # DALI would use its memory again as soon as the tensor is gone, whatever the loop's stream still does with it.
            tensor = tensor.clone()
            torch.cuda.current_stream(tensor.device).synchronize()
        finish = self._graph.finish
        return tensor if finish is None else tensor.to(finish.dtype)

    def _on_the_cpu(self, chunk: Chunk, place: int) -> None:
        attempt = _alone(chunk, place)
        attempt.samples[0] = chunk.samples[place]
        self._plain(attempt)
        sample = attempt.samples[0]
        if sample is None:
            chunk.samples[place] = None
            chunk.failures[place] = attempt.failures[0]
            return
        for name, value in sample.items():
            if type(value) is Image:
                sample[name] = Rendered(self._finish(to_tensor(value).unsqueeze(0)), 0)
        chunk.samples[place] = sample


def _alone(chunk: Chunk, place: int) -> Chunk:
    """A chunk of one sample of a chunk."""
    slot = chunk.lo + place
    return Chunk(chunk.destination, slot, slot + 1, chunk.epoch, chunk.indices[place : place + 1])


def _arguments(column: Sequence[Step]) -> dict[str, list[NDArray[Any]]]:
    """What an operator needs of each image, by the name of its input."""
    first = column[0]
    if isinstance(first, Crop):
        boxes = np.array(column, np.int32)
        return {"start": list(boxes[:, :2]), "shape": list(boxes[:, 2:])}
    if isinstance(first, Scale):
        return {"size": list(np.array(column, np.float32))}
    return {"flip": list(np.array(column, np.int32)[:, 0])}


def _build(dali: Any, graph: Graph) -> Any:
    fn, types = dali.fn, dali.types

    def source(name: str, dtype: Any, ndim: int) -> Any:
        return fn.external_source(name=name, dtype=dtype, ndim=ndim)

    def define() -> Any:
        encoded = source("encoded", types.UINT8, 1)
        device = "cpu" if graph.device is None else "mixed"
        images = None
        if not graph.decodes_crops:
            images = fn.decoders.image(encoded, device=device, output_type=types.RGB, adjust_orientation=False)
        number = 0
        mirror = 0
        last = sum(len(steps.kinds) for _, steps in graph.stages) - 1
        for _, steps in graph.stages:
            for kind in steps.kinds:
                if kind is Crop:
                    window = {
                        "start": source(f"start-{number}", types.INT32, 1),
                        "shape": source(f"shape-{number}", types.INT32, 1),
                    }
                    if images is None:
                        images = fn.decoders.image_slice(
                            encoded,
                            **window,
                            axis_names="HW",
                            device=device,
                            output_type=types.RGB,
                            adjust_orientation=False,
                        )
                    else:
                        images = fn.slice(
                            images, **window, axes=[0, 1], out_of_bounds_policy="pad", fill_values=float(steps.fill)
                        )
                elif kind is Scale:
                    images = fn.resize(
                        images,
                        size=source(f"size-{number}", types.FLOAT, 1),
                        interp_type={"bilinear": types.INTERP_LINEAR, "bicubic": types.INTERP_CUBIC}[
                            steps.interpolation
                        ],
                        antialias=steps.antialias,
                    )
                else:
                    flip = source(f"flip-{number}", types.INT32, 0)
                    if number == last:
                        mirror = flip
                    else:
                        images = fn.flip(images, horizontal=flip)
                number += 1
        finish = graph.finish
        return fn.crop_mirror_normalize(
            images,
            dtype=types.UINT8 if finish is None else types.FLOAT,
            output_layout="CHW",
            mean=[0.0] if finish is None else list(finish.mean),
            std=[1.0] if finish is None else list(finish.std),
            mirror=mirror,
        )

    # One thread: each of loaderkit's workers runs a pipeline of its own. Depth 1: they are what works ahead.
    pipeline = dali.pipeline_def(define)(
        batch_size=graph.batch_size,
        num_threads=1,
        device_id=graph.device,
        prefetch_queue_depth=1,
        exec_dynamic=True,
    )
    pipeline.build()
    return pipeline


def _import_dali() -> Any:
    try:
        dali: Any = importlib.import_module("nvidia.dali")
        importlib.import_module("nvidia.dali.fn")
    except ImportError as error:
        raise ConfigError(
            f"stages.decode.device needs NVIDIA DALI, which cannot be imported ({error}): pip install 'loaderkit[dali]'"
        ) from error
    return dali


_MARKER, _START_OF_SCAN, _END = 0xFF, 0xDA, b"\xff\xd9"
_WITHOUT_LENGTH = frozenset({0x00, 0x01, _MARKER, *range(0xD0, 0xDA)})


def _is_well_formed(data: memoryview) -> bool:
    """Whether a JPEG is a chain of segments up to its scan, and has its end.

    DALI 2.4.0 may crash some time after it was given one whose segments do not follow one another; what is wrong inside
    segments or in the scan it only refuses. And decoders on a GPU fill up what is missing at the end and say nothing.
    """
    if bytes(data[:2]) != b"\xff\xd8":
        return False
    at = 2
    while at + 4 <= len(data) and data[at] == _MARKER and data[at + 1] not in _WITHOUT_LENGTH:
        if data[at + 1] == _START_OF_SCAN:
            return _END in bytes(data[max(at, len(data) - 4096) :])
        length = int.from_bytes(data[at + 2 : at + 4], "big")
        if length < 2:
            return False
        at += 2 + length
    return False
