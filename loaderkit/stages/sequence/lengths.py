"""Samples of batches that are planned by lengths: each must be as long as the plan says, and what replaces one no longer."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from loaderkit.samples.chunk import SampleChunk
from loaderkit.samples.values import InPlace
from loaderkit.sampling.order import SampleOrder
from loaderkit.stages.values import as_tensor


def check_lengths(
    chunk: SampleChunk, field: str, order: SampleOrder, failed: Callable[[SampleChunk, int, Exception], None]
) -> None:
    """Mark the samples as failed whose `field` is not as long as was planned: their batch would be larger than it may be."""
    if chunk.columns is not None and field in chunk.columns:
        values = chunk.columns[field]
    else:
        values = [None if sample is None else sample.get(field) for sample in chunk.samples]
    wrong: list[tuple[int, Exception]] = []
    for row, (value, planned) in enumerate(zip(values, order.lengths_of(chunk.indices).tolist(), strict=True)):
        if type(value) is InPlace:
            value = value.tensor  # noqa: PLW2901 - None for the first sample, of which nothing is read
        if value is None:
            continue
        try:
            shape = list(as_tensor(value).shape if not hasattr(value, "shape") else value.shape)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            wrong.append((row, error))
            continue
        if shape[:1] != [planned]:
            wrong.append((row, ValueError(_said(field, shape, planned))))
    if wrong and chunk.columns is not None:
        rows = zip(*chunk.columns.values(), strict=True)
        chunk.samples = [dict(zip(chunk.columns, row_values, strict=True)) for row_values in rows]
        chunk.columns = None
    for row, reason in wrong:
        failed(chunk, row, reason)


def _said(field: str, shape: list[int], planned: int) -> str:
    return (
        f"its field {field!r} is {shape}, and the batch is planned for a length of {planned}: a stage before `batch` has "
        "changed, or gives another result each time; run `loaderkit index --lengths` again"
    )


def no_longer(
    order: SampleOrder,
    others: Callable[[int, NDArray[np.float64]], NDArray[np.int64]],
    index: int,
    draws: NDArray[np.float64],
) -> NDArray[np.int64]:
    """Of the samples that may replace a bad one, some that are no longer, so that its batch becomes no larger, by numbers drawn
    from [0, 1): int64 [n]."""
    first, last = others(index, np.array([0.0, np.nextafter(1.0, 0.0)]))
    lengths, most = order.lengths_of(np.arange(first, last + 1)), order.lengths_of(np.array([index]))
    fitting: NDArray[np.int64] = first + np.flatnonzero((lengths > 0) & (lengths <= most))
    return fitting[(draws * len(fitting)).astype(np.int64)]
