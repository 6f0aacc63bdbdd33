"""`pack`: documents of unequal length become sequences of one length.

    PackedOrder ──pieces of this chunk's sequences──> read ... ──documents──> pack ──> input_ids, position_ids, document_ids
                                                                                  └──> cu_seqlens

Which documents a sequence holds is planned (`sampling.packing`); this stage puts their tokens where they belong. If `read`
comes directly before it and the source has `Sequences`, their tokens are there already.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveInt

from loaderkit import native
from loaderkit.engine.work import Stage
from loaderkit.errors import StageError
from loaderkit.samples.chunk import PackedChunk, SampleChunk, SampleFailure, Starts
from loaderkit.sampling.packing import PackedOrder
from loaderkit.sampling.random import key_of, uniforms
from loaderkit.stages.base import AddError, StageArgs, StageConfig
from loaderkit.stages.context import CompileContext, StageKind
from loaderkit.stages.runner import FailureNamer, raise_store_failure
from loaderkit.stages.values import as_tensor

FIELDS = ("input_ids", "position_ids", "document_ids", "cu_seqlens")
_NUM_REPLACEMENTS = 64


class PackArgs(StageArgs):
    """Pack documents of unequal length into sequences of one length, the samples from here on; directly before `batch`.

    Their fields: `input_ids`, `position_ids` (int32, from 0 in every piece), `document_ids` (int32, the number in the sequence,
    -1 in the padding), each [B, length]; and `cu_seqlens`, int32, where pieces and paddings begin in all sequences of the batch
    laid end to end, and last B x length.
    """

    length: PositiveInt = Field(description="tokens of a sequence, the padding included")
    window: PositiveInt = Field(20000, description="documents, consecutive in the order, that are packed together")
    split: Literal["long", "never"] = Field(
        "long", description="cut documents that are longer than `length` into pieces; never: they are an error"
    )
    cost: Literal["attention", "none"] = Field(
        "attention",
        description="neighbouring sequences, and so the ranks of a step, have about the same sum of squares of pieces; none: a "
        "random order",
    )
    field: str = Field(
        "tokens", min_length=1, description="of the documents' tokens: whole numbers, [n]; others are left out"
    )


def _compile(stage: StageConfig, context: CompileContext) -> Stage:
    assert isinstance(stage.args, PackArgs)
    assert isinstance(context.order, PackedOrder)
    packer = _Packer(stage.args, context.order, context.failed(stage), context)
    return stage.ready("sample", packer.run)


class _Packer:
    def __init__(self, args: PackArgs, packing: PackedOrder, failed: FailureNamer, context: CompileContext) -> None:
        self._args = args
        self._packing = packing
        self._failed = failed
        self._policy = context.on_bad_sample
        self._seed = context.seed
        self._run_before = context.run_before_pack
        self._made = [name for name in FIELDS if name == FIELDS[0] or context.is_needed(name)]

    def run(self, chunk: SampleChunk) -> None:
        """Write the chunk's slots, or, for the layout of a batch, make its sample."""
        assert isinstance(chunk, PackedChunk)
        arrays = self._fill(chunk)
        if not chunk.work_item.specs:
            if not chunk.failures:
                chunk.samples = [self._sample_of(arrays)]
            return
        if chunk.failures:
            self._settle(chunk)
        chunk.end_pieces()

    def _fill(self, chunk: PackedChunk) -> list[NDArray[Any]]:
        """Put the tokens of good documents in their places, and mark them. Others fail. Returns the chunk's arrays."""
        lo, hi, length, pieces = chunk.lo, chunk.hi, self._args.length, chunk.pieces
        chunk.current = None
        arrays = [self._array(chunk, name) for name in FIELDS[:3]]
        tokens, positions, documents = arrays
        if chunk.tokens is None:
            self._copy(chunk, tokens)
        starts, ends = np.empty(len(pieces.lengths) + hi - lo, np.int32), np.empty(hi - lo, np.int64)
        native.mark_documents(
            pieces.lengths, pieces.bounds, length, positions, documents, tokens, lo * length, starts, ends
        )
        for row in chunk.failures:
            hole = slice(pieces.places[row], pieces.places[row] + pieces.lengths[row])
            tokens.reshape(-1)[hole], documents.reshape(-1)[hole] = 0, -1
        values = chunk.work_item.values.get(FIELDS[3])
        if values is not None:
            bounds = [0, *ends.tolist()]
            values[lo:hi] = [starts[begin:end] for begin, end in pairwise(bounds)]
        return arrays

    def _array(self, chunk: PackedChunk, name: str) -> NDArray[Any]:
        """The chunk's slots of a field, [hi - lo, length], or [0, length] if it is not made; for the layout new ones."""
        num, length = len(chunk), self._args.length
        if name not in self._made:
            return np.empty((0, length), np.int32)
        if name == FIELDS[0] and chunk.tokens is not None:
            return chunk.tokens
        if chunk.work_item.specs:
            array = chunk.work_item.fields[name].array
            assert array is not None
            return array[chunk.lo : chunk.hi]
        return np.zeros((num, length), self._dtype_of(chunk) if name == FIELDS[0] else np.int32)

    def _sample_of(self, arrays: list[NDArray[Any]]) -> dict[str, Any]:
        sample: dict[str, Any] = {name: array[0] for name, array in zip(FIELDS, arrays, strict=False) if len(array)}
        if FIELDS[3] in self._made:
            sample[FIELDS[3]] = Starts(self._args.length)
        return sample

    def _dtype_of(self, chunk: PackedChunk) -> np.dtype[Any]:
        """Of the documents' tokens, for the layout; int64 if there are none, which is told then."""
        sample = chunk.samples[0]
        values = None if sample is None else sample.get(self._args.field)
        try:
            return as_tensor(values).numpy().dtype
        except (TypeError, ValueError, RuntimeError, OverflowError):
            return np.dtype(np.int64)

    def _copy(self, chunk: PackedChunk, tokens: NDArray[Any]) -> None:
        pieces, flat = chunk.pieces, tokens.reshape(-1)
        rows = zip(pieces.firsts.tolist(), pieces.lengths.tolist(), pieces.places.tolist(), strict=True)
        for row, (first, length, place) in enumerate(rows):
            if row in chunk.failures:
                continue
            chunk.current = row
            try:
                values = self._tokens_of(chunk, row, tokens.dtype)
            except Exception as error:
                self._failed(chunk, row, error)
                continue
            flat[place : place + length] = values[first : first + length]
        chunk.current = None

    def _tokens_of(self, chunk: PackedChunk, row: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        sample, name = chunk.samples[row], self._args.field
        planned = int(self._packing.lengths_of(chunk.indices[row : row + 1])[0])
        if sample is None:
            raise ValueError(
                f"the document was dropped, and the index of lengths has {planned} tokens of it: run `loaderkit index "
                "--lengths` again"
            )
        if name not in sample:
            raise ValueError(f"it has no field {name!r}, but {', '.join(sample)}: name the tokens' field in `field`")
        values: NDArray[Any] = as_tensor(sample[name]).numpy()
        if values.ndim != 1 or values.dtype.kind not in "iu":
            raise ValueError(
                f"its field {name!r} is {values.dtype} {list(values.shape)}: tokens are whole numbers, [n]"
            )
        if len(values) != planned:
            raise ValueError(
                f"it has {len(values)} tokens, and the index of lengths says {planned}: a stage before `pack` has changed, or "
                "gives another result each time; run `loaderkit index --lengths` again"
            )
        if values.dtype != dtype:
            raise ValueError(
                f"its tokens are {values.dtype}, and those of the first document {dtype}: give all one type"
            )
        return values

    # ------------------------------------------------------------------------------------------------- bad documents

    def _settle(self, chunk: PackedChunk) -> None:
        """Note bad documents. Raising, the batch fails; skipping, a sequence stays without them, and is left out if nothing
        else is in it; replacing, another sequence takes its place."""
        work_item, bad_rows = chunk.work_item, sorted(chunk.failures)
        if self._policy != "raise":
            raise_store_failure(chunk)
        slots = [chunk.slot_of(row) for row in bad_rows]
        bounds = chunk.pieces.bounds
        for row, slot in zip(bad_rows, slots, strict=True):
            begin, end = bounds[slot - chunk.lo], bounds[slot - chunk.lo + 1]
            is_whole = self._policy == "skip" and slots.count(slot) < end - begin
            error = chunk.failures[row]
            work_item.failures.append(
                SampleFailure(-1 if is_whole else slot, int(chunk.indices[row]), int(work_item.positions[slot]), error)
            )
        if self._policy == "replace":
            for slot in sorted(set(slots)):
                self._replace(chunk, slot, chunk.failures[bad_rows[slots.index(slot)]])

    def _replace(self, chunk: PackedChunk, slot: int, error: StageError) -> None:
        """Put another sequence of the epoch into a slot, drawn from (seed, epoch, sequence)."""
        work_item, original = chunk.work_item, chunk.sequences[slot - chunk.lo : slot - chunk.lo + 1]
        num_sequences = self._packing.num_positions(chunk.epoch)
        draws = uniforms(key_of("replace", self._seed, chunk.epoch), original, _NUM_REPLACEMENTS)[0]
        for sequence in (draws * num_sequences).astype(np.int64):
            wanted = np.array([sequence])
            pieces = self._packing.pieces(chunk.epoch, wanted)
            attempt = PackedChunk(work_item, slot, slot + 1, wanted, pieces)
            self._run_before(attempt)
            self._fill(attempt)
            if not attempt.failures:
                work_item.indices[slot] = sequence
                return
            raise_store_failure(attempt)
            work_item.failures += [
                SampleFailure(slot, int(attempt.indices[row]), int(work_item.positions[slot]), attempt.failures[row])
                for row in sorted(attempt.failures)
            ]
        raise StageError(
            f"none of {_NUM_REPLACEMENTS} sequences drawn to replace that of {error.key!r} was good; the first error: {error}",
            stage=self._failed.stage,
            key=error.key,
            origin=error.origin,
            epoch=chunk.epoch,
            position=int(work_item.positions[slot]),
        ) from error.__cause__


def _check(stages: Sequence[StageConfig], number: int, kinds: Mapping[str, StageKind], add_error: AddError) -> None:
    following = stages[number + 1].kind if number + 1 < len(stages) else None
    if following != "batch":
        add_error(number, "`pack` stands directly before `batch`: what follows acts on batches of sequences")


PACK = StageKind(
    PackArgs,
    "sample",
    compile=_compile,
    check=_check,
    is_single=True,
    packs=True,
    only_computes=True,
    is_contained=True,
)
