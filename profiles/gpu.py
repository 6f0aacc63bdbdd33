"""Decoding on the GPU against the CPU and other loaders.

    python -m profiles.gpu PHOTOS [--rounds 5] [--seconds 15] [--out profiles/results]

PHOTOS has one folder of JPEGs a class. In turns, one loader at a time, batches of 256 pictures cropped to 224, normalised,
on the device: loaderkit decoding on the CPU, loaderkit through DALI (`device: gpu`, or `dali-cpu` without a GPU), a DALI
pipeline by hand with its own file reader (with the decoder's settings as they are, and with chroma upsampled as ours does it),
and torch's DataLoader with Pillow and pinned memory. Reported: img/s by themselves; CPUs used; how much of a GPU's time
kernels ran, as the driver says; and the share of the time that a loop with a step of `--step-ms` of matrix products waits. Of
loaderkit decoding on the CPU also how fast it copies to the GPU during those steps, beside a loop of nothing but `copy_` from
pinned memory, and in how much of that time the loop did not wait for copies. On a machine without a GPU everything runs on
the CPU: that says that it works, not how fast it is.

    python -m profiles.gpu PHOTOS --soak 600

Instead: loaderkit through DALI and on the CPU in turns, rebuilt after every minute, for so many seconds, with the memory of
the process, of torch's allocator and of the whole GPU after each.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.metadata
import os
import random
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import loaderkit
from loaderkit import Pipeline, native
from profiles.peers.contestants.pixels import box
from profiles.record import record

BATCH, SIZE = 256, 224
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def ours(photos: Path, decode: Any, num_cpus: int, watched: list[loaderkit.Loader]) -> Iterator[torch.Tensor]:
    """loaderkit; its loader comes into `watched`."""
    pipeline = Pipeline.files(photos, include="**/*.jpg", label="parent").shuffle(seed=0).read().decode(device=decode)
    pipeline = pipeline.random_resized_crop(SIZE).random_horizontal_flip().batch(BATCH, drop_last=True)
    depth = {"prefetch.batches": max(4, num_cpus // 4), "prefetch.memory": "16GiB"}
    with loaderkit.build(
        pipeline.transfer(str(DEVICE)).normalize(), overrides={"prefetch.concurrency": num_cpus, **depth}
    ) as loader:
        watched.append(loader)
        while True:
            for batch in loader:
                yield batch["image"]


def dali_by_hand(photos: Path, num_cpus: int, *, fancy: bool) -> Iterator[torch.Tensor]:
    """What DALI's documentation shows. `fancy`: chroma is upsampled as libjpeg-turbo does it, and our own decoder."""
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


Make = Callable[[list[loaderkit.Loader]], Iterator[torch.Tensor]]


def contestants(photos: Path) -> dict[str, Make]:
    num_cpus = len(os.sched_getaffinity(0))
    through_dali = "gpu" if DEVICE.type == "cuda" else "dali-cpu"
    return {
        "loaderkit, cpu": lambda watched: ours(photos, "cpu", num_cpus, watched),
        f"loaderkit, {through_dali}": lambda watched: ours(photos, through_dali, num_cpus, watched),
        "dali by hand": lambda watched: dali_by_hand(photos, num_cpus, fancy=False),
        "dali by hand, as we decode": lambda watched: dali_by_hand(photos, num_cpus, fancy=True),
        "dataloader": lambda watched: dataloader(photos, num_cpus),
    }


class Step:
    """Matrix products for `step_s` seconds, as measured once, in the place of a forward and a backward pass."""

    def __init__(self, step_s: float) -> None:
        self._matrix = torch.randn(2048 if DEVICE.type == "cuda" else 256, 2048, device=DEVICE)
        self._count = 1
        self()  # the first one sets up what multiplies matrices, which takes longer than to multiply them
        while (took_s := self.took_s()) < step_s / 4 and self._count < 2**20:
            self._count *= 2
        self._count = max(1, round(self._count * step_s / took_s))

    def took_s(self) -> float:
        """How long one takes, by itself."""
        begin = time.perf_counter()
        self()
        return time.perf_counter() - begin

    def __call__(self) -> None:
        for _ in range(self._count):
            torch.mm(self._matrix, self._matrix.T)
        wait()


def wait() -> None:
    """Until the device has done what the loop has asked for; what loaders do ahead, on streams of their own, may go on."""
    if DEVICE.type == "cuda":
        torch.cuda.current_stream().synchronize()


def bare_copies(seconds: float) -> float:
    """Bytes/s at which one batch of uint8 pictures is copied from pinned memory over and over."""
    source = torch.zeros(BATCH, 3, SIZE, SIZE, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device=DEVICE)
    target.copy_(source)
    since_s, num_bytes = time.perf_counter(), 0
    while time.perf_counter() - since_s < seconds:
        for _ in range(10):
            target.copy_(source, non_blocking=True)
        wait()
        num_bytes += 10 * source.nbytes
    return num_bytes / (time.perf_counter() - since_s)


def busy_percent() -> float | None:
    """How much of the last moment kernels ran on the GPU; None if the driver's library is not there."""
    try:
        return float(torch.cuda.utilization())
    except Exception:  # the driver's library has an error of its own
        return None


