"""Makes one shard of its samples, and writes it whole or not at all.

positions ──order──> indices ──chunks, a few at a time──> SampleMaker ──in order──> TarShard ──> shard-000003.tar, .idx
                                                                               └──> records ──> part-000003.bin
                                                          the record of the shard, last: it is done ──> shard-000003.json

All that a shard's bytes depend on is in the `ShardJob`, so they are the same in whichever process or machine it is made.
"""

from __future__ import annotations

import json
import pickle
from collections import deque
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

from loaderkit.connectors.base import Connector, traits_of, writes_of
from loaderkit.connectors.config import StoreArgs
from loaderkit.connectors.factory import open_connector
from loaderkit.errors import (
    ConfigError,
    ConnectorError,
    FormatError,
    LoaderkitError,
    ObjectChangedError,
    ObjectNotFoundError,
    StageError,
)
from loaderkit.native.identity import Identity, check_same, identity
from loaderkit.pipeline.execution_plan import ExecutionPlan
from loaderkit.shards.layout import Extensions, SampleLayout, tar_key
from loaderkit.shards.samples import CHUNK, MadeChunk, SampleMaker
from loaderkit.shards.tar_shard import TarShard
from loaderkit.sources.formats.tar_index import wds_index_key
from loaderkit.sources.tar.source import UNFINISHED
from loaderkit.stages.image.formats import pillow_limits, set_pillow_limits

Format = Literal["tar", "array"]
FOLDER = ".loaderkit-shards/"
"""Where the plan and the records are until all shards are there."""
VERSION = 1
"""Of the plan and the manifest."""
_NUM_THREADS = 8  # that write to a remote store
_REMOTE_CHUNK = 4  # samples that one of many threads reads from it
Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class Destination:
    """Where shards go."""

    url: str
    args: StoreArgs

    def open(self) -> Connector:
        """A connector, which the caller closes. Raises ConfigError, MissingExtraError."""
        return open_connector(self.url, {}, self.args)


@dataclass(frozen=True)
class ShardRecord:
    """The result of one shard; without samples there is no file. `name` is its key below the destination."""

    name: str
    num_samples: int
    num_bytes: int
    hash: str
    num_dropped: int
    extensions: dict[str, list[str]]  # of a tar, by field
    plan: str  # the digest of the plan that it belongs to
    bad: list[dict[str, Any]] = field(default_factory=list)

    def to_json(self) -> bytes:
        """The same for equal records."""
        return json.dumps(asdict(self), sort_keys=True).encode()

    @classmethod
    def of(cls, data: bytes) -> ShardRecord:
        """The record that `to_json` has written. Raises ValueError, TypeError."""
        return cls(**json.loads(data))

    @property
    def summary(self) -> dict[str, Any]:
        """What the manifest has of it."""
        return {"name": self.name, "num_samples": self.num_samples, "num_bytes": self.num_bytes, "hash": self.hash}


@dataclass(frozen=True)
class ShardJob:
    """What all shards have in common, and the positions where each begins, with the end: int64 [shards + 1]. It can be
    pickled."""

    plan: ExecutionPlan  # the stages that run, and `batch`, which does not
    destination: Destination
    format: Format
    quality: int
    decodes_later: bool  # `decode` is left for training
    wanted: tuple[str, ...] | None  # of an array: the fields of the pipeline's `output`
    layout: SampleLayout
    bounds: Int64
    clashing: Mapping[int, str]  # of samples of the source that have a name of their own in a tar; see `clashing_keys`
    digest: str = ""  # of the plan at the destination
    run: str = ""  # a token of the run that writes there

    @property
    def num_shards(self) -> int:
        """The shards that are planned."""
        return len(self.bounds) - 1

    def name(self, number: int) -> str:
        """The key of a shard below the destination."""
        return f"shard-{number:06}.tar" if self.format == "tar" else f"{FOLDER}part-{number:06}.bin"

    def tar_keys(self, indices: Int64) -> list[str]:
        """The names of samples of the source (int64 [n]) in a tar."""
        keys = self.plan.source.keys(indices)
        numbers = indices.tolist()
        return [self.clashing.get(number) or tar_key(key) for number, key in zip(numbers, keys, strict=True)]

    def maker(self) -> SampleMaker:
        """A maker of this job's samples."""
        return SampleMaker(
            self.plan,
            quality=self.quality,
            decodes_later=self.decodes_later,
            as_array=self.format == "array",
            wanted=self.wanted,
        )


