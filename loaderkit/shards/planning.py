"""Plans shards before any is written: which stages run, what a sample looks like, and which samples are in which shard.

A few samples, evenly spread over the order, are made as a trial. If samples are copied as they are, their sizes are those in
the source; else each counts as much as the mean of the trial.
"""

from __future__ import annotations

import inspect
import os
from collections import Counter
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loaderkit.connectors.config import StoreArgs
from loaderkit.errors import ConfigError, SourceError, StageError
from loaderkit.pipeline.config.model import PipelineConfig, PrefetchArgs
from loaderkit.pipeline.config.source_parsing import absolute_url
from loaderkit.pipeline.execution_plan import ExecutionPlan, compile_pipeline
from loaderkit.shards.encoding import EncodedField
from loaderkit.shards.job import Destination, Format, ShardJob
from loaderkit.shards.layout import Extensions, SampleLayout, clashing_keys
from loaderkit.shards.samples import SampleMaker
from loaderkit.shards.split import Split, split_stages
from loaderkit.shards.tar_shard import tar_bytes
from loaderkit.sources.base import Source
from loaderkit.stages.base import StageConfig
from loaderkit.stages.batch import BatchArgs
from loaderkit.stages.call import CallArgs, load_function
from loaderkit.stages.image.decode import DecodeArgs

NUM_TRIED = 16
_BLOCK = 65_536  # samples whose sizes are looked up at a time
Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class Options:
    """The command's options besides the pipeline: the destination, the format, the bytes of a shard, the quality of JPEGs."""

    out: str
    format: Format = "tar"
    shard_bytes: int = 256 * 10**6
    quality: int = 90


@dataclass(frozen=True)
class ShardPlan:
    """The job, how the stages were split, the bytes it is expected to write, and a fingerprint that no other job has."""

    config: PipelineConfig
    job: ShardJob
    split: Split
    num_samples: int
    expected_bytes: int
    extensions: dict[str, list[str]]  # by field, of all samples
    is_copy: bool  # else `extensions` come from the samples that were tried
    fingerprint: dict[str, str]


def plan_shards(config: PipelineConfig, options: Options) -> ShardPlan:
    """Open the source, try some samples, and cut all of them into shards. The caller closes `job.plan`. Raises
    LoaderkitError."""
    split = split_stages(config, keeps_encoded=options.format == "tar")
    destination = _destination(config, options)
    plan = compile_pipeline(_running(config, split), rank=0, world_size=1)
    try:
        wanted = config.output if options.format == "array" else None
        decodes_later = any(isinstance(stage.args, DecodeArgs) for stage in split.left)
        maker = SampleMaker(
            plan,
            quality=options.quality,
            decodes_later=decodes_later,
            as_array=options.format == "array",
            wanted=wanted,
        )
        try:
            layout, mean_bytes, contents = _tried(plan, maker, options.format)
        finally:
            maker.close()
        is_copy = not split.run and config.kind.encoded == "all" and options.format == "tar"
        sizes = _sizes(plan, mean_bytes, contents, is_copy=is_copy)
        names = Extensions(layout.fields)
        extensions = {name: sorted(names.of(name, one) for one in contents.get(name, ())) for name in layout.fields}
        bounds = cut(sizes, options.shard_bytes)
        clashing = clashing_keys(plan.source.keys, len(plan.source)) if options.format == "tar" else {}
        job = ShardJob(
            plan, destination, options.format, options.quality, decodes_later, wanted, layout, bounds, clashing
        )
        return ShardPlan(
            config,
            job,
            split,
            len(sizes),
            int(sizes.sum()),
            extensions,
            is_copy,
            _fingerprint(plan, job, options, split),
        )
    except BaseException:
        plan.close()
        raise


