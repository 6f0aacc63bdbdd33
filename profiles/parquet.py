"""Parquet through loaderkit, through Hugging Face's `datasets` in a DataLoader, and by pyarrow alone.

python -m profiles.parquet [numbers images] [--rounds 5] [--photos 1500] [--out profiles/results]

*Numbers*: rows of one int64, one float32 and 16 float32 in a fixed list, in batches of 256, all shuffled. *Images*: JPEGs of
56 kB as `datasets` stores them, row groups of 100, to crops of 224, in batches of 64, all shuffled; everybody decodes by
simplejpeg. `datasets` has converted the files to Arrow before, outside the clock, and gives torch's tensors to a DataLoader
with two workers. pyarrow reads by `iter_batches`, in the order of the file: numbers to tensors, images only as bytes. An epoch
each, in turns, in the page cache; medians of the rounds, in samples a second.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import simplejpeg
import torch

import loaderkit
from loaderkit import Pipeline
from profiles.record import record
from profiles.shards import write_photos

Epoch = Callable[[], int]
SIZE = 224


def write_numbers(path: Path, num: int) -> None:
    rng = np.random.default_rng(1)
    lists = pa.FixedSizeListArray.from_arrays(pa.array(rng.random(16 * num, np.float32)), 16)
    table = pa.table({"label": rng.integers(0, 1000, num), "weight": rng.random(num, np.float32), "features": lists})
    pq.write_table(table, path, row_group_size=10_000)


def write_images(path: Path, folder: Path, num: int) -> None:
    write_photos(folder, num)
    files = sorted(folder.rglob("*.jpg"))
    images = [{"bytes": file.read_bytes(), "path": file.name} for file in files]
    labels = [int(file.parent.name) for file in files]
    pq.write_table(pa.table({"image": images, "label": labels}), path, row_group_size=100, compression="none")


class Ours:
    """Epochs of one loader."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._loader = loaderkit.build(pipeline)

    def __call__(self) -> int:
        return sum(len(batch["label"]) for batch in self._loader)

    def close(self) -> None:
        self._loader.close()


def cropped(row: dict[str, Any]) -> dict[str, Any]:
    """A row of `datasets`, undecoded: the picture as a random crop of 224, normalized."""
    images = []
    for image in row["image"]:
        pixels = torch.from_numpy(simplejpeg.decode_jpeg(image["bytes"], "RGB")).permute(2, 0, 1)
        side = int(torch.randint(SIZE, min(pixels.shape[1:]) + 1, ()))
        top, left = (int(torch.randint(length - side + 1, ())) for length in pixels.shape[1:])
        crop = pixels[None, :, top : top + side, left : left + side]
        images.append(torch.nn.functional.interpolate(crop, (SIZE, SIZE), mode="bilinear", antialias=True)[0] / 255)
    return {"image": images, "label": row["label"]}


def of_hugging_face(path: Path, cache: Path, size: int, *, images: bool) -> Epoch:
    import datasets
    from torch.utils.data import DataLoader

    rows = datasets.load_dataset("parquet", data_files=str(path), split="train", cache_dir=str(cache))
    rows = rows.with_transform(cropped) if images else rows.with_format("torch")
    loader: Any = DataLoader(rows, size, shuffle=True, num_workers=2, persistent_workers=True, prefetch_factor=4)

    def epoch() -> int:
        return sum(len(batch["label"]) for batch in loader)

    return epoch


def of_pyarrow(path: Path, size: int, *, images: bool) -> Epoch:
    def epoch() -> int:
        return sum(_batches(path, size, images=images))

    return epoch


def _batches(path: Path, size: int, *, images: bool) -> Iterator[int]:
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(size):
            labels = torch.from_numpy(batch["label"].to_numpy().copy())
            if images:
                held = [one["bytes"].as_py() for one in batch["image"]]
                assert len(held) == len(labels)
            else:
                torch.from_numpy(batch["weight"].to_numpy().copy())
                torch.from_numpy(batch["features"].flatten().to_numpy().reshape(-1, 16).copy())
            yield len(labels)


def numbers(folder: Path, num: int) -> dict[str, Any]:
    path = folder / "numbers.parquet"
    write_numbers(path, num)
    source = Pipeline.parquet(str(path))
    return {
        "loaderkit": Ours(source.shuffle(seed=1).read().batch(256)),
        "loaderkit, in order": Ours(source.shuffle("none").read().batch(256)),
        "datasets": of_hugging_face(path, folder / "cache", 256, images=False),
        "pyarrow, in order": of_pyarrow(path, 256, images=False),
    }


def images(folder: Path, num: int) -> dict[str, Any]:
    path = folder / "images.parquet"
    write_images(path, folder / "photos", num)
    source, files = Pipeline.parquet(str(path)), Pipeline.files(str(folder / "photos"), label="parent")
    trained = [
        one.shuffle(seed=1).read().decode().random_resized_crop(SIZE).batch(64).normalize() for one in (source, files)
    ]
    return {
        "loaderkit": Ours(trained[0]),
        "loaderkit, from files": Ours(trained[1]),
        "loaderkit, in order, only bytes": Ours(source.shuffle("none").read().batch(64)),
        "datasets": of_hugging_face(path, folder / "cache", 64, images=True),
        "pyarrow, in order, only bytes": of_pyarrow(path, 64, images=True),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("works", nargs="*", default=["numbers", "images"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--photos", type=int, default=1500)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in options.works:
            make, num = (numbers, options.rows) if name == "numbers" else (images, options.photos)
            contestants = make(Path(folder), num)
            speeds: dict[str, list[float]] = {contestant: [] for contestant in contestants}
            for number in range(options.rounds + 1):
                for contestant, epoch in contestants.items():
                    begin_s = time.perf_counter()
                    num_samples = epoch()
                    assert num_samples == num
                    if number:  # the first is to warm up
                        speeds[contestant].append(num_samples / (time.perf_counter() - begin_s))
            found[name] = {contestant: round(median(these)) for contestant, these in speeds.items()}
            for peer in [one for one in contestants if one.startswith(("datasets", "pyarrow", "loaderkit, from"))]:
                against = peer.replace("pyarrow", "loaderkit") if peer.startswith("pyarrow") else "loaderkit"
                ratios = [one / other for one, other in zip(speeds[against], speeds[peer], strict=True)]
                found[name][f"{against} / {peer}"] = round(median(ratios), 2)
            print(name, found[name])
            for contestant in contestants.values():
                if isinstance(contestant, Ours):
                    contestant.close()
    record(options.out, "parquet", rounds=options.rounds, **found)


if __name__ == "__main__":
    main()
