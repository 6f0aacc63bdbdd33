"""Reads of tensors by the engine, with the same workers, clocks and watchdog as batches."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Literal, NamedTuple

import torch

from loaderkit._internal.cuda_streams import DeviceStreams
from loaderkit._internal.system.cgroups import num_cpus
from loaderkit.checkpoint.contents import Checksums
from loaderkit.checkpoint.transfer.plan import LATENCY_GAP, ReadRequest, TensorPlan, limits_of, memory_of_worker
from loaderkit.checkpoint.transfer.stages import TransferStages
from loaderkit.connectors.base import Connector, ObjectInfo, bulk_of, counters_of, traits_of
from loaderkit.connectors.page_cache import cached_share, parts_of
from loaderkit.engine.base import Engine
from loaderkit.engine.inline import InlineEngine
from loaderkit.engine.metrics.snapshot import Snapshot
from loaderkit.engine.metrics.tuning import Tuning
from loaderkit.engine.metrics.worker_clock import Clock
from loaderkit.engine.pools import plan_pools
from loaderkit.engine.threaded import ThreadEngine
from loaderkit.errors import CheckpointError, ConfigError, PeerError

_REMOTE_WORKERS = 16
_SPLITTING_WORKERS = 8  # each has several requests in flight
# Tensors of this size take 60 us and more of Python, and 10 us to read. 4,000 tensors, with one thread and with two, in ms: of
# 1 KiB 461 and 635 (dcp), 257 and 290 (safetensors); of 16 KiB 492 and 595, 272 and 276; of 64 KiB 520 and 605, 342 and 325.
_SMALL_BYTES = 64 * 2**10
# On two CPUs, two threads read from the page cache as fast as eight. From a disk eight are faster, and past the page cache up
# to 24, because some are busy with copies. A thread takes 0.3 ms to start, and must have enough to do.
_DISK_WORKERS = 8
_DIRECT_WORKERS = 24
_WORTH_A_WORKER = 32 * 2**20
_FROM_MEMORY = 0.9  # share in the page cache from which on the disk does not matter
_WORTH_KEEPING = 0.1  # share in the page cache from which on the rest is read through it, too
# Of torchrun and most other launchers, Slurm, Open MPI, MPICH.
_NUMBERS_OF_PROCESSES = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


class Access(NamedTuple):
    """The number of threads that read a store, and whether they read past the page cache."""

    num_workers: int
    direct: bool = False


def num_workers_of(
    connector: Connector, concurrency: int | Literal["auto"], requests: Sequence[ReadRequest] | None = None
) -> int:
    """Threads that read: one a CPU for files, and one in all where `requests` are small on average, because Python then takes
    longer than reading. Most for a store with latency, fewer where the connector splits long `requests` itself.

    Raises ConfigError for a `concurrency` that is no such number.
    """
    if concurrency != "auto":
        if type(concurrency) is not int or concurrency < 1:
            raise ConfigError(f"concurrency {concurrency!r}: expected 'auto', or a number of threads from 1 on")
        return concurrency
    mean = _mean_bytes(requests)
    traits = traits_of(connector)
    if traits.coalesce_gap >= LATENCY_GAP:
        is_split = mean is not None and mean >= traits.part_size // 4 > 0
        return _SPLITTING_WORKERS if is_split else _REMOTE_WORKERS
    return 1 if mean is not None and mean < _SMALL_BYTES else max(2, num_cpus())


def plan_access(
    connector: Connector, concurrency: int | Literal["auto"], requests: Sequence[ReadRequest], memory_bytes: int
) -> Access:
    """How a rank that shares nothing reads `requests`: from a disk with more threads than CPUs, as far as memory allows, and
    past the page cache. Raises ConfigError as `num_workers_of`."""
    num_workers = num_workers_of(connector, concurrency, requests)
    if traits_of(connector).coalesce_gap >= LATENCY_GAP or (_mean_bytes(requests) or 0) < _SMALL_BYTES:
        return Access(num_workers)
    paths = parts_of(connector, ((*request.start, request.num_bytes) for request in requests))
    share = cached_share(paths) if paths else 1.0
    is_from_disk = share is not None and share < _WORTH_KEEPING
    direct = is_from_disk and bulk_of(connector).read_direct is not None and not _has_other_processes()
    if concurrency == "auto" and (share is None or share < _FROM_MEMORY):
        useful = _DISK_WORKERS
        if direct:
            num_bytes = sum(request.num_bytes for request in requests)
            useful = max(useful, min(_DIRECT_WORKERS, num_bytes // _WORTH_A_WORKER))
        num_workers = max(num_workers, min(useful, memory_bytes // memory_of_worker(connector)))
    return Access(num_workers, direct)


def _mean_bytes(requests: Sequence[ReadRequest] | None) -> float | None:
    return sum(request.num_bytes for request in requests) / len(requests) if requests else None


def _has_other_processes() -> bool:
    """True if other processes may read the same: they should find it in the page cache."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        return True
    return any(os.environ.get(name, "1") != "1" for name in _NUMBERS_OF_PROCESSES)


