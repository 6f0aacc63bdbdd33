"""`batch`: writes the samples of a chunk into the slots of their batch.

The layout of a batch is derived once (`layout.py`). A sample that does not fit is an error that names it and the example.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from loaderkit import native
from loaderkit._internal.dtypes import all_have_dtype
from loaderkit.engine.work import Stage
from loaderkit.samples.chunk import FieldSpec, SampleChunk, SampleFailure
from loaderkit.samples.sample import Sample
from loaderkit.samples.slots import LEAST_LENT, Slots, TakeBytes, new_tensor
from loaderkit.samples.values import Clip, Encoded, GpuDecoded, Image, InPlace, Pictures, owned
from loaderkit.stages.base import AddError, StageArgs, StageConfig
from loaderkit.stages.context import CompileContext, StageKind
from loaderkit.stages.image.alignment import check_masks
from loaderkit.stages.layout import EXACT, is_empty_list, is_untyped, ragged_tensor, widens
from loaderkit.stages.runner import FailureNamer, raise_store_failure, replace_failed
from loaderkit.stages.sequence.lengths import check_lengths, no_longer
from loaderkit.stages.sequence.pack import PackArgs
from loaderkit.stages.values import NUMBER_DTYPES, as_tensor, describe, dtype_of, shape_and_dtype, to_tensor

PadValue = Annotated[float, Field(allow_inf_nan=True)]
_OF_PADDING = ("padding_side", "pad_to_multiple_of", "attention_mask")


class BatchArgs(StageArgs):
    """Gather samples into batches, of `size` samples or of `tokens` tokens."""

    size: PositiveInt | None = Field(None, description="samples per batch; or give `tokens`")
    drop_last: bool = Field(
        False, description="drop samples that do not fill a batch on every rank; with `tokens`, batches"
    )
    ragged: Mapping[str, Literal["list", "pad"]] = Field(
        {}, description="fields whose tensors differ in shape: delivered as a list, or padded to the largest"
    )
    pad_value: PadValue | Mapping[str, PadValue] = Field(
        0.0,
        description="the value of the padding; or field -> its value, as in {input_ids: 0, labels: -100}: these are padded",
    )
    padding_side: Literal["right", "left"] = Field(
        "right", description="where the padding of a field's first dimension is"
    )
    pad_to_multiple_of: PositiveInt | None = Field(
        None, description="pad the first dimension on, to a multiple of this: what fast kernels ask for"
    )
    attention_mask: str | Mapping[str, str] | None = Field(
        None,
        description="its name in the batch: int64, 1 where there is a sample's own value and 0 in the padding, of all fields "
        "that are padded; or, if these differ in length, name -> field",
    )
    tokens: PositiveInt | None = Field(
        None,
        description="per batch, at most: of a padded `field` the longest sample times the number of samples, of a list the "
        "sum; behind `pack`, whose sequences are all of one length, their number is `tokens` / `length`, rounded down",
    )
    window: NonNegativeInt = Field(
        20000,
        description="samples, consecutive in the order, that are batched by length; 0: in order, without regard to it",
    )
    cost: Literal["attention", "none"] = Field(
        "attention",
        description="neighbouring batches, and so the ranks of a step, have about the same sum of squares of lengths; none: a "
        "random order",
    )
    field: str = Field("tokens", min_length=1, description="that of which `tokens` are counted: its first dimension")

    @model_validator(mode="after")
    def _fits(self) -> BatchArgs:
        if self.size is None and self.tokens is None:
            raise ValueError(
                "'size' is missing, the number of samples of a batch; or give `tokens`, the most tokens of one"
            )
        if self.size is not None and self.tokens is not None:
            raise ValueError(
                "give `size`, the number of samples of a batch, or `tokens`, the most tokens of one, not both"
            )
        if self.size is not None and (changed := self.changed_plan):
            raise ValueError(f"`{changed[0]}` says how batches of `tokens` are planned, and these have a `size`")
        named = self.pad_value if isinstance(self.pad_value, Mapping) else {}
        if listed := [name for name in named if self.ragged.get(name) == "list"]:
            raise ValueError(
                f"`pad_value` pads {listed[0]!r}, and `ragged` makes a list of it: leave it out of one of them"
            )
        padded = [name for name, form in self.forms.items() if form == "pad"]
        changed = [name for name in _OF_PADDING if getattr(self, name) != type(self).model_fields[name].default]
        if changed and not padded:
            raise ValueError(
                f"`{changed[0]}` is for fields that are padded: name them, as in pad_value: {{input_ids: 0}}"
            )
        if unpadded := [field for field in self.masks.values() if field is not None and field not in padded]:
            raise ValueError(
                f"`attention_mask` names {unpadded[0]!r}, which is not padded; those that are: {', '.join(padded)}"
            )
        return self

    @property
    def forms(self) -> Mapping[str, Literal["list", "pad"]]:
        """How the fields whose tensors differ in shape are delivered."""
        named = self.pad_value if isinstance(self.pad_value, Mapping) else {}
        return {**self.ragged, **dict.fromkeys(named, "pad")}

    def padding_of(self, name: str) -> float | None:
        """The value that a field is padded with; None if it is not padded."""
        if self.forms.get(name) != "pad":
            return None
        return self.pad_value.get(name, 0) if isinstance(self.pad_value, Mapping) else self.pad_value

    @property
    def masks(self) -> Mapping[str, str | None]:
        """The name of every attention mask, and the field that it is for, or None for all padded fields."""
        given = self.attention_mask
        return {} if given is None else {given: None} if isinstance(given, str) else given

    @property
    def changed_plan(self) -> list[str]:
        """The settings of the plan that are not the default."""
        names = ("window", "cost", "field")
        return [name for name in names if getattr(self, name) != type(self).model_fields[name].default]


def write_samples(
    chunk: SampleChunk, specs: Mapping[str, FieldSpec], failed: Callable[[SampleChunk, int, Exception], None]
) -> None:
    """Write the chunk's good samples into the slots of its batch; samples that do not fit are marked as failed.

    Images with float slots are only checked, since `normalize` comes next and writes them.
    """
    columns = chunk.columns
    if columns is None:
        if chunk.samples.count(None) == len(chunk.samples):
            return  # `read` filled the slots, or all have failed
        columns = _columns(chunk.samples, specs)
    elif columns.keys() != specs.keys():
        columns = None
    remaining = [
        name for name in specs if columns is None or not _write_column(columns[name], name, specs[name], chunk)
    ]
    if remaining and chunk.columns is not None:
        rows = zip(*chunk.columns.values(), strict=True)
        chunk.samples = [dict(zip(chunk.columns, values, strict=True)) for values in rows]
    if columns is None:
        for row, sample in enumerate(chunk.samples):
            if sample is not None and sample.keys() != specs.keys():
                failed(chunk, row, _different_fields(sample, specs))
    for name in remaining:
        (_write_each if specs[name].kind == "slab" else _store_values)(chunk, name, specs[name], failed)


def _write_column(values: list[Any] | NDArray[Any], name: str, spec: FieldSpec, chunk: SampleChunk) -> bool:
    """Write one field of all samples at once; False if they must be written one by one."""
    if spec.kind == "slab" and spec.image and spec.dtype not in _LEVELS:
        if len(spec.shape) == 4:
            return {*map(type, values)} == {Clip} and {clip.shape for clip in values} == {spec.shape}
        channels, height, width = spec.shape
        are_images = {*map(type, values)} == {Image}
        return are_images and {image.pixels.shape for image in values} == {(height, width, channels)}
    if spec.kind == "slab":
        return _write_together(values, spec, chunk.work_item.fields[name], chunk.where)
    if spec.kind == "list" and {*map(type, values)} in ({bytes}, {str}):
        stored, where = chunk.work_item.values[name], chunk.where
        if isinstance(where, slice):
            stored[where] = values
        else:
            for slot, value in zip(where, values, strict=True):
                stored[slot] = value
        return True
    return False


def _store_values(
    chunk: SampleChunk, name: str, spec: FieldSpec, failed: Callable[[SampleChunk, int, Exception], None]
) -> None:
    """Store values outside the slab: texts, bytes, tensors that differ in shape."""
    values = chunk.work_item.values[name]
    for row, sample in enumerate(chunk.samples):
        if sample is not None:
            try:
                values[chunk.slot_of(row)] = _owned(sample[name], name, spec, chunk.work_item.take_bytes)
            except Exception as error:
                failed(chunk, row, error)


def _columns(samples: list[Sample | None], specs: Mapping[str, FieldSpec]) -> dict[str, list[Any]] | None:
    """All samples' values by field; None if a sample is bad or has other fields."""
    good = [sample for sample in samples if sample is not None]
    if len(good) < len(samples) or {*map(len, good)} != {len(specs)}:
        return None
    try:
        return {name: list(map(itemgetter(name), good)) for name in specs}
    except KeyError:
        return None


