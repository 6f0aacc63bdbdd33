"""What the slots of a batch hold, samples or packed sequences: makes the chunks of work on them, and counts them by
source."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loaderkit.pipeline.batches.plan import MakeChunk
from loaderkit.pipeline.batches.source_counts import CountBySource, DocumentCounter, SourceCounter
from loaderkit.samples.chunk import BatchWork, PackedChunk, SampleChunk
from loaderkit.samples.expanded import ExpandedChunks
from loaderkit.sampling.expanded import ExpandedOrder
from loaderkit.sampling.order import SampleOrder
from loaderkit.sampling.packing import PackedOrder, Pieces
from loaderkit.sources.base import Source
from loaderkit.sources.mixture import MixtureSource


class Contents(NamedTuple):
    """How the slots of a batch are filled. `make_single` makes the chunk of one sample of the source. With several
    sources, `count_sources` counts what is of each, and `sources_of` gives every slot's source, if a slot has one.
    `aligned` moves the bounds of chunks to where a batch, with these indices, may be cut."""

    make_chunk: MakeChunk
    make_single: MakeChunk
    count_sources: CountBySource | None = None
    sources_of: Callable[[NDArray[np.int64]], NDArray[np.int64]] | None = None
    aligned: Callable[[list[int], NDArray[np.int64]], list[int]] | None = None


def contents_of(order: SampleOrder, source: Source, *, skips: bool) -> Contents:
    """The contents of the batches of an order. `skips`: bad samples are left out."""
    return _sequences(order, source, skips) if order.unit == "sequences" else _samples(order, source, skips)


def _samples(order: SampleOrder, source: Source, skips: bool) -> Contents:
    count = None
    if isinstance(source, MixtureSource):
        lengths_of = order.core.lengths_of if order.core.knows_lengths else None
        count = SourceCounter(source, order.samples_of, lengths_of, skips=skips).count
    if isinstance(order, ExpandedOrder):
        chunks = ExpandedChunks(order.num)
        return Contents(chunks.make, chunks.single, count, aligned=chunks.aligned)
    if not isinstance(source, MixtureSource):
        return Contents(SampleChunk, SampleChunk)
    return Contents(SampleChunk, SampleChunk, count, source.numbers_of)


def _sequences(order: SampleOrder, source: Source, skips: bool) -> Contents:
    assert isinstance(order, PackedOrder)
    count = DocumentCounter(source, order, skips=skips).count if isinstance(source, MixtureSource) else None
    return Contents(partial(_packed_chunk, order), partial(_document_chunk, order), count)


def _packed_chunk(
    order: PackedOrder, work_item: BatchWork, lo: int, hi: int, sequences: NDArray[np.int64]
) -> PackedChunk:
    """The work on slots [lo, hi) of a batch, which hold these sequences."""
    return PackedChunk(work_item, lo, hi, sequences, order.pieces(work_item.epoch, sequences))


def _document_chunk(
    order: PackedOrder, work_item: BatchWork, lo: int, hi: int, documents: NDArray[np.int64]
) -> PackedChunk:
    """The work on one slot that holds the beginning of one document, alone."""
    length = np.minimum(order.lengths_of(documents), order.length)
    zero = np.zeros(1, np.int64)
    return PackedChunk(work_item, lo, hi, documents, Pieces(documents, zero, length, zero, np.array([0, 1])))
