"""User code at default settings: what one item at a time, and processes where that is too slow, cost or bring.

    python -m profiles.user_code [--rounds 7] [--seconds 3] [--out profiles/results]

Each contestant is a process that prints samples/s; they take turns, and each begins a turn with a second that does not count.

- `data set`: opens and resizes photographs by Pillow. At defaults, once its processes have taken over, against DataLoader with
  two workers (bar 1.0).
- `call`: photographs decoded and cropped by built-in stages, then a function in NumPy. At defaults, once warm, against the same
  function in the loader's threads, declared `thread_safe` (bar 0.9).
"""

from __future__ import annotations

import argparse
import json
import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from loaderkit._internal.system.user_cache import default_cache_dir
from loaderkit.cli.demo.photos import demo_data
from profiles.before_after import in_turns, turns_of
from profiles.peers.environments import ROOT
from profiles.record import record

_BARS = {"dataset": 1.0, "call": 0.9}

_PROGRAM = """
import itertools, sys, time
from pathlib import Path
import numpy as np, torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
import loaderkit
from loaderkit import Pipeline

torch.set_num_threads(1)
folder, contestant, seconds, intensity = sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4])


class Photos(Dataset):
    def __init__(self):
        self.files = sorted(Path(folder).rglob("*.jpg"))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        with Image.open(self.files[index]) as image:
            pixels = np.asarray(image.convert("RGB").resize((224, 224)))
        return torch.from_numpy(pixels.copy()), index


def normalize(sample):
    # Operations in NumPy, which leave the GIL free for most of the time.
    pixels = np.asarray(sample["image"]).astype(np.float32)
    for _ in range(intensity):
        pixels = pixels * 1.01 - pixels.mean()
    sample["image"] = pixels


def forever(loader):
    return itertools.chain.from_iterable(itertools.repeat(loader))


def call(**settings):
    return (
        Pipeline.files(folder).shuffle(seed=1).read().decode().random_resized_crop(224)
        .call(normalize, **settings).batch(64)
    )


if __name__ == "__main__":
    if contestant == "dataloader":
        batches = forever(DataLoader(Photos(), 64, shuffle=True, num_workers=2, persistent_workers=True))
    else:
        pipeline = {
            "dataset": lambda: Pipeline.dataset(Photos()).shuffle(seed=1).read().batch(64),
            "call": call,
            "declared": lambda: call(thread_safe=True),
        }[contestant]()
        loader = loaderkit.build(pipeline)
        batches = forever(loader)
    print(loaderkit.__file__, flush=True)

    def rate(seconds):
        begin_s, num = time.perf_counter(), 0
        while (passed_s := time.perf_counter() - begin_s) < seconds:
            next(batches)
            num += 64
        return num / passed_s

    rate(20)  # the tuner has decided, and processes have taken over
    begin_s = time.perf_counter()
    while contestant == "dataset" and loader.stats().tuning.executor != "process":
        assert time.perf_counter() < begin_s + 100, "it has not moved into processes"
        rate(1)
    if contestant != "dataloader":
        tuning = loader.stats().tuning
        print(contestant, tuning.executor, tuning.processes, tuning.batches, file=sys.stderr, flush=True)
    for _ in sys.stdin:
        rate(1)
        print(rate(seconds), flush=True)
"""


def compare(title: str, ours: str, other: str, intensity: int, options: argparse.Namespace) -> dict[str, Any]:
    """A row: the rates of both, and their ratio by rounds."""
    folder = str(demo_data(options.demo, 2000))
    with ExitStack() as stack:
        turns = {
            side: stack.enter_context(turns_of(ROOT, _PROGRAM, folder, name, str(options.seconds), str(intensity)))
            for side, name in (("before", other), ("after", ours))
        }
        rates = in_turns(title, turns, options.rounds, lambda turn: turn())
    ratios = [new / old for new, old in zip(rates["after"], rates["before"], strict=True)]
    return {
        "work": title,
        ours: rates["after"],
        other: rates["before"],
        "ratio": statistics.median(ratios),
        "bar": _BARS[ours],
    }


def main() -> int:
    """0: every bar holds; 1: one does not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", default="data set;call, a little;call, a lot", help="some of these")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=3, help="of a turn")
    parser.add_argument("--demo", type=Path, default=default_cache_dir() / "demo", help="where the photographs are")
    parser.add_argument("--out", type=Path, help="where the result goes, as JSON")
    options = parser.parse_args()
    works = {
        "data set": ("dataset", "dataloader", 0),
        "call, a little": ("call", "declared", 4),
        "call, a lot": ("call", "declared", 24),
    }
    rows = [compare(name, *works[name], options) for name in options.work.split(";") if name in works]
    record(options.out, "user-code", rounds=options.rounds, rows=rows)
    print(json.dumps([{key: row[key] for key in ("work", "ratio", "bar")} for row in rows], indent=1))
    return 0 if all(row["ratio"] >= row["bar"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
