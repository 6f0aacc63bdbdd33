"""Renderers without a loader, and pipelines in the place of DALI's that fail as they are told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from loaderkit.pipeline.config.registry import STAGES
from loaderkit.samples.chunk import BatchWork, SampleChunk
from loaderkit.samples.values import Encoded
from loaderkit.stages.image.dali.graph import Graph
from loaderkit.stages.image.dali.renderer import Renderer

SIZE = (16, 16)


def chunk_of(files: Sequence[bytes]) -> SampleChunk:
    """JPEGs as `read` leaves them."""
    indices = np.arange(len(files))
    chunk = SampleChunk(BatchWork(epoch=0, step=0, positions=indices, indices=indices), 0, len(files), indices)
    chunk.samples = [{"image": Encoded(memoryview(data), "jpg")} for data in files]
    return chunk


def renderer(
    batch_size: int,
    decoded: list[int] | None = None,
    *,
    fields: tuple[str, ...] | None = None,
    crops: bool = False,
    on_gpu_error: Literal["raise", "cpu"] = "raise",
) -> Renderer:
    """A renderer on the CPU that resizes, or `crops` and resizes. Its own decoder accepts everything and decodes nothing, and
    the slots that it has looked at come into `decoded`."""
    stage = STAGES["random_resized_crop" if crops else "resize"]
    assert stage.ops is not None

    def decode(chunk: SampleChunk) -> None:
        if decoded is not None:
            decoded.append(chunk.lo)

    return Renderer(
        Graph((("stage", stage.ops(stage.args.model_validate({"size": SIZE}))),), None, batch_size, None),
        fields=fields,
        max_pixels=10**6,
        draws=lambda name, chunk: np.full((len(chunk), stage.num_draws), 0.5),
        decode=decode,
        plain=lambda chunk: None,
        finish=lambda images: images,
        on_gpu_error=on_gpu_error,
    )


class Rendered:
    """Black images, as DALI's output."""

    def __init__(self, num_images: int) -> None:
        self._images = np.zeros((num_images, 3, *SIZE), np.uint8)

    def is_dense_tensor(self) -> bool:
        return True

    def as_tensor(self) -> NDArray[np.uint8]:
        return self._images


class FailingPipelines:
    """Pipelines that fail with `words` where the last byte of an image is one of `refused` (None: always). `num_built` and
    `num_runs` count them."""

    def __init__(self) -> None:
        self.refused: set[int] | None = None
        self.words = "nvImageCodec failure: '#8'"
        self.num_built = self.num_runs = 0

    def build(self, dali: Any, graph: Graph) -> FailingPipeline:
        """In the place of `build_pipeline`."""
        self.num_built += 1
        return FailingPipeline(self)


class FailingPipeline:
    def __init__(self, made_by: FailingPipelines) -> None:
        self._made_by = made_by
        self._numbers: list[int] = []

    def feed_input(self, name: str, values: Any) -> None:
        if name == "encoded":
            self._numbers = [int(data[-1]) for data in values]

    def run(self) -> tuple[Rendered]:
        pipelines = self._made_by
        pipelines.num_runs += 1
        if pipelines.refused is None or pipelines.refused.intersection(self._numbers):
            raise RuntimeError(
                f"Critical error in pipeline:\nError in MIXED operator `image`\nencountered:\n\n{pipelines.words}"
            )
        return (Rendered(len(self._numbers)),)
