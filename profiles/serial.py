"""Lines of text and JSON against Hugging Face `datasets`, TFRecords against `tfrecord` (PyPI), each in a DataLoader: samples
a second over whole shuffled epochs.

    python -m profiles.serial --rounds 5 --samples 200000

Contestants take turns; a figure is the median of the rounds. Their indexes and Arrow files are made before, and files lie in
the page cache. Batches are 64 samples; DataLoader has two workers that stay, loaderkit threads or two processes. `tfrecord`
shuffles by a queue of 1,000 and compares no checksums; loaderkit does, and in one row only that of the length.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

import loaderkit
from loaderkit import Pipeline

BATCH = 64
Contestants = dict[str, Callable[[], Iterable[Any]]]


def write_lines(folder: Path, num: int) -> None:
    """Objects of about 300 bytes: a text, a class, a number and eight tokens; and their texts."""
    rng = np.random.default_rng(0)
    words = ["".join(map(chr, rng.integers(97, 123, size))) for size in rng.integers(2, 10, 5000)]
    with open(folder / "x.jsonl", "w") as objects, open(folder / "x.txt", "w") as texts:
        for number in range(num):
            text = " ".join(words[word] for word in rng.integers(0, len(words), rng.integers(20, 50)))
            tokens = rng.integers(0, 50000, 8).tolist()
            line = {"id": number, "text": text, "label": number % 10, "score": number / 7, "tokens": tokens}
            objects.write(json.dumps(line) + "\n")
            texts.write(text + "\n")


def write_records(folder: Path, num: int) -> None:
    """The same as tf.train.Examples, with DALI's index, by the package `tfrecord`."""
    from tfrecord.tools import create_index  # type: ignore[import-not-found]
    from tfrecord.writer import TFRecordWriter  # type: ignore[import-not-found]

    writer = TFRecordWriter(str(folder / "x.tfrecord"))
    with open(folder / "x.jsonl") as lines:
        for line in itertools.islice(lines, num):
            row = json.loads(line)
            kinds = {"id": "int", "text": "byte", "label": "int", "score": "float", "tokens": "int"}
            row["text"] = row["text"].encode()
            writer.write({name: (row[name], kind) for name, kind in kinds.items()})
    writer.close()
    create_index(str(folder / "x.tfrecord"), str(folder / "x.tfrecord.idx"))


def of_tfrecord(path: Path) -> Callable[[], Iterable[Any]]:
    """Epochs of one DataLoader."""
    from tfrecord.torch.dataset import TFRecordDataset  # type: ignore[import-not-found]
    from torch.utils.data import DataLoader

    data = TFRecordDataset(str(path), f"{path}.idx", shuffle_queue_size=1000)
    loader = DataLoader(data, batch_size=BATCH, num_workers=2, persistent_workers=True)
    return lambda: loader


def of_loaderkit(pipeline: Pipeline, **prefetch: Any) -> Callable[[], Iterable[Any]]:
    """Epochs of one loader."""
    loader = loaderkit.build(pipeline.shuffle(seed=1).read().batch(BATCH).prefetch(**prefetch))
    return lambda: loader


def of_datasets(kind: str, path: Path, cache: Path) -> Callable[[], Iterable[Any]]:
    """Epochs of one DataLoader."""
    import datasets
    from torch.utils.data import DataLoader

    datasets.disable_progress_bars()
    data = datasets.load_dataset(kind, data_files=str(path), split="train", cache_dir=str(cache))
    loader = DataLoader(data, batch_size=BATCH, shuffle=True, num_workers=2, persistent_workers=True)
    return lambda: loader


def samples_per_s(contestants: Contestants, num: int, rounds: int) -> dict[str, list[float]]:
    """Of each, round by round, taking turns; the first epoch of all does not count."""
    figures: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        for name, epoch in contestants.items():
            begin_s = time.perf_counter()
            num_batches = sum(1 for _ in epoch())
            took_s = time.perf_counter() - begin_s
            assert 0 <= num_batches - -(-num // BATCH) <= 1  # two workers may leave two short batches
            if number:
                figures[name].append(num / took_s)
    return figures


def main() -> None:
    """Print the medians and their ratio to the peer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=200_000)
    parser.add_argument("--work", default="json,text,tfrecord")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        os.environ["LOADERKIT_CACHE_DIR"] = str(folder / "cache")
        write_lines(folder, options.samples)
        for work in options.work.split(","):
            for name, (median, ratio) in measured(work, folder, options.samples, options.rounds).items():
                print(f"{work} {name}: {median:,.0f} samples/s, {ratio:.2f} x the peer", flush=True)


def measured(work: str, folder: Path, num: int, rounds: int) -> dict[str, tuple[float, float]]:
    """Of each contestant the median of samples a second, and its ratio to the peer's, the first."""
    if work == "tfrecord":
        write_records(folder, num)
        path = folder / "x.tfrecord"
        pipeline = Pipeline.tfrecord(path)
        contestants: Contestants = {"tfrecord": of_tfrecord(path)}
        contestants["length"] = of_loaderkit(Pipeline.tfrecord(path, verify="length"))
    else:
        path = folder / ("x.jsonl" if work == "json" else "x.txt")
        pipeline = Pipeline.lines(path, format="json" if work == "json" else "text")
        contestants = {"datasets": of_datasets(work, path, folder / "datasets")}
    contestants["thread"] = of_loaderkit(pipeline)
    contestants["process"] = of_loaderkit(pipeline, executor="process", processes=2)
    medians = {name: statistics.median(rates) for name, rates in samples_per_s(contestants, num, rounds).items()}
    first, *_ = medians.values()
    return {name: (median, median / first) for name, median in medians.items()}


if __name__ == "__main__":
    main()
