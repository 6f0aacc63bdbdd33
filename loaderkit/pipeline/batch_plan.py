"""The plan of batches: which destination comes next, what memory it needs, and what becomes of it when it is full.

All methods but `prepare` and `finish` are called under the engine's lock, where it has one: one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from loaderkit._internal.dtypes import Bytes
from loaderkit._internal.units import say_bytes
from loaderkit.engine.process.shared_memory import check_room
from loaderkit.engine.work import WorkItem
from loaderkit.errors import ConfigError, StageError
from loaderkit.pipeline.slabs import SlabLayout, SlabPool
from loaderkit.sampling.schedule import BatchSampler, SamplePermutation
from loaderkit.sampling.shard import WHOLE, Shard
from loaderkit.sources.base import Sample, Source
from loaderkit.stages.base import BatchContext, BatchWork, FieldSpec, SampleChunk, image_fields
from loaderkit.stages.batch import pad, put_together
from loaderkit.stages.runner import raise_store_failure

_BLOCK_POSITIONS = 8192  # the order is computed in blocks: one batch of 64 at a time costs ten times as much a position


@dataclass(frozen=True)
class BatchShape:
    """What `batch` was asked for, and how batches are handed over."""

    size: int
    pad_value: float = 0
    policy: Literal["raise", "skip", "replace"] = "raise"
    num_probes: int = 16  # samples tried for what a batch looks like, until one is readable


class _Ahead(NamedTuple):
    """The samples of the batches [step, end_step), computed at once. All arrays: [samples of those batches]."""

    step: int
    end_step: int
    positions: NDArray[np.int64]
    indices: NDArray[np.int64]
    wrapped: NDArray[np.bool_] | None


class BatchPlan:
    """Batches of one rank, epoch after epoch, from any position on; of these every one that is in the share."""

    def __init__(
        self,
        *,
        source: Source,
        order: SamplePermutation,
        schedule: BatchSampler,
        shape: BatchShape,
        num_epochs: int | None,
        probe: Callable[[SampleChunk], None],
        specs_of: Callable[[Sample, str], Mapping[str, FieldSpec]],
        num_batches: int,
        memory_bytes: int,
        pinned_for: torch.device | None = None,
        whole_chunks: bool = False,
        allocate: Callable[[int], Bytes] | None = None,
        on_seek: Callable[[int, int], None] | None = None,
        shard: Shard = WHOLE,
        run: Callable[..., Any] | None = None,
        names_samples: bool = True,
    ) -> None:
        """`on_seek` is told (epoch, position) where the plan goes on, whenever that is not what would have come anyway.
        `num_batches` and `memory_bytes` are those of the share. `pinned_for`: the CUDA device that slabs are copied to.
        `run` calls what puts a batch together: `Lane.run` where stages have left parts of it on a GPU.
        `names_samples`: somebody wants to know the samples' keys, which take as long to make as numbers take to be stacked."""
        self._source = source
        self._keys = getattr(source, "keys", None) or (lambda indices: list(map(source.key, indices.tolist())))
        self._order = order
        self._schedule = schedule
        self._shape = shape
        self._num_epochs = num_epochs
        self._probe = probe
        self._specs_of = specs_of
        self._num_batches = num_batches
        self.memory_bytes = memory_bytes
        self._pinned_for = pinned_for
        self._whole_chunks = whole_chunks  # a stage works on batches at once
        self._allocate = allocate
        self._on_seek = on_seek
        self._shard = shard
        self._run = run
        self._names_samples = names_samples
        self._ahead: _Ahead | None = None
        self.seek(0, 0)
        self.is_prepared = False
        self.specs: Mapping[str, FieldSpec] = {}
        self._images: tuple[str, ...] = ()
        self._loose: tuple[str, ...] = ()  # fields that lie in no slab
        self.slabs: SlabPool | None = None
        self.batch_bytes = 0  # a slab, and what of a batch lies in none, as far as the first sample tells
        self.room = (num_batches, False)

    @property
    def batch_size(self) -> int:
        return self._shape.size

    @property
    def place(self) -> tuple[int, int]:
        """(epoch, global position) of the batch that would be opened next."""
        return (self._epoch + 1, 0) if self._step >= self._num_steps else (self._epoch, self._end)

    def key(self, index: int) -> str:
        """The key of a sample, for messages."""
        return self._source.key(index)

    def begins_at(self, epoch: int, position: int) -> tuple[int, int]:
        """The `place` to which `seek` would bring it."""
        return self._schedule.place_after(epoch, position, self._shard.number)

    def seek(self, epoch: int, position: int) -> None:
        """Deal the batches out anew, from global `position` of `epoch` on."""
        self._enter(epoch, position)
        self._pass_over(self._shard.number)
        if self._on_seek is not None:
            self._on_seek(epoch, position)

    def _enter(self, epoch: int, position: int) -> None:
        self._epoch, self._start, self._step, self._end = epoch, position, 0, position
        self._num_steps = self._schedule.num_batches(position)
        self._ahead = None

    def _pass_over(self, num_batches: int) -> None:
        """Leave so many batches to others."""
        while self._step + num_batches > self._num_steps and self._schedule.num_batches():
            num_batches -= self._num_steps - self._step
            self._enter(self._epoch + 1, 0)
        self._step += num_batches
        self._end = self._schedule.position_after(self._start, self._step)

    def prepare(self) -> None:
        """Find out what a batch looks like, from the first readable sample of the canonical order.

        That sample, and not the first of the epoch, so that the answer never depends on where training resumed. Raises
        `StageError` if none of the first few is readable, `ConfigError` if `memory` holds not even one batch.
        """
        first_error: StageError | None = None
        for index in range(min(self._shape.num_probes, len(self._source))):
            indices = np.array([index], np.int64)
            probe = BatchWork(epoch=0, step=0, positions=indices, indices=indices)
            chunk = SampleChunk(probe, 0, 1, indices)
            self._probe(chunk)
            sample = chunk.samples[0]
            if sample is not None:
                specs = self._specs_of(sample, self._source.key(index))
                break
            raise_store_failure(chunk)  # it would be that for every one of them, each as long as `source.retry` allows
            first_error = first_error or chunk.failures[0]
        else:
            assert first_error is not None
            raise first_error
        self._loose = tuple(name for name, spec in specs.items() if spec.kind != "slab")
        layout = SlabLayout.of(specs, self._shape.size)
        loose = sum(spec.num_bytes for spec in specs.values()) * self._shape.size
        self.batch_bytes = layout.num_bytes + loose
        self._check_memory(self.memory_bytes)
        num_open, _ = self.room = self._room_for(self._num_batches, self.memory_bytes)
        self._check_room(num_open)
        self.slabs = SlabPool(
            layout, num_kept=num_open + 2, pinned_for=self._pinned_for, allocate=self._allocate, shard=self._shard
        )
        self.specs, self._images = specs, image_fields(specs)
        self.is_prepared = True  # the last: a worker that sees it may open batches

    def set_depth(self, num_batches: int | None, memory_bytes: int | None) -> None:
        """Change how far is read ahead; None: as it is. Raises ConfigError if the memory holds not even one batch, and if
        the machine has none for that many more."""
        num_batches, memory_bytes = num_batches or self._num_batches, memory_bytes or self.memory_bytes
        self._check_memory(memory_bytes)
        room = self._room_for(num_batches, memory_bytes)
        if self.slabs is not None:
            self._check_room(room[0] - self.room[0])
            self.slabs.num_kept = room[0] + 2
        self._num_batches, self.memory_bytes, self.room = num_batches, memory_bytes, room

    def _check_memory(self, memory_bytes: int) -> None:
        if self.batch_bytes > memory_bytes:
            num = self._shard.of
            each, times = (f" for each of {num} processes", f"{num} times ") if num > 1 else ("", "")
            raise ConfigError(
                f"prefetch.memory is {say_bytes(memory_bytes)}{each}, but one batch of {self._shape.size} takes "
                f"{say_bytes(self.batch_bytes)}: allow at least {times}that much, or make stages.batch.size smaller"
            )

    def _room_for(self, num_batches: int, memory_bytes: int) -> tuple[int, bool]:
        """What `room` is with this depth and this budget."""
        allowed = min(num_batches, memory_bytes // self.batch_bytes) if self.batch_bytes else num_batches
        return allowed, allowed < num_batches

    def _check_room(self, num_more: int) -> None:
        """Raise ConfigError if the machine has no memory for so many more batches, here and in every process like this one."""
        if num_more > 0 and self._allocate is not None:  # memory that another process sees
            check_room(self._shard.of * num_more, self.batch_bytes)

    def context(self, work_item: WorkItem) -> BatchContext:
        """What stages behind `batch` are told of a finished batch."""
        assert isinstance(work_item, BatchWork)
        first, keys = int(work_item.positions[0]), work_item.result.get("__key__", [])
        return BatchContext(work_item.epoch, work_item.step, first, keys, self._images)

    def release(self, work_item: WorkItem) -> None:
        """Nothing to count: a slab's lease brings it back."""

    def memory_stats(self, num_open: int) -> dict[str, int]:
        """What batches take: one, those that are open, those that somebody sees, and all there is memory for."""
        slabs = self.slabs
        slab_bytes = slabs.layout.num_bytes if slabs is not None else 0
        return {
            "slab_bytes": slab_bytes,
            "batch_bytes": self.batch_bytes,
            "open_bytes": num_open * self.batch_bytes,
            "live_bytes": slabs.num_live * slab_bytes if slabs is not None else 0,
            "allocated_bytes": slabs.num_allocated * slab_bytes if slabs is not None else 0,
        }

    def open(self, chunk_size: int) -> BatchWork | None:
        """The next batch with its memory and its chunks, or None after the last epoch."""
        assert self.slabs is not None
        while self._step >= self._num_steps:
            if self._schedule.num_batches() == 0:
                return None
            self._enter(self._epoch + 1, 0)
        if self._num_epochs is not None and self._epoch >= self._num_epochs:
            return None
        epoch, step, begin = self._epoch, self._step, self._end
        positions, indices, wrapped = self._samples()
        self._pass_over(1)
        work_item = BatchWork(
            epoch=epoch, step=step, positions=positions, indices=indices, wrapped=wrapped, begin=begin, end=self._end
        )
        work_item.specs = self.specs
        work_item.fields = self.slabs.take()
        size = len(positions)
        for name in self._loose:
            work_item.values[name] = [None] * size
        if chunk_size >= size or self._whole_chunks:
            work_item.chunks = [SampleChunk(work_item, 0, size, indices)]
        else:
            num = -(-size // chunk_size)
            bounds = [size * number // num for number in range(num + 1)]
            for lo, hi in pairwise(bounds):
                work_item.chunks.append(SampleChunk(work_item, lo, hi, indices[lo:hi]))
        work_item.num_pending = len(work_item.chunks)
        if self._shard.of > 1:
            self._pass_over(self._shard.of - 1)
        return work_item

    def _samples(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_] | None]:
        """(positions, samples, which of them are read again) of the batch at the current step."""
        ahead = self._ahead
        if ahead is None or self._step >= ahead.end_step:
            ahead = self._ahead = self._look_ahead()
        lo = (self._step - ahead.step) * self._shape.size
        slots = slice(lo, lo + self._shape.size)
        # Bad samples are replaced in the indices, which are this batch's alone.
        return ahead.positions[slots], ahead.indices[slots], None if ahead.wrapped is None else ahead.wrapped[slots]

    def _look_ahead(self) -> _Ahead:
        num_steps = max(1, _BLOCK_POSITIONS // self._shape.size)
        positions = self._schedule.positions(self._start, self._step, num_steps)
        num_samples = self._schedule.num_samples
        wrapped = None
        if positions[-1] >= num_samples:
            wrapped = positions >= num_samples
            positions %= num_samples
        indices = self._order.indices(self._epoch, positions)
        if indices is positions:
            indices = positions.copy()
        return _Ahead(self._step, self._step + num_steps, positions, indices, wrapped)

    def finish(self, work_item: WorkItem) -> dict[str, Any]:
        """The batch of a full destination, as the user will see it but for the batch stages."""
        assert isinstance(work_item, BatchWork)
        found: dict[str, Any] = self._gather(work_item) if self._run is None else self._run(self._gather, work_item)
        return found

    def _gather(self, work_item: BatchWork) -> dict[str, Any]:
        num_slots = len(work_item)
        slots = self._good_slots(work_item) if work_item.failures else None
        batch: dict[str, Any] = {}
        for name, spec in work_item.specs.items():
            if spec.kind == "slab":
                field = work_item.fields[name]
                if slots is not None or num_slots < self._shape.size:
                    field = field.part(slice(num_slots) if slots is None else slots)
                batch[name] = field.tensor
                continue
            values = work_item.values[name]
            kept = values if slots is None else [values[slot] for slot in slots]
            if spec.kind == "rendered":
                batch[name] = put_together(kept)
            elif spec.kind == "pad":
                batch[name], batch[f"{name}_sizes"] = pad(kept, self._shape.pad_value)
            else:
                batch[name] = kept
        if self._names_samples:
            batch["__key__"] = self._keys(work_item.indices if slots is None else work_item.indices[slots])
        if self._schedule.world_size > 1 and not self._schedule.drop_last:
            wrapped = np.zeros(num_slots, np.bool_) if work_item.wrapped is None else work_item.wrapped
            marks = wrapped if slots is None else wrapped[slots]
            batch["__wrapped__"] = torch.from_numpy(marks)
        work_item.let_go()
        return batch

    def _good_slots(self, work_item: BatchWork) -> NDArray[np.int64] | None:
        """Those that are to be delivered; None for all, since the bad ones were replaced. Raises `StageError`."""
        failures, num_slots = work_item.failures, len(work_item)
        failures.sort(key=lambda failure: (failure.slot, failure.sample))
        first = failures[0].error
        if self._shape.policy == "raise":
            raise first
        if self._shape.policy == "replace":
            return None
        bad = {failure.slot for failure in failures}
        if len(bad) == num_slots:
            raise StageError(
                f"all {num_slots} samples of batch {work_item.step} of epoch {work_item.epoch} were bad, so nothing is "
                f"left to deliver; the first: {first}",
                stage=first.stage,
                epoch=work_item.epoch,
            ) from first.__cause__
        return np.array([slot for slot in range(num_slots) if slot not in bad], np.int64)