def cpu_s() -> float:
    """Of this process and of its children that have ended."""
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def measure(make: Make, seconds: float, step: Step) -> dict[str, float | None]:
    cpu_before_s, begin_s = cpu_s(), time.perf_counter()
    watched: list[loaderkit.Loader] = []
    source = make(watched)
    # Until what was made while nobody took it is gone.
    since_s = time.perf_counter()
    while time.perf_counter() - since_s < seconds / 2:
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
    before = [loader.stats() for loader in watched]
    since_s, waited_s = time.perf_counter(), 0.0
    while time.perf_counter() - since_s < seconds:
        before_s = time.perf_counter()
        next(source)
        wait()
        waited_s += time.perf_counter() - before_s
        step()
    stalled = waited_s / (time.perf_counter() - since_s)
    copies: dict[str, float] = {}
    for loader, earlier in zip(watched, before, strict=True):
        copies |= loader.stats(since=earlier).to_dict()["transfer"]
    watched.clear()
    del source
    cpus = (cpu_s() - cpu_before_s) / (time.perf_counter() - begin_s)
    found = {"images_per_s": rate, "stalled": stalled, "cpus": cpus, "gpu_busy_percent": busy}
    if not copies.get("num_bytes", 0) > 2**20 * seconds:  # labels alone say nothing of copies
        copies = {}
    return found | {"copied_bytes_per_s": copies.get("bytes_per_s"), "copy_overlap": copies.get("overlap")}


def soak(photos: Path, seconds: float) -> list[dict[str, float | str]]:
    """Memory after every loader, in MiB."""
    found: list[dict[str, float | str]] = []
    until_s = time.perf_counter() + seconds
    loaders = [(name, make) for name, make in contestants(photos).items() if name.startswith("loaderkit")]
    while time.perf_counter() < until_s:
        name, make = loaders[len(found) % len(loaders)]
        source, since_s, count = make([]), time.perf_counter(), 0
        while time.perf_counter() - since_s < min(60.0, seconds / 10):
            next(source)
            wait()
            count += 1
        del source
        gc.collect()
        row: dict[str, float | str] = {"name": name, "batches": float(count)}
        row["resident"] = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
        if DEVICE.type == "cuda":
            free, total = torch.cuda.mem_get_info()
            row |= {"allocated": torch.cuda.memory_allocated() / 2**20, "on_gpu": (total - free) / 2**20}
        found.append(row)
        print(", ".join(f"{key} {value:,.0f}" if isinstance(value, float) else value for key, value in row.items()))
    return found


def versions() -> dict[str, str]:
    """Of what decodes, and of the driver."""
    found = {"torch": torch.__version__, "cuda": str(torch.version.cuda)}
    for name in ("nvidia-dali-cuda130", "nvidia-nvjpeg", "nvidia-nvimgcodec-cu13"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    driver = Path("/proc/driver/nvidia/version")
    if driver.exists():
        found["driver"] = driver.read_text().partition("\n")[0]
    return found


def compared(found: dict[str, list[dict[str, float | None]]]) -> dict[str, float | None]:
    """What is asked of decoding on the GPU, in the median of the rounds."""

    def ratio(key: str, one: str, other: str) -> float | None:
        pairs = zip((turn[key] for turn in found[one]), (turn[key] for turn in found[other]), strict=True)
        ratios = [a / b for a, b in pairs if a is not None and b]
        return statistics.median(ratios) if ratios else None

    through_dali = "loaderkit, gpu" if DEVICE.type == "cuda" else "loaderkit, dali-cpu"
    names = ("dali by hand", "dali by hand, as we decode", "loaderkit, cpu", "dataloader")
    ratios = {f"{through_dali} / {name}": ratio("images_per_s", through_dali, name) for name in names}
    if "bare copies" in found:
        ratios["copies of loaderkit, cpu / bare copies"] = ratio("copied_bytes_per_s", "loaderkit, cpu", "bare copies")
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each loader by itself, and again with a step")
    parser.add_argument("--soak", type=float, help="seconds in all")
    parser.add_argument("--step-ms", type=float, default=80.0, help="about a ResNet-50 step of 256 pictures")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    facts: dict[str, Any] = {"device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu"} | versions()
    facts |= {"batch": BATCH, "num_photos": sum(1 for _ in arguments.photos.glob("**/*.jpg"))}
    facts |= {"decodes_pieces": native.HAS_JPEG, "kernels_in_c": native.HAS_KERNELS}
    if arguments.soak is not None:
        record(arguments.out, "soak", **facts, rows=soak(arguments.photos, arguments.soak))
        return
    step = Step(arguments.step_ms / 1e3)
    facts |= {"seconds": arguments.seconds, "step_s": statistics.median(step.took_s() for _ in range(5))}
    found: dict[str, list[dict[str, float | None]]] = {}
    for _ in range(arguments.rounds):
        if DEVICE.type == "cuda":
            found.setdefault("bare copies", []).append({"copied_bytes_per_s": bare_copies(arguments.seconds / 4)})
        for name, make in contestants(arguments.photos).items():
            found.setdefault(name, []).append(measure(make, arguments.seconds, step))
    for name, turns in found.items():
        known = {key: [value for turn in turns if (value := turn[key]) is not None] for key in turns[0]}
        print(f"{name:<22}" + ", ".join(f"{key} {statistics.median(v):,.2f}" for key, v in known.items() if v))
    ratios = compared(found)
    for name, value in ratios.items():
        print(f"{name}: {'not known' if value is None else f'{value:.2f}'}")
    record(arguments.out, "gpu", **facts, ratios=ratios, turns=found)


if __name__ == "__main__":
    main()
