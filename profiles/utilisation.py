"""The utilisation of `loader.profile()` beside MLPerf Storage's AU, on the same data and step.

    python -m profiles.utilisation [--dlio CHECKOUT] [--rounds 5] [--works records] [--out profiles/results]

AU is what DLIO, MLPerf Storage's program, says with loaderkit as its data loader: from a checkout, whose dependencies this
Python must have, and from a stand-in: a loop with DLIO's definition, without its logs. Each is a process of its own, with
`loader.profile()` around the same loop: between two runs AU itself may differ by 10 points, if other programs run beside.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import loaderkit
from loaderkit import Pipeline
from profiles.record import record

ROOT = Path(__file__).parents[1]
_VOLUME_BYTES = 36_000_000


@dataclass(frozen=True)
class Work:
    """Data in files of one format, a pipeline on their folder, and a training step. `num_samples`: of each file."""

    name: str
    format: str
    num_files: int
    num_samples: int
    make: Callable[[Path, int], None]
    pipeline: Callable[[Path], Pipeline]
    batch: int
    step_s: float
    epochs: int


def _volume(path: Path, number: int) -> None:
    np.savez(path, x=np.full((_VOLUME_BYTES,), number, np.uint8))


def _unequal_volume(path: Path, number: int) -> None:
    np.savez(path, x=np.full((_VOLUME_BYTES // 24 * (12 + number),), number, np.uint8))


def _picture(path: Path, number: int) -> None:
    pixels = np.random.default_rng(number).integers(0, 256, (25, 25, 3), np.uint8)
    Image.fromarray(pixels).resize((400, 400)).save(path, "jpeg", quality=92)


def _records(path: Path, number: int) -> None:
    np.save(path, np.random.default_rng(number).random((8_000, 512), np.float32))


def _volumes(folder: Path, **settings: Any) -> Pipeline:
    return Pipeline.files(folder, include="*.npz").read().decode().batch(4, **settings)


def _pictures(folder: Path) -> Pipeline:
    pipeline = Pipeline.files(folder, include="*.jpeg").read().decode().random_resized_crop(224)
    return pipeline.random_horizontal_flip().batch(32).normalize()


def _unequal_volumes(folder: Path) -> Pipeline:
    return _volumes(folder, ragged={"x": "list"})


def _batched_records(folder: Path) -> Pipeline:
    return Pipeline.array(folder / "0000.npy").read().batch(64)


WORKS = (
    Work("volumes", "npz", 24, 1, _volume, _volumes, 4, 0.3, 4),
    Work("unequal-volumes", "npz", 24, 1, _unequal_volume, _unequal_volumes, 4, 0.3, 4),
    Work("pictures", "jpeg", 1280, 1, _picture, _pictures, 32, 0.15, 2),
    Work("records", "npy", 1, 8_000, _records, _batched_records, 64, 0.02, 3),
    Work("records-short-step", "npy", 1, 8_000, _records, _batched_records, 64, 0.005, 4),
)


def stand_in(
    batches: Iterable[Any], step_s: float, epochs: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    """DLIO's AU in percent: by epoch computing / all time without the first step; the mean of the epochs."""
    found = []
    for _ in range(epochs):
        begin_s = loading_s = clock()
        first_s = compute_s = 0.0
        for number, _batch in enumerate(_yielded(batches)):
            computing_s = clock()
            time.sleep(step_s)
            end_s = clock()
            if number == 0:
                first_s = end_s - loading_s
            else:
                compute_s += end_s - computing_s
            loading_s = end_s
        found.append(compute_s / (clock() - begin_s - first_s))
    return 100 * statistics.fmean(found)


def _yielded(batches: Iterable[Any]) -> Iterator[Any]:
    yield from batches


