"""How fast records and windows of one file are delivered: python -m profiles.arrays

Records of 16 bytes in batches of 64 and windows of 2,049 uint16 in batches of 16, shuffled, from the page cache, with the
inline executor. Prints median and tenth percentile of the time of a batch; the file is made under the temporary directory.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

import loaderkit
from loaderkit import Pipeline

_NUM_WARM = 300
_NUM_BATCHES = 8000


def batch_seconds(pipeline: Pipeline) -> list[float]:
    """The times of single batches, over as many epochs as it takes."""
    with loaderkit.build(pipeline, overrides={"prefetch.executor": "inline"}) as loader:
        batches = itertools.chain.from_iterable(itertools.repeat(loader))
        for _ in range(_NUM_WARM):
            next(batches)
        found = []
        for _ in range(_NUM_BATCHES):
            begin = time.perf_counter()
            next(batches)
            found.append(time.perf_counter() - begin)
    return found


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "numbers.bin"
        np.random.default_rng(0).integers(0, 2**16, 20_000_000).astype(np.uint16).tofile(path)
        kinds = {
            "records of 16 bytes, 64 a batch": (Pipeline.array(path, dtype="uint16", shape=[8]).read().batch(64), 64),
            "windows of 2,049, 16 a batch": (Pipeline.array(path, dtype="uint16", window=2049).read().batch(16), 16),
        }
        for name, (pipeline, size) in kinds.items():
            seconds = sorted(batch_seconds(pipeline))
            for what, found in (("median", statistics.median(seconds)), ("10 %", seconds[len(seconds) // 10])):
                print(f"{name}: {what} {found * 1e6:.1f} us a batch, {size / found:,.0f} samples/s")


if __name__ == "__main__":
    main()
