"""`expand`: a user's function makes several samples of one, which are neighbours in the order.

    ExpandedOrder ──4 positions a sample──> read ... ──the sample, once──> expand ──4 samples──> ... ──> batch

Where a batch ends between the samples of one, the stage `share` before it hands what was made of it to the next batch, so that
it is made once in a process all the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch
from pydantic import Field, PositiveInt

from loaderkit.engine.work import Stage
from loaderkit.errors import USER_ERRORS
from loaderkit.samples.chunk import SampleChunk
from loaderkit.samples.expanded import ExpandedChunk, MadeSample
from loaderkit.samples.sample import Sample
from loaderkit.samples.values import Clip, Encoded, Image, Pictures, owned
from loaderkit.sampling.random import generator
from loaderkit.stages.base import AddError, StageConfig
from loaderkit.stages.batch import BatchArgs
from loaderkit.stages.call import CALL, CallArgs, check, given_of, limited, load, makes_functions, merged, taken_of
from loaderkit.stages.context import CompileContext, StageKind


class ExpandArgs(CallArgs):
    """Make `num` samples of one by a user's function, as patches of a volume; they are neighbours in the order.

    The function gets a sample as `call` does, and returns a list of `num` dicts; or, if it has a second parameter, it gets
    the number of one of them, from 0, and returns that. Each is merged into the sample, as `call` does it. It must change no
    array or tensor in place, as all are made of the same: crops may be views.
    """

    num: PositiveInt = Field(description="how many samples are made of one")


def unchanged(sample: Sample, number: int) -> None:
    """For `expand`: each of the samples is the one before, and the stages behind, such as crops, draw for each."""


def _takes_number(function: Callable[..., Any], args: ExpandArgs) -> bool:
    """True if a call gets the number of the sample that it makes."""
    called: Any = function
    try:
        called = called.__call__ if makes_functions(function) else called
        parameters = list(inspect.signature(called).parameters.values())
    except (TypeError, ValueError):
        return False
    is_class = makes_functions(function)
    positional = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    others = [
        one for one in positional[1 + is_class :] if one.name != "rng" and (is_class or one.name not in args.args)
    ]
    return bool(others) and (others[0].default is inspect.Parameter.empty or others[0].name == "number")


class _Expansion:
    """Runs a user's function over a chunk."""

    def __init__(
        self, stage: StageConfig, context: CompileContext, call: Callable[..., Any], *, wants_rng: bool
    ) -> None:
        args = stage.args
        assert isinstance(args, ExpandArgs)
        self._num, self._call = args.num, call
        self._keys = context.keys(stage) if wants_rng else None
        self._source, self._failed = context.source, context.failed(stage)
        self._each = _takes_number(load(stage.name, args), args)
        behind = context.before_batch[context.before_batch.index(stage) + 1 :]
        self._copies = not all(context.kind_of(one).leaves_values for one in behind)  # `batch` copies what it is given

    def run(self, chunk: SampleChunk) -> None:
        """Put in the place of the chunk's samples those that are made of them; outside the order the first one of each."""
        of_rows = chunk.unfold() if isinstance(chunk, ExpandedChunk) else list(chunk.samples)
        slowest, begin_s = (0.0, 0), perf_counter()
        before: Sample | None = None
        for row, sample in enumerate(of_rows):
            if sample is None:
                continue
            chunk.current = row
            number = chunk.number_of(row) if isinstance(chunk, ExpandedChunk) else 0
            try:
                if sample is not before:
                    made = self._made_of(sample, chunk, row)
                    before = sample
                chunk.samples[row] = self._one_of(made, chunk, row, number)
            except USER_ERRORS as error:
                self._failed(chunk, row, error)
            now = perf_counter()
            if now - begin_s > slowest[0]:
                slowest = now - begin_s, row
            begin_s = now
        chunk.slowest = slowest if self._each else None  # else the first sample takes the time of all that come of one

    def _made_of(self, sample: Sample, chunk: SampleChunk, row: int) -> _Made:
        made = _Made(sample, self._source.key(chunk.index_of(row)))
        if not self._each:
            try:
                made.all = self._all_of(made, chunk, row)
            except USER_ERRORS as error:  # of each of them; the function is not called for each
                made.all = error
        return made

    def _all_of(self, made: _Made, chunk: SampleChunk, row: int) -> list[Any]:
        rng = None if self._keys is None else generator(self._keys[chunk.epoch], chunk.index_of(row))
        returned = self._call(made.given(), rng)
        if isinstance(returned, (Mapping, str, bytes)) or not isinstance(returned, Iterable):
            raise TypeError(
                f"the function returned {type(returned).__name__}; it must return a list of `num: {self._num}` dicts, or take "
                "the number of one of them as a second parameter"
            )
        found = list(returned)
        if len(found) != self._num:
            raise ValueError(f"the function returned {len(found)} samples, and `num` is {self._num}")
        return found

    def _one_of(self, made: _Made, chunk: SampleChunk, row: int, number: int) -> Sample:
        if self._each:
            index = chunk.index_of(row) * self._num + number
            rng = None if self._keys is None else generator(self._keys[chunk.epoch], index)
            given = made.given()
            result = merged(given, self._call(given, rng, number))
        else:
            if isinstance(made.all, BaseException):
                raise made.all
            assert made.all is not None
            if made.all[number] is None:
                raise TypeError(f"the function returned None as sample {number}; it must return a list of dicts")
            result = merged(made.given(), made.all[number])
        return made.taken(result, copies=self._copies)


