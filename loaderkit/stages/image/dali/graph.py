"""The operators of DALI that do what the stages do: a frozen description, and the pipeline built from it."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loaderkit.errors import ConfigError
from loaderkit.stages.image.ops import LUMA, Adjust, Crop, Finalizer, Flip, ImageOp, ImageOps, Scale


@dataclass(frozen=True)
class Graph:
    """The description of a DALI pipeline. `device` is the number of the CUDA device, None for DALI's CPU backend; `num_threads`
    are DALI's CPU threads; without `regions` whole images are decoded, and cropped then."""

    stages: tuple[tuple[str, ImageOps], ...]
    finish: Finalizer | None
    batch_size: int
    device: int | None
    num_threads: int = 1
    regions: bool = True

    def lines(self) -> list[str]:
        """One line per operator, for `explain`."""
        where = "cpu" if self.device is None else f"gpu {self.device}"
        first = "decoders.image_slice (only the crop)" if self.decodes_crops else "decoders.image"
        does = [(kind, name) for name, steps in self.stages for kind in steps.kinds]
        mirrored = does.pop()[1] if self.mirrors_last else None
        operators = [f"{_OPERATORS[kind]} on {where}: {name}" for kind, name in does[1 if self.decodes_crops else 0 :]]
        last = [name for name in (mirrored, "normalize" if self.finish is not None else None) if name is not None]
        return [
            f"{first} on {'cpu' if self.device is None else 'mixed'}",
            *dict.fromkeys(operators),
            f"crop_mirror_normalize on {where}: {', '.join([*last, 'batch'])}",
        ]

    @property
    def mirrors_last(self) -> bool:
        """True if a mirror comes last, which the operator that writes the batch then does."""
        return bool(self.stages) and self.stages[-1][1].kinds[-1:] == (Flip,)

    @property
    def decodes_crops(self) -> bool:
        """True if a crop comes first, and only its pixels are decoded."""
        return self.regions and self.crops_first

    @property
    def crops_first(self) -> bool:
        """True if a crop comes first that lies inside the image."""
        return bool(self.stages) and self.stages[0][1].takes_a_piece


_OPERATORS = {Crop: "slice", Scale: "resize", Flip: "flip", Adjust: "arithmetic"}


def import_dali() -> Any:
    """DALI. Raises ConfigError if it is missing."""
    try:
        dali: Any = importlib.import_module("nvidia.dali")
        importlib.import_module("nvidia.dali.fn")
        importlib.import_module("nvidia.dali.math")
    except ImportError as error:
        raise ConfigError(
            f"stages.decode.device needs NVIDIA DALI, which cannot be imported ({error}): pip install 'loaderkit[dali]'"
        ) from error
    return dali


def build_pipeline(dali: Any, graph: Graph) -> Any:
    """The DALI pipeline of a graph. Its inputs are `encoded` and, for operation n, the inputs in `inputs_of`, named
    `name-n`."""
    fn, types = dali.fn, dali.types

    def source(name: str, dtype: Any, ndim: int) -> Any:
        return fn.external_source(name=name, dtype=dtype, ndim=ndim, no_copy=True)

    def define() -> Any:
        encoded = source("encoded", types.UINT8, 1)
        decoding = {
            "device": "cpu" if graph.device is None else "mixed",
            "output_type": types.RGB,
            "adjust_orientation": False,
            "jpeg_fancy_upsampling": True,  # of chroma, as in libjpeg-turbo
        }
        images = None
        if not graph.decodes_crops:
            images = fn.decoders.image(encoded, **decoding)
        number = 0
        mirror = 0
        last = sum(len(steps.kinds) for _, steps in graph.stages) - 1 if graph.mirrors_last else -1
        for _, steps in graph.stages:
            for kind in steps.kinds:
                if kind is Crop:
                    window = {
                        "start": source(f"start-{number}", types.INT32, 1),
                        "shape": source(f"shape-{number}", types.INT32, 1),
                    }
                    if images is None:
                        images = fn.decoders.image_slice(encoded, **window, axis_names="HW", **decoding)
                    else:
                        images = fn.slice(
                            images, **window, axes=[0, 1], out_of_bounds_policy="pad", fill_values=float(steps.fill)
                        )
                elif kind is Scale:
                    images = fn.resize(
                        images,
                        size=source(f"size-{number}", types.FLOAT, 1),
                        interp_type={"bilinear": types.INTERP_LINEAR, "bicubic": types.INTERP_CUBIC}[
                            steps.interpolation
                        ],
                        antialias=steps.antialias,
                    )
                elif kind is Adjust:
                    numbers = source(f"adjust-{number}", types.FLOAT, 1)
                    on_device = numbers if graph.device is None else numbers.gpu()
                    images = _adjusted(dali, images, on_device, steps)
                else:
                    flip = source(f"flip-{number}", types.INT32, 0)
                    if number == last:
                        mirror = flip
                    else:
                        images = fn.flip(images, horizontal=flip)
                number += 1
        finish = graph.finish
        return fn.crop_mirror_normalize(
            images,
            dtype=types.UINT8 if finish is None else types.FLOAT,
            output_layout="CHW",
            mean=[0.0] if finish is None else list(finish.mean),
            std=[1.0] if finish is None else list(finish.std),
            mirror=mirror,
        )

    # Depth 1: loaderkit's workers prefetch, each with its own pipeline.
    pipeline = dali.pipeline_def(define)(
        batch_size=graph.batch_size,
        num_threads=graph.num_threads,
        device_id=graph.device,
        prefetch_queue_depth=1,
        exec_dynamic=True,
    )
    pipeline.build()
    return pipeline