def _running(config: PipelineConfig, split: Split) -> PipelineConfig:
    """The pipeline that is run: it has only the stages that run now, on the CPU. A bad sample has no slot that another
    one could take, so `replace` leaves it out, as `skip` does."""
    errors = config.errors
    if errors.on_bad_sample == "replace":
        errors = errors.model_copy(update={"on_bad_sample": "skip"})
    read, batch = config.stages[0], config.stage("batch")
    run = [
        replace(stage, args=stage.args.model_copy(update={"device": "cpu"}))
        if isinstance(stage.args, DecodeArgs)
        else stage
        for stage in split.run
    ]
    stages: tuple[StageConfig, ...] = (read, *run, replace(batch, args=BatchArgs(size=1)))
    return replace(config, stages=stages, output=None, errors=errors, prefetch=PrefetchArgs(executor="inline"))


def _destination(config: PipelineConfig, options: Options) -> Destination:
    """Where shards go: a bucket is reached with the settings of the source's bucket."""
    out = options.out
    url, args = absolute_url(out, Path.cwd()), StoreArgs()
    if not out:
        raise ConfigError("--out is empty: expected the folder or the URL below which the shards are to be")
    if options.format == "tar" and url.endswith(".tar"):
        raise ConfigError(
            f"--out {out}: this is to be the folder of all shards, and `kind: tar` takes a name that ends in .tar for one "
            "archive: choose another name"
        )
    source = config.source
    if isinstance(source, StoreArgs):
        root = config.kind.root(source) if config.kind.root is not None else ""
        if url.startswith("s3://") and root.startswith("s3://"):
            args = StoreArgs(s3=source.s3, retry=source.retry)
        above, below = (f"{_real(place).rstrip('/')}/" for place in (root, url))
        if (config.source_kind == "files" and below.startswith(above)) or above == below:
            raise ConfigError(
                f"--out {out}: it lies in {root}, where the source's samples are, and shards would be taken for some: choose "
                "another place"
            )
    return Destination(url, args)


def _real(url: str) -> str:
    """A path without symbolic links; a URL as it is."""
    return url if "://" in url else os.path.realpath(url)


def _tried(plan: ExecutionPlan, maker: SampleMaker, form: Format) -> tuple[SampleLayout, float, dict[str, set[str]]]:
    """What most samples look like, the average bytes of one, and what each field's members hold, from some of the
    samples. Raises StageError, SourceError if all are bad."""
    num, order = len(plan.source), plan.order.for_thread()
    positions = np.unique(np.linspace(0, num - 1, min(num, NUM_TRIED)).astype(np.int64))
    first_error: StageError | None = None
    sizes: list[int] = []
    looks: Counter[frozenset[Any]] = Counter()
    examples: dict[frozenset[Any], tuple[dict[str, Any], str]] = {}
    contents: dict[str, set[str]] = {}
    for position in positions:
        index = order.indices(0, positions[positions == position])
        (made,) = maker.make([(np.array([position], np.int64), index)])
        if made.failures:
            first_error = first_error or made.failures[0].error
        if (sample := made.samples[0]) is None:
            continue
        look = frozenset((name, _look_of(value)) for name, value in sample.items())
        looks[look] += 1
        examples.setdefault(look, (sample, plan.source.key(int(index[0]))))
        if form == "tar":
            lengths = np.array([[len(member.data) for member in sample.values()]])
            sizes.append(int(tar_bytes(lengths, len(sample))[0]))
            for name, member in sample.items():
                contents.setdefault(name, set()).add(member.content)
        else:
            sizes += [array.nbytes for array in sample.values()]
    if not looks:
        reason = f"the first: {first_error}" if first_error is not None else "stages drop all of them"
        raise SourceError(f"none of {len(positions)} samples that were tried can be written: {reason}") from first_error
    look, _ = looks.most_common(1)[0]  # of equally many the first; the others, such as an odd first sample, are bad
    return _layout_of(*examples[look], form), float(np.mean(sizes)), contents


def _look_of(value: Any) -> Any:
    """Equal for what fits together."""
    return value.is_raw if isinstance(value, EncodedField) else (value.dtype.str, value.shape)


def _layout_of(sample: dict[str, Any], key: str, form: Format) -> SampleLayout:
    if form == "tar":
        if not sample:
            raise SourceError(f"sample {key!r} has no fields, so there is nothing to write")
        return SampleLayout(
            {name: member.is_raw for name, member in sample.items() if isinstance(member, EncodedField)}, key
        )
    if len(sample) != 1:
        raise ConfigError(
            f"--format array: an array has one field, and samples have {', '.join(sample) or 'none'}: name the one that is "
            f"wanted in the pipeline's `output` (--set output=[{next(iter(sample), 'image')}]), or write --format tar"
        )
    ((name, array),) = sample.items()
    return SampleLayout({name: False}, key, array.dtype.str, array.shape)


