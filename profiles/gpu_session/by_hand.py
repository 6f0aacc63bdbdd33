"""Decoding on the GPU beside a DALI pipeline written by hand, in turns: pictures a second, and the CPUs that each uses."""

from __future__ import annotations

import importlib
import itertools
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any
from unittest import mock

import torch

import loaderkit
from loaderkit._internal.system.cgroups import num_cpus
from loaderkit.pipeline import dali_lowering
from profiles.gpu_session.bare_dali import bare_pipelines, timed_parts
from profiles.gpu_session.context import Context
from profiles.gpu_session.gpu_decoding import MEAN, STD, decoder
from profiles.gpu_session.pictures_pipeline import SIZE, ahead, crops

_RATIO = 0.98
_TURN_S = 6.0  # a turn with the seconds that it takes to build pipelines
Made = Callable[[], Iterator[torch.Tensor]]


def measure(context: Context) -> None:
    """Ours and DALI by hand, twice in turns; then, as long as there is time, what may limit ours: the time of its parts, more
    threads, other numbers of batches ahead (each is a pipeline, and they share the CPUs), our pipelines without the loader, and
    DALI with chroma upsampled as it is documented."""
    device = decoder(context)
    ours, by_hand = partial(_ours, context, device), partial(_by_hand, context, fancy=True)
    found: dict[str, list[tuple[float, float]]] = {}

    def turn(name: str, make: Made) -> None:
        found.setdefault(name, []).append(_turn(context, make))
        rates, cpus = zip(*found[name], strict=True)
        context.report.add(
            **{f"{name}_images_per_s": statistics.median(rates), f"{name}_cpus": statistics.median(cpus)}
        )

    for contestants in ((("loaderkit", ours), ("dali", by_hand)), (("dali", by_hand), ("loaderkit", ours))):
        for name, make in contestants:
            turn(name, make)
    ratios = [one[0] / two[0] for one, two in zip(found["loaderkit"], found["dali"], strict=True)]
    if context.on_gpu:
        context.report.bar("loaderkit_over_dali", statistics.median(ratios), least=_RATIO)
    else:
        context.report.add(loaderkit_over_dali=statistics.median(ratios))
    causes: dict[str, Callable[[], None]] = {
        "parts": lambda: _parts(context, ours),
        "twice_the_threads": lambda: turn("twice_the_threads", partial(_ours, context, device, times_threads=2)),
        "loaderkit_8_ahead": lambda: turn(
            "loaderkit_8_ahead", partial(_ours, context, device, **{"prefetch.batches": 8})
        ),
        "bare_4": lambda: turn("bare_4", partial(bare_pipelines, context, 4)),
        "bare_2": lambda: turn("bare_2", partial(bare_pipelines, context, 2)),
        "loaderkit_2_ahead": lambda: turn(
            "loaderkit_2_ahead", partial(_ours, context, device, **{"prefetch.batches": 2})
        ),
        "dali_as_documented": lambda: turn("dali_as_documented", partial(_by_hand, context, fancy=False)),
    }
    for cause in causes.values():
        if context.left_s() > _TURN_S:
            cause()


def _parts(context: Context, make: Made) -> None:
    """Where a batch's time goes, in ms of it; `_cpu_ms` of the worker's own thread, nearly all of which holds the GIL."""
    with timed_parts() as parts:
        _turn(context, make)
    context.report.add(**parts)


def _turn(context: Context, make: Made) -> tuple[float, float]:
    """Pictures a second, and CPUs used, once what was made ahead is gone."""
    images = make()
    warm_s, seconds = context.sized((0.6, 1.2), (0.05, 0.1))
    for limit_s in (warm_s, seconds):
        begin_s, cpu_s, count = time.perf_counter(), _cpu_s(), 0
        while time.perf_counter() - begin_s < limit_s or count == 0:
            count += len(next(images))
            context.wait()
        took_s = time.perf_counter() - begin_s
        used_s = _cpu_s() - cpu_s
    with suppress(AttributeError):  # a generator's: it ends its threads
        images.close()  # type: ignore[attr-defined]
    return count / took_s, used_s / took_s


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _ours(context: Context, device: str, *, times_threads: int = 1, **settings: Any) -> Iterator[torch.Tensor]:
    """`times_threads`: of each pipeline; the share of CPUs of one whose batch is prepared is idle."""
    share = dali_lowering._num_threads
    with mock.patch.object(dali_lowering, "_num_threads", lambda *given: times_threads * share(*given)):
        loader = loaderkit.build(crops(context, device), overrides=ahead(**settings))
    with loader:
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
