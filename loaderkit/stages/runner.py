"""Runs a stage's function over a chunk. Draws are made for the whole chunk; failures are caught for each sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loaderkit import native
from loaderkit._internal.cuda.device import raise_kernel_failure
from loaderkit.errors import STORE_FAILURES, USER_ERRORS, LoaderkitError, StageError
from loaderkit.samples.chunk import SampleChunk, SampleFailure
from loaderkit.samples.sample import Sample
from loaderkit.sampling.random import generator, key_of, uniforms
from loaderkit.sources.base import Source

_NUM_REPLACEMENTS = 64


@dataclass(frozen=True)
class FailureNamer:
    """Marks samples of a chunk as failed in one stage, with an error that names the sample, its origin and the reason. Raises
    DeviceError if the GPU has failed: no sample is bad for that."""

    stage: str
    source: Source
    describe: Callable[[str], str]

    def __call__(self, chunk: SampleChunk, row: int, error: BaseException) -> None:
        index = chunk.index_of(row)
        key, origin = self.source.key(index), self.describe(self.source.origin(index))
        raise_kernel_failure(error, f"{self.stage}, with sample {key!r},")
        reason = str(error) if isinstance(error, (ValueError, LoaderkitError, OSError)) and str(error) else repr(error)
        named = StageError(
            f"{self.stage} failed for sample {key!r} in {origin}: {reason}",
            stage=self.stage,
            key=key,
            origin=origin,
            epoch=chunk.epoch,
            position=chunk.position_of(row),
        )
        named.__cause__ = error
        chunk.samples[row] = None
        chunk.failures[row] = named


class StageKeys(dict[int, int]):
    """Epoch -> the key of a stage's random numbers in it, from (seed, epoch, stage name)."""

    def __init__(self, seed: int, stage: str, *, by_position: bool = False) -> None:
        """`by_position`: a sample that comes several times in an epoch gets other numbers each time."""
        super().__init__()
        self._by_position = by_position
        self._seed = seed
        self._stage = stage

    def __missing__(self, epoch: int) -> int:
        key = self[epoch] = key_of("stage", self._seed, epoch, self._stage)
        return key

    def draws(self, chunk: SampleChunk, num_draws: int) -> NDArray[np.float64]:
        """The stage's uniform numbers, [samples of the chunk, num_draws]; drawn once, also for the `decode` before a crop."""
        numbers = chunk.draws.get(self._stage)
        if numbers is None:
            numbers = chunk.draws[self._stage] = uniforms(self[chunk.epoch], self.numbers(chunk), num_draws)
        return numbers

    def numbers(self, chunk: SampleChunk) -> NDArray[np.int64]:
        """The number, an index or a position, from which each row's random numbers are made: int64 [samples of the chunk]."""
        if not self._by_position:
            return chunk.indices
        return np.array([chunk.position_of(row) for row in range(len(chunk.samples))], np.int64)


Jobs = list[tuple[int, Any]]
"""The jobs that remain for a chunk's samples: (row of the chunk, job)."""
DoAll = Callable[[SampleChunk, Jobs, "FailureNamer"], None]
"""Does all jobs of a chunk at once; it may fail some samples, and sets `chunk.slowest`."""


def resize_all(chunk: SampleChunk, jobs: Jobs, failed: FailureNamer) -> None:
    """A `DoAll`, of `ResampleJob`s."""
    native.resample([job for _, job in jobs])


def each_sample(
    function: Callable[[Sample, NDArray[np.float64], dict[str, Any] | None], list[Any] | None],
    num_draws: int,
    keys: StageKeys,
    failed: FailureNamer,
    *,
    reuse: bool,
    finish: DoAll = resize_all,
) -> Callable[[SampleChunk], None]:
    """A chunk stage from a function of one sample, its `num_draws` uniform numbers, and memory it may reuse.

    The memory belongs to the chunk, one dict per sample, and passes to another chunk once this one is finished;
    without `reuse` the function gets None. The jobs that the function returns are passed to `finish`.
    """
    nothing = np.empty(0)

    def run(chunk: SampleChunk) -> None:
        samples = chunk.samples
        draws = list(keys.draws(chunk, num_draws)) if num_draws else [nothing] * len(samples)
        memories: list[dict[str, Any] | None] = [None] * len(samples)
        if reuse:
            memories = chunk.scratch.setdefault(failed.stage, [])
            while len(memories) < len(samples):
                memories.append({})
        jobs: Jobs = []
        slowest, begin_s = (0.0, 0), perf_counter()
        for row, (sample, numbers, memory) in enumerate(zip(samples, draws, memories, strict=False)):
            if sample is not None:
                chunk.current = row
                try:
                    made = function(sample, numbers, memory)
                    if made is not None:
                        if type(made) is not list:
                            raise returned(made)
                        for job in made:
                            jobs.append((row, job))
                except USER_ERRORS as error:
                    failed(chunk, row, error)
                now = perf_counter()  # 0.1 us a sample
                if now - begin_s > slowest[0]:
                    slowest = now - begin_s, row
                begin_s = now
        chunk.slowest = slowest
        if jobs:
            chunk.current = None
            finish(chunk, jobs, failed)

    return run


