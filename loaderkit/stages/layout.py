"""Finds the layout of a batch from a few samples: which fields it has, and for each its type, its shape and where it lies.

Tensors, arrays, images and numbers are fields of a slab; texts, bytes and other objects become lists. Where samples are not
typed (JSON, Python objects) no single one decides: a field is what most of them say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch

from loaderkit.samples.chunk import FieldSpec, Starts
from loaderkit.samples.sample import Sample
from loaderkit.samples.values import Clip, Encoded, GpuDecoded, Image, InPlace, Pictures, as_array
from loaderkit.stages.values import as_tensor, describe, dtype_of, shape_and_dtype

Examples = Sequence[tuple[str, Sample]]
"""Some samples, each with its key."""

EXACT = 2**53
"""Up to here float64 holds every whole number."""
_NUMBERS = ("int64", "float64")
_NUMBERS_OF_PYTHON: tuple[type, ...] = (int, float, list)
_UNTYPED = (type(None), bool, str, *_NUMBERS_OF_PYTHON)


def specs_of(
    examples: Examples, ragged: Mapping[str, str], image_dtype: str | None = None, *, has_untyped_arrays: bool = False
) -> dict[str, FieldSpec]:
    """The layout of the fields of a batch of such samples. `image_dtype` is the dtype of normalized images.
    `has_untyped_arrays`: arrays were lists of JSON.

    A batch has the fields that at least half of the examples have. A None, or an empty list, says nothing of a field's
    type; a field with whole and other numbers is float64. Raises TypeError, ValueError for values that fit no batch.
    """
    names = Counter(name for _, sample in examples for name in sample)
    fields = [name for name, num in names.items() if 2 * num >= len(examples)]
    reserved = {
        "__key__",
        "__source__",
        "__wrapped__",
        *(f"{name}_sizes" for name, kind in ragged.items() if kind == "pad"),
    }
    if taken := sorted(reserved & {*fields}):
        raise ValueError(f"its field {taken[0]!r} has a reserved name: rename it")
    for name in ragged:
        if name not in fields:
            raise ValueError(f"`ragged` or `pad_value` names {name!r}, but samples have {', '.join(fields)}")
    untyped = (*_NUMBERS_OF_PYTHON, np.ndarray) if has_untyped_arrays else _NUMBERS_OF_PYTHON
    specs = {}
    for name in fields:
        values = [(key, sample[name]) for key, sample in examples if name in sample]
        specs[name] = _common_spec(values, ragged.get(name), image_dtype, untyped)
    return specs


def is_undecided(value: Any) -> bool:
    """True for what has no type: None, and a list without items or pictures."""
    return value is None or is_empty_list(value)


def is_empty_list(value: Any) -> bool:
    """True for a list without items or pictures."""
    return (type(value) is list and not value) or (type(value) is Pictures and not value.images)


def is_untyped(value: Any) -> bool:
    """True for a value whose type may be another in the next sample, as in JSON: no tensor, array or image."""
    return type(value) in _UNTYPED


def num_bytes_of_sample(sample: Sample) -> int:
    """About the memory that the values of a sample take."""
    num_bytes = 0
    for value in sample.values():
        if isinstance(value, Image):
            num_bytes += value.pixels.nbytes
        elif isinstance(value, Clip):
            num_bytes += len(value.frames) * value.frames[0].pixels.nbytes
        elif isinstance(value, Pictures):
            num_bytes += sum(image.pixels.nbytes for image in value.images)
        elif isinstance(value, GpuDecoded):
            num_bytes += value.tensor[value.row].nbytes
        elif isinstance(value, InPlace):
            num_bytes += value.num_bytes
        elif isinstance(value, Encoded):
            num_bytes += value.data.nbytes
        elif isinstance(value, (torch.Tensor, np.ndarray)):
            num_bytes += value.nbytes
        else:
            num_bytes += 8 * len(value) if hasattr(value, "__len__") else 8
    return num_bytes


def _common_spec(
    values: Sequence[tuple[str, Any]], ragged: str | None, image_dtype: str | None, untyped: tuple[type, ...]
) -> FieldSpec:
    """The spec of one field, from its value in some samples, each with its key. Numbers of the types `untyped` widen."""
    decided = [(key, value) for key, value in values if not is_undecided(value)]
    if not decided:
        key, value = values[0]
        return replace(_spec_of(value, key, ragged, image_dtype), is_open=ragged is None)
    specs, errors = [], []
    for key, value in decided:
        try:
            spec = _spec_of(value, key, ragged, image_dtype)
        except (TypeError, ValueError) as error:
            errors.append(error)
        else:
            specs.append(replace(spec, widens=spec.dtype in _NUMBERS and type(value) in untyped))
    if not specs:
        raise errors[0]
    votes = Counter(map(_kind_of, specs))
    kind = max(votes, key=lambda kind: (votes[kind], kind[0] != "list"))  # the earliest of several
    chosen = [spec for spec in specs if _kind_of(spec) == kind]
    return replace(chosen[0], dtype="float64") if "float64" in {spec.dtype for spec in chosen} else chosen[0]


def _kind_of(spec: FieldSpec) -> tuple[str, str | None]:
    return spec.kind, "a number" if spec.widens else spec.dtype


def _spec_of(  # noqa: PLR0911 - a kind of value each
    value: Any, key: str, ragged: str | None, image_dtype: str | None
) -> FieldSpec:
    if ragged is not None:
        tensor = ragged_tensor(value)
        if ragged == "pad":
            _check_dense(tensor)
        kind: Literal["pad", "ragged"] = "pad" if ragged == "pad" else "ragged"
        is_image = type(value) in (Clip, GpuDecoded) or is_picture(value)
        return FieldSpec(kind, tuple(tensor.shape), dtype_of(tensor), is_image, key, tensor.nbytes)
    if type(value) is Starts:
        return FieldSpec("starts", (value.length,), "int32", example_key=key)
    if type(value) is Image:
        height, width, channels = value.pixels.shape
        stored = value.pixels.dtype.name
        dtype = stored if value.mask or image_dtype is None or stored != "uint8" else image_dtype
        return FieldSpec("slab", (channels, height, width), dtype, image=not value.mask, example_key=key)
    if type(value) is Clip:
        stored = value.frames[0].pixels.dtype.name
        dtype = stored if image_dtype is None or stored != "uint8" else image_dtype
        return FieldSpec("slab", value.shape, dtype, image=True, example_key=key)
    if type(value) is Pictures:
        num_bytes = num_bytes_of_sample({"pictures": value})
        return FieldSpec("list", image=is_picture(value), example_key=key, num_bytes=num_bytes)
    if type(value) is GpuDecoded:
        tensor = value.tensor[0]
        return FieldSpec("rendered", tuple(tensor.shape), dtype_of(tensor), True, key, tensor.nbytes)
    numbers = shape_and_dtype(value)
    if numbers is not None:
        return FieldSpec("slab", *numbers, example_key=key)
    try:
        tensor = as_tensor(value)
    except TypeError:
        held = value.data if isinstance(value, Encoded) else value
        num_bytes = len(held) if isinstance(held, (bytes, str, memoryview)) else 0
        return FieldSpec("list", example_key=key, num_bytes=num_bytes)
    except (OverflowError, RuntimeError, ValueError) as error:
        raise ValueError(f"its value {value!r} fits no tensor: {error}") from error
    _check_dense(tensor)
    return FieldSpec("slab", tuple(tensor.shape), dtype_of(tensor), example_key=key)


def _check_dense(tensor: torch.Tensor) -> None:
    """Raise ValueError for a tensor that has no plain memory, as a batch's has."""
    if tensor.is_nested:
        kind, remedy = "nested", "to_padded_tensor(0)"
    elif tensor.is_quantized:
        kind, remedy = "quantized", "dequantize()"
    elif tensor.layout is not torch.strided:
        kind, remedy = str(tensor.layout).removeprefix("torch."), "to_dense()"
    else:
        return
    raise ValueError(
        f"it has a tensor that is {kind}, and the fields of a batch are dense: give `tensor.{remedy}`, or its parts as fields"
    )


def is_picture(value: Any) -> bool:
    """True for an image, or several, that are no masks."""
    images = value.images if type(value) is Pictures else (value,)
    return all(type(image) is Image and not image.mask for image in images)


def ragged_tensor(value: Any) -> torch.Tensor:
    """The tensor of a field that `ragged` names; also of a list of numbers. Raises TypeError, ValueError."""
    try:
        return as_tensor(as_array(value) if type(value) is list else value)
    except TypeError as error:
        raise TypeError(
            f"`ragged` is for tensors and lists of numbers, and {error}: a field that it does not name comes as a list"
        ) from None


def widens(value: Any, dtype: str, spec: FieldSpec) -> bool:
    """True for whole numbers, int64, in a float64 field of untyped data that has both. Raises ValueError where float64
    would hold another number."""
    if not spec.widens or (dtype, spec.dtype) != _NUMBERS:
        return False
    array = value.cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
    if array.size and not -EXACT <= array.min() <= array.max() <= EXACT:
        raise ValueError(f"{describe(value)} has a whole number that float64 does not hold exactly: make it text")
    return True