def _adjusted(dali: Any, images: Any, numbers: Any, steps: ImageOps) -> Any:
    """`Adjust` in DALI's arithmetic: the same operations in the same order as in `color.py`."""
    fn, types, math = dali.fn, dali.types, dali.math
    levels = fn.cast(images, dtype=types.FLOAT)
    red, green, blue = channels = [levels[:, :, channel : channel + 1] for channel in range(3)]
    adjusted = levels * numbers[0]
    if steps.uses_luma:
        grey = math.floor(red * LUMA[0] + green * LUMA[1] + blue * LUMA[2])
        mean = fn.reductions.mean(grey, axes=[0, 1, 2], keep_dims=True)
        adjusted = adjusted + (grey * numbers[1] + mean * numbers[2])
    adjusted = math.floor(math.clamp(adjusted, 0.0, 255.0))
    if steps.turns_hue:
        adjusted = adjusted * (1.0 - numbers[4]) + _turned(dali, channels, numbers[3]) * numbers[4]
    return fn.reshape(fn.cast(adjusted, dtype=types.UINT8), layout="HWC")


def _turned(dali: Any, channels: Sequence[Any], shift: Any) -> Any:
    """Red, green and blue, [H, W, 1] each, with the hue turned, computed in HSV."""
    math = dali.math
    red, green, blue = (channel / 255.0 for channel in channels)
    value, least = math.max(math.max(red, green), blue), math.min(math.min(red, green), blue)
    spread = value - least
    divisor = spread + (spread == 0.0)
    to_red, to_green, to_blue = (value - red) / divisor, (value - green) / divisor, (value - blue) / divisor
    hue = (value == red) * (to_blue - to_green) + (value != red) * (
        (value == green) * (2.0 + to_red - to_blue) + (value != green) * (4.0 + to_green - to_red)
    )
    turned = hue / 6.0 + shift
    sixths = (turned - math.floor(turned)) * 6.0
    turned_channels = []
    for number in (5.0, 3.0, 1.0):
        k = sixths + number
        k = k - 6.0 * math.floor(k / 6.0)
        turned_channels.append(value - spread * math.clamp(math.min(k, 4.0 - k), 0.0, 1.0))
    return math.floor(math.clamp(dali.fn.cat(*turned_channels, axis=2) * (255.0 + 1.0 - 1e-3), 0.0, 255.0))


def inputs_of(column: Sequence[ImageOp]) -> dict[str, NDArray[Any]]:
    """The inputs by name of one operation of several images, with a row per image."""
    if isinstance(column[0], Crop):
        boxes = np.array(column, np.int32)
        return {"start": np.ascontiguousarray(boxes[:, :2]), "shape": np.ascontiguousarray(boxes[:, 2:])}
    if isinstance(column[0], Scale):
        return {"size": np.array(column, np.float32)}
    if isinstance(column[0], Adjust):
        return {"adjust": np.array(column, np.float32)}
    return {"flip": np.array(column, np.int32)[:, 0].copy()}
