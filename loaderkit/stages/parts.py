"""Runs stages on the samples of one mixed source: such a stage gets the source's rows of a chunk, as a chunk of its own.

chunk, rows 0 1 2 3 4 ──> read.web: rows 0 1 3, as a chunk of 3 ──> their samples back into rows 0 1 3
                      ──> read.code: rows 2 4
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loaderkit.engine.work import Stage
from loaderkit.samples.chunk import BatchWork, SampleChunk
from loaderkit.sources.mixture import MixtureSource, SourcePart


class MixedChunk(SampleChunk):
    """A chunk of samples whose slots lie apart, so that they come from few sources: each source costs a read of its
    own, 15 us and more."""

    __slots__ = ("slot_numbers",)

    def __init__(self, work_item: BatchWork, lo: int, hi: int, slots: NDArray[np.int64]) -> None:
        """Rows [lo, hi) of a batch whose slots are taken in another order, and the `slots` of these: int64 [hi - lo]."""
        super().__init__(work_item, lo, hi, work_item.indices[slots])
        self.slot_numbers: list[int] = slots.tolist()

    def __str__(self) -> str:
        return f"slots {', '.join(map(str, self.slot_numbers))}"

    def slot_of(self, row: int) -> int:
        return self.slot_numbers[row]

    @property
    def where(self) -> list[int]:
        return self.slot_numbers

    def in_slots(self, values: list[Any]) -> tuple[int, list[Any]]:
        first = min(self.slot_numbers)
        by_slot = [None] * (max(self.slot_numbers) - first + 1)
        for slot, value in zip(self.slot_numbers, values, strict=True):
            by_slot[slot - first] = value
        return first, by_slot


class ChunkPart(SampleChunk):
    """The rows of a chunk that belong to one source. Row r of the part is row `rows[r]` of the chunk."""

    __slots__ = ("own_current", "rows", "whole")

    def __init__(self, whole: SampleChunk, part: SourcePart, rows: list[int]) -> None:
        self.whole = whole
        self.rows = rows
        first = whole.lo + rows[0]  # this is only where it begins: `slot_of` is right
        super().__init__(whole.work_item, first, first + len(rows), whole.indices[rows])
        self.source_indices = part.own_of(self.indices)
        self.scratch = whole.scratch.setdefault(f"part {part.name}", {})

    @property
    def current(self) -> Any:
        """The row at work; setting it sets the corresponding row of the whole chunk."""
        return self.own_current

    @current.setter
    def current(self, value: Any) -> None:
        self.own_current = value
        self.whole.current = self.rows[value] if isinstance(value, int) else None

    def slot_of(self, row: int) -> int:
        return self.whole.slot_of(self.rows[row])


def parts_of(chunk: SampleChunk, source: MixtureSource) -> dict[int, ChunkPart]:
    """The parts of a chunk, by the number of their source; made once a chunk."""
    parts = chunk.parts
    if parts is None:
        rows: dict[int, list[int]] = {}
        for row, number in enumerate(source.numbers_of(chunk.indices).tolist()):
            rows.setdefault(number, []).append(row)
        parts = chunk.parts = {number: ChunkPart(chunk, source.parts[number], some) for number, some in rows.items()}
    return parts


def for_part(stage: Stage, source: MixtureSource, number: int, pool: str, *, reads: bool) -> Stage:
    """A stage that runs another one on the samples of source `number`. `reads`: there are no samples before it."""

    def run(chunk: SampleChunk) -> int:
        part = parts_of(chunk, source).get(number)
        if part is None:
            return 0
        if not reads:
            part.samples = [chunk.samples[row] for row in part.rows]
        num_dropped = len(part.dropped)
        num_bytes: int | None = stage.run(part)
        _put_back(part, num_dropped)
        return num_bytes or 0

    def part_of(chunk: SampleChunk) -> ChunkPart | None:
        return parts_of(chunk, source).get(number)

    return replace(stage, run=run, part=part_of, pool=pool, source=source.parts[number].name)


def _put_back(part: ChunkPart, num_dropped: int) -> None:
    whole, rows = part.whole, part.rows
    for row, sample in zip(rows, part.samples, strict=True):
        whole.samples[row] = sample
    for row, error in part.failures.items():
        whole.failures[rows[row]] = error
    whole.dropped.extend(rows[row] for row in part.dropped[num_dropped:])
