"""`pack`: documents of unequal length become sequences of one length.

    PackedOrder ──pieces of this chunk's sequences──> read ... ──documents──> pack ──> input_ids, position_ids, document_ids
                                                                                  ├──> labels, ...: fields beside the tokens
                                                                                  ├──> source_ids, of a mixture
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
from pydantic import Field, PositiveInt, model_validator

from loaderkit import native
from loaderkit.engine.work import Stage
from loaderkit.errors import ConfigError, StageError
from loaderkit.samples.chunk import PackedChunk, SampleChunk, SampleFailure, Starts
from loaderkit.sampling.packing import PackedOrder
from loaderkit.sampling.random import key_of, uniforms
from loaderkit.sources.mixture import MixtureSource
from loaderkit.stages.base import AddError, StageArgs, StageConfig
from loaderkit.stages.context import CompileContext, StageKind
from loaderkit.stages.runner import FailureNamer, raise_store_failure
from loaderkit.stages.values import as_tensor

TOKENS, POSITIONS, DOCUMENTS, STARTS = "input_ids", "position_ids", "document_ids", "cu_seqlens"
SOURCES = "source_ids"
_NUM_REPLACEMENTS = 64


class PackArgs(StageArgs):
    """Pack documents of unequal length into sequences of one length, the samples from here on; directly before `batch`.

    Their fields: `input_ids`, `position_ids` (int32, from 0 in every piece), `document_ids` (int32, the number in the sequence,
    -1 in the padding), each [B, length]; and `cu_seqlens`, int32, where pieces and paddings begin in all sequences of the batch
    laid end to end, and last B x length. Of several sources also `source_ids`, int32 [B, length]: the place of each token's
    source in `loader.sources`, -1 in the padding.
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
    pad_value: Mapping[str, float] = Field(
        {},
        description="other fields that have a number for each token, as in {labels: -100}: they are packed as the tokens are, "
        "and hold this in the padding; `input_ids` gives that of the tokens, which is 0",
    )

    @model_validator(mode="after")
    def _fits(self) -> PackArgs:
        if taken := [name for name in self.pad_value if name in (POSITIONS, DOCUMENTS, STARTS, SOURCES)]:
            raise ValueError(f"`pad_value` names {taken[0]!r}, which `pack` makes itself: rename that field")
        if self.field in self.beside:
            raise ValueError(
                f"`pad_value` names {self.field!r}, the tokens, which become `input_ids`: give the value of that"
            )
        return self

    @property
    def beside(self) -> tuple[str, ...]:
        """The fields that are packed beside the tokens."""
        return tuple(name for name in self.pad_value if name != TOKENS)


def can_hold(dtype: np.dtype[Any], value: float) -> bool:
    """True if an array of this type holds the number as it is; of floats, as near as they come."""
    if dtype.kind not in "iu":
        return True
    bounds = np.iinfo(dtype)
    return value == int(value) and bounds.min <= value <= bounds.max


