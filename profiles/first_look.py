"""First look at speed: loaderkit against torch's DataLoader with Pillow, on the same work, in one interleaved run.

    python profiles/first_look.py [--rounds 7] [--images 1500] [--quality 93] [--out profiles/]

Work: JPEG files from the page cache -> random resized crop to 224 (antialiased) -> horizontal flip -> normalise ->
float32 [64, 3, 224, 224], last short batch dropped; two epochs a round, behind the first 8 batches. Both sides decode at
full resolution and resize with an antialiased bilinear filter; crop boxes come from the same distribution, drawn
independently. Two workers each: two processes with DataLoader, two threads with loaderkit. A round measures each, in
alternating order; workers live across rounds; the figures are the median over the rounds of images per second, and the
median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import loaderkit
from loaderkit.demo.photos import demo_data
from loaderkit.formats.tar_index import default_cache_dir

BATCH = 64
NUM_SKIPPED = 8
MEAN = torch.tensor([0.485, 0.456, 0.406]).reshape(3, 1, 1)
STD = torch.tensor([0.229, 0.224, 0.225]).reshape(3, 1, 1)


class PillowDataset(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """The usual map-style data set: Pillow for everything, then a tensor."""

    def __init__(self, folder: Path) -> None:
        classes = sorted(path.name for path in folder.iterdir())
        self.samples = [(path, classes.index(path.parent.name)) for path in sorted(folder.rglob("*.jpg"))]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self.samples[index]
        with Image.open(path) as opened:
            image = opened.convert("RGB")
        left, top, width, height = self._box(*image.size)
        image = image.resize((224, 224), Image.Resampling.BILINEAR, box=(left, top, left + width, top + height))
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        tensor = torch.from_numpy(np.array(image)).permute(2, 0, 1).to(torch.float32).div_(255)
        return tensor.sub_(MEAN).div_(STD), label

    @staticmethod
    def _box(width: int, height: int) -> tuple[int, int, int, int]:
        for _ in range(10):
            area = width * height * random.uniform(0.08, 1.0)
            ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
            w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < w <= width and 0 < h <= height:
                return random.randint(0, width - w), random.randint(0, height - h), w, h
        side = min(width, height)
        return (width - side) // 2, (height - side) // 2, side, side


def recompress(source: Path, target: Path, quality: int) -> Path:
    """The same pictures at another JPEG quality; made once."""
    if not target.exists():
        temporary = target.with_suffix(".part")
        for path in sorted(source.rglob("*.jpg")):
            place = temporary / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            with Image.open(path) as image:
                image.save(place, quality=quality)
        temporary.rename(target)
    return target


def measure(epoch: Callable[[], Any]) -> tuple[float, float, float]:
    """Images per second of two epochs behind their first 8 batches, and mean and spread of the pixels (the same work?).

    The first batches come from what was read ahead before the clock ran, so they do not count, on either side.
    """
    count, total, squares, num_batches = 0, 0.0, 0.0, 0
    begin = 0.0
    for _ in range(2):
        for images, labels in epoch():
            num_batches += 1
            if num_batches == NUM_SKIPPED:
                begin = time.perf_counter()
            elif num_batches > NUM_SKIPPED:
                count += len(labels)
            # Looking at one pixel in a thousand costs both sides the same next to nothing.
            looked = images.flatten()[::1009]
            total += float(looked.mean())
            squares += float(looked.std())
    return count / (time.perf_counter() - begin), total / num_batches, squares / num_batches


def settle(loader: loaderkit.Loader) -> None:
    """Wait until loaderkit has read ahead all it may, so that it takes no CPU from whoever is measured next."""
    memory = loader.stats().memory
    while memory["open_bytes"] < 4 * memory["slab_bytes"]:
        time.sleep(0.05)
        memory = loader.stats().memory
    time.sleep(0.3)


def run(folder: Path, rounds: int) -> dict[str, Any]:
    """All rounds of both sides, and what comes out of them."""
    peer = torch.utils.data.DataLoader(
        PillowDataset(folder),
        batch_size=BATCH,
        shuffle=True,
        drop_last=True,
        num_workers=2,
        persistent_workers=True,
        prefetch_factor=4,
    )
    pipeline = (
        loaderkit.Pipeline.files(folder, include="**/*.jpg", label="parent")
        .read()
        .decode()
        .random_resized_crop(224)
        .random_horizontal_flip()
        .batch(BATCH, drop_last=True)
        .normalize()
        .output("image", "label")
    )
    speeds: dict[str, list[float]] = {"loaderkit": [], "DataLoader + Pillow": []}
    looks: dict[str, list[tuple[float, float]]] = {name: [] for name in speeds}
    with loaderkit.build(pipeline, overrides={"prefetch.concurrency": 2}) as loader:
        sides: list[tuple[str, Callable[[], Any]]] = [
            ("loaderkit", lambda: loader),
            ("DataLoader + Pillow", lambda: peer),
        ]
        for _, epoch in sides:  # workers start, files come into the page cache
            measure(epoch)
        for number in range(rounds):
            for name, epoch in sides if number % 2 else reversed(sides):
                settle(loader)
                speed, mean, spread = measure(epoch)
                speeds[name].append(speed)
                looks[name].append((mean, spread))
                print(f"round {number + 1}: {name:<20} {speed:8.1f} img/s", flush=True)
        stats = loader.stats().to_dict()
    for side in zip(*looks.values(), strict=True):
        (mean, spread), (peer_mean, peer_spread) = side
        assert abs(mean - peer_mean) < 0.05, f"not the same work: means {mean:.3f} and {peer_mean:.3f}"
        assert abs(spread - peer_spread) < 0.05, f"not the same work: spreads {spread:.3f} and {peer_spread:.3f}"
    ratios = [a / b for a, b in zip(*speeds.values(), strict=True)]
    return {
        "mean_file_bytes": round(statistics.mean(path.stat().st_size for path in folder.rglob("*.jpg"))),
        "command": f"python profiles/first_look.py --rounds {rounds}",
        "machine": {"cpus": torch.get_num_threads(), "python": platform.python_version(), "torch": torch.__version__},
        "rounds": speeds,
        "median_img_per_s": {name: statistics.median(values) for name, values in speeds.items()},
        "ratio": {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)},
        "loaderkit_stages": stats["stages"],
        "loaderkit_rss_peak_bytes": stats["memory"]["rss_peak_bytes"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--images", type=int, default=1500)
    parser.add_argument("--data", type=Path, default=default_cache_dir() / "demo")
    parser.add_argument("--out", type=Path, help="write first-look-<machine>-<date>.json here")
    parser.add_argument(
        "--quality", type=int, default=93, help="of the JPEGs; 93 gives about 56 kB, 0 takes the demo's 100 kB"
    )
    arguments = parser.parse_args()
    folder = demo_data(arguments.data, arguments.images, print).train
    if arguments.quality:
        folder = recompress(folder, folder.parent / f"quality-{arguments.quality}", arguments.quality)
    found = run(folder, arguments.rounds)
    found["command"] += f" --images {arguments.images} --quality {arguments.quality}"
    ratio = found["ratio"]
    print(f"\n{'':<22}{'img/s (median)':>16}")
    for name, speed in found["median_img_per_s"].items():
        print(f"{name:<22}{speed:>16.0f}")
    print(f"ratio {ratio['median']:.2f} (rounds: {ratio['least']:.2f} to {ratio['most']:.2f})")
    if arguments.out is not None:
        machine = f"{found['machine']['cpus']}cpu"
        target = arguments.out / f"first-look-{machine}-{date.today().isoformat()}.json"
        target.write_text(json.dumps(found, indent=1) + "\n")
        print(f"written to {target}")


if __name__ == "__main__":
    main()
