"""`pack`: documents of unequal length become sequences of one length.

    PackedOrder ──pieces of this chunk's sequences──> read ... ──documents──> pack ──> input_ids, position_ids, document_ids
                                                                                  └──> cu_seqlens

Which documents a sequence holds is planned (`sampling.packing`); this stage puts their tokens where they belong. If `read`
comes directly before it and the source has `Sequences`, their tokens are there already.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveInt

from loaderkit import native
from loaderkit.engine.work import Stage
from loaderkit.errors import StageError
from loaderkit.sampling.packing import PackedOrder
from loaderkit.sampling.random import key_of, uniforms
from loaderkit.stages.base import AddError, SampleChunk, SampleFailure, StageArgs, StageConfig, StageKind, Starts
from loaderkit.stages.context import CompileContext
from loaderkit.stages.runner import FailureNamer, raise_store_failure
from loaderkit.stages.sequence.chunk import PackedChunk
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
    assert context.packing is not None
    packer = _Packer(stage.args, context.packing, context.failed(stage), context)
    return stage.ready("sample", packer.run)


class _Packer:
    def __init__(self, args: PackArgs, packing: PackedOrder, failed: FailureNamer, context: CompileContext) -> None:
        self._args = args
        self._packing = packing
        self._failed = failed
        self._policy = context.on_bad_sample
        self._seed = context.seed
        self._run_before = context.run_before_pack

    def run(self, chunk: SampleChunk) -> None:
        """Write the chunk's slots, or, for the layout of a batch, make its sample."""
        assert isinstance(chunk, PackedChunk)
        if not chunk.work_item.specs:
            self._fill(chunk)
            if not chunk.failures:
                chunk.samples = [self._sample_of(chunk)]
            return
        self._fill(chunk)
        if chunk.failures:
            self._settle(chunk)
        chunk.end_pieces()

    def _fill(self, chunk: PackedChunk) -> None:
        """Put the tokens of good documents in their places, and mark them. Others fail."""
        fields = chunk.work_item.fields
        lo, hi, length, pieces = chunk.lo, chunk.hi, self._args.length, chunk.pieces
        chunk.current = None
        if chunk.work_item.specs:
            arrays = [fields[name].array for name in FIELDS[:3]]
            tokens, positions, documents = (array[lo:hi] for array in arrays if array is not None)
        else:
            positions, documents = np.empty((len(chunk), length), np.int32), np.empty((len(chunk), length), np.int32)
            tokens = np.zeros((len(chunk), length), self._dtype_of(chunk))
        if chunk.tokens is None:
            self._copy(chunk, tokens)
        else:
            tokens = chunk.tokens
        native.mark_documents(pieces.lengths, pieces.bounds, length, *map(_memory, (positions, documents, tokens)))
        for row in chunk.failures:
            slot, place = chunk.slot_of(row) - lo, int(pieces.places[row])
            hole = slice(place, place + int(pieces.lengths[row]))
            tokens[slot, hole], documents[slot, hole] = 0, -1
        starts, ends = _starts_of(chunk, length)
        if chunk.work_item.specs:
            values = chunk.work_item.values[FIELDS[3]]
            for slot in range(len(chunk)):
                values[lo + slot] = starts[ends[slot] : ends[slot + 1]]
        else:
            chunk.columns = dict(
                zip(FIELDS, ([tokens], [positions], [documents], [Starts(starts, length)]), strict=True)
            )

    def _sample_of(self, chunk: PackedChunk) -> dict[str, Any]:
        assert chunk.columns is not None
        columns, chunk.columns = chunk.columns, None
        return {name: values[0] if name == FIELDS[3] else values[0][0] for name, values in columns.items()}

    def _dtype_of(self, chunk: PackedChunk) -> np.dtype[Any]:
        """Of the documents' tokens, for the layout; int64 if there are none, which is told then."""
        sample = chunk.samples[0]
        values = None if sample is None else sample.get(self._args.field)
        try:
            return as_tensor(values).numpy().dtype
        except (TypeError, ValueError, RuntimeError, OverflowError):
            return np.dtype(np.int64)

    def _copy(self, chunk: PackedChunk, tokens: NDArray[Any]) -> None:
        pieces = chunk.pieces
        slots = chunk.slots.tolist()
        rows = zip(pieces.firsts.tolist(), pieces.lengths.tolist(), pieces.places.tolist(), slots, strict=True)
        for row, (first, length, place, slot) in enumerate(rows):
            if row in chunk.failures:
                continue
            chunk.current = row
            try:
                values = self._tokens_of(chunk, row, tokens.dtype)
            except Exception as error:
                self._failed(chunk, row, error)
                continue
            tokens[slot, place : place + length] = values[first : first + length]
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
        num_sequences = self._packing.num_samples(chunk.epoch)
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


def _memory(array: NDArray[Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _starts_of(chunk: PackedChunk, length: int) -> tuple[NDArray[np.int32], list[int]]:
    """Where pieces and paddings begin in their slots: int32 [both]; of every slot the first of them, and their number last."""
    pieces = chunk.pieces
    bounds = pieces.bounds
    counts = np.diff(bounds)
    used = np.zeros(len(counts), np.int64)
    filled = np.flatnonzero(counts)
    last = bounds[filled + 1] - 1
    used[filled] = pieces.places[last] + pieces.lengths[last]
    is_padded = used < length
    ends = np.concatenate(([0], np.cumsum(counts + is_padded)))
    starts = np.empty(ends[-1], np.int32)
    is_padding = np.zeros(len(starts), np.bool_)
    is_padding[ends[1:][is_padded] - 1] = True
    starts[~is_padding] = pieces.places
    starts[is_padding] = used[is_padded]
    return starts, ends.tolist()


def _check(stages: Sequence[StageConfig], number: int, kinds: Mapping[str, StageKind], add_error: AddError) -> None:
    following = stages[number + 1].kind if number + 1 < len(stages) else None
    if following != "batch":
        add_error(number, "`pack` stands directly before `batch`: what follows acts on batches of sequences")


PACK = StageKind(PackArgs, "sample", compile=_compile, check=_check, is_single=True, packs=True)
