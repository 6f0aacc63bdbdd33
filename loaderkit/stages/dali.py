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
from typing import Any

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
        places, encoded, steps = [], [], []
        for place, sample in enumerate(chunk.samples):
            value = None if sample is None else sample.get(field)
            if type(value) is Encoded and value.extension.rpartition(".")[2] in _JPEG_EXTENSIONS:
                found = self._steps(value.data, [numbers[place] for numbers in draws])
                if found is not None:
                    places.append(place)
                    encoded.append(np.frombuffer(value.data, np.uint8))
                    steps.append(found)
        for part, tensor in self._render(list(range(len(places))), encoded, steps):
            for row, number in enumerate(part):
                sample = chunk.samples[places[number]]
                assert sample is not None
                sample[field] = Rendered(tensor, row)

    def _steps(self, data: memoryview, draws: Sequence[NDArray[np.float64]]) -> list[Step] | None:
        """What an image goes through; None where the CPU has to look at it."""
        size = jpeg_size(data)
        if size is None or size[0] * size[1] > self._max_pixels or not _is_closed(data):
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

    def _render(
        self, numbers: list[int], encoded: list[Any], steps: list[list[Step]]
    ) -> list[tuple[list[int], torch.Tensor]]:
        """(which of them, [n, C, H, W]) of those that DALI can decode: all at once, and after an error in halves."""
        if not numbers:
            return []
        try:
            return [(numbers, self._run([encoded[n] for n in numbers], [steps[n] for n in numbers]))]
        except RuntimeError:
            if len(numbers) == 1:
                return []
            middle = len(numbers) // 2
            return [
                found for half in (numbers[:middle], numbers[middle:]) for found in self._render(half, encoded, steps)
            ]

    def _run(self, encoded: list[Any], steps: list[list[Step]]) -> torch.Tensor:
        try:
            pipeline = self._idle.pop()
        except IndexError:
            pipeline = _build(self._dali, self._graph)
        try:
            pipeline.feed_input("encoded", encoded)
            for number, column in enumerate(zip(*steps, strict=True)):
                for name, values in _arguments(column).items():
                    pipeline.feed_input(f"{name}-{number}", values)
            (output,) = pipeline.run()
            # The tensor sees DALI's memory, which is not used again before the tensor is gone.
            tensor: torch.Tensor = from_dlpack(output.as_tensor())
            if self._graph.device is not None:
                # DALI would use its memory again as soon as the tensor is gone, whatever the loop's stream still does with it.
                tensor = tensor.clone()
                torch.cuda.current_stream(tensor.device).synchronize()
        finally:
            self._idle.append(pipeline)  # one whose batch failed takes the next one as well
        finish = self._graph.finish
        return tensor if finish is None else tensor.to(finish.dtype)

    def _on_the_cpu(self, chunk: Chunk, place: int) -> None:
        slot = chunk.lo + place
        attempt = Chunk(chunk.destination, slot, slot + 1, chunk.epoch, chunk.indices[place : place + 1])
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


def _is_closed(data: memoryview) -> bool:
    """Whether a JPEG has its end: decoders on a GPU fill up what is missing and say nothing."""
    tail = bytes(data[-4096:])
    return b"\xff\xd9" in tail
