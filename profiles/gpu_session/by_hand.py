"""Decoding on the GPU beside a DALI pipeline written by hand, in turns: pictures a second, and the CPUs that each uses."""

from __future__ import annotations

import importlib
import itertools
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import loaderkit
from loaderkit._internal.system.cgroups import num_cpus
from profiles.gpu_session.context import Context
from profiles.gpu_session.gpu_decoding import MEAN, STD, decoder
from profiles.gpu_session.pictures_pipeline import SIZE, ahead, crops

_RATIO = 0.98
Made = Callable[[], Iterator[torch.Tensor]]


def measure(context: Context) -> None:
    """loaderkit decoding on the GPU and on the CPU; DALI with chroma upsampled as we ask for it, and as documented."""
    device = decoder(context)
    contestants: dict[str, Made] = {
        "loaderkit": lambda: _ours(context, device),
        "dali": lambda: _by_hand(context, fancy=True),
        "dali_as_documented": lambda: _by_hand(context, fancy=False),
        "loaderkit_cpu": lambda: _ours(context, "cpu"),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    for number in range(context.sized(3, 1)):
        for name in list(contestants)[:: 1 if number % 2 == 0 else -1]:
            found[name].append(_turn(context, contestants[name]))
            rates, cpus = zip(*found[name], strict=True)
            context.report.add(
                **{f"{name}_images_per_s": statistics.median(rates), f"{name}_cpus": statistics.median(cpus)}
            )
    for other in ("dali", "dali_as_documented"):
        ratios = [one[0] / two[0] for one, two in zip(found["loaderkit"], found[other], strict=True)]
        if other == "dali" and context.on_gpu:
            context.report.bar("loaderkit_over_dali", statistics.median(ratios), least=_RATIO)
        else:
            context.report.add(**{f"loaderkit_over_{other}": statistics.median(ratios)})


def _turn(context: Context, make: Made) -> tuple[float, float]:
    """Pictures a second, and CPUs used, once what was made ahead is gone."""
    images = make()
    warm_s, seconds = context.sized((0.8, 1.6), (0.05, 0.1))
    for limit_s in (warm_s, seconds):
        begin_s, cpu_s, count = time.perf_counter(), _cpu_s(), 0
        while time.perf_counter() - begin_s < limit_s or count == 0:
            count += len(next(images))
            context.wait()
        took_s = time.perf_counter() - begin_s
    del images
    return count / took_s, (_cpu_s() - cpu_s) / took_s


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _ours(context: Context, device: str) -> Iterator[torch.Tensor]:
    with loaderkit.build(crops(context, device), overrides=ahead()) as loader:
        for _ in itertools.count():
            for batch in loader:
                yield batch["image"]


def _by_hand(context: Context, *, fancy: bool) -> Iterator[torch.Tensor]:
    """What DALI's documentation shows. `fancy`: chroma is upsampled as libjpeg-turbo, and our own decoder, does it."""
    dali: Any = importlib.import_module("nvidia.dali")
    plugin: Any = importlib.import_module("nvidia.dali.plugin.pytorch")
    fn, types = dali.fn, dali.types

    def define() -> Any:
        encoded, labels = fn.readers.file(file_root=str(context.photos()), random_shuffle=True, name="reader")
        images = fn.decoders.image_random_crop(
            encoded,
            device="mixed" if context.on_gpu else "cpu",
            output_type=types.RGB,
            jpeg_fancy_upsampling=fancy,
            random_area=[0.08, 1.0],
            random_aspect_ratio=[3 / 4, 4 / 3],
        )
        images = fn.resize(images, size=[SIZE, SIZE], antialias=True)
        mirror = fn.random.coin_flip(probability=0.5)
        mean, std = ([255 * value for value in values] for values in (MEAN, STD))
        return fn.crop_mirror_normalize(
            images, dtype=types.FLOAT, output_layout="CHW", mean=mean, std=std, mirror=mirror
        ), labels

    pipeline = dali.pipeline_def(define)(
        batch_size=context.sized(256, 16),
        num_threads=num_cpus(),
        device_id=0 if context.on_gpu else None,
        prefetch_queue_depth=2,
    )
    for (batch,) in plugin.DALIGenericIterator([pipeline], ["image", "label"]):
        yield batch["image"]