Arrays = dict[str, NDArray[Any]]
"""The slots of a chunk by field: [sequences, length] each."""


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
        self._mixture = context.source if isinstance(context.source, MixtureSource) else None
        others = (POSITIONS, DOCUMENTS, *args.beside, *([SOURCES] if self._mixture is not None else []))
        self._made = (TOKENS, *filter(context.is_needed, others))
        self._has_starts = context.is_needed(STARTS)
        self._stored = {
            name: args.field if name == TOKENS else name for name in (TOKENS, *args.beside) if name in self._made
        }
        self._nothing = np.empty((0, args.length), np.int32)

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

    def _fill(self, chunk: PackedChunk) -> Arrays:
        """Put the tokens of good documents in their places, and mark them. Others fail. Returns the chunk's arrays."""
        lo, hi, length, pieces = chunk.lo, chunk.hi, self._args.length, chunk.pieces
        chunk.current = None
        arrays = {name: self._array(chunk, name) for name in self._made}
        for name in arrays.keys() & {*self._args.beside}:
            arrays[name].fill(self._args.pad_value[name])
        if chunk.tokens is None:
            self._copy(chunk, arrays)
        tokens, documents = arrays[TOKENS], arrays.get(DOCUMENTS, self._nothing)
        starts, ends = np.empty(len(pieces.lengths) + hi - lo, np.int32), np.empty(hi - lo, np.int64)
        native.mark_documents(
            pieces.lengths,
            pieces.bounds,
            length,
            arrays.get(POSITIONS, self._nothing),
            documents,
            tokens,
            lo * length,
            starts,
            ends,
        )
        if SOURCES in arrays:
            self._mark_sources(chunk, arrays[SOURCES])
        self._empty(chunk, arrays)
        values = chunk.work_item.values.get(STARTS)
        if values is not None:
            bounds = [0, *ends.tolist()]
            values[lo:hi] = [starts[begin:end] for begin, end in pairwise(bounds)]
        return arrays

    def _mark_sources(self, chunk: PackedChunk, array: NDArray[Any]) -> None:
        """Write of every token the number of its source."""
        assert self._mixture is not None
        pieces, flat = chunk.pieces, array.reshape(-1)
        array.fill(-1)
        numbers = self._mixture.numbers_of(pieces.samples).tolist()
        for number, place, length in zip(numbers, pieces.places.tolist(), pieces.lengths.tolist(), strict=True):
            flat[place : place + length] = number

    def _empty(self, chunk: PackedChunk, arrays: Arrays) -> None:
        """Write the padding where it is not 0, and, in the places of failed documents, all of it."""
        pieces, value = chunk.pieces, self._args.pad_value.get(TOKENS, 0)
        if value:
            counts = np.add.reduceat(np.append(pieces.lengths, 0), pieces.bounds[:-1])  # every sequence has a piece
            for row, num in zip(arrays[TOKENS], counts.tolist(), strict=True):
                row[num:] = value
        paddings = {DOCUMENTS: -1, SOURCES: -1, TOKENS: value, **self._args.pad_value}
        for row in chunk.failures:
            hole = slice(pieces.places[row], pieces.places[row] + pieces.lengths[row])
            for name in arrays.keys() & paddings.keys():
                arrays[name].reshape(-1)[hole] = paddings[name]

    def _array(self, chunk: PackedChunk, name: str) -> NDArray[Any]:
        """The chunk's slots of a field that is made, [hi - lo, length]; for the layout new ones."""
        if name == TOKENS and chunk.tokens is not None:
            return chunk.tokens
        if chunk.work_item.specs:
            array = chunk.work_item.fields[name].array
            assert array is not None
            return array[chunk.lo : chunk.hi]
        if name not in self._stored:
            return np.zeros((len(chunk), self._args.length), np.int32)
        dtype, value = self._dtype_of(chunk, self._stored[name]), self._args.pad_value.get(name, 0)
        array = np.zeros((len(chunk), self._args.length), dtype)
        if not can_hold(dtype, value):
            raise ConfigError(
                f"stages.{self._failed.stage}.pad_value: {name!r} cannot hold {value:g}: its type is {dtype}"
            )
        return array

    def _sample_of(self, arrays: Arrays) -> dict[str, Any]:
        sample: dict[str, Any] = {name: array[0] for name, array in arrays.items()}
        if self._has_starts:
            sample[STARTS] = Starts(self._args.length)
        return sample

    def _dtype_of(self, chunk: PackedChunk, name: str) -> np.dtype[Any]:
        """Of the documents' values, for the layout; int64 if there are none, which is told then."""
        sample = chunk.samples[0]
        values = None if sample is None else sample.get(name)
        try:
            return as_tensor(values).numpy().dtype
        except (TypeError, ValueError, RuntimeError, OverflowError):
            return np.dtype(np.int64)

    def _copy(self, chunk: PackedChunk, arrays: Arrays) -> None:
        pieces = chunk.pieces
        flat = {name: arrays[name].reshape(-1) for name in self._stored}
        rows = zip(pieces.firsts.tolist(), pieces.lengths.tolist(), pieces.places.tolist(), strict=True)
        for row, (first, length, place) in enumerate(rows):
            if row in chunk.failures:
                continue
            chunk.current = row
            try:
                values = {name: self._values_of(chunk, row, name, array.dtype) for name, array in flat.items()}
            except Exception as error:
                self._failed(chunk, row, error)
                continue
            for name, array in flat.items():
                array[place : place + length] = values[name][first : first + length]
        chunk.current = None

    def _values_of(self, chunk: PackedChunk, row: int, made: str, dtype: np.dtype[Any]) -> NDArray[Any]:
        """The document's numbers that become the field `made`. Raises ValueError."""
        sample, name = chunk.samples[row], self._stored[made]
        planned = int(self._packing.lengths_of(chunk.indices[row : row + 1])[0])
        if sample is None:
            raise ValueError(
                f"the document was dropped, and the index of lengths has {planned} tokens of it: run `loaderkit index "
                "--lengths` again"
            )
        if name not in sample:
            key = "field" if made == TOKENS else "pad_value"
            raise ValueError(f"it has no field {name!r}, but {', '.join(sample)}: name the tokens' field in `{key}`")
        values: NDArray[Any] = as_tensor(sample[name]).numpy()
        if values.ndim != 1 or (made == TOKENS and values.dtype.kind not in "iu"):
            raise ValueError(
                f"its field {name!r} is {values.dtype} {list(values.shape)}: tokens are whole numbers, [n]"
                if made == TOKENS
                else f"its field {name!r} is {values.dtype} {list(values.shape)}, not a number for each token, [n]"
            )
        if len(values) != planned:
            raise ValueError(
                f"it has {len(values)} tokens, and the index of lengths says {planned}: a stage before `pack` has changed, or "
                "gives another result each time; run `loaderkit index --lengths` again"
                if made == TOKENS
                else f"its field {name!r} has {len(values)} numbers, and there are {planned} tokens: give one for each"
            )
        if values.dtype != dtype:
            noun = "tokens" if made == TOKENS else f"values of {name!r}"
            raise ValueError(
                f"its {noun} are {values.dtype}, and those of the first document {dtype}: give all one type"
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
