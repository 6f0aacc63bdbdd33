"""Makes the order of an epoch from a config and its listed source: samples shuffled, mixed, and packed or cut by tokens."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loaderkit import native
from loaderkit.errors import ConfigError, SourceError
from loaderkit.pipeline.config.mixture import MixtureArgs
from loaderkit.pipeline.config.model import PipelineConfig
from loaderkit.pipeline.lengths import lengths_in, planned_lengths, planned_stage
from loaderkit.sampling.expanded import ExpandedOrder
from loaderkit.sampling.mix_rules import MixedSource
from loaderkit.sampling.mixture import MixedOrder, Mixture
from loaderkit.sampling.order import SampleOrder
from loaderkit.sampling.packing import PackedOrder
from loaderkit.sampling.random import key_of
from loaderkit.sampling.schedule import BlockOrder, GlobalOrder, SequentialOrder, WeightedOrder
from loaderkit.sampling.token_batches import (
    TokenBatches,
    fill_by_length,
    fill_in_order,
    fill_in_order_by_sum,
    fill_rounded,
)
from loaderkit.sampling.token_mixture import TokenMixture
from loaderkit.sources.base import Source
from loaderkit.sources.mixture import MixtureSource
from loaderkit.stages.base import StageConfig
from loaderkit.stages.batch import BatchArgs
from loaderkit.stages.expand import ExpandArgs
from loaderkit.stages.sequence.pack import PackArgs

_WINDOW_IN_ORDER = 32768  # samples: batches end with it, so that no plan needs all samples before
Int64 = NDArray[np.int64]


def order_of(config: PipelineConfig, source: Source) -> SampleOrder:
    """The order of a config's epochs. Raises ConfigError if it needs lengths that are not known, or that do not fit."""
    stage = planned_stage(config)
    if config.order.weights is not None:
        _check_weights(config, stage)
    if stage is None:
        order = _order_of_samples(config, source, None)
        nums = [one.args.num for one in config.stages if isinstance(one.args, ExpandArgs)]
        return ExpandedOrder(order, nums[0]) if nums else order
    if isinstance(config.source, MixtureArgs) and config.source.mix.stop == "never":
        raise ConfigError(
            f"stages.{stage.name}: it is planned by epochs, and this mixture has no end: use another `stop` than never, or "
            "`epochs` for its sources"
        )
    lengths = planned_lengths(config, stage, source)
    order = _order_of_samples(config, source, lengths)
    if not lengths.any():
        raise ConfigError(f"stages.{stage.name}: all {len(lengths)} samples are empty")
    make = _packed if isinstance(stage.args, PackArgs) else _cut_by_tokens
    return make(config, stage, source, order, lengths)


def _order_of_samples(config: PipelineConfig, source: Source, lengths: Int64 | None) -> SampleOrder:
    """The order before samples are packed or cut; `lengths` are those that a stage is planned by."""
    args = config.source
    if not isinstance(args, MixtureArgs):
        return _shuffled(config, config.source_kind, source, config.order.seed)
    assert isinstance(source, MixtureSource)
    orders = [
        _shuffled(config, member.kind, part, key_of("source", config.order.seed, part.name))
        for member, part in zip(args.members, source.parts, strict=True)
    ]
    sources = [
        MixedSource(member.name, len(part), args.num_passes(member))
        for member, part in zip(args.members, source.parts, strict=True)
    ]
    if args.mix.by == "sample":
        return MixedOrder(Mixture(sources, args.changes, args.mix.stop), orders)
    lengths = lengths_in(args, source) if lengths is None else lengths
    return TokenMixture(sources, args.changes, args.mix.stop, orders=orders, lengths=lengths)


def _shuffled(config: PipelineConfig, kind: str, source: Source, seed: int) -> SampleOrder:
    order = config.order
    if order.weights is not None:
        return _weighted(order.weights, kind, source, seed)
    if order.shuffle == "global":
        return GlobalOrder(len(source), seed)
    if order.shuffle == "block":
        return BlockOrder(
            _block_bounds(source, kind, order.block.block), seed, window=order.block.window, lanes=order.block.lanes
        )
    return SequentialOrder(len(source))


def _check_weights(config: PipelineConfig, planned: StageConfig | None) -> None:
    """Raise ConfigError for settings that do not fit samples that are drawn with replacement."""
    expanding = next((stage for stage in config.stages if isinstance(stage.args, ExpandArgs)), None)
    if isinstance(config.source, MixtureArgs):
        raise ConfigError(
            "order.weights: the classes of one source have weights; sources that are mixed have their own"
        )
    if (stage := planned or expanding) is not None:
        raise ConfigError(
            "order.weights: what is drawn by weight is neither packed, nor cut by tokens, nor expanded: remove it, or the "
            f"stage {stage.name}"
        )


def _weighted(given: str | Mapping[str, float], kind: str, source: Source, seed: int) -> WeightedOrder:
    """Samples drawn by the weights of their classes. Raises ConfigError."""
    if source.labels is None or source.labels.dtype.kind not in "iu":
        numbers = " and its labels are numbers that name no class" if source.labels is not None else ""
        raise ConfigError(
            f"order.weights: it needs the class of every sample before it is read{numbers}, which `files` knows with `label: "
            f"parent` or `labels`; this is kind: {kind}"
        )
    classes = source.labels.astype(np.int64)
    weights = _class_weights(None if isinstance(given, str) else given, classes, source.classes, "order.weights")
    return WeightedOrder(classes, weights, seed)


