"""`OpenedPipeline`: a pipeline's config with its source opened and listed, and what order that gives its samples."""

from __future__ import annotations

import json
from copy import copy
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal

import torch

from loaderkit.connectors.base import Connector
from loaderkit.pipeline.config.model import ErrorsArgs, PipelineConfig
from loaderkit.pipeline.ranks.share_check import is_shared
from loaderkit.ranks.place import Place
from loaderkit.sampling.mixture import MixedOrder, Mixture
from loaderkit.sampling.packing import PackedOrder
from loaderkit.sampling.random import key_of
from loaderkit.sampling.schedule import BatchSampler, BlockOrder, GlobalOrder, SamplePermutation, SequentialOrder
from loaderkit.sampling.shard import WHOLE, Shard
from loaderkit.sampling.token_batches import TokenBatches
from loaderkit.sampling.token_mixture import TokenMixture
from loaderkit.sources.base import OwnedConnector, Source, shortened
from loaderkit.sources.mixture import MixtureSource
from loaderkit.stages.base import StageConfig
from loaderkit.stages.slowed import Slowdown


@dataclass(frozen=True)
class OpenedPipeline:
    """A pipeline's config, its listed source, the connector to it, and the order of its samples: plain data."""

    config: PipelineConfig
    source: Source
    connector: Connector | None  # None: samples are Python objects
    schedule: BatchSampler
    num_workers: int  # threads of all processes, at the start
    slowdown: Slowdown | None = None
    owns_connector: bool = False  # False: the caller gave the connector
    list_s: float = 0.0  # the time to list the source, without
    index_s: float = 0.0  # the time to read or build the indexes of archives
    inline_reason: str | None = None  # why a rule chose inline, if it did
    moved_reason: str | None = None  # why processes have taken over from threads, if they have
    shard: Shard = WHOLE  # of this worker process
    packing: PackedOrder | None = None  # the sequences that `pack` makes of the samples
    batching: TokenBatches | None = None  # the batches, if `tokens` make their size; these are dealt out then
    has_given_ranks: bool = True  # False: the schedule's rank and world size are a guess, see `Loader`
    mixture: Mixture | TokenMixture | None = None  # the course of an epoch of several sources
    part_connectors: tuple[OwnedConnector, ...] = ()  # those of several sources
    place: Place = field(default_factory=lambda: Place(0, 1))  # with the ranks that need the same batches
    pinned_for: torch.device | None = None  # the GPU to which `transfer` brings batches elsewhere

    @property
    def connectors(self) -> tuple[Connector | None, ...]:
        """The connector of each source."""
        return (self.connector,) if self.mixture is None else tuple(one.connector for one in self.part_connectors)

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
        """What to do with bad samples here: of several ranks that share a reader, only that one writes the quarantine file."""
        errors = self.config.errors
        return errors.model_copy(update={"quarantine": None}) if self.is_shared and self.place.number else errors

    def positions_before(self, epoch: int, position: int) -> int:
        """The first position of an epoch's samples that what comes before `position` does not depend on; planned by lengths,
        samples are in windows."""
        planned = self.packing if self.batching is None else self.batching.order
        return position if planned is None else planned.positions_before(epoch, position)

    def order(self) -> SamplePermutation:
        """The order of what the schedule deals out: samples, sequences of `pack`, or whole batches; for one thread."""
        is_planned = self.packing is not None or self.batching is not None
        return SequentialOrder() if is_planned else order_of(self.config, self.source, self.mixture)

    def num_samples(self, epoch: int = 0) -> int:
        """The samples of an epoch, with `pack` its sequences. Raises TypeError if that is not known."""
        self.schedule.check_length()
        return self.schedule.of_epoch(epoch).num_samples if self.batching is None else self.batching.num_samples(epoch)

    def fingerprint(self) -> dict[str, str]:
        """The values that must be equal for a saved state to mean the same samples; not the URL or settings of speed."""
        config, source = self.config, self.source
        named = config.source.model_dump(mode="python", include={"fields", "label"}, exclude_none=True)
        size = f" of {len(source)} samples" if self.schedule.wraps else ""
        values = {
            **(self._fingerprint_of_mixture() if self.mixture is not None else {}),
            **({"data": f"{config.source_kind}{size}, digest {source.fingerprint()}"} if self.mixture is None else {}),
            "order": config.order.shuffle,
            "stages": " > ".join(stage.name for stage in config.stages if stage.kind != "transfer"),
        }
        if config.order.shuffle == "block":
            block = config.order.block
            values["order"] = f"block of {block.block} bytes, window {block.window}, lanes {block.lanes}"
        planned = self.packing if self.batching is None else self.batching.order
        if isinstance(self.mixture, TokenMixture):
            values["lengths"] = self.mixture.digest()
        elif planned is not None:
            values["lengths"] = planned.digest()
        if self.batching is not None:
            args = config.batch
            form = args.ragged.get(args.field, "pad")
            values["batches"] = (
                f"{args.tokens} tokens of {args.field!r}, {form}, window {args.window}, cost {args.cost}"
            )
        if source.classes is not None:
            values["classes"] = shortened(source.classes)
        if named:
            values["fields"] = json.dumps(named, sort_keys=True, default=list)
        for stage in config.stages:
            if stage.kind not in ("read", "batch", "transfer"):
                values[f"stages.{stage.name}"] = _said(stage)
        return values

    def _fingerprint_of_mixture(self) -> dict[str, str]:
        """Short: a state with 20 sources is to stay below 1 KiB."""
        assert self.config.mixture is not None
        assert isinstance(self.source, MixtureSource)
        sources = []
        for member, part in zip(self.config.mixture.members, self.source.parts, strict=True):
            named = member.args.model_dump(mode="python", include={"fields", "label"}, exclude_none=True)
            passes = self.config.mixture.num_passes(member)
            said = (
                member.kind,
                part.fingerprint(),
                part.classes,
                sorted(named.items()),
                passes,
                *map(_said, member.stages),
            )
            digest = blake2b(repr(said).encode("utf-8", "surrogateescape"), digest_size=4).hexdigest()
            sources.append(f"{member.name}:{len(part)}:{digest}")
        assert self.mixture is not None
        return {"sources": " ".join(sources), "mix": self.mixture.fingerprint()}

    def close(self) -> None:
        """Close the connector, unless the caller gave it."""
        for connector, is_owned in (OwnedConnector(self.connector, self.owns_connector), *self.part_connectors):
            if connector is not None and is_owned:
                connector.close()


