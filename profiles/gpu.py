"""Decoding on the GPU against the CPU and other loaders.

    python -m profiles.gpu PHOTOS [--rounds 5] [--seconds 4] [--out profiles]

PHOTOS has one folder of JPEGs a class. In turns, one loader at a time, batches of 256 pictures cropped to 224, normalised,
on the device: loaderkit decoding on the CPU, loaderkit through DALI (`device: gpu`, or `dali-cpu` without a GPU), a DALI
pipeline by hand with its own file reader, and torch's DataLoader with Pillow and pinned memory. Reported: img/s by themselves;
CPUs used; how much of a GPU's time kernels ran, as the driver says; and the share of the time that a loop with a step of
`--step-ms` of matrix products waits. On a machine without a GPU everything runs on the CPU: that says that it works, not how
fast it is.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import random
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import loaderkit
from loaderkit import Pipeline
from profiles.peers.contestants.pixels import box

BATCH, SIZE = 256, 224
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def ours(photos: Path, decode: str, num_cpus: int) -> Iterator[torch.Tensor]:
    """loaderkit."""
    pipeline = Pipeline.files(photos, include="**/*.jpg", label="parent").shuffle(seed=0).read().decode(device=decode)
    pipeline = pipeline.random_resized_crop(SIZE).random_horizontal_flip().batch(BATCH, drop_last=True)
    with loaderkit.build(
        pipeline.transfer(str(DEVICE)).normalize(), overrides={"prefetch.concurrency": num_cpus}
    ) as loader:
        while True:
            for batch in loader:
                yield batch["image"]


def dali_by_hand(photos: Path, num_cpus: int) -> Iterator[torch.Tensor]:
    """What DALI's documentation shows."""
    dali: Any = importlib.import_module("nvidia.dali")
    plugin: Any = importlib.import_module("nvidia.dali.plugin.pytorch")
    fn, types = dali.fn, dali.types
    on_gpu = DEVICE.type == "cuda"

    def define() -> Any:
        encoded, labels = fn.readers.file(file_root=str(photos), random_shuffle=True, name="reader")
        images = fn.decoders.image_random_crop(
            encoded,
            device="mixed" if on_gpu else "cpu",
            output_type=types.RGB,
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
        batch_size=BATCH, num_threads=num_cpus, device_id=0 if on_gpu else None, prefetch_queue_depth=2
    )
    for (batch,) in plugin.DALIGenericIterator([pipeline], ["image", "label"]):
        yield batch["image"]


class Pictures(torch.utils.data.Dataset[torch.Tensor]):
    """What a user's own data set does."""

    def __init__(self, photos: Path) -> None:
        self._paths = sorted(photos.glob("**/*.jpg"))
        self._mean = torch.tensor(MEAN)[:, None, None]
        self._std = torch.tensor(STD)[:, None, None]

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        with Image.open(self._paths[index]) as file:
            picture = file.convert("RGB")
        left, top, width, height = box(*picture.size)
        part = picture.resize((SIZE, SIZE), Image.Resampling.BILINEAR, (left, top, left + width, top + height))
        pixels = torch.from_numpy(np.array(part)).permute(2, 0, 1)
        if random.random() < 0.5:
            pixels = pixels.flip(2)
        return (pixels.float() / 255 - self._mean) / self._std


def dataloader(photos: Path, num_cpus: int) -> Iterator[torch.Tensor]:
    """torch's DataLoader."""
    loader = torch.utils.data.DataLoader(
        Pictures(photos),
        batch_size=BATCH,
        shuffle=True,
        drop_last=True,
        num_workers=num_cpus,
        pin_memory=DEVICE.type == "cuda",
        persistent_workers=True,
    )
    while True:
        for images in loader:
            yield images.to(DEVICE, non_blocking=True)


def contestants(photos: Path) -> dict[str, Callable[[], Iterator[torch.Tensor]]]:
    num_cpus = len(os.sched_getaffinity(0))
    through_dali = "gpu" if DEVICE.type == "cuda" else "dali-cpu"
    return {
        "loaderkit, cpu": lambda: ours(photos, "cpu", num_cpus),
        f"loaderkit, {through_dali}": lambda: ours(photos, through_dali, num_cpus),
        "dali by hand": lambda: dali_by_hand(photos, num_cpus),
        "dataloader": lambda: dataloader(photos, num_cpus),
    }


class Step:
    """Matrix products for about `step_s` seconds, in the place of a forward and a backward pass."""

    def __init__(self, step_s: float) -> None:
        self._matrix = torch.randn(2048 if DEVICE.type == "cuda" else 256, 2048, device=DEVICE)
        self._count = 1
        while self._count < 2**20:
            begin = time.perf_counter()
            self()
            if time.perf_counter() - begin >= step_s:
                return
            self._count *= 2

    def __call__(self) -> None:
        for _ in range(self._count):
            torch.mm(self._matrix, self._matrix.T)
        wait()


def wait() -> None:
    """Until the device has done everything."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def busy_percent() -> float | None:
    """How much of the last moment kernels ran on the GPU; None if the driver's library is not there."""
    try:
        return float(torch.cuda.utilization())
    except (AssertionError, ImportError, RuntimeError):
        return None


def cpu_s() -> float:
    """Of this process and of its children that have ended."""
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def measure(make: Callable[[], Iterator[torch.Tensor]], seconds: float, step: Step) -> dict[str, float | None]:
    cpu_before_s, begin_s = cpu_s(), time.perf_counter()
    source = make()
    for _ in range(4):
        images = next(source)
        assert images.shape == (BATCH, 3, SIZE, SIZE), images.shape
    wait()
    since_s, count = time.perf_counter(), 0
    while time.perf_counter() - since_s < seconds:
        next(source)
        wait()
        count += BATCH
    rate = count / (time.perf_counter() - since_s)
    busy = busy_percent()
    since_s, waited_s = time.perf_counter(), 0.0
    while time.perf_counter() - since_s < seconds:
        before_s = time.perf_counter()
        next(source)
        wait()
        waited_s += time.perf_counter() - before_s
        step()
    stalled = waited_s / (time.perf_counter() - since_s)
    del source
    cpus = (cpu_s() - cpu_before_s) / (time.perf_counter() - begin_s)
    return {"images_per_s": rate, "stalled": stalled, "cpus": cpus, "gpu_busy_percent": busy}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--step-ms", type=float, default=80.0, help="about a ResNet-50 step of 256 pictures")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    step = Step(arguments.step_ms / 1e3)
    found: dict[str, list[dict[str, float | None]]] = {}
    for _ in range(arguments.rounds):
        for name, make in contestants(arguments.photos).items():
            found.setdefault(name, []).append(measure(make, arguments.seconds, step))
    for name, turns in found.items():
        known = {key: [value for turn in turns if (value := turn[key]) is not None] for key in turns[0]}
        print(f"{name:<22}" + ", ".join(f"{key} {statistics.median(v):,.2f}" for key, v in known.items() if v))
    if arguments.out is not None:
        machine = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu"
        slug = machine.lower().replace(" ", "-")
        facts = {"device": machine, "cpus": len(os.sched_getaffinity(0)), "python": platform.python_version()}
        path = arguments.out / f"gpu-{slug}-{datetime.now(UTC).date().isoformat()}.json"
        path.write_text(json.dumps({**facts, "torch": torch.__version__, "turns": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
