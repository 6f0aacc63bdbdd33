"""nvJPEG through torchvision beside our own decoder: speed, and by how many levels their pixels differ."""

from __future__ import annotations

import importlib
import importlib.util
import statistics
import time
from functools import partial
from typing import Any

import torch

import loaderkit
from loaderkit import Pipeline
from profiles.gpu_session.context import Context, Skipped
from profiles.gpu_session.pictures_pipeline import ahead


def measure(context: Context) -> None:
    """Whole pictures, as both decode them."""
    num_pictures = context.sized(256, 16)
    made = (
        Pipeline.files(context.photos(), include="**/*.jpg")
        .read()
        .decode()
        .batch(num_pictures, ragged={"image": "list"})
    )
    with loaderkit.build(made, overrides=ahead()) as loader:
        ours = next(iter(loader))
    _own_speed(context, made, num_pictures)
    if importlib.util.find_spec("torchvision") is None:
        raise Skipped("torchvision is not installed; our decoder's speed stands")
    torchvision: Any = importlib.import_module("torchvision.io")
    decode = partial(torchvision.decode_jpeg, mode=torchvision.ImageReadMode.RGB, device=context.device)
    paths = [context.photos() / key for key in ours["__key__"]]
    encoded = [torch.frombuffer(bytearray(_found(path).read_bytes()), dtype=torch.uint8) for path in paths]
    begin_s = time.perf_counter()
    theirs: Any = decode(encoded)
    context.wait()
    first_s = time.perf_counter() - begin_s
    taken_s = []
    for _ in range(context.sized(6, 1)):
        begin_s = time.perf_counter()
        decode(encoded)
        context.wait()
        taken_s.append(time.perf_counter() - begin_s)
    name = "nvjpeg" if context.on_gpu else "torchvision_cpu"
    rate = num_pictures / statistics.median(taken_s)
    context.report.add(**{f"{name}_first_s": first_s, f"{name}_images_per_s": rate})
    differences = [
        (mine.to(context.device).float() - other.float()).abs()
        for mine, other in zip(ours["image"], theirs, strict=True)
    ]
    context.report.add(
        **{
            f"{name}_mean_levels": torch.stack([one.mean() for one in differences]).mean().item(),
            f"{name}_most_levels": max(one.max().item() for one in differences),
            f"{name}_most_mean_levels_of_a_picture": max(one.mean().item() for one in differences),
        }
    )


def _own_speed(context: Context, made: Pipeline, num_pictures: int) -> None:
    """Pictures a second of our decoder alone, with all CPUs."""
    with loaderkit.build(made, overrides=ahead()) as loader:
        sum(1 for _ in loader)
        begin_s, count = time.perf_counter(), 0
        while time.perf_counter() - begin_s < context.sized(3.0, 0.1):
            count += sum(len(batch["image"]) for batch in loader)
        context.report.add(own_images_per_s=count / (time.perf_counter() - begin_s), num_pictures=num_pictures)


def _found(path: Any) -> Any:
    """A sample's key may come without its extension."""
    return path if path.exists() else path.with_name(f"{path.name}.jpg")
