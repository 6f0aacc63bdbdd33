"""Four patches of each volume by `expand` against a DataLoader whose data set gives lists of patches, with two workers.

    python -m profiles.patches [--kind npy] [--rounds 7] [--out profiles/results]

Scans of 160^3, float32 with labels of uint8, as `.npy` or int16 as `.nii.gz`, from the page cache; four windows of 64^3 each,
anywhere, mirrored at random; batches of 8, of two scans. The DataLoader's data set reads a scan and returns a list of four, as
MONAI's crops do, which `collate_fn` makes one batch of; it keeps its workers. The loaders take turns, an epoch each, each first
in every other round, after one that is not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import loaderkit
from loaderkit import Pipeline
from profiles.record import record

KINDS = {"npy": "npy", "nifti": "nii.gz"}
SIDE, PATCH, NUM, VOLUMES = 160, 64, 4, 2


def write(folder: Path, kind: str, num: int) -> None:
    for name in ("images", "labels"):
        (folder / name).mkdir()
    rng = np.random.default_rng(0)
    for number in range(num):
        scan = rng.normal(0, 100, (SIDE,) * 3).astype(np.float32)
        label = (scan > 200).astype(np.uint8)
        for name, values in (("images", scan), ("labels", label)):
            path = folder / name / f"{number:03}.{KINDS[kind]}"
            if kind == "npy":
                np.save(path, values)
            else:
                nibabel.Nifti1Image(values.astype(np.int16), np.eye(4)).to_filename(path)


class Patches(Dataset[list[dict[str, torch.Tensor]]]):
    """A scan, of which it gives a list of patches."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.files = [(path, folder / "labels" / path.name) for path in sorted((folder / "images").iterdir())]
        self.read = np.load if kind == "npy" else lambda path: np.asarray(nibabel.load(path).dataobj)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> list[dict[str, torch.Tensor]]:
        image, label = (np.asarray(self.read(path)) for path in self.files[index])
        found = []
        for _ in range(NUM):
            starts = torch.randint(0, SIDE - PATCH + 1, (3,)).tolist()
            window = tuple(slice(start, start + PATCH) for start in starts)
            axes = [axis for axis in range(3) if torch.rand(()) < 0.5]
            patch = {name: np.flip(array[window], tuple(axes)) for name, array in (("image", image), ("label", label))}
            found.append({name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in patch.items()})
        return found


def joined(scans: list[list[dict[str, torch.Tensor]]]) -> dict[str, torch.Tensor]:
    """The patches of all scans as one batch."""
    patches = [patch for scan in scans for patch in scan]
    return {name: torch.stack([patch[name] for patch in patches]) for name in patches[0]}


def rate_of(batches: Iterable[Any], num: int) -> float:
    """Patches a second of an epoch."""
    begin_s = time.perf_counter()
    for batch in batches:
        num -= len(batch["image"])
    assert num == 0
    return 1 / (time.perf_counter() - begin_s)


def measure(kind: str, num_rounds: int, num_scans: int) -> dict[str, Any]:
    turns: dict[str, list[float]] = {"loaderkit": [], "torch": []}
    num = num_scans * NUM
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, kind, num_scans)
        fields = {one: f"{one}s/*.{KINDS[kind]}" for one in ("image", "label")}
        cut = Pipeline.files(folder, fields=fields).shuffle(seed=0).read().decode()
        cut = cut.expand("loaderkit.stages.expand:unchanged", NUM, thread_safe=True)
        cut = cut.random_volume_crop([PATCH] * 3, fields=["image", "label"])
        cut = cut.random_volume_flip(fields=["image", "label"]).batch(NUM * VOLUMES)
        workers: dict[str, Any] = {"num_workers": 2, "persistent_workers": True}
        theirs = DataLoader(Patches(folder, kind), VOLUMES, shuffle=True, collate_fn=joined, **workers)
        with loaderkit.build(cut) as ours:
            loaders: dict[str, Iterable[Any]] = {"loaderkit": ours, "torch": theirs}
            for loader in loaders.values():
                rate_of(loader, num)
            for number in range(num_rounds):
                for one in sorted(loaders, reverse=number % 2 == 1):
                    turns[one].append(num * rate_of(loaders[one], num))
        del theirs
    ratios = [a / b for a, b in zip(turns["loaderkit"], turns["torch"], strict=True)]
    return {
        "kind": kind,
        "ratio": statistics.median(ratios),
        "patches_per_s": {one: statistics.median(values) for one, values in turns.items()},
        "ratios": ratios,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", action="append", choices=KINDS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--scans", type=int, default=24)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = []
    for kind in options.kind or KINDS:
        found.append(measure(kind, options.rounds, options.scans))
        print(json.dumps({key: value for key, value in found[-1].items() if key != "ratios"}, indent=1))
    record(options.out, "patches", rounds=options.rounds, found=found)


if __name__ == "__main__":
    main()
