"""Runs samples through the stages before they are written, and makes members or records of them.

indices ──read──> bytes ──decode──> pictures, with a digest of each ──other stages──> the same digest? the original bytes
                                                                                  └──> encoded anew
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from loaderkit.errors import USER_ERRORS, StageError
from loaderkit.pipeline.config.registry import STAGES
from loaderkit.pipeline.execution_plan import ExecutionPlan
from loaderkit.pipeline.run_samples import StageRuns, chunk_of, run_samples
from loaderkit.samples.chunk import SampleChunk, SampleFailure
from loaderkit.samples.values import Image
from loaderkit.shards.encoding import EncodedField, Original, array_of, encoded_field, original_of
from loaderkit.stages.read import values_reader
from loaderkit.stages.runner import FailureNamer, raise_store_failure

Int64 = NDArray[np.int64]
CHUNK = 16
_STAGE = "pack"
_CONTENT = re.compile(r"[a-z0-9_+-]+")


class MadeChunk(NamedTuple):
    """Consecutive samples: for each its members by field, or the record of its field; None for a sample that was bad or
    dropped."""

    samples: list[dict[str, Any] | None]
    failures: list[SampleFailure]
    num_dropped: int


class SampleMaker:
    """Makes members, or with `as_array` records, of samples. Any number of threads at once."""

    def __init__(
        self, plan: ExecutionPlan, *, quality: int, decodes_later: bool, as_array: bool, wanted: tuple[str, ...] | None
    ) -> None:
        """`plan` has the stages that run, and `batch`, which does not. Records are made of the fields `wanted`, or of
        all if it is None."""
        self._plan, self._wanted = plan, wanted
        self._quality, self._decodes_later, self._as_array = quality, decodes_later, as_array
        context = plan.compiled.context
        self._reader = values_reader(context.stages[0], context)
        stages = [stage for stage in plan.compiled.stages if stage.kind not in ("read", "batch")]
        runs = [
            (stage.name, partial(self._decode, stage.run) if STAGES[stage.kind].decodes else stage.run)
            for stage in stages
        ]
        self._run = StageRuns(
            [(context.stages[0].name, self._begin), *runs, (_STAGE, self._write)], in_turn=self._reader.in_turn
        )
        self._failed: FailureNamer = replace(context.failed(context.stages[0]), stage=_STAGE)
        self._of_thread = (
            threading.local()
        )  # `scratch`, and by row of its chunk `originals`: what pictures were decoded from

    def make(self, chunks: Iterable[tuple[Int64, Int64]], num_threads: int = 0) -> Generator[MadeChunk, None, None]:
        """Samples, by chunks of their (positions, indices), which are to be written to these positions; see `run_samples`.
        Raises StageError if the store fails, or a sample is bad and `on_bad_sample` says raise."""
        config = self._plan.config
        made = run_samples(
            self._run,
            (chunk_of(indices, positions) for positions, indices in chunks),
            num_threads=num_threads,
            prefetch=config.prefetch,
            key=self._plan.source.key,
        )
        with closing(made):
            for chunk in made:
                raise_store_failure(chunk)
                if chunk.failures and config.errors.on_bad_sample == "raise":
                    raise chunk.failures[min(chunk.failures)]
                failures = [
                    SampleFailure(row, chunk.index_of(row), chunk.position_of(row), error)
                    for row, error in sorted(chunk.failures.items())
                ]
                yield MadeChunk(chunk.samples, failures, len(chunk.dropped))

    def fail(self, position: int, index: int, reason: str) -> StageError:
        """Note the error of a sample that was made and does not fit the others."""
        chunk = chunk_of(np.array([index], np.int64), np.array([position], np.int64))
        self._failed(chunk, 0, ValueError(reason))
        return chunk.failures[0]

    def close(self) -> None:
        """Release what stages hold; they may run again."""
        self._reader.close()
        for stage in self._plan.compiled.stages:
            if stage.close is not None:
                stage.close()

    def _begin(self, chunk: SampleChunk) -> None:
        chunk.scratch = self._of_thread.__dict__.setdefault("scratch", {})
        self._of_thread.originals = [{} for _ in range(len(chunk))]
        self._reader.read(chunk)

    def _decode(self, run: Callable[[SampleChunk], object], chunk: SampleChunk) -> None:
        """Run a stage that decodes, and keep the bytes from which it decoded pictures."""
        before = [dict(sample or {}) for sample in chunk.samples]
        run(chunk)
        for row, values in enumerate(before):
            for field, value in (chunk.samples[row] or {}).items():
                if type(value) is Image and (found := original_of(values.get(field), value)) is not None:
                    self._of_thread.originals[row][field] = found

    def _write(self, chunk: SampleChunk) -> None:
        """Replace samples by what is written of them."""
        for row, sample in enumerate(chunk.samples):
            if sample is not None:
                chunk.samples[row] = self._written(chunk, row, sample, self._of_thread.originals[row])

    def _written(
        self, chunk: SampleChunk, row: int, sample: dict[str, Any], originals: dict[str, Original]
    ) -> dict[str, Any] | None:
        made: dict[str, Any] = {}
        for field, value in sample.items():
            try:
                if self._as_array:
                    if self._wanted is None or field in self._wanted:
                        made[field] = array_of(value).copy()  # else memory of the chunk, which the next one gets
                    continue
                member = encoded_field(
                    value, originals.get(field), quality=self._quality, decodes_later=self._decodes_later
                )
                made[field] = _checked(member)
            except USER_ERRORS as error:
                self._failed(chunk, row, ValueError(f"field {field!r}: {error}"))
                return None
        return made


def _checked(member: EncodedField) -> EncodedField:
    if _CONTENT.fullmatch(member.content) is None:
        raise ValueError(f"the extension {member.content!r} cannot be that of a member of a shard: rename the file")
    return member