def _class_weights(
    given: Mapping[str, float] | None, classes: Int64, names: list[str] | None, where: str
) -> dict[int, float]:
    """The weight of every class that has samples, by its number: the weight `given` for its name (for its number if
    there are no names); else 1. Raises ConfigError, naming `where`, for a name that is no class, one left out, and for
    no weight at all."""
    present = np.unique(classes).tolist()
    if given is None:
        return dict.fromkeys(present, 1.0)
    name_of = {number: names[number] if names is not None else str(number) for number in present}
    known = {*name_of.values()} | {*(names or ())}
    if unknown := [name for name in given if name not in known]:
        raise ConfigError(f"{where}: {unknown[0]!r} is no class; there are: {', '.join(sorted(known)[:10])}")
    if missing := [name for name in name_of.values() if name not in given]:
        raise ConfigError(
            f"{where}: the class {missing[0]!r} has no weight: name all, and give 0 to what is to be left out"
        )
    found = {number: given[name] for number, name in name_of.items()}
    if not any(found.values()):
        raise ConfigError(f"{where}: no class that has samples has a weight above 0")
    return found


def _block_bounds(source: Source, kind: str, block_bytes: int) -> Int64:
    """The blocks of a source, which hold each sample once. Raises SourceError."""
    bounds = np.asarray(source.blocks(block_bytes))
    is_one_list = bounds.ndim == 1 and bounds.dtype.kind in "iu" and len(bounds) > 0
    if is_one_list and (bounds[0], bounds[-1]) == (0, len(source)) and (bounds[1:] >= bounds[:-1]).all():
        return bounds.astype(np.int64, copy=False)
    raise SourceError(
        f"order.shuffle: block: `blocks` of kind: {kind} gives {_shortened(bounds)} for {len(source)} samples: it has to give "
        f"the first sample of every block in ascending order, from 0 on, and then {len(source)}; else use global"
    )


def _shortened(bounds: NDArray[Any]) -> str:
    return np.array2string(bounds, threshold=8, edgeitems=3, separator=", ").replace("\n", "")


def _packed(
    config: PipelineConfig, stage: StageConfig, source: Source, order: SampleOrder, lengths: Int64
) -> SampleOrder:
    """The sequences that `pack` makes of samples."""
    args = stage.args
    assert isinstance(args, PackArgs)
    too_long = np.flatnonzero(lengths > args.length)
    if args.split == "never" and len(too_long):
        first = int(too_long[0])
        raise ConfigError(
            f"stages.{stage.name}.split: {len(too_long)} of {len(lengths)} documents are longer than `length: {args.length}`, "
            f"the first {source.key(first)!r} with {lengths[first]} tokens: set `split: long` to cut them, make `length` "
            "larger, or leave them out of the source"
        )
    return PackedOrder(
        order,
        lengths,
        length=args.length,
        window=args.window,
        seed=config.order.seed,
        is_even=args.cost == "attention",
    )


def _cut_by_tokens(
    config: PipelineConfig, stage: StageConfig, source: Source, order: SampleOrder, lengths: Int64
) -> SampleOrder:
    """The batches that `batch: {tokens: N}` makes of samples."""
    args = stage.args
    assert isinstance(args, BatchArgs)
    assert args.tokens is not None
    _check_tokens(stage.name, args, source, lengths)
    window = args.window or _WINDOW_IN_ORDER
    is_padded = args.forms.get(args.field) != "list"
    in_order = fill_in_order if is_padded else fill_in_order_by_sum
    by_length = fill_by_length if is_padded else native.best_fit
    fill = by_length if args.window else in_order
    if is_padded and args.pad_to_multiple_of is not None:
        fill = partial(fill_rounded, fill, args.pad_to_multiple_of)
    planned = PackedOrder(
        order,
        lengths,
        length=args.tokens,
        window=window,
        seed=config.order.seed,
        is_even=args.window > 0 and args.cost == "attention",
        keeps_order=args.window == 0,
        fill=fill,
    )
    shortest = int(lengths[lengths > 0].min())
    return TokenBatches(planned, min(window, args.tokens // shortest))


def _check_tokens(name: str, args: BatchArgs, source: Source, lengths: Int64) -> None:
    assert args.tokens is not None
    multiple = (args.pad_to_multiple_of or 1) if args.forms.get(args.field) == "pad" else 1
    most = args.tokens // multiple * multiple
    too_long = np.flatnonzero(lengths > most)
    if len(too_long):
        first = int(too_long[0])
        to_multiple = f", padded to a multiple of {multiple}" if multiple > 1 else ""
        raise ConfigError(
            f"stages.{name}.tokens: {len(too_long)} of {len(lengths)} samples are longer than a batch of {args.tokens} tokens, "
            f"the first {source.key(first)!r} with {lengths[first]}{to_multiple}: allow at least "
            f"{-(-lengths.max() // multiple) * multiple}, cut them (`max_length` of `tokenize`, or a `call`), or leave "
            "them out (`filter`)"
        )
    if args.field not in args.forms and lengths.min() < lengths.max():
        raise ConfigError(
            f"stages.{name}.ragged: samples have {lengths.min()} to {lengths.max()} tokens in {args.field!r}: say how a batch "
            f"holds them, `ragged: {{{args.field}: pad}}` or `list`"
        )
