"""`loaderkit pack`: write the samples of a pipeline as shards, its deterministic stages run once."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loaderkit._internal.units import parse_bytes, say_count, say_size
from loaderkit.cli.terminal import console
from loaderkit.cli.terminal.byte_progress import ByteProgress, byte_progress
from loaderkit.cli.terminal.options import AsJson, Assignments, Debug, PipelineFile, described

if TYPE_CHECKING:
    from loaderkit.shards.planning import Options, ShardPlan
    from loaderkit.shards.run import PackProgress, PackResult, Workers

_MAX_NAMED = 5


def pack(
    pipeline: PipelineFile,
    *,
    out: Annotated[
        str, typer.Option("--out", metavar="URL", help="Where the shards go: a folder, s3:// or another store.")
    ],
    form: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="tar: archives that WebDataset reads, too; array: one .npy, for samples of one field and shape.",
        ),
    ] = "tar",
    shard: Annotated[
        str, typer.Option("--shard", metavar="SIZE", help="About how large a shard is; a worker holds one in memory.")
    ] = "256MB",
    quality: Annotated[int, typer.Option(min=1, max=100, help="Of JPEGs, for images that stages have changed.")] = 90,
    processes: Annotated[
        int | None,
        typer.Option(
            "--processes",
            metavar="N",
            min=1,
            help="How many make shards; default: one a CPU, if there is more than 32 MB to write.",
            show_default=False,
        ),
    ] = None,
    ray: Annotated[
        bool, typer.Option("--ray", help="Make them on a Ray cluster ($RAY_ADDRESS, or the one that runs here).")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write nothing: say what would be, and how to train from it.")
    ] = False,
    assignments: Assignments = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Write the samples of pipeline P as shards; stages that draw random numbers are left for training. What was cut off goes
    on."""
    options = _options(out, form, shard, quality)
    config = described(pipeline, assignments)

    from loaderkit.shards.planning import plan_shards
    from loaderkit.shards.run import Workers, found_so_far

    plan = plan_shards(config, options)
    with closing(plan.job.plan):
        if dry_run:
            num_found, is_whole = found_so_far(plan)
            document = _planned(plan) | {"num_found": num_found, "was_whole": is_whole}
            if as_json:
                console.tell_json(document)
            else:
                _tell_plan(document)
            return
        result = _run(plan, Workers(processes, ray, config.prefetch.ray.address))
    document = _done(plan, result)
    if as_json:
        console.tell_json(document)
    else:
        _tell_result(document)


def _options(out: str, form: str, shard: str, quality: int) -> Options:
    """Raises BadParameter."""
    from loaderkit.shards.planning import Options

    if form not in ("tar", "array"):
        raise typer.BadParameter(f"expected tar or array, not {form!r}", param_hint="--format")
    try:
        shard_bytes = parse_bytes(int(shard) if shard.isdecimal() else shard)
        if shard_bytes < 1:
            raise ValueError("a size above 0")
    except ValueError as error:
        raise typer.BadParameter(f"expected {error}", param_hint="--shard") from None
    return Options(out, "tar" if form == "tar" else "array", shard_bytes, quality)


@dataclass
class _Watch:
    """How far the work has come, for the progress bar."""

    total_bytes: int
    begin_s: float = field(default_factory=time.perf_counter)
    progress: PackProgress | None = None
    show: Any = None

    def take(self, progress: PackProgress) -> None:
        self.progress = progress
        self.show()

    def now(self) -> ByteProgress:
        seconds, done = time.perf_counter() - self.begin_s, self.progress
        if done is None:
            return ByteProgress(0, self.total_bytes, seconds)
        note = f"{done.num_samples} samples, shard {min(done.num_shards + 1, done.total_shards)} of {done.total_shards}"
        return ByteProgress(done.num_bytes, max(done.total_bytes, done.num_bytes), seconds, note)


def _run(plan: ShardPlan, workers: Workers) -> PackResult:
    from loaderkit.shards.run import pack_shards

    watch = _Watch(plan.expected_bytes)
    try:
        with byte_progress(watch.now) as watch.show:
            return pack_shards(plan, workers, watch.take)
    except KeyboardInterrupt:
        done = watch.progress
        said = "nothing" if done is None else f"{done.num_shards} of {done.total_shards} shards"
        raise console.Interrupted(f"interrupted: {said} done, and they stay; the same command goes on") from None


