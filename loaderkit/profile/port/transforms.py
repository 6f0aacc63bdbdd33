"""Turns torchvision's transforms, v1 and v2, into stages.

Compose([Resize, ..., ToTensor, Normalize]) ──one after another──> Ported: sample stages, and the arguments of `normalize`

loaderkit's pictures are uint8 until `normalize`, which comes after `batch`. So what a transform does is followed
through four forms: a picture of Pillow's, levels (a uint8 tensor), numbers from 0 to 1, and these normalised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import methodcaller
from typing import Any, Literal, cast

import torch

from loaderkit.profile.port.recognise import CannotPort, class_of, is_of_torchvision, name_of_function

Form = Literal["pillow", "levels", "unit", "normalised"]
_LEVELS = 255
_BY_NUMBER = {0: "nearest", 2: "bilinear", 3: "bicubic"}  # Pillow's
_NO_INTERPOLATION = (
    "`resize` has bilinear, bicubic, and for tensors nearest-exact; another pixel than by {!r} may be taken or mixed in"
)
_CHANNELS = 3
_FLOATS = (torch.float32, torch.float64)


@dataclass
class Ported:
    """The stages so far. A number in the form "unit" or "normalised" is (level / 255 - mean) / std."""

    stages: list[Any] = field(default_factory=list)
    form: Form = "pillow"
    dtype: torch.dtype = torch.float32
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    upright: bool = False
    most_levels: int = 1  # by how many levels pixels may differ, by what resizing and colours document
    is_random: bool = False

    def add(self, kind: str, **arguments: Any) -> None:
        """A stage."""
        self.stages.append({kind: arguments} if arguments else kind)

    @property
    def normalize(self) -> dict[str, Any] | None:
        """The arguments of `normalize`, or None if pictures stay uint8."""
        if self.form not in ("unit", "normalised"):
            return None
        dtype = {} if self.dtype == torch.float32 else {"dtype": str(self.dtype).removeprefix("torch.")}
        return {"mean": list(self.mean), "std": list(self.std), **dtype}


def port_transforms(transform: Any, form: Form = "pillow") -> Ported:
    """The stages of a transform, or of a Compose of them. Raises ExceptionGroup of CannotPort, one for each that has none."""
    ported, failed = Ported(form=form), []
    for one in _flat(transform):
        try:
            _port(one, ported)
        except CannotPort as error:
            failed.append(error)
        except (AttributeError, TypeError, ValueError) as error:  # of another release
            failed.append(CannotPort(one, f"its attributes are not those that loaderkit knows ({error})"))
    if not failed and ported.form == "pillow":
        failed.append(CannotPort(transform, "it ends with a picture of Pillow's, which no batch can hold"))
    if failed:
        raise ExceptionGroup("transforms without a stage", failed)
    return ported


def _flat(transform: Any) -> Iterator[Any]:
    if transform is None:
        return
    if is_of_torchvision(transform, "transforms") == "Compose":
        for inner in transform.transforms:
            yield from _flat(inner)
    elif class_of(transform) == "torch.nn.modules.container.Sequential":
        for inner in transform:
            yield from _flat(inner)
    else:
        yield transform


def _port(transform: Any, ported: Ported) -> None:
    name = is_of_torchvision(transform, "transforms")
    if name is None:
        _port_pillows(transform, ported)
    elif name == "Lambda":
        raise CannotPort(transform.lambd, "loaderkit cannot see what it does: write it as a `call`, or by a stage")
    elif name not in _RULES:
        raise CannotPort(transform, "no stage of loaderkit does the same")
    else:
        _RULES[name](transform, ported)


# ------------------------------------------------------------------------------------------------- forms of a picture


def _to_levels(transform: Any, ported: Ported) -> None:
    if ported.form == "pillow":
        ported.form = "levels"


def _to_unit(transform: Any, ported: Ported) -> None:
    """v1's ToTensor, and v2's."""
    _to_levels(transform, ported)
    if ported.form == "levels":
        ported.form = "unit"


def _to_pillow(transform: Any, ported: Ported) -> None:
    if ported.form not in ("pillow", "levels") or transform.mode not in (None, "RGB"):
        raise CannotPort(
            transform, "only uint8 tensors become Pillow's pictures without being rounded, and only as RGB"
        )
    ported.form = "pillow"


def _to_dtype(transform: Any, ported: Ported) -> None:
    dtype, scale = _image_dtype(transform), getattr(transform, "scale", True)  # ConvertImageDtype scales
    if dtype is None or ported.form == "pillow" or (ported.form == "levels" and dtype == torch.uint8):
        return
    if dtype not in _FLOATS:
        raise CannotPort(transform, f"pictures are uint8, or become float32 or float64 by `normalize`: not {dtype}")
    if ported.form == "levels":
        ported.form = "unit"
        ported.std = (1.0,) if scale else (1 / _LEVELS,)
    ported.dtype = dtype


def _image_dtype(transform: Any) -> torch.dtype | None:
    """The dtype of pictures, which in v2 may be given for each class."""
    dtype = transform.dtype
    if not isinstance(dtype, Mapping):
        return dtype  # type: ignore[no-any-return]
    by_name = {getattr(kind, "__name__", kind): one for kind, one in dtype.items()}
    return by_name.get("Image", by_name.get("others"))


def _normalize(transform: Any, ported: Ported) -> None:
    if ported.form not in ("unit", "normalised"):
        raise CannotPort(transform, "it stands before the picture is a float tensor")
    mean, std = _floats(transform.mean), _floats(transform.std)
    num_channels = max(map(len, (mean, std, ported.mean, ported.std)))
    means, stds, inner_means, inner_stds = (
        values * num_channels if len(values) == 1 else values for values in (mean, std, ported.mean, ported.std)
    )
    if num_channels not in (1, _CHANNELS) or not all(one > 0 for one in stds):
        raise CannotPort(transform, "pictures have three channels, and each std is above 0")
    ported.mean = tuple(m + s * mean for m, s, mean in zip(inner_means, inner_stds, means, strict=True))
    ported.std = tuple(s * std for s, std in zip(inner_stds, stds, strict=True))
    ported.form = "normalised"


def _floats(values: Any) -> tuple[float, ...]:
    return tuple(float(value) for value in ([values] if isinstance(values, (int, float)) else values))


def _nothing(transform: Any, ported: Ported) -> None:
    """It changes no pixel."""


# --------------------------------------------------------------------------------------------------------- geometry


def _resize(transform: Any, ported: Ported) -> None:
    size = transform.size
    if size is None or getattr(transform, "max_size", None) is not None:
        raise CannotPort(transform, "`resize` has no max_size")
    if not isinstance(size, int):
        size = size[0] if len(size) == 1 else list(size)
    ported.add("resize", size=size, **_filter(transform, ported))


def _random_resized_crop(transform: Any, ported: Ported) -> None:
    given = {"scale": [0.08, 1.0], "ratio": [3 / 4, 4 / 3]}
    bounds = {name: [*map(float, getattr(transform, name))] for name in given}
    changed = {name: value for name, value in bounds.items() if value != given[name]}
    ported.add("random_resized_crop", size=_size(transform.size), **changed, **_filter(transform, ported))
    ported.is_random = True


def _filter(transform: Any, ported: Ported) -> dict[str, Any]:
    """The arguments of a resize that are not `resize`'s own defaults."""
    name, is_pillow = _interpolation(transform), ported.form == "pillow"
    if name == "nearest-exact" and not is_pillow:
        name = "nearest"
    elif name not in ("bilinear", "bicubic"):
        raise CannotPort(transform, _NO_INTERPOLATION.format(name))
    elif name == "bicubic" and ported.form in ("unit", "normalised"):
        raise CannotPort(
            transform, "bicubic goes beyond 0 and 1 where pictures are floats: put it before ToTensor or ToDtype"
        )
    # Pillow always widens the filter. None, the default of torchvision before 0.17, and its "warn" do not, for tensors.
    is_wide = is_pillow or transform.antialias is True or name == "nearest"
    ported.most_levels += name != "nearest"
    return {**({} if name == "bilinear" else {"interpolation": name}), **({} if is_wide else {"antialias": False})}


