"""The demo: what `loaderkit demo` shows, step by step."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import loaderkit
from loaderkit._internal.cgroups import num_cpus
from loaderkit.cli.demo.photos import PHOTOGRAPHS, DemoData, demo_data
from loaderkit.cli.demo.training import Trainer, digest, save_checkpoint
from loaderkit.errors import LoaderkitError
from loaderkit.profile.render.summary import print_summary, reading
from loaderkit.sources.formats.tar_index import default_cache_dir

_NUM_LINES = 10
_TAR_SHARE = 0.25  # of the time; the rest goes to the files


def run_demo(
    out: Console,
    *,
    data: Path | None = None,
    seconds: float = 60,
    num_images: int = 2000,
    keep: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Show everything on `out`. Returns what was found, by pipeline, and whether both resumed exactly.

    The data set is made below `data` (default: the user's cache directory) and stays there; the checkpoints are
    removed unless `keep`. Raises LoaderkitError, OSError.
    """
    say = _line_printer(out)
    started_s = clock()
    dataset = demo_data(data if data is not None else default_cache_dir() / "demo", num_images, say)
    say(f"data set: {dataset.folder} ({num_images} images, {len(PHOTOGRAPHS)} classes; {clock() - started_s:.1f} s)")
    batch_size = max(2, min(64, num_images // 8))  # so that an epoch has a middle to stop in
    shows = {
        "files": (files_pipeline(dataset, batch_size), seconds * (1 - _TAR_SHARE)),
        "tar": (tar_pipeline(dataset, batch_size), seconds * _TAR_SHARE),
    }
    results: dict[str, Any] = {}
    with _checkpoint_folder(keep, say) as folder, _half_the_cpus():
        for name, (pipeline, share_s) in shows.items():
            say(f"\n--- {name}: {pipeline!r}")
            results[name] = _show(out, pipeline, folder / name, share_s, clock)
    exact = all(result["resumed_exactly"] for result in results.values())
    say("\nBoth pipelines resumed exactly." if exact else "\nNot the batch that would have come: this is a bug.")
    return {"data": str(dataset.folder), **results, "resumed_exactly": exact}


def files_pipeline(data: DemoData, batch_size: int) -> loaderkit.Pipeline:
    """The usual training pipeline over class folders, as in pipelines/imagenet-files.yaml."""
    source = loaderkit.Pipeline.files(data.train, include="**/*.jpg", label="parent").named("demo-files")
    return _with_stages(source.shuffle(seed=0), batch_size)


def tar_pipeline(data: DemoData, batch_size: int) -> loaderkit.Pipeline:
    """The same over tar shards, as in pipelines/imagenet-tar.yaml."""
    source = loaderkit.Pipeline.tar(data.shards).named("demo-tar")
    return _with_stages(source.shuffle("block", seed=0, block="2MiB"), batch_size)


def _with_stages(source: loaderkit.Pipeline, batch_size: int) -> loaderkit.Pipeline:
    return (
        source.read()
        .decode()
        .random_resized_crop(224)
        .random_horizontal_flip()
        .batch(batch_size, drop_last=True)
        .normalize(mean="imagenet", std="imagenet")
    )


def _show(
    out: Console, pipeline: loaderkit.Pipeline, folder: Path, seconds: float, clock: Callable[[], float]
) -> dict[str, Any]:
    """Train, stop in mid-epoch, and compare the batch that would have come with the one a new process gets."""
    say = _line_printer(out)
    trainer = Trainer(len(PHOTOGRAPHS))
    with loaderkit.build(pipeline) as loader:
        iterator = _train(loader, trainer, seconds, clock, say)
        stats = loader.stats().to_dict()
        state = loader.state_dict()
        save_checkpoint(folder, pipeline, trainer, loader)
        say(f"stopped in epoch {state['epoch']} after {state['position']} of {loader.num_samples} samples\n")
        expected = next(iterator)
        wanted = digest(expected)
        loss, _ = trainer.step(expected)
    print_summary(out, stats)
    say(f"\n{reading(stats)}")
    resumed = _resume(folder)
    exact = bool(resumed["digest"] == wanted)
    say(f"batch that would have come next   {wanted}  loss {loss:.6f}")
    say(f"first batch of the new process    {resumed['digest']}  loss {resumed['loss']:.6f}")
    say("the same, to the last byte" if exact else "NOT THE SAME")
    return {"resumed_exactly": exact, "digest": wanted, "resumed": resumed, "state": state, "stats": stats}


def _train(
    loader: loaderkit.Loader, trainer: Trainer, seconds: float, clock: Callable[[], float], say: Callable[[str], None]
) -> Iterator[Any]:
    """Train until time is up and an epoch is in its middle; returns the iterator, which has batches left."""
    began_s = clock()
    line_s = seconds / _NUM_LINES
    due_s = line_s
    before = loader.stats()
    steps: list[tuple[float, float]] = []  # since the last line
    while True:
        iterator = iter(loader)
        for number, batch in enumerate(iterator, 1):
            steps.append(trainer.step(batch))
            elapsed_s = clock() - began_s
            is_over = elapsed_s >= seconds and number < len(loader)
            if elapsed_s >= due_s or is_over:
                due_s = elapsed_s + line_s
                now = loader.stats()
                recent = now.since(before).to_dict()
                before = now
                loss, accuracy = (sum(values) / len(steps) for values in zip(*steps, strict=True))
                steps.clear()
                say(
                    f"{elapsed_s:5.1f} s  epoch {loader.epoch}  batch {number:2}/{len(loader)}  loss {loss:.3f}  "
                    f"accuracy {accuracy:4.0%}  {recent['throughput']['samples_per_s']:4.0f} img/s  "
                    f"stall {recent['stall']['percent']:.0f} %"
                )
            if is_over:
                return iterator


def _resume(folder: Path) -> dict[str, Any]:
    done = subprocess.run(  # noqa: S603 - our own module, in the interpreter that runs this one
        [sys.executable, "-P", "-m", "loaderkit.cli.demo.resume", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise LoaderkitError(f"the process that was to resume failed:\n{done.stderr.rstrip()}")
    resumed: dict[str, Any] = json.loads(done.stdout)
    return resumed


@contextmanager
def _checkpoint_folder(keep: bool, say: Callable[[str], None]) -> Iterator[Path]:
    if keep:
        folder = Path(tempfile.mkdtemp(prefix="loaderkit-demo-"))
        yield folder
        say(f"the checkpoints are in {folder}")
    else:
        with tempfile.TemporaryDirectory(prefix="loaderkit-demo-") as name:
            yield Path(name)


@contextmanager
def _half_the_cpus() -> Iterator[None]:
    """Leave half of the CPUs to loading; training on all of them, both would take longer."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, num_cpus() // 2))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _line_printer(out: Console) -> Callable[[str], None]:
    def say(line: str) -> None:
        out.print(line, markup=False, highlight=False, soft_wrap=True)
        out.file.flush()

    return say
