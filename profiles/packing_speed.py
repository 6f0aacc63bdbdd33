"""Tokens a second of packed documents, against windows of the same file, without a loader, and Grain's packing.

python -m profiles.packing_speed [--out profiles/results] [--grain PYTHON]      PYTHON: of an environment with grain

A packed token comes with its position and its document, 8 bytes; one in a window with nothing. A document takes a read of its
own, a window one read. So `bare` shows what is left to gain: the same bytes by as many reads into the same places, in C, and
the two fields copied from arrays that are there, and nothing else. All in turns, one batch of 131,072 tokens after another.
"""

from __future__ import annotations

import argparse
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

import loaderkit
from loaderkit import native
from loaderkit.sampling.packing import PackedOrder
from loaderkit.sampling.schedule import GlobalOrder
from profiles.packing import lognormal
from profiles.record import record

BATCH_TOKENS, NUM_TOKENS, WINDOW = 131_072, 33_000_000, 20_000
GRAIN = """
import sys
import time
import numpy as np
import grain
path, dtype, length, size, num = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
tokens, ends = np.memmap(path, dtype, "r"), np.load(path + ".ends.npy")
class Documents:
    def __len__(self):
        return len(ends)
    def __getitem__(self, i):
        return {"x": tokens[ends[i - 1] if i else 0 : ends[i]][:length]}
data = grain.MapDataset.source(Documents()).seed(0).shuffle().to_iter_dataset()
data = grain.experimental.BestFitPackIterDataset(data, length_struct={"x": length}, num_packing_bins=64)
batches = iter(data.batch(size))
for _ in range(4):
    next(batches)
begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
for _ in range(num):
    next(batches)
print(num / (time.perf_counter() - begin_s), num / (time.process_time() - begin_cpu_s))
"""
Rate = tuple[float, float]
"""Batches a second, and a second of CPU time."""


def timed(next_batch: Callable[[int], Any], num: int) -> Rate:
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    for number in range(num):
        next_batch(number)
    return num / (time.perf_counter() - begin_s), num / (time.process_time() - begin_cpu_s)


def loaded(pipeline: dict[str, Any], num: int) -> Rate:
    with loaderkit.build(pipeline) as loader:
        batches = iter(loader)
        for _ in range(10):
            next(batches)
        return timed(lambda number: next(batches), num)


