"""Finds out what a batch holds: from the first sample that can be read, and for untyped data from some others as well;
for a mixture from samples of every source, which must agree."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from loaderkit.errors import ConfigError, SourceError, StageError
from loaderkit.pipeline.batches.plan import MakeChunk
from loaderkit.pipeline.run_samples import StageRuns, chunk_of, run_samples
from loaderkit.samples.chunk import BatchWork, FieldSpec, SampleChunk
from loaderkit.samples.sample import Sample
from loaderkit.sampling.random import Bijection
from loaderkit.sources.base import Source
from loaderkit.sources.mixture import MixtureSource, SourcePart
from loaderkit.sources.objects.iterable import Pass, Preview
from loaderkit.stages.layout import Examples, is_undecided, is_untyped, num_bytes_of_sample
from loaderkit.stages.runner import raise_store_failure

_MOST_AT_ONCE = 32  # sources
_NUM_FIRST, _NUM_ELSEWHERE = 1000, 9000  # the samples looked at for one that `filter` keeps
# Untyped data shows 32 more samples after the first, or as many as 1 MiB holds. At least 8 of them are looked at, however large
# they are, if the first one leaves a type open (None, or an empty list).
_NUM_EXAMPLES, _NUM_LEAST, _EXAMPLES_BYTES = 32, 8, 1 << 20


def specs_of_first(
    source: Source,
    run: StageRuns,
    specs_of: Callable[[Examples], Mapping[str, FieldSpec]],
    stream: Pass | None,
    *,
    num_tries: int,
    first: int = 0,
    make_chunk: MakeChunk = SampleChunk,
) -> Mapping[str, FieldSpec]:
    """The fields of a batch, from the first readable sample of the canonical order after `run` has taken it through the stages.

    The first sample of the epoch is not used, so that the fields do not depend on where training resumed. Where the one
    sample leaves types open, some others are used as well, always the same ones. `stream`: a pass from the first item
    on, of a source that can only be iterated over. Raises `StageError` if `num_tries` samples are bad before that, or
    if filters keep none of the first samples and of as many others as can be tried all over the source.
    """
    errors: list[StageError] = []
    num_dropped = 0
    places = _candidates(len(source)) if stream is None else range(_NUM_FIRST + _NUM_ELSEWHERE)
    for chunk in run_samples(run, _singles((first + place for place in places), stream, make_chunk)):
        if stream is not None and stream.num_items is not None:
            break
        sample = chunk.samples[0]
        if sample is not None:
            index = int(chunk.work_item.indices[0])
            others = (
                _other_examples(source, run, stream, sample, index, first=first) if make_chunk is SampleChunk else []
            )
            return specs_of([(source.key(index), sample), *others])
        num_dropped += len(chunk.dropped)
        raise_store_failure(chunk)  # every other sample would fail as well, each after all retries of `source.retry`
        errors.extend(chunk.failures.values())
        if len(errors) == num_tries:
            break
    if errors and (not num_dropped or len(errors) == num_tries):
        raise errors[0]
    if not num_dropped:
        raise SourceError(f"the iterable {source.origin(0)} has no items: it ended before the first")
    bad = f"; the other {len(errors)} were bad, the first: {errors[0]}" if errors else ""
    size = "" if stream is not None else f"; the source has {len(source)}"
    raise StageError(
        f"filter dropped {num_dropped} of the {num_dropped + len(errors)} samples tried, and none is left to show what a batch "
        f"holds{size}: does the function return True for what is to be kept?{bad}",
        stage="filter",
    )


def _other_examples(
    source: Source,
    run: StageRuns,
    stream: Pass | None,
    sample: Sample,
    index: int,
    *,
    first: int,
) -> Examples:
    """Samples that say with `sample`, at `index`, what type untyped fields have; none if `sample` leaves no type open.
    Bad samples are left out here: the batches that they are in report them."""
    is_undecided_one = any(map(is_undecided, sample.values()))
    if not is_undecided_one and (source.is_typed or not any(map(is_untyped, sample.values()))):
        return []
    num = min(_NUM_EXAMPLES, _EXAMPLES_BYTES // max(1, num_bytes_of_sample(sample)))
    num = max(num, _NUM_LEAST if is_undecided_one else 1)
    chunks: Iterator[SampleChunk]
    if stream is None:
        others = np.array(_around(index - first, len(source), num), np.int64) + first
        chunks = run_samples(run, [chunk_of(others)] if len(others) else [])
    else:
        chunks = _next_of_stream(run, stream, range(index + 1, min(index + num, stream.num_peekable)))
    pairs = (pair for chunk in chunks for pair in zip(chunk.indices.tolist(), chunk.samples, strict=True))
    return [(source.key(index), other) for index, other in pairs if other is not None]


def _around(place: int, num_samples: int, num: int) -> list[int]:
    """`num` other places, if there are so many: the next ones, and some from all over the source."""
    spread = Bijection(num_samples, 0)(np.arange(min(num_samples, num))).tolist()
    near = range(place + 1, min(place + 1 + (num + 1) // 2, num_samples))
    return [other for other in dict.fromkeys([*near, *spread]) if other != place][:num]


def _singles(indices: Iterable[int], stream: Pass | None, make_chunk: MakeChunk = SampleChunk) -> Iterator[SampleChunk]:
    """The work on one sample after another."""
    for index in indices:
        single = np.array([index], np.int64)
        work_item = BatchWork(epoch=0, step=0, positions=single, indices=single, end=index + 1)
        work_item.stream = None if stream is None else Preview(stream)
        yield make_chunk(work_item, 0, 1, single)


def _next_of_stream(run: StageRuns, stream: Pass, indices: range) -> Iterator[SampleChunk]:
    """The next items, one by one, up to the end or an error of the stream; the batch with the error raises it again."""
    try:
        for chunk in run_samples(run, _singles(indices, stream)):
            if stream.num_items is not None:
                return
            yield chunk
    except SourceError:
        return


def _candidates(num_samples: int) -> Iterator[int]:
    """The first samples, then some from all over the source: sorted data may begin with many samples that `filter` drops."""
    yield from range(min(num_samples, _NUM_FIRST))
    if num_samples > _NUM_FIRST:
        yield from Bijection(num_samples, 0)(np.arange(min(num_samples, _NUM_ELSEWHERE))).tolist()


def specs_of_all_parts(
    source: MixtureSource,
    run: StageRuns,
    specs_of: Callable[[Examples], Mapping[str, FieldSpec]],
    stream: Pass | None,
    *,
    num_tries: int,
    make_chunk: MakeChunk = SampleChunk,
    at_once: Container[str] = (),
) -> Mapping[str, FieldSpec]:
    """`specs_of_first` of a mixture: of every source, in turn; of those named in `at_once` side by side, as each waits for a
    store. Raises ConfigError if they differ, naming sources and fields."""

    def specs_of_part(part: SourcePart) -> Mapping[str, FieldSpec]:
        return specs_of_first(part, run, specs_of, stream, num_tries=num_tries, first=part.first, make_chunk=make_chunk)

    first, *others = source.parts
    num_threads = sum(part.name in at_once for part in source.parts)
    with ThreadPoolExecutor(max(1, min(num_threads, _MOST_AT_ONCE)), "loaderkit-first") as pool:
        try:
            started = {part.name: pool.submit(specs_of_part, part) for part in source.parts if part.name in at_once}
            found = {
                part.name: started[part.name].result() if part.name in started else specs_of_part(part)
                for part in source.parts
            }
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    specs = found[first.name]
    differences = []
    for part in others:
        these = found[part.name]
        for name in {**specs, **these}:
            said, expected = (_said(which.get(name)) for which in (these, specs))
            if said != expected:
                differences.append(f"{name!r} is {said} in {part.name}, {expected} in {first.name}")
    if differences:
        raise ConfigError(
            f"the sources differ in what they give to `batch`: {'; '.join(differences)}. Make them agree by `stages` of their "
            "own (`call`, `resize`, ...), by `fields`, or for tensors that may differ in shape by `ragged` in `batch`"
        )
    return specs


def _said(spec: FieldSpec | None) -> str:
    if spec is None:
        return "missing"
    if spec.kind == "list":
        return "a list of values"
    what = "an image" if spec.image else "a tensor"
    shape = f" {list(spec.shape)}" if spec.kind in ("slab", "rendered") else f" of {len(spec.shape)} dimensions"
    return f"{what}, {spec.dtype}{'' if spec.kind == 'ragged' else shape}"
