"""`OpenedPipeline`: a pipeline's config with its source opened and listed, and the order of the samples."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from loaderkit.connectors.base import Connector
from loaderkit.pipeline.config.model import ErrorsArgs, PipelineConfig
from loaderkit.pipeline.fingerprint import fingerprint_of
from loaderkit.pipeline.ranks.share_check import is_shared
from loaderkit.ranks.place import Place
from loaderkit.sampling.order import SampleOrder
from loaderkit.sampling.schedule import BatchSampler
from loaderkit.sampling.shard import WHOLE, Shard
from loaderkit.sources.base import OwnedConnector, Source
from loaderkit.stages.slowed import Slowdown


@dataclass(frozen=True)
class OpenedPipeline:
    """A pipeline's config, its listed source, the connector to it, and the order of its samples: plain data."""

    config: PipelineConfig
    source: Source
    connector: Connector | None  # None if samples are Python objects
    order: SampleOrder  # for one thread: `order.for_thread()`
    schedule: BatchSampler  # of the positions of `order`
    num_workers: int  # threads of all processes, at the start
    slowdown: Slowdown | None = None
    owns_connector: bool = False  # False: the caller gave the connector
    list_s: float = 0.0  # the time to list the source, without
    index_s: float = 0.0  # the time to read or build the indexes of archives
    inline_reason: str | None = None  # why a rule chose inline, if it did
    moved_reason: str | None = None  # why processes have taken over from threads, if they have
    shard: Shard = WHOLE  # of this worker process
    has_given_ranks: bool = True  # False: the schedule's rank and world size are a guess, see `Loader`
    part_connectors: tuple[OwnedConnector, ...] = ()  # of each of several sources
    place: Place = field(default_factory=lambda: Place(0, 1))  # with the ranks that need the same batches
    pinned_for: torch.device | None = None  # the GPU to which `transfer` brings batches elsewhere

    @property
    def connectors(self) -> tuple[Connector | None, ...]:
        """The connector of each source."""
        return tuple(one.connector for one in self.part_connectors) or (self.connector,)

    @property
    def executor(self) -> Literal["inline", "thread", "process", "ray"]:
        """What makes the batches."""
        if self.inline_reason is not None:
            return "inline"
        executor = self.config.prefetch.executor
        return "thread" if executor == "auto" else executor

    @property
    def is_remote(self) -> bool:
        """True if other processes make the batches, here or on other machines."""
        return self.executor in ("process", "ray")

    @property
    def is_shared(self) -> bool:
        """True if one rank reads for several: then only it runs the stages before a `transfer` to CUDA."""
        return is_shared(self.config, self.place)

    @property
    def noted_errors(self) -> ErrorsArgs:
        """What to do with bad samples on this rank: if several ranks share a reader, only the reader writes the
        quarantine file."""
        errors = self.config.errors
        return errors.model_copy(update={"quarantine": None}) if self.is_shared and self.place.number else errors

    def num_samples(self, epoch: int = 0) -> int:
        """The number of samples of an epoch; with `pack`, of its sequences. Raises TypeError if that is not known."""
        self.schedule.check_length()
        return self.order.num_samples(epoch)

    def fingerprint(self) -> dict[str, str]:
        """The values that must be equal for a saved state to mean the same samples."""
        return fingerprint_of(self.config, self.source, self.order)

    def close(self) -> None:
        """Close the connector, unless the caller gave it."""
        for connector, is_owned in (OwnedConnector(self.connector, self.owns_connector), *self.part_connectors):
            if connector is not None and is_owned:
                connector.close()