def returned(value: Any, given: str = "sample") -> TypeError:
    """The error of a stage's function that returned something that is no list of jobs."""
    return TypeError(
        f"its function returned a value of type {type(value).__name__}: it changes the {given} in place, and returns nothing"
    )


def each_call(
    call: Callable[[Sample, str, np.random.Generator | None], Sample | None],
    keys: StageKeys | None,
    source: Source,
    failed: FailureNamer,
) -> Callable[[SampleChunk], None]:
    """A chunk stage from a user's function; `keys` is given only if it needs `rng`. A sample for which it gives None is
    dropped."""

    def run(chunk: SampleChunk) -> None:
        slowest, begin_s = (0.0, 0), perf_counter()
        numbers = chunk.indices if keys is None else keys.numbers(chunk)
        for row, sample in enumerate(chunk.samples):
            if sample is not None:
                chunk.current = row
                rng = generator(keys[chunk.epoch], int(numbers[row])) if keys is not None else None
                try:
                    chunk.samples[row] = call(sample, source.key(chunk.index_of(row)), rng)
                    if chunk.samples[row] is None:
                        chunk.dropped.append(row)
                except USER_ERRORS as error:
                    failed(chunk, row, error)
                now = perf_counter()
                if now - begin_s > slowest[0]:
                    slowest = now - begin_s, row
                begin_s = now
        chunk.slowest = slowest

    return run


def raise_store_failure(chunk: SampleChunk) -> None:
    """Raise the first failure of the store: a sample is not bad because its store is unreachable."""
    for row in sorted(chunk.failures):
        if isinstance(chunk.failures[row].__cause__, STORE_FAILURES):
            raise chunk.failures[row]


def replace_failed(
    chunk: SampleChunk,
    run_all: Callable[[SampleChunk], None],
    others: Callable[[int, NDArray[np.float64]], NDArray[np.int64]],
    seed: int,
    failed: FailureNamer,
    *,
    by_position: bool = False,
) -> list[SampleFailure]:
    """Fill every failed slot of a chunk with another sample, one of `others`; returns all failures, including failures
    of replacements.

    Attempt j for sample i of epoch e is a function of (seed, e, i, j) alone, so batches do not depend on the concurrency; with
    `by_position`, where a sample comes several times, of the position instead of i. The
    replacement goes through all stages under its own index; if `filter` drops it, the slot is dropped.
    """
    failures = []
    key = key_of("replace", seed, chunk.epoch)
    for row in sorted(chunk.failures):
        slot, original = chunk.slot_of(row), chunk.index_of(row)
        position = int(chunk.work_item.positions[slot])
        failures.append(SampleFailure(slot, original, position, chunk.failures[row]))
        draws = uniforms(key, np.array([position if by_position else original], np.int64), _NUM_REPLACEMENTS)[0]
        for index in others(original, draws):
            attempt = chunk.replacement(row, int(index))
            run_all(attempt)
            if not attempt.failures:
                chunk.work_item.indices[slot] = attempt.indices[0]
                chunk.samples[row] = attempt.samples[0]
                if attempt.dropped:
                    chunk.dropped.append(row)
                break
            raise_store_failure(attempt)
            failures.append(SampleFailure(slot, int(index), position, attempt.failures[0]))
        else:
            raise StageError(
                f"none of {_NUM_REPLACEMENTS} samples drawn to replace {chunk.failures[row].key!r} was good; "
                f"the first error: {chunk.failures[row]}",
                stage=failed.stage,
                key=chunk.failures[row].key,
                origin=chunk.failures[row].origin,
                epoch=chunk.epoch,
                position=position,
            ) from chunk.failures[row].__cause__
    return failures
