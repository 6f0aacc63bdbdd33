"""From a pipeline with `batch: {tokens: N}` to the plan of its batches, and what that asks of their samples."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from loaderkit import native
from loaderkit.errors import ConfigError
from loaderkit.pipeline.batches.packing import pack_stage, planned_lengths
from loaderkit.pipeline.config.model import PipelineConfig
from loaderkit.sampling.packing import PackedOrder
from loaderkit.sampling.schedule import EpochSizes, SamplePermutation
from loaderkit.sampling.token_batches import TokenBatches, fill_by_length, fill_in_order, fill_in_order_by_sum
from loaderkit.sources.base import Source
from loaderkit.stages.batch import BatchArgs

_WINDOW_IN_ORDER = 32768  # samples: batches end with it, so that no plan needs all samples before


def token_batches(
    config: PipelineConfig,
    source: Source,
    order: SamplePermutation,
    num_positions: int,
    *,
    lengths: NDArray[np.int64] | None = None,
    sizes: EpochSizes | None = None,
) -> TokenBatches | None:
    """The batches of the samples at the positions of `order`; None if they have a `size`, or hold sequences of `pack`.
    `lengths`: of all samples, if they are known already. `sizes`: of epochs, if they differ. Raises ConfigError if the lengths
    are not known, or do not fit a batch."""
    args = config.batch
    if args.tokens is None or pack_stage(config) is not None:
        return None
    lengths = planned_lengths(config, source, num_positions, lengths)
    _check(config.stage("batch").name, args, source, lengths)
    window = args.window or _WINDOW_IN_ORDER
    is_padded = args.ragged.get(args.field) != "list"
    in_order = fill_in_order if is_padded else fill_in_order_by_sum
    by_length = fill_by_length if is_padded else native.best_fit
    planned = PackedOrder(
        order,
        num_positions,
        lengths,
        length=args.tokens,
        window=window,
        seed=config.order.seed,
        is_even=args.window > 0 and args.cost == "attention",
        sizes=sizes,
        keeps_order=args.window == 0,
        fill=by_length if args.window else in_order,
    )
    shortest = int(lengths[lengths > 0].min())
    return TokenBatches(planned, min(window, args.tokens // shortest))


def _check(name: str, args: BatchArgs, source: Source, lengths: NDArray[np.int64]) -> None:
    assert args.tokens is not None
    too_long = np.flatnonzero(lengths > args.tokens)
    if len(too_long):
        first = int(too_long[0])
        raise ConfigError(
            f"stages.{name}.tokens: {len(too_long)} of {len(lengths)} samples are longer than a batch of {args.tokens} tokens, "
            f"the first {source.key(first)!r} with {lengths[first]}: allow at least {lengths.max()}, cut them (`call`), or "
            "leave them out (`filter`)"
        )
    if args.field not in args.ragged and lengths.min() < lengths.max():
        raise ConfigError(
            f"stages.{name}.ragged: samples have {lengths.min()} to {lengths.max()} tokens in {args.field!r}: say how a batch "
            f"holds them, `ragged: {{{args.field}: pad}}` or `list`"
        )
