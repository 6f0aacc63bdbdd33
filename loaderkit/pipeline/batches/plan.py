"""The plan of batches: the next one, its memory and its chunks, and its result when it is full.

All methods but `prepare`, `finish` and `context` are called by one thread at a time: under the engine's lock, where it has one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from loaderkit.engine.work import Chunk, WorkItem
from loaderkit.pipeline.batches.assembler import BatchAssembler
from loaderkit.pipeline.batches.cursor import BatchCursor
from loaderkit.pipeline.batches.memory import BatchMemory
from loaderkit.samples.chunk import BatchContext, BatchWork, FieldSpec, SampleChunk, image_names
from loaderkit.sampling.shard import Shard
from loaderkit.sources.objects.iterable import Pass
from loaderkit.stages.parts import MixedChunk

MakeChunk = Callable[[BatchWork, int, int, NDArray[np.int64]], SampleChunk]
"""(batch, slots [lo, hi), indices of their samples) -> the work on them."""


class BatchPlan:
    """Implements `engine.contracts.Plan` by a cursor (samples), a memory and an assembler (results)."""

    def __init__(
        self,
        cursor: BatchCursor,
        memory: BatchMemory,
        assembler: BatchAssembler,
        *,
        key: Callable[[int], str],
        find_specs: Callable[[Pass | None], Mapping[str, FieldSpec]],
        preparing: Callable[[], tuple[str, Chunk] | None],
        whole_chunks: bool = False,
        begin_pass: Callable[[int, int, int], Pass] | None = None,
        make_chunk: MakeChunk = SampleChunk,
        make_single: MakeChunk = SampleChunk,
        sources_of: Callable[[NDArray[np.int64]], NDArray[np.int64]] | None = None,
        aligned: Callable[[list[int], NDArray[np.int64]], list[int]] | None = None,
        batch_size: int,
    ) -> None:
        """`find_specs` gives the fields of a batch: see `specs_of_first`; `preparing` says how far that has come.
        `whole_chunks`: a batch is one chunk. `begin_pass` begins to read, from (epoch, position, step) on, a source
        whose items come in order only. `make_single` makes the chunk of one sample of the source. `sources_of` gives
        the mixed source of every sample: a chunk is to have few. `aligned` moves the bounds of chunks to where a batch
        may be cut. `batch_size`: the samples of a batch, about the mean of unequal ones."""
        self._cursor = cursor
        self.memory = memory
        self._assembler = assembler
        self.key = key
        self._find_specs = find_specs
        self.preparing = preparing
        self._whole_chunks = whole_chunks
        self._begin_pass = begin_pass
        self._make_chunk = make_chunk
        self.make_single = make_single
        self._sources_of = sources_of
        self._aligned = aligned
        self._batch_size = batch_size
        self._begin = (0, 0)  # where the cursor was put last
        self._pass: Pass | None = None  # the pass of the newest batch
        self._previewed: Pass | None = None  # that whose first items have shown what a batch holds
        self.is_prepared = False
        self.specs: Mapping[str, FieldSpec] = {}
        self._images: tuple[str, ...] = ()
        self._loose: tuple[str, ...] = ()  # fields that lie in no slab
        self._ragged: tuple[str, ...] = ()  # of these, the fields with tensors that differ in shape

    @property
    def batch_size(self) -> int:
        return self._batch_size

    @property
    def next_position(self) -> tuple[int, int]:
        return self._cursor.next_position

    @property
    def room(self) -> tuple[int, bool]:
        return self.memory.room

    @property
    def memory_bytes(self) -> int:
        return self.memory.num_bytes

    def begins_at(self, epoch: int, position: int, shard: Shard | None = None) -> tuple[int, int] | None:
        return self._cursor.begins_at(epoch, position, shard)

    def seek(self, epoch: int, position: int, shard: Shard | None = None) -> None:
        self._cursor.seek(epoch, position, shard)
        self._end_pass()
        self._begin = (epoch, position)

    def redeal(self, border: tuple[int, int], shard: Shard | None) -> None:
        assert self._begin_pass is None, "what is read in order cannot be begun again at a border"
        self._cursor.redeal(border, shard)

    def share(self, shard: Shard) -> None:
        self.memory.share(shard)

    def set_depth(self, num_batches: int | None, memory_bytes: int | None) -> None:
        self.memory.set_depth(num_batches, memory_bytes)

    def memory_stats(self, num_open: int) -> dict[str, int]:
        return self.memory.stats(num_open)

    def prepare(self) -> None:
        """Determine the fields of a batch. Raises `StageError` if no sample is readable, `ConfigError` if the memory holds not
        even one batch."""
        if self._begin_pass is not None:
            self._previewed = self._begin_pass(self._begin[0], 0, self._cursor.first_step)
        specs = self._find_specs(self._previewed)
        self.memory.prepare(specs)
        self._loose = tuple(name for name, spec in specs.items() if spec.kind != "slab")
        self._ragged = tuple(name for name, spec in specs.items() if spec.kind in ("ragged", "pad"))
        self.specs, self._images = specs, image_names(specs)
        self.is_prepared = True  # set last: another worker that reads it may open batches

    def open(self, chunk_size: int) -> BatchWork | None:
        """The next batch with its memory and its chunks, or None after the last epoch."""
        work_item = self._cursor.next()
        if work_item is None:
            return None
        if self._begin_pass is not None:
            work_item.stream = self._pass = self._pass_of(work_item, self._begin_pass)
        work_item.specs = self.specs
        work_item.fields = self.memory.take()
        work_item.take_bytes = self.memory.take_bytes
        size = len(work_item)
        for name in self._loose:
            work_item.values[name] = [None] * size
        if chunk_size >= size or self._whole_chunks:
            work_item.chunks = [self._make_chunk(work_item, 0, size, work_item.indices)]
        else:
            num = -(-size // chunk_size)
            bounds = [size * number // num for number in range(num + 1)]
            if self._aligned is not None:
                bounds = self._aligned(bounds, work_item.indices)
            if self._sources_of is not None:
                slots = np.argsort(self._sources_of(work_item.indices), kind="stable")
                work_item.chunks = [MixedChunk(work_item, lo, hi, slots[lo:hi]) for lo, hi in pairwise(bounds)]
            else:
                for lo, hi in pairwise(bounds):
                    work_item.chunks.append(self._make_chunk(work_item, lo, hi, work_item.indices[lo:hi]))
        work_item.num_pending = len(work_item.chunks)
        return work_item

    def finish(self, work_item: WorkItem) -> dict[str, Any]:
        assert isinstance(work_item, BatchWork)
        if isinstance(work_item.stream, Pass) and not _cut_to_end(work_item, work_item.stream):
            return {}
        batch = self._assembler.finish(work_item)
        if self._ragged and batch:
            self.memory.note_batch(sum(_num_bytes(batch[name]) for name in self._ragged))
        return batch

    def context(self, work_item: WorkItem) -> BatchContext:
        assert isinstance(work_item, BatchWork)
        first, keys = int(work_item.positions[0]), work_item.result.get("__key__", [])
        return BatchContext(work_item.epoch, work_item.step, first, keys, self._images)

    def release(self, work_item: WorkItem) -> None:
        """Nothing to do: a slab's lease returns it."""

    def close(self) -> None:
        self._end_pass()
        if self._previewed is not None:
            self._previewed.end()
        self.memory.close()

    def _pass_of(self, work_item: BatchWork, begin_pass: Callable[[int, int, int], Pass]) -> Pass:
        """The pass that a batch belongs to: the pass of the batch before it, the previewed one if it begins there, or a
        new one."""
        if self._pass is not None and self._pass.begin[0] == work_item.epoch:
            return self._pass
        begin = (*(self._begin if work_item.epoch == self._begin[0] else (work_item.epoch, 0)), work_item.step)
        previewed, self._previewed = self._previewed, None
        if previewed is not None and previewed.begin == begin and previewed.is_whole:
            return previewed
        if previewed is not None:
            previewed.end()
        return begin_pass(*begin)

    def _end_pass(self) -> None:
        if self._pass is not None:
            self._pass.end()
            self._pass = None


def _cut_to_end(work_item: BatchWork, stream: Pass) -> bool:
    """Cut a batch to the samples before the end of the source; False if these make no batch."""
    num_left = stream.num_left(work_item.indices.tolist(), work_item.begin, work_item.end)
    if num_left == 0:
        work_item.is_empty = work_item.is_end = True
        work_item.let_go()
        return False
    if stream.num_items is not None and stream.num_items < work_item.end:
        work_item.cut(num_left)
        work_item.end = stream.num_items
    return True


def _num_bytes(values: torch.Tensor | list[torch.Tensor]) -> int:
    return values.nbytes if isinstance(values, torch.Tensor) else sum(value.nbytes for value in values)