def _different_fields(sample: Sample, specs: Mapping[str, FieldSpec]) -> ValueError:
    missing, extra = sorted(specs.keys() - sample.keys()), sorted(sample.keys() - specs.keys())
    example = specs[missing[0]].example_key if missing else next(iter(specs.values())).example_key if specs else ""
    parts = [f"it has no {', '.join(map(repr, missing))}"] if missing else []
    parts += [f"it has {', '.join(map(repr, extra))} besides"] if extra else []
    return ValueError(f"{' and '.join(parts)}, unlike sample {example!r}: all samples of a batch have the same fields")


def _write_each(
    chunk: SampleChunk, name: str, spec: FieldSpec, failed: Callable[[SampleChunk, int, Exception], None]
) -> None:
    slots = chunk.work_item.fields[name]
    for row, sample in enumerate(chunk.samples):
        if sample is not None:
            try:
                _write_value(sample[name], name, spec, slots, chunk.slot_of(row))
            except Exception as error:
                failed(chunk, row, error)


def _write_value(value: Any, name: str, spec: FieldSpec, slots: Slots, slot: int) -> None:
    if type(value) is InPlace:
        return
    if spec.image and type(value) is Clip:
        _write_clip(value, name, spec, slots, slot)
        return
    if spec.image and type(value) is Image:
        height, width, channels = value.pixels.shape
        if (channels, height, width) == spec.shape:
            if spec.dtype in _LEVELS:
                assert slots.array is not None
                if value.pixels.dtype != slots.array.dtype:
                    raise ValueError(_misfit(value, name, spec))
                if spec.dtype == "uint16":
                    slots.array[slot] = value.pixels.transpose(2, 0, 1)
                    return
                native.write_planes(slots.array, slot, value.pixels)
            return
    array = slots.array
    if isinstance(value, np.ndarray) and array is not None and value.dtype == array.dtype:
        numbers: tuple[tuple[int, ...], str] | None = (value.shape, slots.dtype)  # `dtype.name` takes 3 us
    else:
        numbers = shape_and_dtype(value)
    if numbers is None:
        _write_tensor(value, name, spec, slots, slot)
        return
    is_alike = numbers == (spec.shape, spec.dtype) or (numbers[0] == spec.shape and widens(value, numbers[1], spec))
    if spec.image or not is_alike:
        raise ValueError(_misfit(value, name, spec))
    assert array is not None
    np.copyto(array[slot, ...], value)  # one copy for any layout: swapped, reversed, unaligned


