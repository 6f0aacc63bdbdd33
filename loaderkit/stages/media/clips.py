"""Image stages on clips and lists of pictures: a stage does to every frame or picture what it does to an image, with the same
draws, so one crop, flip or colour a clip, and of pictures of several sizes the same part of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from loaderkit.samples.sample import Sample
from loaderkit.samples.values import Clip, Image, Pictures
from loaderkit.stages.values import CHANNELS, as_image, describe


def each_frame(function: Callable[..., Any], fields: tuple[str, ...] | None) -> Callable[..., Any]:
    """A stage's function of one sample, which acts on images, for samples that may have clips or lists of pictures as well."""

    def run(sample: Sample, draws: NDArray[np.float64], scratch: dict[str, Any] | None = None) -> Any:
        clips = _clips_of(sample, fields)
        if not clips:
            return function(sample, draws, scratch)
        sample.update(clips)
        images_of = {name: clip.images if isinstance(clip, Pictures) else clip.frames for name, clip in clips.items()}
        most = max(map(len, images_of.values()))
        names = sample.keys() if fields is None else fields
        beside = {name: sample[name] for name in names if name in sample and name not in clips}
        images_beside = _images_among(beside.values()) if fields is not None or not most else []
        if not most and not images_beside:
            return None  # lists without pictures
        jobs: list[Any] = []
        made: dict[str, list[Image]] = {name: [] for name in clips}
        for number in range(max(1, most)):
            frames = {name: images[number] for name, images in images_of.items() if number < len(images)}
            shown = {**sample, **frames}
            if number:  # images beside a clip have had their turn, unless the stage asks for them by name
                shown = frames if fields is None else beside | frames
            if fields is not None:  # it asks for shorter ones, too: what it makes of another image there is not taken
                shown |= dict.fromkeys(clips.keys() - frames.keys(), [*frames.values(), *images_beside][0])
            memory = None if scratch is None else scratch.setdefault(f"frame {number}", {})
            of_frame = function(shown, draws, memory)
            if of_frame is not None:
                jobs += of_frame
            for name in frames:
                made[name].append(shown[name])
            if not number:
                sample.update({name: value for name, value in shown.items() if name not in clips})
        sample.update({name: type(clips[name])(tuple(images)) for name, images in made.items()})
        return jobs

    return run


def _clips_of(sample: Sample, fields: Iterable[str] | None) -> dict[str, Clip | Pictures]:
    """The clips and lists of pictures that a stage acts on: of its `fields`, or all. Where a sample has neither nor images,
    arrays and tensors that are like clips are, and a list without items is one without pictures. Raises ValueError for an
    array whose channels may be second or last."""
    values = sample if fields is None else {name: sample[name] for name in fields if name in sample}
    clips = {name: value for name, value in values.items() if type(value) in (Clip, Pictures)}
    if fields is None and (clips or Image in map(type, values.values())):
        return clips
    for name, value in values.items():
        if getattr(value, "ndim", 0) == 4 and (clip := as_clip(value)) is not None:
            clips[name] = clip
    empty = {name: Pictures(()) for name, value in values.items() if type(value) is list and not value}
    if fields is None and (clips or not empty or _images_among(values.values())):
        return clips
    return clips | empty


def _images_among(values: Iterable[Any]) -> list[Image]:
    """Those that a stage acts on: images, or where there are none, arrays and tensors that are like images."""
    given = [*values]
    images = [value for value in given if type(value) is Image]
    return images or [image for value in given if (image := as_image(value)) is not None]


def as_clip(value: Any) -> Clip | None:
    """A uint8 array or tensor [T, C, H, W] or [T, H, W, C], C = 1 or 3, as a clip; None if it is nothing of the kind.

    If both ends of a frame have such a length, a tensor's channels come before its rows, as everywhere in torch; an
    array raises ValueError.
    """
    is_tensor = isinstance(value, torch.Tensor)
    if is_tensor and value.dtype == torch.uint8 and value.device.type == "cpu" and value.layout is torch.strided:
        array: NDArray[np.uint8] = value.numpy()
    elif isinstance(value, np.ndarray) and value.dtype == np.uint8:
        array = value
    else:
        return None
    if array.ndim != 4 or not len(array):
        return None
    is_second, is_last = array.shape[1] in CHANNELS[:2], array.shape[3] in CHANNELS[:2]
    if is_second and is_last and not is_tensor:
        raise ValueError(
            f"its {describe(value)} may be [T, C, H, W] or [T, H, W, C]: give it as a tensor, which is [T, C, H, W]"
        )
    if not is_second and not is_last:
        return None
    return Clip(tuple(Image(frame.transpose(1, 2, 0) if is_second else frame) for frame in array))
