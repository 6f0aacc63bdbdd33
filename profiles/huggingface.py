"""`kind: huggingface` against torch's DataLoader over the same data set of Hugging Face's, with two workers.

    python -m profiles.huggingface [--kind tokens] [--rounds 7] [--out profiles/results]

`datasets` saves each data set with `save_to_disk`: 60,000 texts of 120 words, 60,000 rows of 512 tokens, or 4,000 JPEGs of
400 x 300, resized to 224. Batches of 64 in random order, from the page cache. The DataLoader keeps its workers, and takes rows
as `datasets` gives them (tokens in its `torch` format). The loaders take turns, an epoch each, each first in every other round,
after one that is not counted.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from PIL import Image
from torch.nn.functional import interpolate
from torch.utils.data import DataLoader

import loaderkit
from loaderkit import Pipeline
from profiles.record import record

KINDS = ("text", "tokens", "image")
NUM = {"text": 60_000, "tokens": 60_000, "image": 4_000}
BATCH = 64


def made(kind: str) -> Any:
    """A data set of `datasets` with the columns of one kind, and a label."""
    rng, num = np.random.default_rng(0), NUM[kind]
    label = rng.integers(0, 9, num)
    if kind == "text":
        return datasets.Dataset.from_dict({"text": ["some words of a document " * 24] * num, "label": label})
    if kind == "tokens":
        return datasets.Dataset.from_dict(
            {"input_ids": [*rng.integers(0, 50_000, (num, 512), dtype=np.int32)], "label": label}
        )
    few = [photograph(rng) for _ in range(30)]
    columns = {"image": [{"bytes": few[number % len(few)], "path": None} for number in range(num)], "label": label}
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(num_classes=9)})
    return datasets.Dataset.from_dict(columns, features=features)


def photograph(rng: np.random.Generator) -> bytes:
    file = io.BytesIO()
    small = Image.fromarray(rng.integers(0, 255, (8, 10, 3), dtype=np.uint8))
    small.resize((400, 300)).save(file, "JPEG", quality=90)
    return file.getvalue()


def resized(rows: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch as a user's collate function makes it."""
    images = [torch.from_numpy(np.array(row["image"].convert("RGB"))).permute(2, 0, 1)[None].float() for row in rows]
    shrunk = [interpolate(image, (224, 224), mode="bilinear", antialias=True)[0].byte() for image in images]
    return torch.stack(shrunk), torch.tensor([row["label"] for row in rows])


def rate_of(batches: Iterable[Any], num: int) -> float:
    """Samples a second of an epoch."""
    begin_s = time.perf_counter()
    for _ in batches:
        pass
    return num / (time.perf_counter() - begin_s)


def measure(kind: str, num_rounds: int) -> dict[str, Any]:
    turns: dict[str, list[float]] = {"loaderkit": [], "torch": []}
    with tempfile.TemporaryDirectory() as folder:
        made(kind).save_to_disk(folder)
        data = datasets.load_from_disk(folder)
        described = Pipeline.huggingface(url=folder).shuffle(seed=1).read()
        if kind == "image":
            described = described.decode().resize([224, 224])
        others: DataLoader[Any] = DataLoader(
            data.with_format("torch") if kind == "tokens" else data,
            batch_size=BATCH,
            shuffle=True,
            num_workers=2,
            persistent_workers=True,
            collate_fn=resized if kind == "image" else None,
        )
        with loaderkit.build(described.batch(BATCH)) as ours:
            for number in range(num_rounds + 1):
                for who in sorted(turns, reverse=number % 2 == 1):
                    rate = rate_of(ours if who == "loaderkit" else others, NUM[kind])
                    turns[who] += [rate] if number else []
        del others
    ratios = [ours / theirs for ours, theirs in zip(turns["loaderkit"], turns["torch"], strict=True)]
    return {"kind": kind, "ratio": statistics.median(ratios), "ratios": ratios, "turns": turns}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", action="append", choices=KINDS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    datasets.disable_progress_bars()
    found = []
    for kind in options.kind or KINDS:
        found.append(measure(kind, options.rounds))
        print(json.dumps(found[-1]))
    record(options.out, "huggingface", rounds=options.rounds, found=found)


if __name__ == "__main__":
    main()
