"""Packing documents: time and memory of a plan, padding, how even ranks are, and tokens a second against windows of an array.

python -m profiles.packing [--out profiles/results] [--grain PYTHON]      PYTHON: of an environment with grain, measured beside
"""

from __future__ import annotations

import argparse
import struct
import subprocess
import tempfile
import time
import tracemalloc
from bisect import bisect_left, insort
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

import loaderkit
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
    return PackedOrder(order, len(lengths), lengths, length=LENGTH, window=WINDOW, seed=0, is_even=True)


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


def write_index(path: Path, lengths: NDArray[np.int64], dtype: str) -> None:
    """Megatron's .idx of documents one behind another."""
    starts = (np.cumsum(lengths) - lengths) * np.dtype(dtype).itemsize
    bounds = np.arange(len(lengths) + 1)
    code = {"uint16": 8, "int32": 4}[dtype]
    header = struct.pack("<9sQBQQ", b"MMIDIDX", 1, code, len(lengths), len(bounds))
    path.write_bytes(header + lengths.astype("<i4").tobytes() + starts.tobytes() + bounds.tobytes())


def speed(dtype: str, size: int, rounds: int) -> dict[str, Any]:
    """Tokens a second, and a second of CPU time, of an epoch, packed and as windows of the same file, in turns, inline.

    A token that is packed comes with its position and its document, 8 bytes; one in a window with nothing.
    """
    lengths = lognormal(30_000, 6.5)
    with tempfile.TemporaryDirectory() as folder:
        np.ones(lengths.sum(), dtype).tofile(f"{folder}/x.bin")
        write_index(Path(folder, "x.idx"), lengths, dtype)
        batch = {"batch": {"size": size}}
        pipelines: dict[str, dict[str, Any]] = {
            "windows": {
                "source": {"kind": "array", "url": f"{folder}/x.bin", "dtype": dtype, "window": LENGTH},
                "stages": ["read", batch],
            },
            "pack": {
                "source": {"kind": "tokens", "url": f"{folder}/x.bin"},
                "stages": ["read", {"pack": {"length": LENGTH, "window": WINDOW}}, batch],
            },
        }
        rates: dict[str, list[float]] = {name: [] for name in pipelines}
        cpu_rates: dict[str, list[float]] = {name: [] for name in pipelines}
        num = int(lengths.sum()) // LENGTH // size - 20
        for _ in range(rounds):
            for name, pipeline in pipelines.items():
                with loaderkit.build({**pipeline, "prefetch": {"executor": "inline"}}) as loader:
                    batches = iter(loader)
                    for _ in range(10):
                        next(batches)
                    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
                    for _ in range(num):
                        next(batches)
                    num_tokens = num * size * LENGTH
                    rates[name].append(num_tokens / (time.perf_counter() - begin_s))
                    cpu_rates[name].append(num_tokens / (time.process_time() - begin_cpu_s))
    ratio, cpu_ratio = (
        median(one / other for one, other in zip(some["pack"], some["windows"], strict=True))
        for some in (rates, cpu_rates)
    )
    found = {"tokens_per_s": rates, "tokens_per_cpu_s": cpu_rates, "ratio": ratio, "cpu_ratio": cpu_ratio}
    return {"dtype": dtype, "size": size, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--grain", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    found: dict[str, Any] = {"plan": plan(), "padding_percent": padding(given.grain), "most_over_mean": evenness()}
    found["speed"] = [speed(dtype, size, given.rounds) for dtype, size in (("uint16", 16), ("int32", 16))]
    for name, value in found.items():
        print(name, value)
    record(given.out, "packing", **found)


if __name__ == "__main__":
    main()
