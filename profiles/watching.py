"""What `loaderkit.watch` adds to a loop, per batch: nothing to iterate over but a list, so that the rest is all its own.

python -m profiles.watching
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader

import loaderkit

NUM_BATCHES, NUM_ROUNDS = 2_000, 7


class Ready(torch.utils.data.Dataset[int]):
    """Samples that cost nothing."""

    def __len__(self) -> int:
        return 4 * NUM_BATCHES

    def __getitem__(self, index: int) -> int:
        return index


def seconds_of(batches: Iterable[Any]) -> float:
    """How long a loop takes that does nothing."""
    begin_s = time.perf_counter()
    for _ in batches:
        pass
    return time.perf_counter() - begin_s


def main() -> None:
    """Print microseconds a batch: the median of rounds, all in turns."""
    batches = [[torch.zeros(4, 8), torch.zeros(4, dtype=torch.int64)] for _ in range(NUM_BATCHES)]
    watched, profiled = loaderkit.watch(batches), loaderkit.watch(batches)
    inline = DataLoader(Ready(), batch_size=4)
    watched_inline = loaderkit.watch(inline)
    times: dict[str, list[float]] = {"bare": [], "watched": [], "with profile": [], "inline": [], "watched inline": []}
    for _ in range(NUM_ROUNDS):
        times["bare"].append(seconds_of(batches))
        times["watched"].append(seconds_of(watched))
        with profiled.profile():
            times["with profile"].append(seconds_of(profiled))
        times["inline"].append(seconds_of(inline))
        times["watched inline"].append(seconds_of(watched_inline))
    each = {name: 1e6 * statistics.median(values) / NUM_BATCHES for name, values in times.items()}
    print(
        f"watched: {each['watched'] - each['bare']:.1f} us a batch, with a profile {each['with profile'] - each['bare']:.1f} us"
    )
    print(
        f"a DataLoader without workers: {each['watched inline'] - each['inline']:.1f} us a batch of {each['inline']:.0f} us"
    )


if __name__ == "__main__":
    main()
