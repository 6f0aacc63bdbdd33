"""`decode: {device: gpu}` and `{device: dali-cpu}`: the run of stages from `decode` through `normalize` as one DALI pipeline.

    encoded bytes ─┐
    crop boxes ────┼─ external sources ─> decode the crop ─> resize ─> mirror, normalise ─> tensor [n, C, H, W] ─DLPack─> torch
    sizes, flips ──┘  (host arithmetic: ops.py, with loaderkit's own draws)

A chunk, which is a whole batch, is rendered in one run: its tensor is the batch's, without a copy. Images that are no JPEG for
DALI go through the CPU's stages in the same batch: other formats, four-channel and damaged files, and decoded images. So a
damaged image costs one sample, and its error is the CPU's.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.dlpack import from_dlpack

from loaderkit import native
from loaderkit.errors import StageError
from loaderkit.samples.chunk import SampleChunk
from loaderkit.samples.sample import Sample
from loaderkit.samples.values import Encoded, GpuDecoded, Image
from loaderkit.sources.fields import IMAGE_EXTENSIONS
from loaderkit.stages.image.dali.errors import reason_of, system_failure
from loaderkit.stages.image.dali.graph import Graph, build_pipeline, import_dali, inputs_of
from loaderkit.stages.image.ops import ImageOp, size_after
from loaderkit.stages.values import to_tensor

logger = logging.getLogger("loaderkit")

_JPEG_EXTENSIONS = frozenset({"jpg", "jpeg", "jfif"})
_LEFT_AS_THEY_ARE = frozenset({GpuDecoded, int, float, bool, str})  # by `decode`, unless they are named
_SAMPLE = re.compile(r"sample #(\d+)")  # in some errors of DALI
_MOST_NAMED = 3  # each costs a run and a new pipeline
# One image that DALI refuses fails log2 of their number in a row, 11 of a batch of 2048.
_MOST_FAILED = 16


class _Job(NamedTuple):
    """An image for DALI: its row in the chunk, its bytes, its operations, and its (height, width) before every stage that
    needs images of one size."""

    row: int
    data: NDArray[np.uint8]
    steps: list[ImageOp]
    shared_sizes: list[tuple[int, int]]


class Renderer:
    """Runs a graph over chunks, for the images of `fields` (None means all) of at most `max_pixels`, as the stage
    `name`; without `takes_jpegs` all images go to `decode`, which refuses them.

    `draws(name, chunk)` returns a stage's uniform numbers, float64 [n, num_draws]. On the CPU `decode(chunk)` decodes the other
    images, `plain(chunk)` runs the stages between `decode` and `batch`, and `finish` those after it, on [n, C, H, W]; the
    result of `finish` is new memory. `on_gpu_error`: what to do if DALI fails whatever the images are: raise, or stay
    on the CPU.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        name: str = "decode",
        fields: tuple[str, ...] | None,
        takes_jpegs: bool = True,
        max_pixels: int,
        draws: Callable[[str, SampleChunk], NDArray[np.float64]],
        decode: Callable[[SampleChunk], Any],
        plain: Callable[[SampleChunk], None],
        finish: Callable[[torch.Tensor], torch.Tensor],
        on_gpu_error: Literal["raise", "cpu"] = "raise",
    ) -> None:
        self._dali = import_dali()
        self._graph = graph
        self._name = name
        self._fields = fields
        self._extensions = _JPEG_EXTENSIONS if takes_jpegs else frozenset[str]()
        self._max_pixels = max_pixels
        self._draws = draws
        self._decode = decode
        self._plain = plain
        self._finish = finish
        self._idle: deque[Any] = deque()  # pipelines not in use; a pipeline runs in one thread at a time
        self._has_warned = False
        self._num_failed = 0  # runs in a row that failed on images which the CPU's decoder accepts
        self._on_gpu_error = on_gpu_error
        self._stays_on_cpu = False
        self._leaving = threading.Lock()

    def __call__(self, chunk: SampleChunk) -> None:
        """A chunk stage: every image becomes a row of a tensor, or its sample fails. Raises StageError if DALI has no memory or
        fails whatever the images are, unless `on_gpu_error` is "cpu"."""
        chunk.current = None
        try:
            for field, jobs in self._jobs(chunk).items():
                self._render(chunk, field, jobs)
        except StageError as failure:
            if self._on_gpu_error == "raise":
                raise
            self._leave_dali(failure)
        for row, sample in enumerate(chunk.samples):
            if sample is not None and not self._is_done(sample):
                chunk.current = row
                self._on_the_cpu(chunk, row, sample)

    def close(self) -> None:
        """Drop the pipelines, and give back the memory that DALI keeps for others."""
        self._idle.clear()
        with suppress(RuntimeError):  # of a GPU that has failed
            self._dali.backend.ReleaseUnusedMemory()

    def _leave_dali(self, failure: StageError) -> None:
        """Decode on the CPU from now on."""
        with self._leaving:
            is_first, self._stays_on_cpu = not self._stays_on_cpu, True
        if is_first:
            logger.warning("%s. From now on it is done on the CPU, as `on_gpu_error: cpu` says", failure)
            self.close()

    def _jobs(self, chunk: SampleChunk) -> dict[str, list[_Job]]:
        """The jobs for DALI, by field."""
        if self._stays_on_cpu:
            return {}
        draws = [self._draws(name, chunk) for name, _ in self._graph.stages]
        by_field: dict[str, list[_Job]] = {}
        for row, (sample, *numbers) in enumerate(zip(chunk.samples, *draws, strict=True)):
            jobs = {
                name: self._job(row, value, extension, numbers)
                for name, value in (sample or {}).items()
                if type(value) is Encoded
                and (extension := value.extension.rpartition(".")[2]) in IMAGE_EXTENSIONS
                and (self._fields is None or name in self._fields)
            }
            if len(jobs) > 1 and not self._fit_together(list(jobs.values())):
                continue  # the CPU raises the error
            for name, job in jobs.items():
                if job is not None:
                    by_field.setdefault(name, []).append(job)
        return by_field

    def _fit_together(self, jobs: list[_Job | None]) -> bool:
        """True unless the images of one sample share a crop and are incomplete or of different sizes."""
        if not any(steps.is_shared for _, steps in self._graph.stages):
            return True
        shared_sizes = [job.shared_sizes for job in jobs if job is not None]
        return len(shared_sizes) == len(jobs) and all(sizes == shared_sizes[0] for sizes in shared_sizes)

    def _job(self, row: int, value: Encoded, extension: str, draws: Sequence[NDArray[np.float64]]) -> _Job | None:
        """The job of an image; None if it must go through the CPU's stages."""
        size = native.whole_jpeg_size(value.data) if extension in self._extensions else None
        if size is None or size[0] * size[1] > self._max_pixels:
            return None
        job = _Job(row, np.frombuffer(value.data, np.uint8), [], [])
        for (_, stage), numbers in zip(self._graph.stages, draws, strict=True):
            try:
                steps = stage.of(*size, numbers)
            except ValueError:  # the CPU raises the error
                return None
            if stage.is_shared:
                job.shared_sizes.append(size)
            job.steps.extend(steps)
            size = size_after(steps, *size)
        return job

    def _render(self, chunk: SampleChunk, field: str, jobs: list[_Job]) -> None:
        """Run the jobs in DALI; images it fails on stay encoded."""
        for num_named in range(_MOST_NAMED + 1):
            error = self._run(chunk, field, jobs)
            if error is None:
                return
            named = _SAMPLE.search(str(error))
            number = len(jobs) if named is None else int(named[1])
            if num_named == _MOST_NAMED or number >= len(jobs) or self.is_whole(chunk, jobs[number].row, field):
                break
            del jobs[number]
            if not jobs:
                return
        # A damaged image fails the whole chunk, and DALI often does not name it, so the CPU's decoder looks for it.
        whole = [job for job in jobs if self.is_whole(chunk, job.row, field)]
        error = self._run(chunk, field, whole) if whole else None
        if error is not None:
            self._count_failure(chunk, error)
            self._render_halves(chunk, field, whole)
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "DALI fails on images that the CPU's decoder accepts; they are decoded on the CPU instead (logged once): "
                    "%s",
                    error,
                )

    def _render_halves(self, chunk: SampleChunk, field: str, jobs: list[_Job]) -> None:
        """Bisect for the images that DALI fails on, with about 2 log2(n) runs each."""
        middle = len(jobs) // 2
        for half in (jobs[:middle], jobs[middle:]) if middle else ():
            if (error := self._run(chunk, field, half)) is not None:
                self._count_failure(chunk, error)
                self._render_halves(chunk, field, half)

    def _count_failure(self, chunk: SampleChunk, error: Exception) -> None:
        """Raises StageError if DALI has failed so often that the images cannot be the cause: a batch of 256 would cost 511
        runs, each with a new pipeline."""
        self._num_failed += 1
        if self._num_failed >= _MOST_FAILED:
            reason = reason_of(error).partition("\n")[0]
            whole = "; `regions: false` to decode whole images may help" if self._graph.decodes_crops else ""
            raise StageError(
                f"{self._name} failed: DALI failed {self._num_failed} times in a row on images that the CPU's decoder accepts: "
                f"{reason} (`decode: {{on_gpu_error: cpu}}` goes on without DALI{whole})",
                stage=self._name,
                epoch=chunk.epoch,
            ) from error

    def is_whole(self, chunk: SampleChunk, row: int, field: str) -> bool:
        """True if the CPU's decoder accepts an image."""
        sample = chunk.samples[row]
        assert sample is not None
        attempt = _alone(chunk, row, {field: sample[field]})
        self._decode(attempt)
        return attempt.samples[0] is not None

    def _run(self, chunk: SampleChunk, field: str, jobs: Sequence[_Job]) -> Exception | None:
        """Put DALI's results of the jobs into their samples; returns its error if it fails on one of them."""
        try:
            pipeline = self._idle.pop()
        except IndexError:
            pipeline = self._built(chunk.epoch)
        pipeline.feed_input("encoded", [job.data for job in jobs])
        # Inputs are not copied, so they must stay alive until the run ends.
        fed = [inputs_of(column) for column in zip(*(job.steps for job in jobs), strict=True)]
        for number, arguments in enumerate(fed):
            for name, values in arguments.items():
                pipeline.feed_input(f"{name}-{number}", values)
        try:
            (output,) = pipeline.run()
        except (RuntimeError, ValueError, IndexError, TypeError) as error:  # DALI's errors have no common type
            del pipeline  # invalid after an error
            error = error.with_traceback(None)  # its frames would keep memory alive
            if (failure := system_failure(error, self._graph)) is not None:
                failed = StageError(f"{self._name} failed: {failure}", stage=self._name, epoch=chunk.epoch)
                raise failed from error
            return error
        self._num_failed = 0
        images = self._rows(output)
        # Only after the output was taken: the next run of an interrupted pipeline would return these images.
        self._idle.append(pipeline)
        for job, image in zip(jobs, images, strict=True):
            sample = chunk.samples[job.row]
            assert sample is not None
            sample[field] = image
        return None

    def _built(self, epoch: int) -> Any:
        """A new pipeline. Raises StageError without memory for it, or without a suitable driver."""
        try:
            return build_pipeline(self._dali, self._graph)
        except (RuntimeError, ValueError) as error:
            reason = system_failure(error, self._graph) or str(error).strip().partition("\n")[0]
            failed = StageError(
                f"{self._name} failed: DALI cannot build its pipeline: {reason}", stage=self._name, epoch=epoch
            )
            raise failed from error.with_traceback(None)

    def _rows(self, output: Any) -> list[GpuDecoded]:
        """DALI's output, image by image."""
        if output.is_dense_tensor():
            # The tensor shares DALI's memory, which is not reused before the tensor is freed.
            tensor = self._taken_over(from_dlpack(output.as_tensor()))
            return [GpuDecoded(tensor, row) for row in range(len(tensor))]
        images = [self._taken_over(from_dlpack(output[row]), copy=True) for row in range(len(output))]
        return [GpuDecoded(image.unsqueeze(0), 0) for image in images]

    def _taken_over(self, tensor: torch.Tensor, *, copy: bool = False) -> torch.Tensor:
        """A tensor of DALI's in the output dtype, copied if its memory may be reused."""
        on_gpu = self._graph.device is not None
        dtype = tensor.dtype if self._graph.finish is None else self._graph.finish.dtype
        # On a GPU DALI would reuse the memory once the tensor is freed, even if the loop's stream still uses it.
        tensor = tensor.to(dtype, copy=copy or on_gpu)
        if on_gpu:
            torch.cuda.current_stream(tensor.device).synchronize()
        return tensor

    def _is_done(self, sample: Sample) -> bool:
        """True if the CPU's stages would leave a sample as it is: running them to find out costs 30 us, a third of a
        sample's cost."""
        kinds = set(map(type, sample.values()))
        if self._fields is None:
            return GpuDecoded in kinds and kinds <= _LEFT_AS_THEY_ARE
        return Image not in kinds and all(type(sample.get(name)) is GpuDecoded for name in self._fields)

    def _on_the_cpu(self, chunk: SampleChunk, row: int, sample: Sample) -> None:
        """Process a sample's remaining images on the CPU, one sample at a time: a batch of decoded images takes gigabytes."""
        attempt = _alone(chunk, row, sample)
        self._decode(attempt)
        if attempt.samples[0] is not None:
            kinds = set(map(type, sample.values()))
            if Image in kinds or GpuDecoded not in kinds:
                self._plain(attempt)
        chunk.samples[row] = attempt.samples[0]
        if attempt.samples[0] is None:
            chunk.failures[row] = attempt.failures[0]
            return
        for name, value in sample.items():
            if type(value) is Image:
                sample[name] = GpuDecoded(self._finish(to_tensor(value).unsqueeze(0)), 0)


def _alone(chunk: SampleChunk, row: int, sample: Sample) -> SampleChunk:
    """A chunk of one sample, with the memory of the original chunk."""
    slot = chunk.slot_of(row)
    single = SampleChunk(chunk.work_item, slot, slot + 1, chunk.indices[row : row + 1])
    single.samples[0] = sample
    single.scratch = chunk.scratch
    return single
