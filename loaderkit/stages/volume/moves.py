"""`random_volume_crop` and `random_volume_flip`: one window, and one flip, for the arrays of a sample, such as a scan and its
labels. They act on the last dimensions, so a scan may have channels and its labels none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import AfterValidator, BeforeValidator, Field, PositiveInt, model_validator

from loaderkit._internal.config.settings import as_tuple
from loaderkit.samples.sample import Sample
from loaderkit.samples.values import CutWindow
from loaderkit.sources.base import WindowRule
from loaderkit.stages.base import StageArgs
from loaderkit.stages.context import StageKind
from loaderkit.stages.values import describe

Draws = NDArray[np.float64]
_MOST_DIMS = 4
Named = Annotated[tuple[str, ...], BeforeValidator(as_tuple), Field(min_length=1)]


def _last_axes(value: tuple[int, ...]) -> tuple[int, ...]:
    if len({*value}) < len(value) or not all(-_MOST_DIMS <= axis <= -1 for axis in value):
        raise ValueError(f"different axes from -{_MOST_DIMS} to -1, counted from the last one, not {list(value)}")
    return value


class RandomVolumeCropArgs(StageArgs):
    """Cut one random window out of arrays or tensors, such as a scan and its labels."""

    size: Annotated[tuple[PositiveInt, ...], BeforeValidator(as_tuple), Field(min_length=1, max_length=_MOST_DIMS)] = (
        Field(description="of the window along the last dimensions, as in [128, 128, 128]")
    )
    fields: Named = Field(description="the arrays to cut, which are alike in these dimensions")
    foreground: str | None = Field(
        None, description="a field of labels: the window holds one of its values that are not 0, as often as `p` says"
    )
    p: float = Field(
        0.4, ge=0, le=1, description="the probability of that; at other times, and without any, it is anywhere"
    )
    pad_if_needed: bool = Field(False, description="pad what is smaller than `size` at its ends instead of refusing it")
    fill: int | float = Field(0, description="the value of what is padded; labels are padded with 0")
    labels: Annotated[tuple[str, ...], BeforeValidator(as_tuple)] = Field(
        (), description="fields of class numbers, which are padded with 0; `foreground` is one of them"
    )

    @model_validator(mode="after")
    def _names_are_fields(self) -> RandomVolumeCropArgs:
        for argument, names in (("foreground", [self.foreground] if self.foreground else []), ("labels", self.labels)):
            if missing := [name for name in names if name not in self.fields]:
                raise ValueError(
                    f"`{argument}` names {missing[0]!r}, which is none of `fields` ({', '.join(self.fields)})"
                )
        return self


class RandomVolumeFlipArgs(StageArgs):
    """Mirror arrays or tensors alike, along each axis by itself."""

    fields: Named = Field(description="the arrays to mirror, which are alike along these axes")
    axes: Annotated[tuple[int, ...], BeforeValidator(as_tuple), Field(min_length=1), AfterValidator(_last_axes)] = (
        Field((-3, -2, -1), description="counted from the last one, -1")
    )
    p: float = Field(0.5, ge=0, le=1, description="the probability for each axis")


def random_volume_crop(args: RandomVolumeCropArgs) -> Callable[..., None]:
    """Six draws: whether the foreground is wanted, which of its values, and the window's start along each dimension.

    Each start of the window is as likely; for a value of the foreground, each start with which the window has it.
    MLPerf's 3D U-Net takes the foreground in four of ten crops. Directly behind `read`, a source may read the window
    alone: see `window_rule`.
    """
    size, rule = args.size, window_rule(args)

    def run(sample: Sample, draws: Draws, scratch: Any = None) -> None:
        if type(sample.get(args.fields[0])) is CutWindow:
            sample.update({name: sample[name].array for name in args.fields})
            return
        arrays = _arrays(sample, args.fields, len(size), "window")
        shape = next(iter(arrays.values())).shape[-len(size) :]
        missing = [max(0, wanted - length) for wanted, length in zip(size, shape, strict=True)]
        if any(missing):
            if not args.pad_if_needed:
                raise ValueError(
                    f"its {args.fields[0]} has {list(shape)} along its last dimensions, less than the window of {list(size)}: "
                    "set pad_if_needed: true, or a smaller `size`"
                )
            flat = {*args.labels, args.foreground}
            arrays = {name: _padded(array, missing, 0 if name in flat else args.fill) for name, array in arrays.items()}
            shape = tuple(map(max, shape, size))
        window = rule.place(tuple(shape), draws, lambda: arrays[args.foreground or ""])
        assert window is not None
        for name, array in arrays.items():
            sample[name] = array[(..., *window)]

    return run


@dataclass(frozen=True)
class _Place:
    """Finds where the window lies; see `WindowRule`. Returns None if an array is smaller than the window."""

    args: RandomVolumeCropArgs

    def __call__(self, lengths: tuple[int, ...], draws: Draws, load: Callable[[], Any]) -> tuple[slice, ...] | None:
        args = self.args
        if any(length < wanted for length, wanted in zip(lengths, args.size, strict=True)):
            return None
        held = _foreground(load(), len(args.size), draws[1]) if args.foreground and draws[0] < args.p else None
        window = []
        for axis, (length, wanted) in enumerate(zip(lengths, args.size, strict=True)):
            first, last = 0, length - wanted
            if held is not None:
                first, last = max(first, held[axis] - wanted + 1), min(last, held[axis])
            start = first + int(draws[2 + axis] * (last - first + 1))
            window.append(slice(start, start + wanted))
        return tuple(window)


def window_rule(args: RandomVolumeCropArgs) -> WindowRule:
    """What it cuts, for a source that reads no more."""
    return WindowRule(args.fields, len(args.size), args.foreground, _Place(args))


def _foreground(labels: Any, num_dims: int, draw: float) -> tuple[int, ...] | None:
    """The place of a value that is not 0, each as likely, or None if there is none."""
    values = labels.numpy() if isinstance(labels, torch.Tensor) else labels
    is_any = (values != 0).reshape(-1, *values.shape[-num_dims:]).any(0)
    places = np.flatnonzero(is_any)
    if not len(places):
        return None
    return tuple(map(int, np.unravel_index(places[int(draw * len(places))], is_any.shape)))


def _padded(array: Any, missing: list[int], fill: float) -> Any:
    """`array` with `fill` on both sides of its last dimensions; if the number is odd, one more at the end."""
    around = [(0, 0)] * (array.ndim - len(missing)) + [(num // 2, num - num // 2) for num in missing]
    values = array.numpy() if isinstance(array, torch.Tensor) else array
    kind = values.dtype.kind
    if (kind == "b" and fill not in (0, 1)) or (kind in "iu" and not _is_within(fill, values.dtype)):
        raise ValueError(f"`fill` is {fill}, which its {values.dtype} array cannot hold")
    padded = np.pad(values, around, constant_values=values.dtype.type(fill))
    return torch.from_numpy(padded) if isinstance(array, torch.Tensor) else padded


def _is_within(value: float, dtype: np.dtype[Any]) -> bool:
    limits = np.iinfo(dtype)
    return value == int(value) and limits.min <= value <= limits.max


def random_volume_flip(args: RandomVolumeFlipArgs) -> Callable[..., None]:
    """A draw an axis, in the order of `axes`."""
    num_dims = -min(args.axes)

    def run(sample: Sample, draws: Draws, scratch: Any = None) -> None:
        arrays = _arrays(sample, args.fields, num_dims, "flip")
        turned = [axis for axis, draw in zip(args.axes, draws, strict=False) if draw < args.p]
        for name, array in arrays.items():
            flipped = (
                array.flip(turned)
                if isinstance(array, torch.Tensor)
                else np.ascontiguousarray(np.flip(array, tuple(turned)))
            )
            sample[name] = flipped if turned else array

    return run


def _arrays(sample: Sample, fields: tuple[str, ...], num_dims: int, what: str) -> dict[str, Any]:
    """The arrays of the fields, which have at least `num_dims` dimensions and agree in the last ones. Raises ValueError."""
    found: dict[str, Any] = {}
    for name in fields:
        if name not in sample:
            raise ValueError(f"it has no field {name!r}, only {', '.join(sample)}")
        value = sample[name]
        if not isinstance(value, (np.ndarray, torch.Tensor)) or value.ndim < num_dims:
            raise ValueError(
                f"its field {name!r} is {describe(value)}, no array of {num_dims} or more dimensions: is `decode` missing "
                "before this stage?"
            )
        found[name] = value
    shapes = {name: tuple(value.shape[-num_dims:]) for name, value in found.items()}
    if len({*shapes.values()}) > 1:
        said = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise ValueError(f"its arrays differ in their last {num_dims} dimensions ({said}) and cannot share a {what}")
    return found


RANDOM_VOLUME_CROP = StageKind(
    RandomVolumeCropArgs,
    "sample",
    random_volume_crop,
    num_draws=2 + _MOST_DIMS,
    window=window_rule,
    shrinks=True,
    only_computes=True,
    is_contained=True,
    leaves_values=True,
)
RANDOM_VOLUME_FLIP = StageKind(
    RandomVolumeFlipArgs,
    "sample",
    random_volume_flip,
    num_draws=_MOST_DIMS,
    only_computes=True,
    is_contained=True,
    leaves_values=True,
)
