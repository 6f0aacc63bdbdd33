"""The work on packed sequences: a chunk whose samples are documents until `pack` has put them into their slots."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from loaderkit.sampling.packing import Pieces
from loaderkit.stages.base import BatchWork, SampleChunk


class PackedChunk(SampleChunk):
    """Slots [lo, hi) of a batch of sequences. Up to `pack` its rows are the pieces: of row i the sample is `samples[i]`, with
    index `indices[i]`; then they are the slots.

    `tokens` are those of all slots, [hi - lo, length], if `read` has written them where they belong.
    """

    __slots__ = ("pieces", "sequences", "tokens")

    def __init__(self, work_item: BatchWork, lo: int, hi: int, sequences: NDArray[np.int64], pieces: Pieces) -> None:
        super().__init__(work_item, lo, hi, pieces.samples)
        self.samples = [None] * len(pieces.samples)
        self.sequences = sequences
        self.pieces = pieces
        self.tokens: NDArray[Any] | None = None

    def slot_of(self, row: int) -> int:
        return self.lo + int(np.searchsorted(self.pieces.bounds, row, side="right")) - 1

    def position_of(self, row: int) -> int:
        return int(self.work_item.positions[self.slot_of(row)])

    def end_pieces(self) -> None:
        """From now on the rows are the slots, which are written."""
        self.indices, self.samples = self.sequences, [None] * len(self)
        self.failures, self.dropped, self.draws = {}, [], {}
