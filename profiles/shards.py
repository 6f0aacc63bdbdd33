"""What packing costs beside what has to be done, and what training gains by it.

python -m profiles.shards [--rounds 5] [--photos 1500] [--out profiles/results]

*Packing*, on one core, by CPU time a picture: `loaderkit pack` of photographs shrunk to 256 pixels, against a plain loop of the
same calls (read, decode, shrink, encode, into one file); and of photographs as they are, against Python's tarfile.
*Reading*: one epoch by default threads, from files and from the two packings, raw (`read` and `batch`) and to crops of 224. All
in turns, in the page cache; medians of the rounds.
"""

from __future__ import annotations

import argparse
import io
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import simplejpeg
import torch
from PIL import Image

import loaderkit
from loaderkit import Pipeline
from loaderkit.shards.planning import Options, plan_shards
from loaderkit.shards.run import PackResult, Workers, pack_shards
from profiles.record import record

SHARD_BYTES = 32 * 10**6
SIZE = 256


def write_photos(folder: Path, num: int) -> None:
    """JPEGs of 500 x 375 and about 56 kB, as class folders of 100."""
    rng = np.random.default_rng(1)
    for number in range(num):
        coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), np.uint8)).resize(
            (500, 375), Image.Resampling.BICUBIC
        )
        pixels = np.asarray(coarse, np.float32) + rng.normal(0, 9, (375, 500, 3))
        path = folder / f"{number // 100:03}" / f"{number:05}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path, quality=85)


def packed(pipeline: Pipeline, out: Path) -> PackResult:
    shutil.rmtree(out, ignore_errors=True)
    plan = plan_shards(pipeline.config, Options(str(out), shard_bytes=SHARD_BYTES))
    try:
        return pack_shards(plan, Workers(1), lambda progress: None)
    finally:
        plan.job.plan.close()


def encoded_by_a_loop(photos: list[Path], out: Path) -> None:
    """The same calls and nothing else, into one file."""
    with open(out, "wb") as file:
        for path in photos:
            pixels = simplejpeg.decode_jpeg(path.read_bytes(), "RGB")
            height, width = pixels.shape[:2]
            scale = SIZE / min(height, width)
            planes = torch.from_numpy(pixels).permute(2, 0, 1)[None]
            shrunk = torch.nn.functional.interpolate(
                planes, (round(height * scale), round(width * scale)), mode="bilinear", antialias=True
            )
            rows = np.ascontiguousarray(shrunk[0].permute(1, 2, 0).numpy())
            file.write(simplejpeg.encode_jpeg(rows, 90, "RGB", "420", fastdct=False))


def copied_by_tarfile(photos: list[Path], out: Path) -> None:
    with tarfile.open(out, "w", format=tarfile.GNU_FORMAT) as tar:
        for number, path in enumerate(photos):
            for name, data in (
                (f"{path.stem}.jpg", path.read_bytes()),
                (f"{path.stem}.cls", str(number // 100).encode()),
            ):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


def timed(act: Callable[[], Any]) -> tuple[float, float]:
    """Seconds by the clock and of CPU."""
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    act()
    return time.perf_counter() - begin_s, time.process_time() - begin_cpu_s


def epoch(pipeline: dict[str, Any]) -> float:
    """Samples a second of one epoch, behind its first batch."""
    with loaderkit.build(pipeline) as loader:
        batches = iter(loader)
        num, begin_s = 0, 0.0
        for number, batch in enumerate(batches):
            if not number:
                begin_s = time.perf_counter()
            else:
                num += len(batch["__key__"])
        return num / (time.perf_counter() - begin_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--photos", type=int, default=1500)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_photos(folder / "photos", arguments.photos)
        photos = sorted((folder / "photos").glob("*/*.jpg"))
        files = Pipeline.files(str(folder / "photos"), label="parent").read()
        crops = files.decode().random_resized_crop(224).random_horizontal_flip().batch(64, drop_last=True).normalize()
        small = files.decode().resize(SIZE).random_resized_crop(224).random_horizontal_flip()
        small = small.batch(64, drop_last=True).normalize()
        ways: dict[str, Callable[[], Any]] = {
            "encode: pack": lambda: packed(small, folder / "small"),
            "encode: loop": lambda: encoded_by_a_loop(photos, folder / "loop.bin"),
            "copy: pack": lambda: packed(crops, folder / "whole"),
            "copy: tarfile": lambda: copied_by_tarfile(photos, folder / "plain.tar"),
        }
        costs: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        for _ in range(arguments.rounds + 1):
            for way, act in ways.items():
                costs[way].append(timed(act))
        pipelines = {
            "crops: files": crops.config.to_dict(),
            "crops: packed as they are": packed(crops, folder / "whole").pipeline.to_dict(),
            "crops: packed at 256": packed(small, folder / "small").pipeline.to_dict(),
            "raw: files": files.batch(64).config.to_dict(),
        }
        whole = pipelines["crops: packed as they are"]
        pipelines["raw: packed as they are"] = {**whole, "stages": ["read", {"batch": {"size": 64}}]}
        speeds: dict[str, list[float]] = {way: [] for way in pipelines}
        for number in range(arguments.rounds + 1):
            for way in list(pipelines)[:: 1 if number % 2 else -1]:
                speeds[way].append(epoch(pipelines[way]))
        num = len(photos)
        found: dict[str, Any] = {
            "photos": num,
            "photo_bytes": round(sum(path.stat().st_size for path in photos) / num),
            "us_a_picture": {
                way: [round(1e6 / num * median(each[k] for each in times[1:])) for k in (0, 1)]
                for way, times in costs.items()
            },
            "samples_per_s": {way: round(median(each[1:])) for way, each in speeds.items()},
        }
        for work, peer in (("encode", "loop"), ("copy", "tarfile")):
            pairs = zip(costs[f"{work}: {peer}"][1:], costs[f"{work}: pack"][1:], strict=True)
            found[f"{work}: speed by CPU against {peer}"] = round(median(one[1] / own[1] for one, own in pairs), 3)
        for key, value in found.items():
            print(key, value)
        record(arguments.out, "shards", **found)


if __name__ == "__main__":
    main()
