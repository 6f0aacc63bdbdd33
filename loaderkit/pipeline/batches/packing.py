"""From a pipeline with `pack` to its sequences: the lengths of all samples, the order of sequences, their work and names."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loaderkit._internal.system.cgroups import num_cpus
from loaderkit._internal.system.user_cache import default_cache_dir
from loaderkit.engine.work import Stage
from loaderkit.errors import ConfigError, StageError
from loaderkit.pipeline.config.model import PipelineConfig
from loaderkit.samples.chunk import BatchWork, PackedChunk, SampleChunk
from loaderkit.sampling.packing import PackedOrder, Pieces
from loaderkit.sampling.schedule import UNKNOWN, EpochSizes, SamplePermutation
from loaderkit.sources.base import Source
from loaderkit.sources.mixture import MixtureSource
from loaderkit.sources.sequences.lengths import LengthIndex
from loaderkit.stages.base import StageConfig
from loaderkit.stages.batch import BatchArgs
from loaderkit.stages.sequence.pack import PackArgs
from loaderkit.stages.values import as_tensor

_CHUNK = 64
logger = logging.getLogger("loaderkit")


def pack_stage(config: PipelineConfig) -> StageConfig | None:
    """The stage `pack`; None: there is none."""
    return next((stage for stage in config.stages if isinstance(stage.args, PackArgs)), None)


def planned_stage(config: PipelineConfig) -> StageConfig | None:
    """The stage that is planned by the lengths of samples: `pack`, or else `batch` with `tokens`; None: there is none."""
    batches = (stage for stage in config.stages if isinstance(stage.args, BatchArgs) and stage.args.tokens is not None)
    return pack_stage(config) or next(batches, None)


def mixture_lengths(config: PipelineConfig, source: MixtureSource) -> NDArray[np.int64]:
    """The lengths of all samples, of which the sources of a mixture have shares: those that `pack` or `batch` is planned by, or
    else those in the sources. Raises ConfigError if they are not known."""
    stage = planned_stage(config)
    if stage is not None:
        lengths = known_lengths(config, source)
        lengths = _measured(config, source) if lengths is None else lengths
        if lengths is None:
            raise ConfigError(f"mix.by: tokens: {_unknown(stage, source)}")
        return lengths
    known = {part.name: _lengths_in(part.inner, None) for part in source.parts}
    if missing := [name for name, own in known.items() if own is None]:
        raise ConfigError(
            f"mix.by: tokens: how many tokens a sample of {', '.join(missing)} has is not known: kind: tokens and windows of "
            "an array know it, and for other sources, with `pack` behind the tokenizer, `loaderkit index --lengths` finds it "
            "out; else mix by sample"
        )
    if config.mixture is not None and (own := [member.name for member in config.mixture.members if member.stages]):
        logger.warning(
            "mix.by: tokens: samples of %s count with the tokens that they have in the source: what stages of their own "
            "change or drop is not seen. With `pack`, or `batch: {tokens: ...}`, and `loaderkit index --lengths` it is",
            ", ".join(own),
        )
    return np.concatenate([own for own in known.values() if own is not None])


def _unknown(stage: StageConfig, source: Source) -> str:
    assert isinstance(stage.args, (PackArgs, BatchArgs))
    own = source.length_field
    other = (
        "" if own in (None, stage.args.field) else f" (the source knows those of {own!r}, not of {stage.args.field!r})"
    )
    return (
        f"stages.{stage.name}: it is planned by the lengths of the samples, which are not known{other}: run `loaderkit index "
        f"--lengths` with this pipeline once; it takes all samples through the stages before `{stage.kind}` and keeps their "
        "lengths"
    )


def packed_order(
    config: PipelineConfig,
    source: Source,
    order: SamplePermutation,
    num_positions: int,
    *,
    lengths: NDArray[np.int64] | None = None,
    sizes: EpochSizes | None = None,
) -> PackedOrder | None:
    """The sequences that `pack` makes of the samples at the positions of `order`; None without `pack`. `lengths`, if they were
    loaded before. `sizes`, if epochs differ. Raises ConfigError if the lengths of the documents are not known, or one is too
    long."""
    stage = pack_stage(config)
    if stage is None:
        return None
    args = stage.args
    assert isinstance(args, PackArgs)
    lengths = planned_lengths(config, source, num_positions, lengths)
    _check_lengths(stage.name, args, source, lengths)
    return PackedOrder(
        order,
        num_positions,
        lengths,
        length=args.length,
        window=args.window,
        seed=config.order.seed,
        is_even=args.cost == "attention",
        sizes=sizes,
    )


def planned_lengths(
    config: PipelineConfig, source: Source, num_positions: int, lengths: NDArray[np.int64] | None
) -> NDArray[np.int64]:
    """The lengths of all samples, `lengths` if they were loaded before, for a plan of epochs of `num_positions`: int64
    [samples]. Raises ConfigError if they are not known, or epochs have no end."""
    stage = planned_stage(config)
    assert stage is not None
    if num_positions >= UNKNOWN:
        raise ConfigError(
            f"stages.{stage.name}: it is planned by epochs, and this mixture has no end: use another `stop` than never, or "
            "`epochs` for its sources"
        )
    if lengths is None:
        lengths = known_lengths(config, source)
    if lengths is None:
        lengths = _measured(config, source)
    if lengths is None:
        raise ConfigError(_unknown(stage, source))
    if not lengths.any():
        raise ConfigError(f"stages.{stage.name}: all {len(lengths)} samples are empty")
    return lengths


def _check_lengths(name: str, args: PackArgs, source: Source, lengths: NDArray[np.int64]) -> None:
    too_long = np.flatnonzero(lengths > args.length)
    if args.split == "never" and len(too_long):
        first = int(too_long[0])
        raise ConfigError(
            f"stages.{name}.split: {len(too_long)} of {len(lengths)} documents are longer than `length: {args.length}`, the "
            f"first {source.key(first)!r} with {lengths[first]} tokens: set `split: long` to cut them, make `length` larger, "
            "or leave them out of the source"
        )


def known_lengths(config: PipelineConfig, source: Source) -> NDArray[np.int64] | None:
    """The lengths of the samples where the source knows them, as nothing but `read` comes before the stage that is planned by
    them; else None."""
    stage = planned_stage(config)
    if stage is None or config.stages.index(stage) != 1:
        return None
    assert isinstance(stage.args, (PackArgs, BatchArgs))
    field = stage.args.field
    if isinstance(source, MixtureSource):
        if config.mixture is None or any(member.stages for member in config.mixture.members):
            return None
        lengths = [_lengths_in(part.inner, field) for part in source.parts]
        known = [one for one in lengths if one is not None]
        return np.concatenate(known) if len(known) == len(lengths) else None
    return _lengths_in(source, field)


def _lengths_in(source: Source, field: str | None) -> NDArray[np.int64] | None:
    """The lengths of a field, or of the one that the source has; None: it does not know them."""
    return source.lengths if source.length_field is not None and field in (None, source.length_field) else None


def _measured(config: PipelineConfig, source: Source) -> NDArray[np.int64] | None:
    """The lengths that `loaderkit index --lengths` has kept; None: there are none. Raises ConfigError if some samples were bad
    then, and none may be."""
    found = length_index(config, source).load(len(source))
    if found is None:
        return None
    lengths, num_bad = found
    stage = planned_stage(config)
    assert stage is not None
    if num_bad and config.errors.on_bad_sample == "raise":
        raise ConfigError(
            f"stages.{stage.name}: {num_bad} samples were bad when `loaderkit index --lengths` measured them, so they are in "
            "no batch, and errors.on_bad_sample is raise: run it again, which names them, or let bad samples be skipped"
        )
    num_empty = len(lengths) - int(np.count_nonzero(lengths))
    if num_empty:
        logger.warning(
            "stages.%s: %d of %d samples were bad, dropped or empty when `loaderkit index --lengths` measured them, and are in "
            "no batch; if samples or functions have changed since, run it again",
            *(stage.name, num_empty, len(lengths)),
        )
    return lengths


def length_index(config: PipelineConfig, source: Source) -> LengthIndex:
    """Where the lengths of these samples are kept."""
    stage = planned_stage(config)
    assert stage is not None
    assert isinstance(stage.args, (PackArgs, BatchArgs))
    parts: list[Any] = [config.source_kind, len(source), source.fingerprint(), stage.args.field, config.order.seed]
    parts.append(config.source.model_dump(mode="python", include={"fields", "label", "field"}, exclude_none=True))
    if config.mixture is not None:
        parts += [[member.kind, [_said(own) for own in member.stages]] for member in config.mixture.members]
    for before in config.stages[: config.stages.index(stage)]:
        parts.append(_said(before))
    return LengthIndex(default_cache_dir(), json.dumps(parts, sort_keys=True, default=_name_of))


def _said(stage: StageConfig) -> list[Any]:
    args = {
        name: value
        for name, value in stage.args
        if name not in ("workers", "timeout", "thread_safe", "device", "regions", "on_gpu_error")
    }
    return [stage.kind, stage.name, args]


def _name_of(value: Any) -> str:
    return getattr(value, "__qualname__", None) or repr(value)


# ---------------------------------------------------------------------------------------------------- measuring


def measure_lengths(
    source: Source, stages: Sequence[Stage], wanted: StageConfig, *, raises: bool
) -> Iterator[tuple[NDArray[np.int64], int]]:
    """Run all samples through the stages, which are those before `wanted` and `batch`, and yield their lengths in canonical
    order, some at a time, and how many of those are bad: 0 is the length of these, which are warned about, and of those that
    are dropped. Raises StageError, with `raises` also for a bad sample. Closes the stages."""
    begins = range(0, len(source), _CHUNK)
    run = [stage for stage in stages if stage.scope == "sample" and stage.kind != "batch"]
    try:
        with ThreadPoolExecutor(num_cpus(), thread_name_prefix="loaderkit-lengths") as pool:
            try:
                yield from pool.map(partial(_lengths_from, source, run, wanted, raises), begins)
            finally:
                pool.shutdown(cancel_futures=True)  # an error is not to wait for all the others
    finally:
        for one in stages:
            if one.close is not None:
                one.close()


def _lengths_from(
    source: Source, stages: Sequence[Stage], wanted: StageConfig, raises: bool, begin: int
) -> tuple[NDArray[np.int64], int]:
    indices = np.arange(begin, min(begin + _CHUNK, len(source)), dtype=np.int64)
    work_item = BatchWork(epoch=0, step=0, positions=indices, indices=indices)
    chunk = SampleChunk(work_item, 0, len(indices), indices)
    for stage in stages:
        stage.run(chunk)
    if chunk.failures and raises:
        raise chunk.failures[min(chunk.failures)]
    for error in chunk.failures.values():
        logger.warning("bad sample, of length 0 in the index: %s", error)
    lengths = np.zeros(len(indices), np.int64)
    for row, sample in enumerate(chunk.samples):
        if sample is not None:
            lengths[row] = _length_of(sample, wanted, source.key(int(indices[row])))
    return lengths, len(chunk.failures)


def _length_of(sample: dict[str, Any], stage: StageConfig, key: str) -> int:
    assert isinstance(stage.args, (PackArgs, BatchArgs))
    field, where = stage.args.field, f"{stage.kind}: sample {key!r}"
    if field not in sample:
        raise StageError(
            f"{where} has no field {field!r}, but {', '.join(sample)}: name that with the tokens in `field`",
            stage=stage.name,
            key=key,
        )
    try:
        shape = as_tensor(sample[field]).shape
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise StageError(f"{where}: its field {field!r} is no tensor: {error}", stage=stage.name, key=key) from error
    if len(shape) != 1 and (stage.kind == "pack" or not shape):
        wanted = "[n]" if stage.kind == "pack" else "[n, ...]"
        raise StageError(f"{where}: its field {field!r} is {list(shape)}, not {wanted}", stage=stage.name, key=key)
    return int(shape[0])


# ---------------------------------------------------------------------------------------------------- the sequences' work


def packed_chunk(
    packing: PackedOrder, work_item: BatchWork, lo: int, hi: int, sequences: NDArray[np.int64]
) -> PackedChunk:
    """The work on slots [lo, hi) of a batch, which hold these sequences."""
    return PackedChunk(work_item, lo, hi, sequences, packing.pieces(work_item.epoch, sequences))


def document_chunk(
    packing: PackedOrder, work_item: BatchWork, lo: int, hi: int, documents: NDArray[np.int64]
) -> PackedChunk:
    """The work on one slot that holds the beginning of one document, alone."""
    length = np.minimum(packing.lengths_of(documents), packing.length)
    zero = np.zeros(1, np.int64)
    return PackedChunk(work_item, lo, hi, documents, Pieces(documents, zero, length, zero, np.array([0, 1])))


def sequence_keys(packing: PackedOrder, source: Source, epoch: int, sequences: NDArray[np.int64]) -> list[str]:
    """Of every sequence the keys of its documents; of a piece also which of its tokens: "4 17[8192:9000] 5"."""
    pieces = packing.pieces(epoch, sequences)
    samples, firsts, lengths = pieces.samples, pieces.firsts, pieces.lengths
    keys = source.keys(samples)
    for row in (lengths < packing.lengths_of(samples)).nonzero()[0].tolist():
        keys[row] += f"[{firsts[row]}:{firsts[row] + lengths[row]}]"
    ends = pieces.bounds.tolist()
    return [" ".join(keys[begin:end]) for begin, end in pairwise(ends)]
