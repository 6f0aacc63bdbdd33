"""Counts, by source, what a batch of a mixture holds. This is done once for each batch, where it is assembled."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from loaderkit.engine.work import SourceCounts
from loaderkit.samples.chunk import BatchWork
from loaderkit.sampling.packing import PackedOrder
from loaderkit.sources.mixture import MixtureSource

Int64 = NDArray[np.int64]
CountBySource = Callable[[BatchWork, Int64 | None], Int64 | None]
"""Notes the counts of a batch. The second argument gives the slots that the loop gets, or None for all; returns the
source of each of these slots, if each has one."""


class SourceCounter:
    """Counts the samples of each of several sources."""

    def __init__(
        self,
        source: MixtureSource,
        samples_of: Callable[[Int64], Int64],
        lengths_of: Callable[[Int64], Int64] | None,
        *,
        skips: bool,
    ) -> None:
        """`samples_of` gives the samples that slots are made of, `lengths_of` the tokens of samples, if weights are shares of
        these. `skips`: bad samples are left out; else others stand in their slots."""
        self._source = source
        self._samples_of = samples_of
        self._lengths_of = lengths_of
        self._skips = skips

    def count(self, work_item: BatchWork, kept: Int64 | None) -> Int64:
        """See `CountBySource`."""
        samples = self._samples_of(work_item.indices)
        numbers = self._source.numbers_of(samples)
        given = numbers if kept is None else numbers[kept]
        counts = SourceCounts(self._sums(given))
        if self._lengths_of is not None:
            lengths = self._lengths_of(samples if kept is None else samples[kept])
            counts = counts._replace(tokens=self._sums(given, lengths))
        if kept is not None or work_item.failures:
            bad = {failure.slot for failure in work_item.failures}
            skipped = bad.difference(work_item.dropped) if self._skips else ()
            counts = counts._replace(
                dropped=self._in_slots(numbers, work_item.dropped),
                skipped=self._in_slots(numbers, skipped),
                replaced=() if self._skips else self._in_slots(numbers, bad),
            )
        work_item.by_source = counts
        return given

    def _in_slots(self, numbers: Int64, slots: Iterable[int]) -> tuple[int, ...]:
        chosen = list(slots)
        return self._sums(numbers[chosen]) if chosen else ()

    def _sums(self, numbers: Int64, weights: Int64 | None = None) -> tuple[int, ...]:
        return _sums(numbers, len(self._source.parts), weights)


class DocumentCounter:
    """Counts the documents and tokens of packed sequences; a sequence may have some of several sources. A document that
    is cut counts where it begins."""

    def __init__(self, source: MixtureSource, packing: PackedOrder, *, skips: bool) -> None:
        """`skips` as above."""
        self._source = source
        self._packing = packing
        self._skips = skips

    def count(self, work_item: BatchWork, kept: Int64 | None) -> None:
        """See `CountBySource`. A sequence that was replaced by another one counts for the source of its first bad
        document."""
        pieces = self._packing.pieces(work_item.epoch, work_item.indices)
        numbers, begins = self._source.numbers_of(pieces.samples), pieces.firsts == 0
        failures, num_sources = work_item.failures, len(self._source.parts)
        counts = SourceCounts(_sums(numbers[begins], num_sources), _sums(numbers, num_sources, pieces.lengths))
        if self._skips and failures:
            slots = np.repeat(np.arange(len(work_item)), np.diff(pieces.bounds))
            is_bad = np.zeros(len(numbers), np.bool_)
            for failure in failures:  # a sequence has at most one piece of a document
                is_bad |= (work_item.positions[slots] == failure.position) & (pieces.samples == failure.sample)
            is_given = ~is_bad if kept is None else ~is_bad & np.isin(slots, kept)
            counts = SourceCounts(
                _sums(numbers[is_given & begins], num_sources),
                _sums(numbers[is_given], num_sources, pieces.lengths[is_given]),
                skipped=_sums(numbers[is_bad & begins], num_sources),
            )
        elif failures:
            firsts = {failure.slot: failure.sample for failure in reversed(failures)}
            replaced = self._source.numbers_of(np.array(list(firsts.values()), np.int64))
            counts = counts._replace(replaced=_sums(replaced, num_sources))
        work_item.by_source = counts


def _sums(numbers: Int64, num_sources: int, weights: Int64 | None = None) -> tuple[int, ...]:
    """For each source, how often it occurs, or the sum of its `weights`."""
    return tuple(np.bincount(numbers, weights, num_sources).astype(np.int64).tolist())