def _interpolation(transform: Any) -> str:
    value = getattr(transform.interpolation, "value", transform.interpolation)
    return _BY_NUMBER.get(value, "others") if isinstance(value, int) else str(value)


def _size(size: Any) -> Any:
    """[height, width], or one number for both."""
    height, width = (size, size) if isinstance(size, int) else (size[0], size[-1])
    return height if height == width else [height, width]


def _center_crop(transform: Any, ported: Ported) -> None:
    _refuse_padding(transform, ported)
    ported.add("center_crop", size=_size(transform.size))


def _random_crop(transform: Any, ported: Ported) -> None:
    padding = transform.padding
    paddings = {0} if padding is None else {padding} if isinstance(padding, int) else {*padding}
    fill = 0 if transform.fill is None else transform.fill
    is_padded = paddings != {0} or transform.pad_if_needed
    if is_padded:
        _refuse_padding(transform, ported)
    if is_padded and (len(paddings) > 1 or transform.padding_mode != "constant" or not isinstance(fill, (int, float))):
        raise CannotPort(transform, "`random_crop` pads by the same number of pixels on every side, of one level")
    level = fill * _LEVELS if ported.form == "unit" else fill
    if is_padded and (level != int(level) or not 0 <= level <= _LEVELS):
        raise CannotPort(transform, f"the fill {fill} is no level of 255")
    more = {"padding": max(paddings), "pad_if_needed": transform.pad_if_needed, "fill": int(level)} if is_padded else {}
    ported.add("random_crop", size=_size(transform.size), **{name: value for name, value in more.items() if value})
    ported.is_random = True


