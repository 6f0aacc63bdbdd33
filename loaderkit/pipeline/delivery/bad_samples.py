"""Counts and records bad samples as their batches are delivered, and runs them again later.

delivery ──> BadSamples.note ──> one JSON line a sample and epoch ──> read_quarantine ──> retry_quarantined
"""

from __future__ import annotations

import errno
import io
import json
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from loaderkit.engine.work import Delivery
from loaderkit.errors import ConfigError, ConnectorError, StageError, TooManyBadSamplesError, printable
from loaderkit.pipeline.config.model import ErrorsArgs
from loaderkit.pipeline.execution_plan import ExecutionPlan
from loaderkit.pipeline.executors.thread_engine import make_batch_plan
from loaderkit.pipeline.run_samples import StageRuns, chunk_of, run_samples
from loaderkit.samples.chunk import SampleChunk
from loaderkit.sources.bad_shards import BadShard
from loaderkit.sources.base import Source

_BLOCK = 65_536  # keys looked through at a time
logger = logging.getLogger("loaderkit")


class BadSamples:
    """Counts and records the bad samples of delivered batches only, so that read-ahead does not change the result."""

    def __init__(self, errors: ErrorsArgs, source: Source | None = None) -> None:
        """`source` names mixed sources, and knows which indices are passes over the same sample. Raises ConfigError if
        the quarantine file cannot be written."""
        self._errors = errors
        self._source = source
        self._epoch = -1
        self._seen: set[int] = set()
        self._by_source: tuple[int, dict[str, int]] = (-1, {})  # a run, and how many of it
        self._file: io.FileIO | None = None
        path = self._errors.quarantine
        if path is not None:
            folder = os.path.dirname(path)
            is_writable = os.access(path, os.W_OK) if os.path.exists(path) else os.access(folder, os.W_OK)
            if os.path.isdir(path) or not os.path.isdir(folder) or not is_writable:
                raise ConfigError(f"errors.quarantine: {path} cannot be written: make its folder, or name another file")

    def by_source(self, run: int) -> Mapping[str, int]:
        """How many samples of each mixed source were bad in a run so far; from any thread."""
        counted_run, counts = self._by_source
        return counts if counted_run == run else {}

    def recall(self, samples: Iterable[int]) -> None:
        """Count samples of epoch 0 that were noted before, by another process, and not again."""
        self._epoch = 0
        self._seen.update(samples)

    def note_shards(self) -> None:
        """Record the shards that were left out of the source."""
        for shard in () if self._source is None else self._source.bad_shards:
            self._write(
                {
                    "shard": shard.key,
                    "source": shard.origin,
                    "error": shard.error,
                    "num_kept": shard.num_kept,
                    **({} if shard.source is None else {"mixed": shard.source}),
                }
            )

    def note(self, work_item: Delivery, run: int = 0) -> None:
        """Record new bad samples; raise TooManyBadSamplesError when there are more than allowed."""
        if work_item.epoch != self._epoch:
            self._epoch, self._seen = work_item.epoch, set()
        for failure in work_item.failures:
            sample = failure.sample if self._source is None else self._source.number(failure.sample)
            if sample in self._seen:
                continue
            self._seen.add(sample)
            error = failure.error
            name = None if self._source is None else self._source.source_name(sample)
            if name is not None:
                counts = self.by_source(run)
                self._by_source = run, {**counts, name: counts.get(name, 0) + 1}  # another thread may read it
            self._write(
                {
                    "key": error.key,
                    "source": error.origin,
                    "stage": error.stage,
                    "error": str(error),
                    "epoch": work_item.epoch,
                    "position": failure.position,
                    **({} if name is None else {"mixed": name}),
                }
            )
            if self._errors.on_bad_sample != "raise" and len(self._seen) > self._errors.max_bad_samples:
                raise TooManyBadSamplesError(
                    f"more than errors.max_bad_samples = {self._errors.max_bad_samples} samples of epoch {work_item.epoch} "
                    f"were bad{self._said_by_source()}; the last: {error}",
                    stage=error.stage,
                    key=error.key,
                    origin=error.origin,
                    epoch=work_item.epoch,
                    position=failure.position,
                ) from error
            if self._errors.on_bad_sample != "raise":
                logger.warning("bad sample (%s): %s", self._errors.on_bad_sample, error)

    def _said_by_source(self) -> str:
        names = [] if self._source is None else [self._source.source_name(sample) for sample in self._seen]
        counts = Counter(name for name in names if name is not None)
        return f" ({', '.join(f'{count} of {name}' for name, count in counts.most_common())})" if counts else ""

    def _write(self, line: dict[str, Any]) -> None:
        if self._errors.quarantine is None:
            return
        path, data = self._errors.quarantine, json.dumps(line).encode() + b"\n"
        try:
            if self._file is None:
                self._file = io.FileIO(path, "a")
            if (self._file.write(data) or 0) < len(data):  # one system call a line: ranks may share the file
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            bad = f"bad sample {line['key']!r}" if "key" in line else f"bad shard {line['shard']!r}"
            raise ConnectorError(
                f"errors.quarantine: {path} cannot be written ({error.strerror}), so {bad} would go unrecorded: make room, or "
                "name another file"
            ) from error

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


