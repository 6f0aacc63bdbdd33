"""What a batch of one-element tensors costs in the training's process: python -m profiles.inline [--rounds 15] [--out FOLDER]

torch's DataLoader, then a loop that does ever more of what loaderkit promises of a batch, then loaderkit itself with `executor:
inline`; in turns, an epoch of 300 batches of 64 each. The first loop is the least that any loader can take: it makes the
tensors, stacks and frees them. What stands between the last loop and loaderkit are the accounts, the stall attribution, state
and errors.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import loaderkit
from loaderkit import Pipeline
from loaderkit.pipeline.batches.slabs import SlabLayout, SlabPool
from loaderkit.samples.chunk import FieldSpec
from loaderkit.sampling.schedule import GlobalOrder
from profiles.record import record

BATCH, NUM_BATCHES = 64, 300


class Numbers(Dataset[torch.Tensor]):
    """One-element tensors, made when they are asked for."""

    def __len__(self) -> int:
        return BATCH * NUM_BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


DATA = Numbers()


def stacked() -> Iterator[torch.Tensor]:
    """Nothing but making the tensors in a random order, and stacking them."""
    order = torch.randperm(len(DATA)).tolist()
    for begin in range(0, len(order), BATCH):
        yield torch.stack([DATA[index] for index in order[begin : begin + BATCH]])


def into_memory_that_is_reused() -> Iterator[dict[str, torch.Tensor]]:
    """The same into slabs of a pool, once nobody sees them any more."""
    pool = SlabPool(SlabLayout.of({"x": FieldSpec("slab", (1,), "float32")}, BATCH), num_kept=8)
    order = torch.randperm(len(DATA)).tolist()
    for begin in range(0, len(order), BATCH):
        batch = {name: slots.tensor for name, slots in pool.take().items()}
        torch.stack([DATA[index] for index in order[begin : begin + BATCH]], out=batch["x"])
        yield batch


def checked() -> Iterator[dict[str, torch.Tensor]]:
    """The same, and values of another type or shape are noticed instead of being converted."""
    pool = SlabPool(SlabLayout.of({"x": FieldSpec("slab", (1,), "float32")}, BATCH), num_kept=8)
    order = torch.randperm(len(DATA)).tolist()
    for begin in range(0, len(order), BATCH):
        batch = {name: slots.tensor for name, slots in pool.take().items()}
        values = [DATA[index] for index in order[begin : begin + BATCH]]
        if {*map(type, values)} != {torch.Tensor} or {value.dtype for value in values} != {torch.float32}:
            raise TypeError("samples of several types")
        torch.stack(values, out=batch["x"])
        yield batch


def with_keys() -> Iterator[dict[str, Any]]:
    """The same in the reproducible order of (seed, epoch), with the keys of the samples."""
    pool = SlabPool(SlabLayout.of({"x": FieldSpec("slab", (1,), "float32")}, BATCH), num_kept=8)
    order = GlobalOrder(len(DATA), 0).indices(0, np.arange(len(DATA)))
    for begin in range(0, len(order), BATCH):
        indices = order[begin : begin + BATCH].tolist()
        batch: dict[str, Any] = {name: slots.tensor for name, slots in pool.take().items()}
        batch["__key__"] = [*map(str, indices)]
        values = []
        for index in indices:
            try:
                values.append(DATA[index])
            except Exception as error:
                raise RuntimeError(f"sample {index}") from error
        if {*map(type, values)} != {torch.Tensor} or {value.dtype for value in values} != {torch.float32}:
            raise TypeError("samples of several types")
        torch.stack(values, out=batch["x"])
        yield batch


def contestants(loader: loaderkit.Loader) -> dict[str, Callable[[], Iterable[Any]]]:
    """What takes turns, by name: each gives an epoch."""
    theirs = DataLoader(DATA, batch_size=BATCH, shuffle=True)
    return {
        "DataLoader": lambda: theirs,
        "make, stack, free": stacked,
        "... into memory that is reused": into_memory_that_is_reused,
        "... types checked": checked,
        "... order, keys, errors that name the sample": with_keys,
        "loaderkit inline": lambda: loader,
    }


def batch_us(epoch: Iterable[Any]) -> float:
    begin = time.perf_counter()
    count = sum(1 for _ in epoch)
    return (time.perf_counter() - begin) / count * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pipeline = Pipeline.dataset(DATA, fields=["x"]).read().batch(BATCH)
    with loaderkit.build(pipeline, overrides={"prefetch.executor": "inline"}) as loader:
        made = contestants(loader)
        times: dict[str, list[float]] = {name: [] for name in made}
        for _ in range(arguments.rounds + 1):
            for name, epoch in made.items():
                times[name].append(batch_us(epoch()))
    times = {name: found[1:] for name, found in times.items()}  # the first warms up
    rows = [
        {
            "what": name,
            "batch_us": statistics.median(found),
            "of_dataloader": statistics.median(a / b for a, b in zip(times["DataLoader"], found, strict=True)),
        }
        for name, found in times.items()
    ]
    for row in rows:
        print(f"{row['what']:48} {row['batch_us']:6.0f} us a batch, {row['of_dataloader']:.2f} of DataLoader's speed")
    record(arguments.out, "inline", rounds=arguments.rounds, rows=rows)


if __name__ == "__main__":
    main()
