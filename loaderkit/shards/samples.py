"""Runs samples through the stages before they are written, and makes members or records of them.

indices ──read──> bytes ──decode──> pictures, with a digest of each ──other stages──> the same digest? the original bytes
                                                                                  └──> encoded anew
"""

from __future__ import annotations

import re
import threading
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from loaderkit.errors import USER_ERRORS, StageError
from loaderkit.pipeline.config.registry import STAGES
from loaderkit.pipeline.execution_plan import ExecutionPlan
from loaderkit.samples.chunk import BatchWork, SampleChunk, SampleFailure
from loaderkit.samples.values import Image
from loaderkit.shards.encoding import EncodedField, Original, array_of, encoded_field, original_of
from loaderkit.stages.read import values_reader
from loaderkit.stages.runner import FailureNamer, raise_store_failure

Int64 = NDArray[np.int64]
CHUNK = 16
_STAGE = "pack"
_CONTENT = re.compile(r"[a-z0-9_+-]+")


class MadeChunk(NamedTuple):
    """Consecutive samples: of each its members by field, or the record of its field; None for those that were bad or
    dropped."""

    samples: list[dict[str, Any] | None]
    failures: list[SampleFailure]
    num_dropped: int


class SampleMaker:
    """Makes members, or with `as_array` records, of samples. Any number of threads at once."""

    def __init__(
        self, plan: ExecutionPlan, *, quality: int, decodes_later: bool, as_array: bool, wanted: tuple[str, ...] | None
    ) -> None:
        """`plan` has the stages that run, and `batch`, which does not. Records are made of the fields `wanted`; None:
        of all."""
        self._plan, self._wanted = plan, wanted
        self._quality, self._decodes_later, self._as_array = quality, decodes_later, as_array
        context = plan.compiled.context
        self._reader = values_reader(context.stages[0], context)
        self._stages = [stage for stage in plan.compiled.stages if stage.kind not in ("read", "batch")]
        self._failed: FailureNamer = replace(context.failed(context.stages[0]), stage=_STAGE)
        self._memory = threading.local()

    def make(self, positions: Int64, indices: Int64) -> MadeChunk:
        """The samples `indices`, which are to be written to these `positions`. Raises StageError if the store fails, or a
        sample is bad and `on_bad_sample` says raise."""
        work_item = BatchWork(epoch=0, step=0, positions=positions, indices=indices)
        chunk = SampleChunk(work_item, 0, len(indices), indices)
        chunk.scratch = self._memory.__dict__.setdefault("scratch", {})
        originals = self._run(chunk)
        made = [
            None if sample is None else self._written(chunk, row, sample, originals[row])
            for row, sample in enumerate(chunk.samples)
        ]
        raise_store_failure(chunk)
        if chunk.failures and self._plan.config.errors.on_bad_sample == "raise":
            raise chunk.failures[min(chunk.failures)]
        failures = [
            SampleFailure(row, int(indices[row]), int(positions[row]), error)
            for row, error in sorted(chunk.failures.items())
        ]
        return MadeChunk(made, failures, len(chunk.dropped))

    def fail(self, position: int, index: int, reason: str) -> StageError:
        """The error of a sample that was made, and does not fit the others."""
        chunk = SampleChunk(
            BatchWork(epoch=0, step=0, positions=np.array([position]), indices=np.array([index])),
            0, 1, np.array([index], np.int64),
        )  # fmt: skip
        self._failed(chunk, 0, ValueError(reason))
        return chunk.failures[0]

    def close(self) -> None:
        """Release what stages hold; they may run again."""
        self._reader.close()
        for stage in self._plan.compiled.stages:
            if stage.close is not None:
                stage.close()

    def _run(self, chunk: SampleChunk) -> list[dict[str, Original]]:
        """Run the stages; of each sample what its pictures were decoded from."""
        originals: list[dict[str, Original]] = [{} for _ in range(len(chunk))]
        self._reader.read(chunk)
        for stage in self._stages:
            decodes = STAGES[stage.kind].decodes
            before = [dict(sample or {}) for sample in chunk.samples] if decodes else []
            stage.run(chunk)
            for row, values in enumerate(before):
                for field, value in (chunk.samples[row] or {}).items():
                    if type(value) is Image and (found := original_of(values.get(field), value)) is not None:
                        originals[row][field] = found
        return originals

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
