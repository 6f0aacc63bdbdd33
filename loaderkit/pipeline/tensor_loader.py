"""`loaderkit.build` for a pipeline whose source is a checkpoint: yields each tensor as soon as it is complete."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from types import TracebackType
from typing import Any

import torch

from loaderkit.checkpoint.contents import TensorEntry
from loaderkit.checkpoint.restore.selection import choose
from loaderkit.checkpoint.restore.source import OpenCheckpoint, parse_device
from loaderkit.checkpoint.transfer.session import TransferSession
from loaderkit.checkpoint.transfer.stages import hand_over
from loaderkit.connectors.base import Connector
from loaderkit.diagnosis.stats import Stats
from loaderkit.engine.lifetime import Lifetime
from loaderkit.engine.metrics.snapshot import Snapshot
from loaderkit.engine.metrics.tuning import Tuning
from loaderkit.engine.metrics.worker_clock import Clock
from loaderkit.errors import ConfigError
from loaderkit.pipeline.config.checkpoint_source import CheckpointArgs
from loaderkit.pipeline.config.model import PipelineConfig
from loaderkit.stages.transfer import TransferArgs


class TensorLoader:
    """Iterates over (name, tensor) in the order of their bytes in the checkpoint. Every tensor is new and belongs to
    the consumer.

    Tensors that are read and not yet taken count towards `prefetch.memory`, as staging memory does; one that is larger is read
    alone. `values` are the checkpoint's plain values. Close it; it is a context manager.
    """

    def __init__(self, config: PipelineConfig, connectors: Mapping[str, Connector], clock: Clock) -> None:
        """Opens the checkpoint and reads its table of contents. Raises the errors of `loaderkit.restore`."""
        args = config.source
        assert isinstance(args, CheckpointArgs)
        if config.prefetch.is_remote:
            raise ConfigError("prefetch.executor: tensors of a checkpoint are read by threads: use thread or inline")
        if config.metrics.prometheus is not None:
            raise ConfigError(
                "metrics.prometheus: there are metrics of batches, and none of a checkpoint: leave it out here"
            )
        self.config = config
        self._args = args
        self._clock = clock
        self._session: TransferSession | None = None
        self._last: Snapshot | None = None
        self._run = 0
        moves = [stage.args for stage in config.stages if isinstance(stage.args, TransferArgs)]
        self._device = (parse_device(moves[0].device) if moves else None) or torch.device("cpu")
        self.source = OpenCheckpoint.open(args.url, connectors, config.prefetch.memory, args.verify)
        self._lifetime = Lifetime()
        try:
            names, values = choose(self.source.contents, args.keys)
            self._names = [*islice(names, args.limit)]
            self.values: dict[str, Any] = self.source.plain_values(values)
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        """The number of tensors."""
        return len(self._names)

    @property
    def stored(self) -> list[TensorEntry]:
        """The entries of the tensors in the checkpoint."""
        return [self.source.contents.tensors[name] for name in self._names]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over all tensors; ends an earlier iteration."""
        return self._tensors(self.fill())

    def fill(self) -> TransferSession:
        """Start an iteration: a session that yields lists of tensors as they are complete. This loader closes it."""
        self._lifetime.check_open()
        self._stop()
        prefetch = self.config.prefetch
        session = self._session = self.source.transfer_new(
            self._names,
            self._device,
            self._args.dtype,
            concurrency=prefetch.concurrency,
            counts_made=True,
            timeout_s=prefetch.timeout,
            raises=prefetch.on_timeout == "raise",
            inline=prefetch.executor == "inline",
            clock=self._clock,
        )
        return session

    def _tensors(self, session: TransferSession) -> Iterator[tuple[str, torch.Tensor]]:
        try:
            for given in session:
                hand_over(tensor for _, tensor in given)
                while given:
                    yield given.pop(0)
        finally:
            if self._session is session:
                self._stop()
            else:
                session.close()

    def stats(self, since: Stats | None = None) -> Stats:
        """The counters up to now; with `since`, their rise after that moment."""
        session = self._session
        counted = session.engine.stats(Tuning(), self._run) if session is not None else self._last
        now = Stats.of(counted) if counted is not None else Stats.empty([], self.config.prefetch.memory)
        return now if since is None else now.since(since)

    def _stop(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            self._last = session.engine.stats(Tuning(), self._run)
            self._run += 1
            session.close()

    def close(self) -> None:
        """Stop all threads. Idempotent; delivered tensors stay valid."""
        self._lifetime.is_closed = True
        self._stop()
        self.source.close()

    def __enter__(self) -> TensorLoader:
        self._lifetime.check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