def pack_job(job: ShardJob) -> bytes:
    """The job for other processes and machines. A data set given by name is opened again there, as it may hold open files.
    Raises ConfigError if a part of it cannot be sent."""
    config, plan = job.plan.config, job.plan
    reopen = config.kind.reopen(config.source, len(plan.source))
    if reopen is not None:
        plan = replace(plan, source=None)  # type: ignore[arg-type]
    try:
        return pickle.dumps((tuple(identity()), pickle.dumps((replace(job, plan=plan), reopen, pillow_limits()), 5)), 5)
    except Exception as error:
        raise ConfigError(
            f"{config.name}: it cannot be sent to other processes ({error}): name functions and data sets as "
            '"package.module:name", or use --processes 1'
        ) from error


def unpack_job(data: bytes) -> ShardJob:
    """The job that `pack_job` was given. Pillow's limits are set as in the process that packed it. Raises ConfigError
    if another loaderkit has packed it."""
    job: ShardJob
    program, packed = pickle.loads(data)  # noqa: S301 - of our own process
    check_same(Identity(*program))
    job, reopen, limits = pickle.loads(packed)  # noqa: S301 - of our own process
    set_pillow_limits(limits)
    return job if reopen is None else replace(job, plan=replace(job.plan, source=reopen()))


def record_key(number: int) -> str:
    """The key of a shard's record."""
    return f"{FOLDER}shard-{number:06}.json"


def make_shard(job: ShardJob, number: int, on_samples: Callable[[int, int], None]) -> ShardRecord:
    """Make and write one shard, then its record. `on_samples` gets the samples and bytes made so far, now and then; what it
    raises ends the work. Raises LoaderkitError naming the shard; then nothing is there under the shard's name."""
    try:
        maker = job.maker()
        try:
            record, data, index = _made(job, number, maker, on_samples)
        finally:
            maker.close()
        with closing(job.destination.open()) as connector:
            check_own(connector, job)
            try:
                if record.num_samples:
                    write_own(connector, job, record.name, data)
                    if index:
                        write_own(connector, job, wds_index_key(record.name), index)
                write_own(connector, job, record_key(number), record.to_json())
            except ConnectorError:
                check_own(connector, job)  # another run removes what was being written
                raise
    except StageError as error:
        raise StageError(
            f"shard {number} of {job.num_shards}: {error}",
            stage=error.stage,
            key=error.key,
            origin=error.origin,
            position=error.position,
        ) from error.__cause__
    except LoaderkitError as error:
        kind = type(error) if isinstance(error, ConnectorError) else LoaderkitError
        raise kind(f"shard {number} of {job.num_shards}: {error}") from error
    return record


def check_own(connector: Connector, job: ShardJob) -> None:
    """Raise LoaderkitError unless the plan at the destination is still this run's."""
    try:
        found = read_json(connector, UNFINISHED)
    except ObjectChangedError:
        found = {}
    if found is None:
        raise LoaderkitError(
            f"{connector.describe(UNFINISHED)} is gone: another `loaderkit pack` has finished there, or it was removed by "
            "hand; this one stops: run it again, and it goes on with what is there"
        )
    if found.get("run") != job.run:
        raise LoaderkitError(
            f"another `loaderkit pack` is at work in {connector.describe('')}: the one that began last goes on, and this one "
            "stops; to write other shards choose another --out"
        )


def _made(
    job: ShardJob, number: int, maker: SampleMaker, on_samples: Callable[[int, int], None]
) -> tuple[ShardRecord, bytearray, bytes]:
    first, end = int(job.bounds[number]), int(job.bounds[number + 1])
    positions = np.arange(first, end, dtype=np.int64)
    indices = job.plan.order.for_thread().indices(0, positions)
    keys = job.tar_keys(indices) if job.format == "tar" else []
    shard, records = TarShard(Extensions(job.layout.fields)), bytearray()
    num_samples = num_dropped = done = 0
    bad: list[dict[str, Any]] = []
    with closing(_chunks(maker, positions, indices, _threads_for(job.plan))) as chunks:
        for made in chunks:
            failures = {failure.slot: failure.error for failure in made.failures}
            for row, sample in enumerate(made.samples):
                position, index = int(positions[done + row]), int(indices[done + row])
                if sample is not None and (why := _misfit(job.layout, sample)) is not None:
                    failures[row] = maker.fail(position, index, why)
                    if job.plan.config.errors.on_bad_sample == "raise":
                        raise failures[row]
                if row in failures:
                    bad.append(_described(failures[row], position, index))
                elif sample is not None:
                    num_samples += 1
                    if job.format == "tar":
                        shard.add(keys[done + row], sample)
                    else:
                        records += next(iter(sample.values())).data.cast("B")
            num_dropped += made.num_dropped
            done += len(made.samples)
            on_samples(done, len(shard.data) + len(records))
    if job.format == "tar" and num_samples:
        shard.finish()
    data = shard.data if job.format == "tar" else records
    record = ShardRecord(
        job.name(number),
        num_samples,
        len(data),
        xxhash.xxh3_64_hexdigest(data),
        num_dropped,
        {name: sorted(used) for name, used in shard.used.items()},
        job.digest,
        bad,
    )
    return record, data, shard.index() if job.format == "tar" and num_samples else b""


