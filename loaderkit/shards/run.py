"""Writes all shards of a plan that are not there yet, then the manifest.

plan.json ──> shards, by this process, by others or on a Ray cluster ──> records ──> (an array: its parts, joined) ──> manifest
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from loaderkit._internal.system.cgroups import num_cpus
from loaderkit._internal.units import say_count
from loaderkit.connectors.base import Connector, writes_of
from loaderkit.errors import ConnectorError, ObjectNotFoundError, SourceError, StageError, TooManyBadSamplesError
from loaderkit.pipeline.config.model import PipelineConfig
from loaderkit.pipeline.delivery.bad_samples import BadSamples
from loaderkit.samples.chunk import BatchWork, SampleFailure
from loaderkit.shards import state
from loaderkit.shards.job import ShardJob, ShardRecord, check_own, read_json
from loaderkit.shards.joining import join_parts
from loaderkit.shards.planning import ShardPlan
from loaderkit.shards.training import array_name, check_left, training_pipeline
from loaderkit.shards.workers import MadeShard, make_here, make_in_processes
from loaderkit.sources.tar.source import MANIFEST

_WORTH_PROCESSES = 32 * 10**6  # bytes to write: starting processes takes 3 s


@dataclass(frozen=True)
class PackProgress:
    """How far the run is: bytes written of those expected, and how many of all samples and of all shards."""

    num_bytes: int
    total_bytes: int
    num_samples: int
    num_shards: int
    total_shards: int


@dataclass(frozen=True)
class Workers:
    """What makes the shards: `processes` of this machine (None means one a CPU, if there is much to do); or, with
    `ray`, tasks on a cluster, that many at once (None means one for each CPU of the cluster)."""

    processes: int | None = None
    ray: bool = False
    ray_address: str = "auto"


@dataclass(frozen=True)
class PackResult:
    """What is there now. `was_whole`: everything was there before, and nothing was written; `num_found`: shards that an
    earlier run had made."""

    manifest: Mapping[str, Any]
    pipeline: PipelineConfig
    was_whole: bool
    num_found: int
    seconds: float


def found_so_far(plan: ShardPlan) -> tuple[int, bool]:
    """The shards that are there already, and True if the manifest is. Raises ConfigError if others are there."""
    with closing(plan.job.destination.open()) as connector:
        manifest = _whole(connector, plan)
        if manifest is not None:
            num_lost = len(state.lost(connector, manifest))
            return max(1, len(manifest["shards"])) - num_lost, not num_lost
        job = state.planned(connector, plan.job, plan.fingerprint)
        return (0 if job is None else len(state.done(connector, job))), False


def pack_shards(plan: ShardPlan, workers: Workers, on_progress: Callable[[PackProgress], None]) -> PackResult:
    """Write what is missing. Raises LoaderkitError; what is done then stays, and the next call continues."""
    check_left(plan.config, plan.split, plan.job.layout)
    begin_s = time.perf_counter()
    with closing(plan.job.destination.open()) as connector:
        manifest = _whole(connector, plan)
        lost = [] if manifest is None else state.lost(connector, manifest)
        if manifest is not None and lost and plan.job.format == "tar":
            _mend(connector, plan, manifest, lost, workers=workers, on_progress=on_progress)
            num_found = len(manifest["shards"]) - len(lost)
            return _result(plan, manifest, begin_s, was_whole=False, num_found=num_found)
        if manifest is not None and not lost:
            state.clear(connector)
            return _result(plan, manifest, begin_s, was_whole=True, num_found=len(manifest["shards"]))
        if lost:  # an array, which is made as a whole
            for key in (MANIFEST, *lost):
                writes_of(connector).delete(key)
        begun = state.planned(connector, plan.job, plan.fingerprint)
        begin = state.begin if begun is None else state.own
        job = begin(connector, begun or plan.job, plan.fingerprint)
        state.check_unfinished(connector)
        plan = replace(plan, job=job)
        records = state.done(connector, job)
        num_found = len(records)
        missing = [number for number in range(job.num_shards) if number not in records]
        _make_missing(connector, plan, records, missing, workers=workers, on_progress=on_progress)
        ordered = [records[number] for number in range(job.num_shards)]
        if not any(record.num_samples for record in ordered):
            raise SourceError(
                f"no sample is left to write: {sum(len(record.bad) for record in ordered)} of {plan.num_samples} are bad, "
                f"{sum(record.num_dropped for record in ordered)} were dropped"
            )
        manifest = _manifest(plan, ordered)
        if job.format == "array":
            (name,) = job.layout.fields
            check_own(connector, job)
            size = join_parts(connector, job, array_name(name), ordered)
            manifest |= {"shards": [], "array": array_name(name), "num_bytes": size}
        state.finish(connector, manifest, job)
    return _result(plan, manifest, begin_s, was_whole=False, num_found=num_found)


def _mend(
    connector: Connector,
    plan: ShardPlan,
    manifest: Mapping[str, Any],
    lost: list[str],
    *,
    workers: Workers,
    on_progress: Callable[[PackProgress], None],
) -> None:
    """Make shards again that were lost after the run had finished. Raises SourceError if they are not the same as before."""
    job = state.own(connector, plan.job, plan.fingerprint)
    numbers = [number for number in range(job.num_shards) if job.name(number) in lost]
    records: dict[int, ShardRecord] = {}
    _make_missing(connector, replace(plan, job=job), records, numbers, workers=workers, on_progress=on_progress)
    made = {record.name: record.summary for record in records.values()}
    changed = [shard["name"] for shard in manifest["shards"] if made.get(shard["name"], shard) != shard]
    changed += [name for name in lost if name not in made]
    if changed:
        for name in changed:
            writes_of(connector).delete(name)
        raise SourceError(
            f"{connector.describe(changed[0])} was lost, and what is made in its place differs from what the manifest has: the "
            "data or what stages make of them has changed; remove all of these shards, or choose another --out"
        )
    state.clear(connector)


def _whole(connector: Connector, plan: ShardPlan) -> dict[str, Any] | None:
    """The manifest that is there, or None. Raises ConfigError if it belongs to other shards."""
    manifest = read_json(connector, MANIFEST)
    if manifest is not None:
        state.check_fingerprint(
            manifest, plan.fingerprint, connector.describe(""), "finished shards of other data or settings"
        )
    return manifest


def _result(
    plan: ShardPlan, manifest: Mapping[str, Any], begin_s: float, *, was_whole: bool, num_found: int
) -> PackResult:
    pipeline = training_pipeline(plan, manifest["fields"])
    return PackResult(manifest, pipeline, was_whole, num_found, time.perf_counter() - begin_s)


def _make_missing(
    connector: Connector,
    plan: ShardPlan,
    records: dict[int, ShardRecord],
    missing: list[int],
    *,
    workers: Workers,
    on_progress: Callable[[PackProgress], None],
) -> None:
    """Make the shards `missing`, and add them to `records`."""
    job, errors = plan.job, plan.job.plan.config.errors
    bad = BadSamples(errors, job.plan.source)
    bad.note_shards()
    bad.recall(one["sample"] for record in records.values() for one in record.bad)
    samples_done = sum(int(job.bounds[number + 1] - job.bounds[number]) for number in records)
    bytes_done = sum(record.num_bytes for record in records.values())

    def show(num_samples: int = 0, num_bytes: int = 0) -> None:
        on_progress(
            PackProgress(
                bytes_done + num_bytes, plan.expected_bytes, samples_done + num_samples, len(records), job.num_shards
            )
        )

    try:
        show()
        with closing(_made(job, missing, plan.expected_bytes, workers, show)) as made:
            for number, record in made:
                _check_there(connector, record)
                records[number] = record
                samples_done += int(job.bounds[number + 1] - job.bounds[number])
                bytes_done += record.num_bytes
                _note(bad, record)
                show()
    finally:
        bad.close()
    num_bad = sum(len(record.bad) for record in records.values())
    if num_bad > errors.max_bad_samples:
        raise TooManyBadSamplesError(
            f"{say_count(num_bad, 'bad sample')}, more than errors.max_bad_samples = {errors.max_bad_samples}: the shards are "
            "not finished; allow more, and run it again"
        )


def _made(
    job: ShardJob,
    missing: list[int],
    expected_bytes: int,
    workers: Workers,
    on_samples: Callable[[int, int], None],
) -> Generator[MadeShard, None, None]:
    if workers.ray and missing:
        from loaderkit.shards.ray_tasks import make_on_ray

        return make_on_ray(job, missing, workers.ray_address, workers.processes)
    num_processes = min(workers.processes or (num_cpus() if expected_bytes > _WORTH_PROCESSES else 1), len(missing))
    return make_here(job, missing, on_samples) if num_processes <= 1 else make_in_processes(job, missing, num_processes)


def _check_there(connector: Connector, record: ShardRecord) -> None:
    """Raise ConnectorError unless the shard that was made elsewhere is seen from here."""
    if not record.num_samples:
        return
    try:
        size: int | None = connector.stat(record.name).size
    except ObjectNotFoundError:
        size = None
    if size != record.num_bytes:
        there = "is not there" if size is None else f"has {size} bytes"
        raise ConnectorError(
            f"{connector.describe(record.name)} {there}, and {record.num_bytes} were written: is --out the same directory on "
            "all machines?"
        )


def _note(bad: BadSamples, record: ShardRecord) -> None:
    """Count and record the bad samples of a shard. Raises TooManyBadSamplesError."""
    if not record.bad:
        return
    positions = np.array([one["position"] for one in record.bad], np.int64)
    indices = np.array([one["sample"] for one in record.bad], np.int64)
    work_item = BatchWork(epoch=0, step=0, positions=positions, indices=indices)
    for slot, one in enumerate(record.bad):
        error = StageError(
            one["error"], stage=one["stage"], key=one["key"], origin=one["source"], position=one["position"]
        )
        work_item.failures.append(SampleFailure(slot, one["sample"], one["position"], error))
    bad.note(work_item)


def _manifest(plan: ShardPlan, records: list[ShardRecord]) -> dict[str, Any]:
    """The manifest. It is the same however the shards were made."""
    job, config = plan.job, plan.config
    there = [record for record in records if record.num_samples]
    classes = job.plan.source.classes
    extensions = state.merged_extensions(there)
    return {
        "fingerprint": plan.fingerprint,
        "name": config.name,
        "format": job.format,
        "num_samples": sum(record.num_samples for record in there),
        "num_bytes": sum(record.num_bytes for record in there),
        "num_dropped": sum(record.num_dropped for record in records),
        "num_bad": sum(len(record.bad) for record in records),
        "fields": {name: extensions.get(name, []) for name in job.layout.fields},
        "classes": classes,
        "stages": [stage.name for stage in plan.split.run],
        "shards": [record.summary for record in there],
        "bad": [one for record in records for one in record.bad],
    }