def _write_clip(clip: Clip, name: str, spec: FieldSpec, slots: Slots, slot: int) -> None:
    if clip.shape != spec.shape:
        raise ValueError(_misfit(clip, name, spec))
    if spec.dtype in _LEVELS:
        assert slots.array is not None
        for number, frame in enumerate(clip.frames):
            if frame.pixels.dtype != slots.array.dtype:
                raise ValueError(_misfit(clip, name, spec))
            native.write_planes(slots.array[slot], number, frame.pixels)


def _write_tensor(value: Any, name: str, spec: FieldSpec, slots: Slots, slot: int) -> None:
    try:
        tensor = as_tensor(value)
    except (TypeError, OverflowError, RuntimeError, ValueError) as error:
        raise ValueError(_misfit(value, name, spec)) from error
    dtype = dtype_of(tensor)
    if spec.image or tensor.shape != spec.shape or not (dtype == spec.dtype or widens(tensor, dtype, spec)):
        raise ValueError(_misfit(value, name, spec))
    slots.tensor[slot].copy_(tensor.detach())


_SMALL_BYTES = 4096
_LEVELS = frozenset({"uint8", "uint16"})  # images that `normalize` does not write into their slots


def _write_together(values: list[Any] | NDArray[Any], spec: FieldSpec, slots: Slots, where: slice | list[int]) -> bool:
    """Write numbers, small tensors or small arrays of one type at once, in a tenth of the time of one assignment per slot.

    False if they do not fit: they are then written one by one, to find the misfit.
    """
    if isinstance(values, np.ndarray):  # [slots, ...]
        array = slots.array
        if array is None or values.dtype != array.dtype or values.shape[1:] != spec.shape:
            return False
        array[where] = values
        return True
    kinds = {*map(type, values)}
    if spec.widens and int in kinds and kinds <= {int, float} and spec.dtype == "float64":
        return _write_widened(values, spec, slots, where)
    kind = kinds.pop()
    write = _WRITERS.get(kind) or (_write_arrays if issubclass(kind, np.generic) else None)
    if write is None and isinstance(values[0], torch.Tensor) and kind is torch.Tensor:
        write = _write_tensors
    if write is None or kinds:
        return False
    try:
        return write(values, spec, slots, where)
    except (OverflowError, RuntimeError, TypeError, ValueError):
        return False