def _misfit(layout: SampleLayout, sample: dict[str, Any]) -> str | None:
    if layout.dtype:
        if (found := layout.misfit(dict.fromkeys(sample, False))) is not None:
            return found
        return layout.array_misfit(next(iter(sample.values())))
    return layout.misfit({name: member.is_raw for name, member in sample.items()})


def _described(error: StageError, position: int, index: int) -> dict[str, Any]:
    return {
        "key": error.key,
        "source": error.origin,
        "stage": error.stage,
        "error": str(error),
        "position": position,
        "sample": index,
    }


def _threads_for(plan: ExecutionPlan) -> int:
    """The number of threads: as many as training makes requests ahead, where reads wait for a store; 0 means only the
    caller's thread."""
    args, connector = plan.config.source, plan.connector
    if connector is None or not traits_of(connector).is_remote or not isinstance(args, StoreArgs):
        return 0
    return args.read_ahead.requests


def _chunks(maker: SampleMaker, positions: Int64, indices: Int64, num_threads: int) -> Generator[MadeChunk, None, None]:
    """The samples in chunks, in their order; several threads work ahead."""
    size = _REMOTE_CHUNK if num_threads else CHUNK
    pieces = (slice(begin, begin + size) for begin in range(0, len(positions), size))
    return maker.make(((positions[piece], indices[piece]) for piece in pieces), num_threads)


def read_json(connector: Connector, key: str) -> dict[str, Any] | None:
    """An object that holds JSON; None if there is none. Raises FormatError, ConnectorError."""
    try:
        info = connector.stat(key)
        data = bytearray(info.size)
        connector.read_into(key, 0, memoryview(data), etag=info.etag)
    except ObjectNotFoundError:
        return None
    try:
        values = json.loads(data)
        if not isinstance(values, dict) or values.get("version") != VERSION:
            raise ValueError("it is of another version, or of another program")
    except ValueError as error:
        raise FormatError(f"{connector.describe(key)} is not what `loaderkit pack` has written: {error}") from None
    return values


def write_own(connector: Connector, job: ShardJob, key: str, data: bytes | bytearray) -> None:
    """Write an object whole, or leave nothing of it. Raises ConnectorError, and LoaderkitError if another run has begun."""
    view = memoryview(data)
    write_parts(connector, job, key, len(view), lambda start, length: view[start : start + length])


def write_parts(
    connector: Connector, job: ShardJob, key: str, size: int, part_at: Callable[[int, int], memoryview]
) -> None:
    """Write an object of `size` bytes, whose parts `part_at(start, length)` gives, from several threads if the store is remote;
    whole, or leave nothing of it. Raises ConnectorError, LoaderkitError if another run has begun, and what `part_at` raises.

    The plan is checked when all bytes are written. Another run that has written its own plan removes what is not
    committed by then, so nothing of this run appears among the other's shards.
    """
    writes = writes_of(connector)
    part_bytes = writes.part_bytes_of(size)
    writer = writes.create(key, size)

    def write(start: int) -> None:
        writer.write(start, part_at(start, min(part_bytes, size - start)))

    starts = range(0, size, part_bytes)
    try:
        num_threads = min(len(starts), _NUM_THREADS if traits_of(connector).is_remote else 1)
        if num_threads <= 1:
            for start in starts:
                write(start)
        else:
            with ThreadPoolExecutor(num_threads, thread_name_prefix="loaderkit-shards") as pool:
                try:
                    deque(pool.map(write, starts), maxlen=0)  # the first error of any
                finally:
                    pool.shutdown(cancel_futures=True)
        check_own(connector, job)
        writer.commit()
    except BaseException:
        with suppress(ConnectorError):  # the first error says more
            writer.abort()
        raise
