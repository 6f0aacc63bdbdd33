"""Packing documents: time and memory of a plan, padding, and how even ranks are.

python -m profiles.packing [--out profiles/results] [--grain PYTHON]      PYTHON: of an environment with grain, measured beside
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import time
import tracemalloc
from bisect import bisect_left, insort
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loaderkit.sampling.packing import PackedOrder
from loaderkit.sampling.schedule import GlobalOrder
from profiles.record import record

LENGTH, WINDOW = 8192, 20_000
GRAIN = """
import sys
import numpy as np
import grain
lengths, length, bins = np.load(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
data = grain.MapDataset.source([{"x": np.ones(n, np.uint8)} for n in lengths]).to_iter_dataset()
packed = grain.experimental.BestFitPackIterDataset(data, length_struct={"x": length}, num_packing_bins=bins)
print(sum(1 for _ in packed))
"""


def lognormal(num: int, mean: float) -> NDArray[np.int64]:
    """Lengths whose logarithms are normal, of that mean, with a deviation of 1."""
    return np.maximum(1, np.random.default_rng(0).lognormal(mean, 1, num).astype(np.int64))


def order_of(lengths: NDArray[np.int64]) -> PackedOrder:
    order = GlobalOrder(len(lengths), 0)
    return PackedOrder(order, lengths, length=LENGTH, window=WINDOW, seed=0, is_even=True)


def plan(num: int = 5_000_000) -> dict[str, Any]:
    """Seconds and the most memory of a plan of that many documents, without their lengths."""
    lengths = lognormal(num, 6.5)
    times = []
    for _ in range(5):
        order = order_of(lengths)
        begin_s = time.perf_counter()
        num_sequences = order.num_samples(0)
        times.append(time.perf_counter() - begin_s)
    tracemalloc.start()
    order_of(lengths).num_samples(0)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    padding = 100 * (1 - lengths.sum() / num_sequences / LENGTH)
    return {"num_documents": num, "seconds": times, "most_bytes": most, "padding_percent": padding}


def best_fit(lengths: list[int]) -> int:
    """The sequences that best fit makes of documents as they come, none longer than a sequence."""
    spaces: list[int] = []
    num = 0
    for size in lengths:
        at = bisect_left(spaces, size)
        if at == len(spaces):
            num += 1
            insort(spaces, LENGTH - size)
        else:
            insort(spaces, spaces.pop(at) - size)
    return num


def padding(grain: Path | None, num: int = 2 * WINDOW) -> dict[str, float]:
    """Percent of padding of one order of documents: as planned, best fit of each window, and Grain's with many open bins."""
    lengths = np.minimum(lognormal(num, 6.5), LENGTH)
    in_order = lengths[GlobalOrder(num, 0).indices(0, np.arange(num))]
    numbers = {"plan": order_of(lengths).num_samples(0)}
    numbers["best fit"] = sum(best_fit(in_order[at : at + WINDOW].tolist()) for at in range(0, num, WINDOW))
    if grain is not None:
        with tempfile.TemporaryDirectory() as folder:
            np.save(f"{folder}/lengths.npy", in_order)
            for bins in (64, 1024):
                command = [str(grain), "-c", GRAIN, f"{folder}/lengths.npy", str(LENGTH), str(bins)]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                numbers[f"Grain's BestFit, {bins} bins"] = int(done.stdout.split()[-1])
    return {name: 100 * (1 - float(lengths.sum()) / number / LENGTH) for name, number in numbers.items()}


def evenness() -> dict[str, dict[str, float]]:
    """Most over mean of the sums of squares of the ranks of a step, summed over steps; and in random order."""
    rows = {}
    for mean in (5.2, 6.5):
        order = order_of(lognormal(700_000, mean))
        pieces = order.pieces(0, np.arange(order.num_samples(0)))
        costs = np.add.reduceat(pieces.lengths.astype(np.float64) ** 2, pieces.bounds[:-1])
        for size, ranks in ((1, 16), (4, 16), (1, 12)):
            num = len(costs) // (size * ranks) * size * ranks
            row = {}
            for name, ordered in (("plan", costs), ("random", np.random.default_rng(0).permutation(costs))):
                steps = ordered[:num].reshape(-1, size, ranks).sum(1)
                row[name] = float(steps.max(1).sum() / steps.mean(1).sum())
            rows[f"documents of about {int(np.exp(mean + 0.5))} tokens, {size} x {ranks} ranks"] = row
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--grain", type=Path)
    given = parser.parse_args()
    found: dict[str, Any] = {"plan": plan(), "padding_percent": padding(given.grain), "most_over_mean": evenness()}
    for name, value in found.items():
        print(name, value)
    record(given.out, "packing", **found)


if __name__ == "__main__":
    main()