class TransferSession:
    """Reads `requests`, and iterates over the tensors as they become whole. Close it; it is a context manager."""

    def __init__(
        self,
        requests: Sequence[ReadRequest],
        connector: Connector,
        objects: Mapping[str, ObjectInfo],
        *,
        memory_bytes: int,
        num_parts: int = 1,
        num_workers: int,
        direct: bool = False,
        checksums: Mapping[str, Checksums] | None = None,
        devices: Collection[torch.device] = (),
        touched: set[str] | None = None,
        counts_made: bool = False,
        timeout_s: float = 60.0,
        raises: bool = False,
        inline: bool = False,
        depth: int | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        """`memory_bytes` is divided into `num_parts`, one of which is for this session. `devices`: where the tensors are.
        `direct`: read past the page cache, if the connector can. `touched` collects the names of the tensors that are written
        to, if the caller needs them."""
        num_workers = 1 if inline else num_workers
        limits = limits_of(connector, memory_bytes, num_workers, is_checked=bool(checksums), num_parts=num_parts)
        self.most_bytes = limits.most_bytes  # of one read
        self.plan = TensorPlan(
            requests,
            limits=limits,
            memory_bytes=memory_bytes // num_parts,
            staging_bytes=num_workers * limits.most_bytes,
            depth=depth or 2 * num_workers + 2,
            counts_made=counts_made,
        )
        self.totals = self.plan.totals
        self.direct = direct
        self._streams = DeviceStreams(devices)
        stages = TransferStages(
            connector,
            objects,
            self.totals,
            checksums=checksums or {},
            streams=self._streams,
            touched=set() if touched is None else touched,
            direct=direct,
        ).stages()
        pools = plan_pools(stages, num_workers)
        counters = partial(counters_of, connector)
        self.engine: Engine
        if inline:
            self.engine = InlineEngine(self.plan, stages, pools, clock=clock, counters=counters)
        else:
            self.engine = ThreadEngine(
                self.plan,
                stages,
                pools,
                timeout_s=timeout_s,
                raises=raises,
                tries_one_worker=False,
                clock=clock,
                counters=counters,
            )
        self._finalizer = weakref.finalize(self, self.engine.abandon)  # if Ctrl-C interrupts `close`

    def __iter__(self) -> Iterator[list[tuple[str, Any]]]:
        """Names with their tensors, of one work item after the other. An error stops the engine."""
        try:
            for _ in range(len(self.plan)):
                work_item = self.engine.next()
                if work_item.error is not None:
                    raise work_item.error
                yield work_item.result
        except BaseException as error:
            self.engine.close(join_s=10.0 if isinstance(error, Exception) else 2.0)
            raise

    def stats(self) -> Snapshot:
        """The engine's counters so far."""
        return self.engine.stats(Tuning(), 0)

    def close(self) -> None:
        """Stop the workers. Idempotent."""
        self.engine.close()
        self._streams.close()
        self._finalizer.detach()

    def __enter__(self) -> TransferSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def name_touched(error: BaseException, names: set[str]) -> None:
    """Add to an error the names of the caller's tensors that were written to before it."""
    touched = tuple(sorted(names.copy()))  # a worker that hangs may still add to the set
    if isinstance(error, (CheckpointError, PeerError)):
        error.touched = touched
    if touched:
        listed = ", ".join(touched[:5]) + (f" and {len(touched) - 5} more" if len(touched) > 5 else "")
        error.add_note(f"written to already, so neither old nor new: {listed}")