def order_of(config: PipelineConfig, source: Source, mixture: Mixture | TokenMixture | None) -> SamplePermutation:
    """The order of a source's samples; for one thread."""
    if mixture is None:
        return _order_of_one(config, source, config.order.seed)
    assert isinstance(source, MixtureSource)
    return mixture if isinstance(mixture, TokenMixture) else MixedOrder(copy(mixture), orders_of(config, source))


def orders_of(config: PipelineConfig, source: MixtureSource) -> list[SamplePermutation]:
    """The order of each source's samples."""
    return [_order_of_one(config, part, key_of("source", config.order.seed, part.name)) for part in source.parts]


def _order_of_one(config: PipelineConfig, source: Source, seed: int) -> SamplePermutation:
    order = config.order
    if order.shuffle == "global":
        return GlobalOrder(len(source), seed)
    if order.shuffle == "block":
        bounds = source.blocks(order.block.block)
        return BlockOrder(bounds, seed, window=order.block.window, lanes=order.block.lanes)
    return SequentialOrder()


def _said(stage: StageConfig) -> str:
    """What of a stage changes bytes."""
    args = {
        name: value
        for name, value in stage.args
        if name
        not in (
            "workers",
            "name",
            "timeout",
            "thread_safe",
            "max_pixels",
            "formats",
            "device",
            "regions",
            "on_gpu_error",
            "on_empty_batch",
        )
        and value != type(stage.args).model_fields[name].default
    }
    return f"{stage.kind} {json.dumps(args, sort_keys=True, default=_name_of)}"


def _name_of(value: Any) -> str:
    return getattr(value, "__qualname__", None) or type(value).__qualname__