def dlio(checkout: Path, work: Work, pipeline: Path) -> dict[str, float]:
    """What DLIO says, and a profile in its loop."""
    with tempfile.TemporaryDirectory() as out:
        settings = {
            "framework": "pytorch",
            "workflow.generate_data": False,
            "workflow.train": True,
            "workflow.evaluation": False,
            "workflow.checkpoint": False,
            "dataset.data_folder": pipeline.parent,
            "dataset.format": work.format,
            "dataset.num_files_train": work.num_files,
            "dataset.num_files_eval": 0,
            "dataset.num_subfolders_train": 0,
            "dataset.num_subfolders_eval": 0,
            "dataset.num_samples_per_file": work.num_samples,
            "reader.data_loader": "pytorch",
            "reader.data_loader_classname": "profiles.dlio_loader.LoaderkitLoader",
            "reader.data_loader_sampler": "iterative",
            "reader.batch_size": work.batch,
            "train.epochs": work.epochs,
            "train.computation_time": work.step_s,
            "output.folder": out,
        }
        overrides = [f"++workload.{name}={value}" for name, value in settings.items()]
        report = Path(out) / "report.json"
        paths = os.pathsep.join([str(ROOT), str(checkout)])
        more = {"LOADERKIT_PIPELINE": str(pipeline), "LOADERKIT_REPORT": str(report), "PYTHONPATH": paths}
        _run(["-m", "dlio_benchmark.main", *overrides, f"hydra.run.dir={out}"], more)
        found = json.loads((Path(out) / "summary.json").read_text())
        inside = json.loads(report.read_text())
        output = json.loads((Path(out) / "0_output.json").read_text())
        epochs = [output[str(number)] for number in range(1, work.epochs + 1)]
    return {
        "DLIO": found["metric"]["train_au_mean_percentage"],
        "DLIO, steps measured": statistics.fmean(map(_measured, epochs)),
        "profile in DLIO": inside["utilisation"]["percent"],
    }


def _measured(epoch: Mapping[str, Any]) -> float:
    """An epoch's AU by how long its steps took. DLIO 2.0 takes how long they were set to take, newer ones measure."""
    load, whole, compute = (epoch[name]["block1"][1:] for name in ("load", "proc", "compute"))
    return float(epoch["au"]["block1"] * (sum(whole) - sum(load)) / sum(compute))


def _run(arguments: list[str], more: dict[str, str] | None = None) -> str:
    environment = {**os.environ, **(more or {})}
    ran = subprocess.run(
        [sys.executable, *arguments], check=False, cwd=ROOT, env=environment, capture_output=True, text=True
    )
    if ran.returncode:
        raise SystemExit(
            f"{' '.join(arguments)} ended with {ran.returncode}:\n{ran.stdout[-2000:]}{ran.stderr[-4000:]}"
        )
    return ran.stdout


def measure(work: Work, folder: Path, rounds: int, checkout: Path | None) -> dict[str, Any]:
    """The medians, and how many points the profile says more."""
    data = folder / "train"
    data.mkdir(parents=True)
    (folder / "valid").mkdir()  # DLIO lists it
    for number in range(work.num_files):
        path = data / f"{number:04}.{work.format}"
        work.make(path, number)
        path.read_bytes()  # into the page cache: the first contestant would read it from the disk for all
    pipeline = folder / "pipeline.yaml"
    pipeline.write_text(work.pipeline(data).to_yaml())
    loop = ["-m", "profiles.utilisation", "--loop", str(pipeline), "--works", work.name]
    found: list[dict[str, float]] = []
    for _ in range(rounds):
        one: dict[str, float] = json.loads(_run(loop))
        if checkout is not None:
            one |= dlio(checkout, work, pipeline)
        found.append(one)
    for one in found:
        for other in ("stand-in", "DLIO", "DLIO, steps measured"):
            if other in one:
                one[f"points more than {other}"] = one[f"profile in {other.split(',')[0]}"] - one[other]
    medians = {name: statistics.median(one[name] for one in found) for name in found[0]}
    print(work.name, *(f"{name} {value:.1f}" for name, value in medians.items()), sep=", ", flush=True)
    return {"work": work.name, "step_s": work.step_s, "batch": work.batch, "percent": medians, "rounds": found}


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dlio", type=Path, help="a checkout of dlio_benchmark")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--works", default=",".join(work.name for work in WORKS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--loop", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    works = [work for work in WORKS if work.name in args.works.split(",")]
    if args.loop is not None:
        with loaderkit.build(args.loop) as loader, loader.profile() as report:
            percent = stand_in(loader, works[0].step_s, works[0].epochs)
        print(json.dumps({"stand-in": percent, "profile in stand-in": report.utilisation.percent}))
        return
    found = []
    for work in works:
        with tempfile.TemporaryDirectory() as folder:
            found.append(measure(work, Path(folder), args.rounds, args.dlio))
        record(args.out, "utilisation", works=found)


if __name__ == "__main__":
    main()