class _Made:
    """A sample of which others are made: `all` of them, or why there are none, where one call makes all."""

    def __init__(self, sample: Sample, key: str) -> None:
        self._sample = sample
        self._given = {name: _read_only(value) for name, value in given_of(sample, key).items()}
        self._versions = {name: _version(value) for name, value in self._given.items()}
        self._spans = [span for value in self._given.values() if (span := _span(value)) is not None]
        self.all: list[Any] | BaseException | None = None

    def given(self) -> Sample:
        """What the function gets, in a dict of its own, with lists and dicts of its own."""
        return {name: owned(value) if _is_container(value) else value for name, value in self._given.items()}

    def taken(self, result: Sample, *, copies: bool) -> Sample:
        """What the function has made. With `copies` nothing in it lies in the memory of the sample, which others are made of.
        Raises ValueError if it has changed that."""
        changed = [name for name, value in self._given.items() if _version(value) != self._versions[name]]
        if changed:
            raise ValueError(
                f"the function changed {changed[0]!r} in place, of which the other samples are made, too: let it change a copy"
            )
        unchanged = {name: value for name, value in self._given.items() if result.get(name) is value}
        encoded = {name: value for name, value in unchanged.items() if type(self._sample.get(name)) is Encoded}
        for name in unchanged:
            if isinstance(self._sample.get(name), np.ndarray):
                result[name] = self._sample[name]
        made = taken_of(self._sample, encoded, result)
        return {name: _apart(value, self._spans) if copies else _writable(value) for name, value in made.items()}


def _is_container(value: Any) -> bool:
    """True for what may be changed in place, or hold such: not for our own values, which are named tuples."""
    return isinstance(value, (list, dict)) or type(value) is tuple


def _read_only(value: Any) -> Any:
    if type(value) is not np.ndarray:
        return value
    view = value.view()
    view.flags.writeable = False
    return view


def _writable(value: Any) -> Any:
    """A view of what was read-only for the function, as torch warns of such arrays."""
    if type(value) is np.ndarray and not value.flags.writeable and isinstance(value.base, np.ndarray):
        value = value.view()
        if value.base.flags.writeable:
            value.flags.writeable = True
    return value


def _version(value: Any) -> int | None:
    """It counts what was changed of a tensor in place."""
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else None


def _span(value: Any) -> tuple[int, int] | None:
    """The addresses [begin, end) of the memory that an array or a tensor is in."""
    if isinstance(value, Image):
        value = value.pixels
    if isinstance(value, np.ndarray) and value.size:
        return np.lib.array_utils.byte_bounds(value)
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and value.device.type == "cpu":
        storage = value.untyped_storage()
        return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    return None


