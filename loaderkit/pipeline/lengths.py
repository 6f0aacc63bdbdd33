"""Gets the lengths of all samples, from which `pack`, `batch` with `tokens` and `mix: {by: tokens}` are planned."""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loaderkit._internal.system.cgroups import num_cpus
from loaderkit._internal.system.user_cache import default_cache_dir
from loaderkit.engine.work import Stage
from loaderkit.errors import ConfigError, StageError
from loaderkit.pipeline.config.mixture import MixtureArgs
from loaderkit.pipeline.config.model import PipelineConfig, PrefetchArgs
from loaderkit.pipeline.fingerprint import arguments_of, text_of
from loaderkit.pipeline.run_samples import StageRuns, chunk_of, run_samples
from loaderkit.samples.chunk import SampleChunk
from loaderkit.sources.base import Source
from loaderkit.sources.lengths import LengthIndex
from loaderkit.sources.mixture import MixtureSource
from loaderkit.stages.base import StageConfig
from loaderkit.stages.batch import BatchArgs
from loaderkit.stages.sequence.pack import PackArgs
from loaderkit.stages.values import as_tensor

_CHUNK = 64
logger = logging.getLogger("loaderkit")


def pack_stage(config: PipelineConfig) -> StageConfig | None:
    """The stage `pack`, or None if there is none."""
    return next((stage for stage in config.stages if isinstance(stage.args, PackArgs)), None)


def planned_stage(config: PipelineConfig) -> StageConfig | None:
    """The stage that is planned by the lengths of samples: `pack`, or else `batch` with `tokens`; None if there is
    neither."""
    batches = (stage for stage in config.stages if isinstance(stage.args, BatchArgs) and stage.args.tokens is not None)
    return pack_stage(config) or next(batches, None)


def lengths_in(args: MixtureArgs, source: MixtureSource) -> NDArray[np.int64]:
    """The lengths of all samples that the sources of a mixture know themselves. Raises ConfigError if one does not."""
    known = {part.name: _lengths_in(part.inner, None) for part in source.parts}
    if missing := [name for name, own in known.items() if own is None]:
        raise ConfigError(
            f"mix.by: tokens: how many tokens a sample of {', '.join(missing)} has is not known: kind: tokens and windows of "
            "an array know it, and for other sources, with `pack` behind the tokenizer, `loaderkit index --lengths` finds it "
            "out; else mix by sample"
        )
    if own := [member.name for member in args.members if member.stages]:
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


def planned_lengths(config: PipelineConfig, stage: StageConfig, source: Source) -> NDArray[np.int64]:
    """The lengths of all samples that `stage` is planned by: int64 [samples]. Raises ConfigError if they are not known."""
    lengths = known_lengths(config, source)
    if lengths is None:
        lengths = _measured(config, stage, source)
    if lengths is None:
        by = "mix.by: tokens: " if isinstance(config.source, MixtureArgs) and config.source.mix.by == "tokens" else ""
        raise ConfigError(f"{by}{_unknown(stage, source)}")
    return lengths


def known_lengths(config: PipelineConfig, source: Source) -> NDArray[np.int64] | None:
    """The lengths of the samples where the source knows them, as nothing but `read` comes before the stage that is planned by
    them; else None."""
    stage = planned_stage(config)
    if stage is None or config.stages.index(stage) != 1:
        return None
    assert isinstance(stage.args, (PackArgs, BatchArgs))
    field = stage.args.field
    if isinstance(source, MixtureSource):
        if any(member.stages for member in config.members):
            return None
        lengths = [_lengths_in(part.inner, field) for part in source.parts]
        known = [one for one in lengths if one is not None]
        return np.concatenate(known) if len(known) == len(lengths) else None
    return _lengths_in(source, field)


def _lengths_in(source: Source, field: str | None) -> NDArray[np.int64] | None:
    """The lengths of a field, or of the source's only field; None if the source does not know them."""
    return source.lengths if source.length_field is not None and field in (None, source.length_field) else None


def _measured(config: PipelineConfig, stage: StageConfig, source: Source) -> NDArray[np.int64] | None:
    """The lengths that `loaderkit index --lengths` has kept; None if there are none. Raises ConfigError if some samples
    were bad then, and bad samples are errors."""
    found = length_index(config, source).load(len(source))
    if found is None:
        return None
    lengths, num_bad = found
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
    parts += [[member.kind, [_described(own) for own in member.stages]] for member in config.members]
    parts += [_described(before) for before in config.stages[: config.stages.index(stage)]]
    return LengthIndex(default_cache_dir(), text_of(parts))


def _described(stage: StageConfig) -> list[Any]:
    return [stage.kind, stage.name, arguments_of(stage, of="lengths")]


# ---------------------------------------------------------------------------------------------------- measuring


def measure_lengths(
    source: Source, stages: Sequence[Stage], wanted: StageConfig, prefetch: PrefetchArgs, *, raises: bool
) -> Generator[tuple[NDArray[np.int64], int], None, None]:
    """Run all samples through the stages before `wanted` and `batch`. Yields their lengths in canonical order, some at
    a time, and how many of them are bad. The length of a bad sample, which is warned about, and of a dropped one is 0.
    Raises StageError, with `raises` also for a bad sample, and StallTimeout as `run_samples` does. Closes the
    stages."""
    size = len(source)
    chunks = (chunk_of(np.arange(begin, min(begin + _CHUNK, size))) for begin in range(0, size, _CHUNK))
    before = [one for one in stages if one.scope == "sample" and one.kind != "batch"]
    run = StageRuns([(one.name, one.run) for one in before], in_turn=any(one.in_turn for one in before))
    try:
        with closing(run_samples(run, chunks, num_threads=num_cpus(), prefetch=prefetch, key=source.key)) as made:
            for chunk in made:
                yield _lengths_in_chunk(chunk, source, wanted, raises=raises)
    finally:
        for one in stages:
            if one.interrupt is not None:  # ends the threads that read ahead
                one.interrupt()
            if one.close is not None:
                one.close()


def _lengths_in_chunk(
    chunk: SampleChunk, source: Source, wanted: StageConfig, *, raises: bool
) -> tuple[NDArray[np.int64], int]:
    if chunk.failures and raises:
        raise chunk.failures[min(chunk.failures)]
    for error in chunk.failures.values():
        logger.warning("bad sample, of length 0 in the index: %s", error)
    lengths = np.zeros(len(chunk), np.int64)
    for row, sample in enumerate(chunk.samples):
        if sample is not None:
            lengths[row] = _length_of(sample, wanted, source.key(chunk.index_of(row)))
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
