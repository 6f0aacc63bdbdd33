"""What mixing costs on pictures: python -m profiles.mixing [--sources 10] [--pairs 15]

The same JPEGs as one source and as several, each epoch by a loader of its own, in turns: CPU time a picture, and its ratio by
pairs. Prints the median and the quartiles. Beside busy programs the CPU time of a picture rises and falls by more than mixing
costs: wait for a quiet machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import loaderkit
from loaderkit import Pipeline
from profiles.record import record

_NUM_PICTURES = 1500


def linked(photos: Path, place: Path, num_sources: int) -> Path:
    """The photographs below `place`, shared out among folders."""
    for number, path in enumerate(sorted(photos.glob("**/*.jpg"))):
        folder = place / f"{number % num_sources}"
        folder.mkdir(exist_ok=True)
        os.symlink(path, folder / f"{number:05}.jpg")
    return place


def pipelines(place: Path, num_sources: int) -> dict[str, Pipeline]:
    """All of them as one source, and mixed."""
    sources = {f"s{number}": Pipeline.files(place / str(number), include="*.jpg") for number in range(num_sources)}
    begun = {"one": Pipeline.files(place, include="**/*.jpg"), "mixed": Pipeline.mix(sources, stop="all")}
    return {
        name: one.shuffle(seed=0)
        .read()
        .decode()
        .random_resized_crop(224)
        .random_horizontal_flip()
        .batch(64, drop_last=True)
        .normalize()
        for name, one in begun.items()
    }


def cpu_of_epoch(pipeline: Pipeline, epoch: int) -> float:
    """CPU time in s a picture of an epoch, without the start."""
    with loaderkit.build(pipeline, rank=0, world_size=1) as loader:
        loader.set_epoch(epoch)
        batches = iter(loader)
        next(batches)
        begin_s, num = time.process_time(), 0
        for batch in batches:
            num += len(batch["__key__"])
        return (time.process_time() - begin_s) / num


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sources", type=int, default=10)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--photos", type=Path, help="a folder of JPEGs; default: those of the demo")
    parser.add_argument("--out", type=Path, help="a folder for the result")
    args = parser.parse_args()
    photos = args.photos
    if photos is None:
        from loaderkit.cli.demo.photos import demo_data  # needs the extra `demo`

        photos = demo_data(Path.home() / ".cache/loaderkit/demo", _NUM_PICTURES)
    with tempfile.TemporaryDirectory() as place:
        both = pipelines(linked(photos.resolve(), Path(place), args.sources), args.sources)
        for pipeline in both.values():
            cpu_of_epoch(pipeline, 0)
        found: dict[str, list[float]] = {"one": [], "mixed": []}
        for pair in range(args.pairs):
            for name in sorted(both, reverse=pair % 2 == 0):
                found[name].append(cpu_of_epoch(both[name], pair + 1))
    ratios = [mixed / one for one, mixed in zip(found["one"], found["mixed"], strict=True)]
    for name, times in found.items():
        print(f"{name}: {1e6 * statistics.median(times):.0f} us a picture")
    low, median, high = statistics.quantiles(ratios, n=4)
    print(
        f"{args.sources} sources against one: {median:.3f} ({low:.3f} to {high:.3f}) of the CPU time, {args.pairs} pairs"
    )
    record(args.out, "mixing", sources=args.sources, cpu_s=found, ratio=median, quartiles=[low, high])


if __name__ == "__main__":
    main()
