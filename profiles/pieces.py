"""What it is worth to decode only the crops of JPEGs: python -m profiles.pieces [--rounds 15] [--out profiles/results]

The same loader with `loaderkit.native._jpeg` and without it, in short turns in one process: photographs to crops of 224, of
`profiles.peers`' data, or loaderkit's demo pictures. By worker threads, and in the training's thread. Reported are the medians
of the rounds: how many times as fast the loader is, and what share of the time decoding takes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import loaderkit
from loaderkit import native
from loaderkit.engine.metrics.snapshot import StageStats
from profiles.overhead import endless, pictures
from profiles.record import record

NUM_SETTLING, NUM_BATCHES = 12, 24


def picture_us(loader: loaderkit.Loader, batches: Iterator[Any]) -> tuple[float, float]:
    """How long a picture takes in all, and a CPU in `decode`, once what was read ahead is used up."""
    for _ in range(NUM_SETTLING):
        next(batches)
    begin, begin_s = decoding(loader), time.perf_counter()
    count = sum(len(next(batches)["label"]) for _ in range(NUM_BATCHES))
    end, end_s = decoding(loader), time.perf_counter()
    decode_us = (end.cpu_s - begin.cpu_s) / (end.num_items - begin.num_items) * 1e6
    return (end_s - begin_s) / count * 1e6, decode_us


def decoding(loader: loaderkit.Loader) -> StageStats:
    return next(stage for stage in loader.stats().stages if stage.name == "decode")


def compare(executor: str, num_rounds: int) -> dict[str, Any]:
    """Both ways in turns, by one loader."""
    found: dict[str, list[tuple[float, float]]] = {"crop": [], "whole": []}
    with loaderkit.build(pictures(), overrides={"prefetch.executor": executor}) as loader:
        batches = endless(loader)
        for number in range(num_rounds + 1):
            for way in list(found)[:: 1 if number % 2 else -1]:
                with patch.object(native, "HAS_JPEG", way == "crop"):
                    found[way].append(picture_us(loader, batches))
    pairs = list(zip(found["whole"][1:], found["crop"][1:], strict=True))  # the first warms up
    speeds = [whole[0] / crop[0] for whole, crop in pairs]
    return {
        "executor": executor,
        "times_as_fast": statistics.median(speeds),
        "rounds": sorted(round(speed, 3) for speed in speeds),
        "share_of_decoding": statistics.median(crop[1] / whole[1] for whole, crop in pairs),
        "decode_us": {way: statistics.median(decode_us for _, decode_us in times[1:]) for way, times in found.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if not native.HAS_JPEG:
        parser.error("loaderkit was built without libjpeg-turbo: there is nothing to compare")
    rows = [compare(executor, arguments.rounds) for executor in ("thread", "inline")]
    for row in rows:
        print(
            f"{row['executor']:8} {row['times_as_fast']:.2f} times as fast; decoding takes {row['share_of_decoding']:.2f} of "
            f"the time, {row['decode_us']['crop']:.0f} instead of {row['decode_us']['whole']:.0f} us a picture"
        )
    record(arguments.out, "pieces", rounds=arguments.rounds, rows=rows)


if __name__ == "__main__":
    main()