def bare_windows(path: Path, dtype: str, length: int, size: int) -> Callable[[int], Any]:
    tokens = np.empty((size, length), dtype)
    num_windows = path.stat().st_size // tokens.itemsize - length
    starts = GlobalOrder(num_windows, 0).indices(0, np.arange(NUM_TOKENS // length)) * tokens.itemsize
    memory, num_bytes = tokens.data.cast("B"), length * tokens.itemsize
    return lambda n: native.gather_ranges(str(path), starts[n * size : (n + 1) * size], num_bytes, memory)


def bare_pieces(path: Path, dtype: str, lengths: NDArray[np.int64], length: int, size: int) -> Callable[[int], Any]:
    tokens, fields = np.empty((size, length), dtype), np.empty((2, size, length), np.int32)
    marks = np.zeros((2, size, length), np.int32)
    item, memory = tokens.itemsize, tokens.data.cast("B")
    order = GlobalOrder(len(lengths), 0)
    packed = PackedOrder(order, lengths, length=length, window=WINDOW, seed=0, is_even=True)
    first_bytes = (np.cumsum(lengths) - lengths) * item
    ranges = []
    for begin in range(0, packed.num_samples(0) - size, size):
        pieces = packed.pieces(0, np.arange(begin, begin + size))
        starts = first_bytes[pieces.samples] + pieces.firsts * item
        ranges.append((starts, pieces.lengths * item, pieces.places * item))

    def next_batch(number: int) -> None:
        native.scatter_ranges(str(path), *ranges[number], memory)
        np.copyto(fields, marks)

    return next_batch


def write_tokens(path: Path, lengths: NDArray[np.int64], dtype: str) -> None:
    """Megatron's .bin and .idx of documents one behind another, and their ends for Grain."""
    ends = np.cumsum(lengths)
    (np.arange(ends[-1]) % 30_000).astype(dtype).tofile(path)
    np.save(f"{path}.ends.npy", ends)
    starts = (ends - lengths) * np.dtype(dtype).itemsize
    code = {"uint16": 8, "int32": 4}[dtype]
    header = struct.pack("<9sQBQQ", b"MMIDIDX", 1, code, len(lengths), len(lengths) + 1)
    index = header + lengths.astype("<i4").tobytes() + starts.tobytes() + np.arange(len(lengths) + 1).tobytes()
    path.with_suffix(".idx").write_bytes(index)


def compare(dtype: str, length: int, mean: int, *, rounds: int, grain: Path | None) -> dict[str, Any]:
    """Tokens a second, of all and by name, with documents of about `mean` tokens; ratios to windows, made alike."""
    lengths = lognormal(NUM_TOKENS // mean, float(np.log(mean) - 0.5))
    size = BATCH_TOKENS // length
    num = int(lengths.sum()) // BATCH_TOKENS - 20
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.bin")
        write_tokens(path, lengths, dtype)
        stages = ["read", {"pack": {"length": length, "window": WINDOW}}, {"batch": {"size": size}}]
        pack: dict[str, Any] = {"source": {"kind": "tokens", "url": str(path)}, "stages": stages}
        windows: dict[str, Any] = {
            "source": {"kind": "array", "url": str(path), "dtype": dtype, "window": length},
            "stages": ["read", {"batch": {"size": size}}],
        }
        few = {**pack, "output": ["input_ids", "cu_seqlens"]}
        run: dict[str, Callable[[], Rate]] = {}
        for executor in ("inline", "thread"):
            chosen = {} if executor == "thread" else {"prefetch": {"executor": executor}}
            for name, pipeline in (("windows", windows), ("pack", pack), ("pack, two fields", few)):
                run[f"{name}, {executor}"] = partial(loaded, {**pipeline, **chosen}, num)
        run["bare windows"] = lambda: timed(bare_windows(path, dtype, length, size), num)
        run["bare pack"] = lambda: timed(bare_pieces(path, dtype, lengths, length, size), num)
        if grain is not None:
            command = [str(grain), "-c", GRAIN, str(path), dtype, *map(str, (length, size, num // 32))]
            run["Grain"] = lambda: rate_of(command)
        rates: dict[str, list[Rate]] = {name: [] for name in run}
        for _ in range(rounds):
            for name, once in run.items():
                rates[name].append(once())
    per_s = {
        name: [[BATCH_TOKENS * rate for rate in rates_of] for rates_of in zip(*of_name, strict=True)]
        for name, of_name in rates.items()
    }
    ratios = {}
    for executor in ("inline", "thread"):
        base = rates[f"windows, {executor}"]
        for name in (f"pack, {executor}", f"pack, two fields, {executor}", "bare pack"):
            ratios[f"{name} / windows, {executor}"] = [
                median(one[k] / other[k] for one, other in zip(rates[name], base, strict=True)) for k in (0, 1)
            ]
    return {"dtype": dtype, "length": length, "mean": mean, "ratios": ratios, "tokens_per_s": per_s}


def rate_of(command: list[str]) -> Rate:
    words = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return float(words[0]), float(words[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--grain", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    rows = []
    for dtype in ("uint16", "int32"):
        for length in (2048, 8192):
            for mean in (300, 1100):
                row = compare(dtype, length, mean, rounds=given.rounds, grain=given.grain)
                rows.append(row)
                print(dtype, length, mean)
                for name, (per_s, per_cpu_s) in row["tokens_per_s"].items():
                    print(f"    {name:26} {median(per_s) / 1e6:6.0f} M/s {median(per_cpu_s) / 1e6:6.0f} M/s of CPU")
                for name, (ratio, cpu_ratio) in row["ratios"].items():
                    print(f"    {name:50} {ratio:.2f} {cpu_ratio:.2f}")
    record(given.out, "packing-speed", about="[wall-clock, CPU time] of each", rows=rows)


if __name__ == "__main__":
    main()
