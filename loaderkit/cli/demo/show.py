"""The demo: a stall, its cause, the change, the gain; then a process that is killed, and one that resumes exactly."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

from rich.console import Console
from threadpoolctl import threadpool_limits

import loaderkit
from loaderkit._internal.system.cgroups import num_cpus
from loaderkit._internal.system.user_cache import default_cache_dir
from loaderkit.cli.demo.child import SAVED_BATCHES
from loaderkit.cli.demo.photos import demo_data
from loaderkit.cli.demo.training import ANSWER_S, SLOW, SmallNet, train_on, training_pipeline
from loaderkit.errors import LoaderkitError
from loaderkit.profile.compare import compare_reports
from loaderkit.profile.render.summary import facts_table
from loaderkit.profile.render.terminal import render
from loaderkit.profile.report import Report

_NUM_REPEATED = 3  # batches between the checkpoint and the kill, and so those that are made twice


def run_demo(out: Console, *, data: Path | None, seconds: float, num_images: int) -> dict[str, Any]:
    """Show everything on `out`. Returns the two reports, the batches of both processes, and whether they agree.

    The data set is made below `data` (default: the user's cache directory) and stays there. Raises LoaderkitError, OSError.
    """
    place = (data or default_cache_dir() / "demo").resolve()
    out.print(f"1/4 {num_images} photographs (made once, then used again)")
    train = demo_data(place, num_images)
    batch_size = max(2, min(8, num_images // 16))  # so that checkpoint and kill are in mid-epoch
    pipeline = training_pipeline(train, batch_size, slow=True)

    out.print(f"2/4 training on {train}")
    out.print(
        f"    for {seconds / 2:.0f} s; the function {SLOW}, which waits {ANSWER_S} s for each sample, was left in\n"
    )
    before = _train(pipeline, seconds / 2)
    out.print(render(before))

    changed, change = follow(before, pipeline, training_pipeline(train, batch_size, slow=False))
    out.print(f"\n3/4 training for {seconds / 2:.0f} s with the change")
    after = _train(changed, seconds / 2)
    gain = compare_reports([before], after).summary

    out.print("4/4 two processes that train: one saves and is killed, the other resumes\n")
    with tempfile.TemporaryDirectory(prefix="loaderkit-demo-") as folder:
        (Path(folder) / "pipeline.yaml").write_text(changed.to_yaml(), encoding="utf-8")
        killed = _train_until_killed(folder, SAVED_BATCHES + _NUM_REPEATED)[SAVED_BATCHES:]
        resumed = _train_until_killed(folder, _NUM_REPEATED)
    exact = [one["digest"] for one in killed] == [one["digest"] for one in resumed]

    verdict = before.verdict
    rows = facts_table()
    rows.add_row("cause", f"{verdict.headline} ({100 * verdict.confidence:.0f} % sure)")
    rows.add_row("", verdict.evidence)
    rows.add_row("change", change)
    rows.add_row("gain", gain)
    rows.add_row("resume", f"saved after batch {SAVED_BATCHES}, then killed by SIGKILL; the new process continues:")
    rows.add_row("", "batch  in the killed process         in the new process")
    for one, two in zip(killed, resumed, strict=True):
        sides = (f"{batch['digest']}  loss {batch['loss']:.4f}" for batch in (one, two))
        rows.add_row("", f"{one['batch']:5}  {'   '.join(sides)}")
    rows.add_row("", "the same, to the last byte" if exact else "NOT THE SAME: this is a bug")
    out.print(rows)
    return {
        "before": before.to_dict(),
        "change": change,
        "after": after.to_dict(),
        "gain": gain,
        "killed": killed,
        "resumed": resumed,
        "resumed_exactly": exact,
    }


def follow(
    report: Report, pipeline: loaderkit.Pipeline, fallback: loaderkit.Pipeline
) -> tuple[loaderkit.Pipeline, str]:
    """The pipeline with the settings that the report suggests, and what was changed; `fallback` where it suggests none."""
    settings = report.verdict.settings
    if not settings:
        return fallback, f"{SLOW} removed, since the report has no setting for it"
    change = ", ".join(f"{one.key}: {one.before} -> {one.value}" for one in settings)
    return pipeline.with_overrides({one.key: one.value for one in settings}), f"{change}, as the report suggests"


def _train(pipeline: loaderkit.Pipeline, seconds: float) -> Report:
    # Half of the CPUs are left to loading; training on all of them, both would take longer.
    with threadpool_limits(max(1, num_cpus() // 2)), loaderkit.build(pipeline) as loader, loader.profile() as profile:
        model = SmallNet(len(loader.classes or ()))
        end_s = time.perf_counter() + seconds
        for batch in chain.from_iterable(repeat(loader)):  # epoch after epoch
            train_on(model, batch)
            if time.perf_counter() >= end_s:
                break
    return profile.result


def _train_until_killed(folder: str, num_batches: int) -> list[dict[str, Any]]:
    """A training process, killed after `num_batches`: the number, digest and loss of each."""
    command = [sys.executable, "-P", "-m", "loaderkit.cli.demo.child", folder]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603 - our own module
        assert process.stdout is not None
        batches = [json.loads(line) for line in islice(process.stdout, num_batches)]
        process.kill()
    if len(batches) < num_batches:
        raise LoaderkitError("the training process failed; what it said is above")
    return batches
