"""Scripts with a DataLoader and one slow line, whose place and kind are drawn. It does 40 times as much as each line beside it.

PYTHONPATH=.:tests/helpers python tests/helpers/slow_lines.py SEED > script.py
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass

_MUCH, _BATCH = 40, 4
_WORK = {
    "loop": ("", "total = sum(i * i for i in range(700 * {n}))"),
    "statistics": ("import statistics", "mean = statistics.mean(range(250 * {n}))"),
    "json": ("import json", "values = json.loads(json.dumps([*range(250 * {n})]))"),
    "hashlib": ("import hashlib", "digest = hashlib.sha256(bytes(40_000 * {n})).digest()"),
    "numpy": ("import numpy as np", "least = np.sort(np.arange(4_000 * {n})[::-1] % 1013)[0]"),
    "pillow": (
        "from PIL import Image",
        "image = Image.new('RGB', (64, 64)).resize((160 * {n}, 40), Image.Resampling.BICUBIC)",
    ),
}
"""Lines that do n times as much: in Python, in Python of a library, in C with and without the GIL."""
_PLACES = ("__getitem__", "helper", "transform", "collate", "__iter__")
_SCRIPT = """
import sys
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
{imports}

class Transform:
    def __call__(self, index):
        {transform}  # transform
        return index

def helper(index):
    {helper}  # helper
    return torch.tensor([index])

transform = Transform()

class Samples(Dataset):
    def __len__(self):
        return {number}

    def __getitem__(self, index):
        index = transform(index)
        {getitem}  # getitem
        return helper(index)

class Stream(IterableDataset):
    def __iter__(self):
        for index in range({number}):
            index = transform(index)
            {iter}  # iter
            yield helper(index)

def collate(samples):
    {collate}  # collate
    return torch.stack(samples)

if __name__ == "__main__":
    loader = DataLoader({dataset}(), batch_size={batch}, collate_fn=collate, {options})
    for batch in loader:
        {step}
        print(batch.shape)
    sys.exit(3)
"""


@dataclass(frozen=True)
class SlowLine:
    """A script, and which of its lines is slow."""

    text: str
    line: int
    part: str  # of torch's fetcher
    num_workers: int
    title: str


def draw(rng: random.Random, *, may_spawn: bool = False, num_batches: int = 40) -> SlowLine:
    """One of them. `may_spawn`: workers may be begun by `spawn`, which needs a program of its own."""
    kind, place, num_workers = rng.choice([*_WORK]), rng.choice(_PLACES), rng.choice([0, 0, 1, 2])
    is_stream = place == "__iter__" or (place != "__getitem__" and num_workers < 2 and rng.random() < 0.3)
    imports, work = _WORK[kind]
    slots = {
        "transform": "transform",
        "helper": "helper",
        "__getitem__": "getitem",
        "__iter__": "iter",
        "collate": "collate",
    }
    amounts = dict.fromkeys(slots.values(), 1)
    amounts[slots[place]] = _MUCH * (_BATCH if place == "collate" else 1)
    lines = {name: work.format(n=amount) for name, amount in amounts.items()}
    options = f"num_workers={num_workers}"
    if may_spawn and num_workers and rng.random() < 0.5:
        options += ", multiprocessing_context='spawn'"
    text = _SCRIPT.format(
        imports=imports,
        number=_BATCH * num_batches,
        batch=_BATCH,
        dataset="Stream" if is_stream else "Samples",
        options=options,
        step=work.format(n=_MUCH),  # of the loop, which is no part of loading
        **lines,
    )
    before = text.partition(f"# {slots[place]}")[0]
    part = "collate_fn" if place == "collate" else "__iter__" if is_stream else "__getitem__"
    return SlowLine(text, before.count("\n") + 1, part, num_workers, f"{kind} in {place}, {options}")


if __name__ == "__main__":
    print(draw(random.Random(int(sys.argv[1])), may_spawn=True).text)
