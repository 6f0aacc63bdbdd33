"""Reads tensors by the engine, with the workers, clocks and watchdog that batches have."""

from __future__ import annotations

import time
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import torch

from loaderkit._internal.cuda.streams import DeviceStreams
from loaderkit.checkpoint.contents import Checksums
from loaderkit.checkpoint.transfer.plan import ReadRequest, TensorPlan, limits_of
from loaderkit.checkpoint.transfer.stages import TransferStages
from loaderkit.connectors.base import Connector, ObjectInfo, counters_of
from loaderkit.engine.base import Engine
from loaderkit.engine.inline import InlineEngine
from loaderkit.engine.metrics.snapshot import Snapshot
from loaderkit.engine.metrics.tuning import Tuning
from loaderkit.engine.metrics.worker_clock import Clock
from loaderkit.engine.pools import plan_pools
from loaderkit.engine.threaded import ThreadEngine


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
