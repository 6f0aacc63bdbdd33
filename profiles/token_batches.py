"""Batches of tokens: time and memory of a plan, padding beside other ways to batch, and how even the ranks of a step are.

python -m profiles.token_batches [--out profiles/results]
"""

from __future__ import annotations

import argparse
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loaderkit import native
from loaderkit.sampling.packing import Fill, PackedOrder
from loaderkit.sampling.schedule import GlobalOrder
from loaderkit.sampling.token_batches import fill_by_length, fill_in_order
from profiles.record import record

WINDOW, NUM_RANKS = 20_000, 16
WORK = {  # (mean of the logarithms, longest, tokens of a batch)
    "documents of about 1,080 tokens, at most 8,192; batches of 65,536": (6.5, 8192, 65_536),
    "documents of about 1,100 tokens, at most 65,536; batches of 65,536": (6.5, 65_536, 65_536),
    "sentences of about 33 tokens, at most 256; batches of 4,096": (3.0, 256, 4096),
}


def lengths_of(num: int, mean: float, longest: int) -> NDArray[np.int64]:
    """Lengths whose logarithms are normal with a deviation of 1, cut."""
    return np.random.default_rng(0).lognormal(mean, 1, num).astype(np.int64).clip(1, longest)


def plan_of(
    lengths: NDArray[np.int64], tokens: int, fill: Fill, *, window: int = WINDOW, is_even: bool = True
) -> PackedOrder:
    order, in_order = GlobalOrder(len(lengths), 0), fill is fill_in_order
    return PackedOrder(
        order,
        lengths,
        length=tokens,
        window=window,
        seed=0,
        is_even=is_even and not in_order,
        keeps_order=in_order,
        fill=fill,
    )


def cost_of_plan(fill: Fill, num: int = 5_000_000) -> dict[str, Any]:
    """Seconds of CPU time and the most memory of counting an epoch's batches, and seconds to put a span of windows in order."""
    mean, longest, tokens = next(iter(WORK.values()))
    lengths = lengths_of(num, mean, longest)
    times = []
    for _ in range(5):
        order = plan_of(lengths, tokens, fill)
        begin_s = time.process_time()
        num_batches = order.num_samples(0)
        times.append(time.process_time() - begin_s)
    begin_s = time.process_time()
    order.pieces(0, np.zeros(1, np.int64))
    span_s = time.process_time() - begin_s
    tracemalloc.start()
    plan_of(lengths, tokens, fill).num_samples(0)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {"num_samples": num, "num_batches": num_batches, "cpu_s": times, "span_cpu_s": span_s, "most_bytes": most}


def areas_and_costs(order: PackedOrder, *, is_padded: bool = True) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of an epoch's batches the tokens, and the attention: of padded ones both with the padding."""
    pieces = order.pieces(0, np.arange(order.num_samples(0)))
    firsts = pieces.bounds[:-1]
    if not is_padded:
        return np.add.reduceat(pieces.lengths, firsts), np.add.reduceat(pieces.lengths**2, firsts)
    num, longest = np.diff(pieces.bounds), np.maximum.reduceat(pieces.lengths, firsts)
    return num * longest, num * longest**2


def most_over_mean(costs: NDArray[np.int64]) -> float:
    """Summed over the steps of an epoch."""
    steps = costs[: len(costs) // NUM_RANKS * NUM_RANKS].reshape(-1, NUM_RANKS)
    return float(steps.max(1).sum() / steps.mean(1).sum())


def compare(mean: float, longest: int, tokens: int, num: int = 1_000_000) -> dict[str, dict[str, float]]:
    """Percent of padding, batches, and most over mean of tokens and attention on 16 ranks, by way to batch."""
    lengths = lengths_of(num, mean, longest)
    plans = {
        f"planned, window {WINDOW}": plan_of(lengths, tokens, fill_by_length),
        "planned, window 2,000": plan_of(lengths, tokens, fill_by_length, window=2000),
        f"planned, window {WINDOW}, cost none": plan_of(lengths, tokens, fill_by_length, is_even=False),
        "the whole epoch sorted": plan_of(lengths, tokens, fill_by_length, window=num),
        "in random order": plan_of(lengths, tokens, fill_in_order, window=32_768),
        f"lists, window {WINDOW}": plan_of(lengths, tokens, native.best_fit),
    }
    rows = {}
    for name, order in plans.items():
        areas, costs = areas_and_costs(order, is_padded=not name.startswith("lists"))
        taken = areas.sum() if not name.startswith("lists") else len(areas) * tokens
        rows[name] = {
            "padding_percent": 100 * (1 - float(lengths.sum()) / float(taken)),
            "num_batches": len(areas),
            "tokens_most_over_mean": most_over_mean(areas),
            "attention_most_over_mean": most_over_mean(costs),
        }
    size = num // int(rows[f"planned, window {WINDOW}"]["num_batches"])
    shuffled = lengths[GlobalOrder(num, 0).indices(0, np.arange(num // size * size))].reshape(-1, size)
    padded = shuffled.max(1) * size
    rows[f"batches of {size} in random order"] = {
        "padding_percent": 100 * (1 - float(shuffled.sum()) / float(padded.sum())),
        "num_batches": len(padded),
        "tokens_most_over_mean": most_over_mean(padded),
        "attention_most_over_mean": most_over_mean(shuffled.max(1) * padded),
    }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found: dict[str, Any] = {
        "plan": {"pad": cost_of_plan(fill_by_length), "list": cost_of_plan(native.best_fit)},
        "batches": {name: compare(*work) for name, work in WORK.items()},
    }
    for name, value in found.items():
        for what, row in value.items():
            print(name, what)
            for key, numbers in row.items():
                print("   ", key, numbers)
    record(given.out, "token-batches", **found)


if __name__ == "__main__":
    main()