def _planned(plan: ShardPlan) -> dict[str, Any]:
    from loaderkit.shards.planning import NUM_TRIED
    from loaderkit.shards.training import check_left, training_pipeline

    check_left(plan.config, plan.split, plan.job.layout)
    return {
        "pipeline": plan.config.name,
        "out": plan.job.destination.url,
        "format": plan.job.format,
        "num_samples": plan.num_samples,
        "num_shards": plan.job.num_shards,
        "expected_bytes": plan.expected_bytes,
        "stages_run": [stage.name for stage in plan.split.run],
        "stages_left": [stage.name for stage in plan.split.left],
        "why_left": plan.split.reason or None,
        "num_tried": None if plan.is_copy or plan.job.format == "array" else min(plan.num_samples, NUM_TRIED),
        "train": training_pipeline(plan, plan.extensions).to_yaml(),
    }


def _done(plan: ShardPlan, result: PackResult) -> dict[str, Any]:
    manifest = result.manifest
    return {
        "pipeline": plan.config.name,
        "out": plan.job.destination.url,
        "format": plan.job.format,
        "num_samples": manifest["num_samples"],
        "num_shards": len(manifest["shards"]),
        "num_bytes": manifest["num_bytes"],
        "num_bad": manifest["num_bad"],
        "num_dropped": manifest["num_dropped"],
        "bad": manifest["bad"],
        "stages_run": [stage.name for stage in plan.split.run],
        "stages_left": [stage.name for stage in plan.split.left],
        "why_left": plan.split.reason or None,
        "was_whole": result.was_whole,
        "num_found": result.num_found,
        "seconds": result.seconds,
        "train": result.pipeline.to_yaml(),
    }


def _tell_plan(document: dict[str, Any]) -> None:
    console.tell(
        f"{document['pipeline']}: {say_count(document['num_samples'], 'sample')} in "
        f"{say_count(document['num_shards'], 'shard')}, about {say_size(document['expected_bytes'])}, would go to "
        f"{document['out']}"
    )
    if document["was_whole"]:
        console.tell("All of it is there already.")
    elif document["num_found"]:
        console.tell(f"There already: {say_count(document['num_found'], 'shard')}.")
    _tell_stages(document)
    if document["num_tried"]:
        console.tell(
            f"\nThe extensions in `fields` are those of {say_count(document['num_tried'], 'sample')} tried: others may have "
            "more, and the run itself prints all."
        )


def _tell_result(document: dict[str, Any]) -> None:
    what = say_count(document["num_shards"], "shard") if document["format"] == "tar" else "one array"
    counts = f"{say_count(document['num_samples'], 'sample')} in {what}, {say_size(document['num_bytes'])}"
    if document["was_whole"]:
        console.tell(f"{document['out']}: whole already, {counts}")
    else:
        found = (
            f", {say_count(document['num_found'], 'shard')} of it from an earlier run" if document["num_found"] else ""
        )
        console.tell(f"{document['out']}: {counts} in {document['seconds']:.1f} s{found}")
    if document["num_dropped"]:
        console.tell(f"dropped by a filter: {say_count(document['num_dropped'], 'sample')}")
    for one in document["bad"][:_MAX_NAMED]:
        console.tell(f"left out, as it is bad: {one['error']}")
    if document["num_bad"] > _MAX_NAMED:
        console.tell(f"and {document['num_bad'] - _MAX_NAMED} more, all named in the manifest")
    _tell_stages(document)


def _tell_stages(document: dict[str, Any]) -> None:
    run = ", ".join(document["stages_run"]) or "none but read"
    console.tell(f"stages that run once: {run}")
    if document["why_left"]:
        console.tell(f"left for training: {', '.join(document['stages_left'])} ({document['why_left']})")
    console.tell("\nto train from them:\n")
    for line in document["train"].rstrip().splitlines():
        console.tell(f"  {line}")