def _write_tensors(values: list[Any], spec: FieldSpec, slots: Slots, where: slice | list[int]) -> bool:
    tensor = slots.tensor
    fits: bool = values[0].shape == spec.shape and all_have_dtype(values, slots.tensor.dtype)
    if fits:
        if isinstance(where, slice):
            is_whole = len(values) == tensor.shape[0]  # torch's len() is written in Python and takes 2 us, a slice 1
            torch.stack(values, out=tensor if is_whole else tensor[where])
        else:
            tensor[where] = torch.stack(values)
    return fits


def _write_arrays(values: list[Any], spec: FieldSpec, slots: Slots, where: slice | list[int]) -> bool:
    array = slots.array
    if array is None or values[0].shape != spec.shape or not all_have_dtype(values, array.dtype):
        return False
    if values[0].nbytes > _SMALL_BYTES:
        return False
    array[where] = values
    return True


def _write_numbers(values: list[Any], spec: FieldSpec, slots: Slots, where: slice | list[int]) -> bool:
    fits = not spec.shape and spec.dtype == NUMBER_DTYPES[type(values[0])]
    if fits:
        assert slots.array is not None
        slots.array[where] = values  # NumPy, as torch's operations take tenths of a ms after a decoder
    return fits


def _write_widened(values: list[Any], spec: FieldSpec, slots: Slots, where: slice | list[int]) -> bool:
    """Whole numbers, also beside others, as float64."""
    fits = not spec.shape and all(type(value) is float or -EXACT <= value <= EXACT for value in values)
    if fits:
        assert slots.array is not None
        slots.array[where] = values
    return fits


_WRITERS: dict[type, Callable[[list[Any], FieldSpec, Slots, slice | list[int]], bool]] = {
    np.ndarray: _write_arrays,
    int: _write_numbers,
    float: _write_numbers,
    bool: _write_numbers,
}


def _misfit(value: Any, name: str, spec: FieldSpec) -> str:
    levels = "uint16" if spec.dtype == "uint16" else "uint8"
    expected = f"{levels if spec.image and spec.kind == 'slab' else spec.dtype} {list(spec.shape)}"
    remedy = "give all samples one shape and type"
    if value is None:
        remedy += ", in a `call` before, or leave such samples out (`errors: {on_bad_sample: skip}`)"
    elif is_untyped(value):
        remedy += f" (`fields: {{{name}: {'int64' if spec.dtype == 'bool' else 'float64'}}}` in `source` declares one)"
    return (
        f"its field {name!r} is {describe(value)}, the batch holds {expected} (from sample {spec.example_key!r}): {remedy}, or "
        f"set `ragged: {{{name}: list}}` (or pad) in `batch`"
    )


def _owned(value: Any, name: str, spec: FieldSpec, take_bytes: TakeBytes | None) -> Any:
    """The value in memory that the user may keep: a copy of what stages reuse."""
    if spec.kind == "rendered":
        if (
            type(value) is not GpuDecoded
            or value.tensor.shape[1:] != spec.shape
            or dtype_of(value.tensor) != spec.dtype
        ):
            raise ValueError(_misfit(value, name, spec))
        return value
    if spec.kind == "list":
        return _listed(value, name, spec)
    if is_empty_list(value):  # of the field's type, as far as that goes
        value = torch.empty((0, *spec.shape[1:]), dtype=getattr(torch, str(spec.dtype)), device="cpu")
    try:
        tensor = ragged_tensor(value)
    except TypeError as error:
        raise ValueError(f"its field {name!r}: {error}") from None
    if widens(tensor, dtype_of(tensor), spec):
        tensor = tensor.double()
    if spec.kind == "pad" and (dtype_of(tensor) != spec.dtype or tensor.ndim != len(spec.shape)):
        example = f"{spec.dtype} {list(spec.shape)}"
        raise ValueError(
            f"its field {name!r} is {describe(value)} and cannot be padded together with {example} (from sample "
            f"{spec.example_key!r}): give all samples one type and number of dimensions, or set `ragged: {{{name}: list}}`"
        )
    tensor = tensor.detach()
    if type(value) is InPlace:
        return tensor
    is_large = tensor.nbytes >= LEAST_LENT  # `clone` takes 3 us, a tensor to copy to 10
    if is_large and tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.is_quantized:
        return new_tensor(tuple(tensor.shape), tensor.dtype, take_bytes).copy_(tensor)
    return tensor.clone()