def _apart(value: Any, spans: Sequence[tuple[int, int]]) -> Any:
    """The value, copied if it lies in this memory, or is a list or dict, which several samples may share."""
    if isinstance(value, Clip):
        return Clip(tuple(_apart(frame, spans) for frame in value.frames))
    if isinstance(value, Pictures):
        return Pictures(tuple(_apart(image, spans) for image in value.images))
    if _is_container(value):
        return owned(value)
    span = _span(value)
    if span is None or not any(begin < span[1] and span[0] < end for begin, end in spans):
        return value
    if isinstance(value, Image):
        return value._replace(pixels=value.pixels.copy())
    return value.clone() if isinstance(value, torch.Tensor) else value.copy()


# --------------------------------------------------------------------------------------------------------- compiling


def _compile(stage: StageConfig, context: CompileContext) -> Stage:
    assert isinstance(stage.args, ExpandArgs)
    call, wants_rng, limit, owner = limited(stage.name, stage.args, None)
    run = _Expansion(stage, context, call, wants_rng=wants_rng).run
    return stage.ready("sample", run, close=None if limit is None else limit.close, owner=owner)


def sharing(stage: StageConfig) -> Stage:
    """The stage before `expand` that hands samples at the borders of batches on. It waits where no lock is held."""
    return Stage(f"{stage.name}.share", stage.kind, "sample", _share, waits=True)


def _share(chunk: SampleChunk) -> None:
    if not isinstance(chunk, ExpandedChunk):
        return
    if chunk.lent is not None:
        chunk.lent.put(_owned(chunk.made(len(chunk.samples) - 1)))
    if chunk.borrowed is not None:
        chunk.taken = chunk.borrowed.take(chunk.work_item)


def _owned(made: MadeSample) -> MadeSample:
    """What was made, without the memory of the chunk, which the next one gets."""
    if made.sample is None:
        return made
    sample = {
        name: value._replace(data=memoryview(bytes(value.data))) if type(value) is Encoded else value
        for name, value in made.sample.items()
    }
    return made._replace(sample=sample)


def unless_empty(run: Callable[[SampleChunk], Any]) -> Callable[[SampleChunk], Any]:
    """A stage before `expand`, of which a chunk may have nothing: its only sample is that of the batch before."""

    def run_some(chunk: SampleChunk) -> Any:
        return run(chunk) if chunk.samples else None

    return run_some


def cuts_samples(stages: Sequence[StageConfig]) -> bool:
    """True if batches end between the samples of one."""
    sizes = [stage.args.size for stage in stages if isinstance(stage.args, BatchArgs)]
    nums = [stage.args.num for stage in stages if isinstance(stage.args, ExpandArgs)]
    return any(size is None or size % num for size in sizes for num in nums)


def _check(stages: Sequence[StageConfig], number: int, kinds: Mapping[str, StageKind], add_error: AddError) -> None:
    check(stages, number, kinds, add_error)
    for place, stage in enumerate(stages):
        if kinds[stage.kind].packs or (isinstance(stage.args, BatchArgs) and stage.args.tokens is not None):
            add_error(
                place,
                "sequences and batches of tokens are planned by the lengths of the samples of the source, and `expand` makes "
                "others of them: use `batch: {size: N}`, or write them as samples of their own first",
            )
        elif place <= number and stage.args.workers != "auto" and cuts_samples(stages):
            add_error(
                place,
                "not where a batch ends between the samples that `expand` makes of one, which the next batch takes over: make "
                "`batch.size` a multiple of `expand.num`, or leave this out",
                "workers",
            )


EXPAND = StageKind(
    ExpandArgs,
    "sample",
    compile=_compile,
    check=_check,
    is_single=True,
    expands=True,
    runs_user_code=True,
    args_of_speed=CALL.args_of_speed,
    objects=CALL.objects,
)