def _sizes(plan: ExecutionPlan, mean_bytes: float, contents: dict[str, set[str]], *, is_copy: bool) -> Int64:
    """The bytes of every sample, in the order in which they are written: int64 [samples]. If samples are copied,
    `contents` gets what each field holds."""
    num, order = len(plan.source), plan.order.for_thread()
    if not is_copy:
        ends = (np.arange(num + 1) * mean_bytes).astype(np.int64)
        return np.diff(ends)
    sizes = np.empty(num, np.int64)
    for begin in range(0, num, _BLOCK):
        positions = np.arange(begin, min(begin + _BLOCK, num), dtype=np.int64)
        sizes[begin : begin + len(positions)] = _sizes_in(plan.source, order.indices(0, positions), contents)
    return sizes


def _sizes_in(source: Source, indices: Int64, contents: dict[str, set[str]]) -> Int64:
    """The bytes that samples take in a tar if they are copied."""
    table = source.table(indices)
    if table is not None:
        lengths = np.array(table.ranges.lengths, np.int64).reshape(len(indices), -1)
        num_constants = len(table.constants)
        for name, extension in table.fields:
            contents.setdefault(name, set()).add(extension.rpartition(".")[2])
        return tar_bytes(
            np.concatenate([lengths, np.ones((len(indices), num_constants), np.int64)], axis=1),
            lengths.shape[1] + num_constants,
        )
    sizes = []
    for index in indices.tolist():
        try:
            ranges = source.ranges(index)
        except SourceError:  # a bad sample, which is named when it is read
            ranges = []
        for each in ranges:
            contents.setdefault(each.field, set()).add(each.extension.rpartition(".")[2])
        members = [each.range.length for each in ranges]
        members += [1] * len(source.constants(index))
        sizes.append(int(tar_bytes(np.array([members], np.int64), len(members))[0]))
    return np.array(sizes, np.int64)


def cut(sizes: Int64, shard_bytes: int) -> Int64:
    """The first sample of every shard, and last the number of all: int64 [shards + 1].

    There are as many shards as hold all samples at `shard_bytes` each, and they are about equal; none is empty.
    """
    ends = np.cumsum(sizes)
    total = int(ends[-1])
    num_shards = max(1, -(-total // shard_bytes))
    if num_shards >= len(sizes):
        return np.arange(len(sizes) + 1, dtype=np.int64)
    middles = ends - sizes / 2
    wanted = np.arange(1, num_shards) * (total / num_shards)
    inner = np.searchsorted(middles, wanted)
    return np.unique(np.concatenate([[0], inner, [len(sizes)]])).astype(np.int64)


def _fingerprint(plan: ExecutionPlan, job: ShardJob, options: Options, split: Split) -> dict[str, str]:
    """What must be equal for shards to belong together."""
    codes = {f"code of {stage.name}": _code(stage.args) for stage in split.run if isinstance(stage.args, CallArgs)}
    order = plan.config.order
    fields = blake2b(repr(sorted(job.layout.to_dict().items())).encode(), digest_size=8).hexdigest()
    named = {
        **plan.fingerprint(),
        **codes,
        "seed": str(order.seed) if order.shuffle != "none" else "-",
        "format": options.format,
        "shard": str(options.shard_bytes),
        "quality": str(options.quality),
        "fields of samples": fields,
        "on_bad_sample": plan.config.errors.on_bad_sample,
    }
    return {name: value for name, value in named.items() if not name.startswith("stages.batch")}


def _code(args: CallArgs) -> str:
    """A digest of the text of a user's function; "-" if there is no text. Functions that it calls are not included."""
    function = load_function(args.function) if isinstance(args.function, str) else args.function
    try:
        text = inspect.getsource(function if inspect.isroutine(function) else type(function))
    except (OSError, TypeError):
        return "-"
    return blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