def _listed(value: Any, name: str, spec: FieldSpec) -> Any:
    """A value of a field that comes as a list, in memory of its own."""
    if spec.is_open and shape_and_dtype(value) is not None:
        raise ValueError(
            f"its field {name!r} is {describe(value)}, and it was None in every sample looked at for what a batch holds, "
            f"as in {spec.example_key!r}: declare its type by `fields: {{{name}: float64}}` in `source`"
        )
    if type(value) is Pictures:
        return [to_tensor(image).clone(memory_format=torch.contiguous_format) for image in value.images]
    if isinstance(value, Encoded):
        value = value.data
    return bytes(value) if isinstance(value, memoryview) else owned(value)


def _compile(stage: StageConfig, context: CompileContext) -> Stage:
    assert isinstance(stage.args, BatchArgs)
    gather = _gather(context.failed(stage), context, stage.args.field)
    stream = context.early_stream
    # `finish` pads: see `pipeline.batches.assembler`.
    return stage.ready("sample", gather if stream is None else partial(stream.run, gather), finishes=True)


def _check_masks(chunk: SampleChunk, failed: FailureNamer) -> None:
    """Mark samples as failed whose mask lies on none of their images."""
    specs = chunk.work_item.specs.values()
    if len(specs) < 2 or sum(spec.image or (len(spec.shape) == 3 and spec.dtype in _LEVELS) for spec in specs) < 2:
        return
    for row, sample in enumerate(chunk.samples):
        if sample is not None:
            try:
                check_masks([(name, value) for name, value in sample.items() if type(value) is Image])
            except ValueError as error:
                failed(chunk, row, error)


def _gather(failed: FailureNamer, context: CompileContext, field: str) -> Callable[[SampleChunk], None]:
    """A chunk stage that writes samples into their slots, and raises, skips or replaces bad ones."""

    order = context.order
    others: Callable[[int, NDArray[np.float64]], Any] = order.others if order.repeats else context.source.others
    is_planned = order.unit == "batches"
    # Otherwise masks may have been left as they are, say to be compared with in full.
    keeps_together = not any(
        getattr(stage.args, "fields", None) or not context.kind_of(stage).is_contained
        for stage in context.before_batch
        if not context.kind_of(stage).decodes
    )
    if is_planned:
        others = partial(no_longer, order, others)

    def write(chunk: SampleChunk) -> None:
        if is_planned:
            check_lengths(chunk, field, order, failed)
        if keeps_together:
            _check_masks(chunk, failed)
        write_samples(chunk, chunk.work_item.specs, failed)

    def fill(chunk: SampleChunk) -> None:
        context.run_before_batch(chunk)
        write(chunk)

    def run(chunk: SampleChunk) -> None:
        write(chunk)
        if chunk.failures:
            chunk.work_item.failures.extend(failures_of(chunk))
        if chunk.dropped:
            chunk.work_item.dropped.extend(map(chunk.slot_of, chunk.dropped))

    def failures_of(chunk: SampleChunk) -> list[SampleFailure]:
        if context.on_bad_sample != "raise":
            raise_store_failure(chunk)
        if context.on_bad_sample == "replace":
            return replace_failed(chunk, fill, others, context.seed, failed, by_position=order.repeats)
        return [
            SampleFailure(chunk.slot_of(row), chunk.index_of(row), error.position, error)
            for row, error in chunk.failures.items()
        ]

    return run


def _check(stages: Sequence[StageConfig], number: int, kinds: Mapping[str, StageKind], add_error: AddError) -> None:
    args = stages[number].args
    assert isinstance(args, BatchArgs)
    if args.tokens is None:
        return
    before = stages[number - 1].args if number else None
    if isinstance(before, PackArgs):
        if args.tokens < before.length:
            add_error(
                number,
                f"{args.tokens} tokens hold no sequence of `pack: {{length: {before.length}}}`: allow at least that many, or "
                "make the sequences shorter",
                "tokens",
            )
        if changed := args.changed_plan:
            add_error(number, "sequences of `pack` are of one length: leave this out, or set it in `pack`", changed[0])
        return
    for stage in stages:
        if getattr(stage.args, "device", "cpu") in ("gpu", "dali-cpu"):
            add_error(number, "DALI takes batches of one size: use `size`, or `decode: {device: cpu}`", "tokens")


BATCH = StageKind(
    BatchArgs, "boundary", compile=_compile, check=_check, is_single=True, only_computes=True, is_contained=True
)