# ---------------------------------------------------------------------------------------------------- run again


class Quarantined(NamedTuple):
    """One line of a quarantine file: a bad sample, its epoch and its position."""

    key: str
    source: str
    epoch: int
    position: int
    mixed: str | None = None  # the name of the source, if several are mixed


def read_quarantine(path: Path) -> list[Quarantined]:
    """The distinct samples in a quarantine file. Raises ConfigError naming an invalid line, OSError."""
    samples: dict[Quarantined, None] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
            if "shard" in values:
                continue
            key, origin, epoch, position = (values[name] for name in Quarantined._fields[:4])
            sample = Quarantined(key, origin, epoch, position, values.get("mixed"))
        except (ValueError, TypeError, KeyError, RecursionError):
            raise ConfigError(
                f"{path}, line {number}: no line of a quarantine file, which is JSON with key, source, epoch and position: "
                f"{line[:100].decode('utf-8', 'replace')}"
            ) from None
        texts, counts = sample[:2], sample[2:4]
        fits = [isinstance(value, str) for value in texts]
        fits += [type(value) is int and 0 <= value < 2**63 for value in counts]
        fits.append(sample.mixed is None or isinstance(sample.mixed, str))
        if not all(fits):
            name = Quarantined._fields[fits.index(False)]
            raise ConfigError(f"{path}, line {number}: no quarantined sample has the {name} {values.get(name)!r}")
        samples[sample] = None
    return list(samples)


def quarantined_shards(path: Path) -> list[str]:
    """The distinct shards in a quarantine file that `read_quarantine` reads, by key, with the name of a mixed source."""
    lines = [json.loads(line) for line in path.read_bytes().splitlines() if line.strip()]
    shards = [BadShard(one["shard"], "", "", source=one.get("mixed")) for one in lines if "shard" in one]
    return [*dict.fromkeys(shard.name for shard in shards)]


def retry_quarantined(
    execution: ExecutionPlan, indices: Mapping[Quarantined, int]
) -> Iterator[tuple[Quarantined, StageError | None]]:
    """Run every sample through the stages before `batch`, with the random numbers of the epoch in which it was bad.

    `indices` are the indices of the samples that the source still has. Yields each with its error, or None if it is good now.
    """
    errors = execution.config.errors.model_copy(update={"on_bad_sample": "raise", "quarantine": None})
    execution = replace(execution, config=replace(execution.config, errors=errors))
    plan = make_batch_plan(execution)
    plan.prepare()

    def chunks() -> Iterator[SampleChunk]:
        for line, index in indices.items():
            single = np.array([index], np.int64)
            work_item = chunk_of(single, np.array([line.position], np.int64), line.epoch).work_item
            work_item.specs = plan.specs
            work_item.fields = plan.memory.take()
            work_item.values = {name: [None] for name, spec in plan.specs.items() if spec.kind != "slab"}
            yield plan.make_single(work_item, 0, 1, single)

    run = StageRuns([(stage.name, stage.run) for stage in execution.compiled.stages if stage.scope == "sample"])
    try:
        for line, chunk in zip(indices, run_samples(run, chunks()), strict=True):
            yield line, next((failure.error for failure in chunk.work_item.failures), None)
    finally:
        for stage in execution.compiled.stages:
            if stage.close is not None:
                stage.close()


def indices_of(source: Source, lines: list[Quarantined]) -> dict[Quarantined, int]:
    """The index of each sample that is still in the source. Keys may repeat in tar shards, so objects are compared, too.

    The data may have moved since: a key that only another object has is taken to be the same sample, with a warning.
    """
    wanted: dict[str, list[Quarantined]] = {}
    for line in lines:
        wanted.setdefault(line.key, []).append(line)
    best: dict[Quarantined, tuple[int, int]] = {}  # (length of the object's name that agrees, index)
    for begin in range(0, len(source), _BLOCK):
        indices = np.arange(begin, min(begin + _BLOCK, len(source)))
        for index, name in enumerate(source.keys(indices), begin):
            for line in wanted.get(name, ()):
                if line.mixed is not None and line.mixed != source.source_name(index):
                    continue
                agreement = _agreement(line.source, source.origin(index))
                if line not in best or agreement > best[line][0]:
                    best[line] = agreement, index
    elsewhere = [line.source for line, (agreement, _) in best.items() if not agreement]
    if elsewhere:
        logger.warning(
            "%d of the samples %s in another place: %s, ...; what has the same key here is taken to be the same sample",
            len(elsewhere),
            "was" if len(elsewhere) == 1 else "were",
            printable(elsewhere[0]),
        )
    return {line: best[line][1] for line in lines if line in best}


def _agreement(described: str, origin: str) -> int:
    """The length of an object's name, if its recorded description ends with it; else 0."""
    return len(origin) if f"/{described}".endswith(f"/{origin}") else 0