def _refuse_padding(transform: Any, ported: Ported) -> None:
    if ported.form == "normalised":
        raise CannotPort(transform, "what it pads with is 0 behind Normalize, which is no level: put it before")


def _flip(kind: str, transform: Any, ported: Ported) -> None:
    ported.add(kind, **({} if transform.p == 0.5 else {"p": float(transform.p)}))
    ported.is_random |= transform.p not in (0, 1)


def _rotation(transform: Any, ported: Ported) -> None:
    fill = transform.fill if isinstance(transform.fill, (int, float)) else -1
    if ported.form != "pillow" or transform.center is not None or fill != int(fill) or not 0 <= fill <= _LEVELS:
        raise CannotPort(
            transform, "`random_rotation` is Pillow's, about the middle: put it before the picture is a tensor"
        )
    name = _interpolation(transform)
    if name not in _BY_NUMBER.values():
        raise CannotPort(transform, f"`random_rotation` has no interpolation {name!r}")
    more = {"interpolation": "" if name == "nearest" else name, "expand": transform.expand, "fill": int(fill)}
    degrees = [*map(float, transform.degrees)]
    ported.add("random_rotation", degrees=degrees, **{name: value for name, value in more.items() if value})
    ported.is_random = True


# ----------------------------------------------------------------------------------------------------------- colours


def _color_jitter(transform: Any, ported: Ported) -> None:
    _refuse_normalised(transform, ported)
    names = ("brightness", "contrast", "saturation", "hue")
    bounds = {name: getattr(transform, name) for name in names}
    given = {name: [*map(float, value)] for name, value in bounds.items() if value is not None}
    ported.add("color_jitter", **given)
    ported.is_random = True


def _grayscale(transform: Any, ported: Ported) -> None:
    _refuse_normalised(transform, ported)
    if transform.num_output_channels != _CHANNELS:
        raise CannotPort(transform, "pictures have three channels: only Grayscale(3) has a stage")
    ported.add("random_grayscale", p=1.0)
    ported.most_levels += 1


def _random_grayscale(transform: Any, ported: Ported) -> None:
    _refuse_normalised(transform, ported)
    ported.add("random_grayscale", p=float(transform.p))
    ported.is_random = True


def _blur(transform: Any, ported: Ported) -> None:
    _refuse_normalised(transform, ported)
    height, width = transform.kernel_size
    if height != width:
        raise CannotPort(transform, "the window of `gaussian_blur` is as high as it is wide")
    ported.add("gaussian_blur", kernel_size=int(height), sigma=[*map(float, transform.sigma)])
    ported.is_random = True


def _refuse_normalised(transform: Any, ported: Ported) -> None:
    if ported.form == "normalised":
        raise CannotPort(transform, "behind Normalize it acts on numbers that are no levels: put it before")


def _erasing(transform: Any, ported: Ported) -> None:
    ported.add(
        "random_erasing",
        p=float(transform.p),
        scale=[*map(float, transform.scale)],
        ratio=[*map(float, transform.ratio)],
        value=_erased_level(transform, ported),
    )
    ported.is_random = True


