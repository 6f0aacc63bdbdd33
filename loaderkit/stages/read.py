"""`read`: runs the source's own reader, which is told what comes after it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loaderkit.connectors.layers.read_ahead import ReadAheadConnector
from loaderkit.engine.work import Stage
from loaderkit.errors import ConfigError
from loaderkit.samples.chunk import SampleChunk
from loaderkit.sources.base import InPlaceFields, ReadContext, Reader, Windows
from loaderkit.stages.base import StageArgs, StageConfig
from loaderkit.stages.context import CompileContext, StageKind
from loaderkit.stages.runner import StageKeys


class ReadArgs(StageArgs):
    """Read each sample from its source."""


def _compile(stage: StageConfig, context: CompileContext) -> Stage:
    reader = context.source.reader(_read_context(stage, context))
    is_in_turn = (
        reader.in_turn and context.source.in_order is None
    )  # items in order are refused earlier, by their config
    if is_in_turn and context.on_bad_sample == "replace":
        raise ConfigError(
            f"errors.on_bad_sample: {_named(context)} is read in order, so no other sample is at hand to put in the place of a "
            "bad one: use skip or raise"
        )
    ahead = context.connector if isinstance(context.connector, ReadAheadConnector) else None

    def interrupt() -> None:
        reader.interrupt()
        if ahead is not None:  # the reader may wait for its threads
            ahead.stop()

    return stage.ready(
        "sample",
        _one_at_a_time(reader) if is_in_turn else reader.read,
        close=reader.close,
        interrupt=interrupt,
        waits_for=reader.waits_for,
        in_turn=reader.in_turn,
        owner=reader.owner,
    )


def _named(context: CompileContext) -> str:
    return "this source" if context.mixed is None else f"the source {context.mixed!r}"


def _one_at_a_time(reader: Reader) -> Callable[[SampleChunk], int]:
    """`read` under a lock: an engine gives turns, but code that runs the stages outside an engine does not."""
    lock = threading.Lock()

    def read(chunk: SampleChunk) -> int:
        with lock:
            return reader.read(chunk)

    return read


def values_reader(stage: StageConfig, context: CompileContext) -> Reader:
    """A reader that leaves all values in `chunk.samples`, encoded bytes as `Encoded`, whatever comes behind it; the
    reader in `read` may put them into slots."""
    return context.source.reader(ReadContext(context.connector, context.failed(stage), may_reuse=context.may_reuse))


def _read_context(stage: StageConfig, context: CompileContext) -> ReadContext:
    is_alone = context.mixed is None  # else its samples are a part of the chunk
    behind = context.before_batch[1:]
    packs = bool(behind) and context.kind_of(behind[0]).packs and not getattr(behind[0].args, "beside", ())
    return ReadContext(
        context.connector,
        context.failed(stage),
        is_last=is_alone and len(context.before_batch) == 1,
        may_reuse=context.may_reuse,
        in_place=_in_place(context) if is_alone else None,
        packed_length=context.order.length if packs and is_alone else None,
        windows=_windows(context, behind[0]) if behind else None,
    )


def _windows(context: CompileContext, following: StageConfig) -> Windows | None:
    """The windows that the next stage cuts, with the draws that it makes itself for each chunk."""
    kind = context.kind_of(following)
    if kind.window is None:
        return None
    return Windows(kind.window(following.args), _Draws(context.keys(following), kind.num_draws))


@dataclass(frozen=True)
class _Draws:
    """A function of draws that can be pickled, which a lambda cannot."""

    keys: StageKeys
    num: int

    def __call__(self, chunk: SampleChunk) -> NDArray[np.float64]:
        return self.keys.draws(chunk, self.num)


def _in_place(context: CompileContext) -> InPlaceFields | None:
    """The arrays that may be read into their slots; None unless there is a `decode` and all other stages before `batch` name
    their fields."""
    between = context.before_batch[1:]
    decode = next((stage.args for stage in between if context.kind_of(stage).decodes), None)
    others = [stage for stage in between if not context.kind_of(stage).decodes]
    named = [getattr(stage.args, "fields", None) for stage in others]
    if decode is None or not context.may_reuse or None in named or getattr(decode, "takes_arrays", False):
        return None
    decoded = getattr(decode, "fields", None)
    masks = getattr(decode, "masks", None) or ()
    touched = context.annotations.names.union(masks, *(names or () for names in named))
    return InPlaceFields(None if decoded is None else frozenset(decoded), touched)


READ = StageKind(ReadArgs, "sample", compile=_compile, is_single=True, takes_tensors=True, is_contained=True)