def _erased_level(transform: Any, ported: Ported) -> int | list[int]:
    """The level that is the transform's number in the picture's form. Behind Normalize 0 is the mean, to half a level."""
    given = transform.value
    values = () if given is None or isinstance(given, str) else _floats(given)
    if not values:
        raise CannotPort(transform, "its random values are normally distributed, those of `random_erasing` are levels")
    if ported.form == "normalised":
        if any(values):
            raise CannotPort(transform, "behind Normalize only the value 0 is a level, that of the mean")
        levels = [round(_LEVELS * min(1.0, max(0.0, mean))) for mean in ported.mean]
    else:
        exact = [_LEVELS * value if ported.form == "unit" else value for value in values]
        levels = [round(value) for value in exact]
        if any(abs(level - value) > 1e-3 for level, value in zip(levels, exact, strict=True)) or max(levels) > _LEVELS:
            raise CannotPort(transform, f"the value {given} is no level of 255")
    return levels[0] if len({*levels}) == 1 else levels


_RULES: dict[str, Callable[[Any, Ported], None]] = {
    "ToTensor": _to_unit,
    "PILToTensor": _to_levels,
    "ToImage": _to_levels,
    "ToPILImage": _to_pillow,
    "ToPureTensor": _nothing,
    "Identity": _nothing,
    "RGB": _nothing,
    "ToDtype": _to_dtype,
    "ConvertImageDtype": _to_dtype,
    "Normalize": _normalize,
    "Resize": _resize,
    "CenterCrop": _center_crop,
    "RandomCrop": _random_crop,
    "RandomResizedCrop": _random_resized_crop,
    "RandomHorizontalFlip": partial(_flip, "random_horizontal_flip"),
    "RandomVerticalFlip": partial(_flip, "random_vertical_flip"),
    "RandomRotation": _rotation,
    "ColorJitter": _color_jitter,
    "Grayscale": _grayscale,
    "RandomGrayscale": _random_grayscale,
    "GaussianBlur": _blur,
    "RandomErasing": _erasing,
}

# ------------------------------------------------------------------------------------------------------ Pillow's own


def _port_pillows(function: Any, ported: Ported) -> None:
    """Functions of Pillow's, and calls of a method of its pictures by `operator.methodcaller` or `functools.partial`."""
    name, arguments = _pillows(function)
    if name is None or ported.form != "pillow":
        raise CannotPort(function, "loaderkit cannot see what it does: write it as a `call`, or by a stage")
    if name == "exif_transpose" and not arguments and not ported.stages:
        ported.upright = True
    elif name in ("mirror", "flip") and not arguments:
        ported.add(f"random_{'horizontal' if name == 'mirror' else 'vertical'}_flip", p=1.0)
    elif name == "convert" and arguments == {"mode": "RGB"}:
        return
    elif name == "resize" and arguments.keys() <= {"size", "resample"} and "size" in arguments:
        _resize_of_pillow(function, arguments, ported)
    else:
        raise CannotPort(function, "no stage of loaderkit does the same")


def _pillows(function: Any) -> tuple[str | None, dict[str, Any]]:
    """The name and arguments of a call of Pillow's, or None if it is no such call."""
    if isinstance(function, methodcaller):
        made, given = cast("tuple[Any, tuple[Any, ...]]", function.__reduce__())
        is_named = isinstance(made, partial)
        name, *positional = (*made.args, *given) if is_named else given
        named = made.keywords if is_named else {}
    elif isinstance(function, partial):
        name, positional, named = name_of_function(function.func), [*function.args], function.keywords
        if (
            not name.startswith("PIL.Image.Image.") or positional
        ):  # an argument given by position would be taken for the picture
            return None, {}
        name = name.rpartition(".")[2]
    else:
        name = name_of_function(function)
        return (name.rpartition(".")[2] if name.startswith("PIL.ImageOps.") else None), {}
    order = {"convert": ("mode",), "resize": ("size", "resample")}.get(name, ())
    return name, {**dict(zip(order, positional, strict=False)), **named}


def _resize_of_pillow(function: Any, arguments: Mapping[str, Any], ported: Ported) -> None:
    number = arguments.get("resample")
    name = "bicubic" if number is None else _BY_NUMBER.get(int(number), str(number))
    if name not in ("bilinear", "bicubic"):
        raise CannotPort(function, _NO_INTERPOLATION.format(name))
    width, height = arguments["size"]
    ported.add("resize", size=[height, width], **({} if name == "bilinear" else {"interpolation": name}))
    ported.most_levels += 1
