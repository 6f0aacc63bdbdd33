"""One frozen description of a pipeline, whether it comes from YAML, a dict or `Pipeline`.

`parsing.py` makes it, `validation.py` checks how its parts fit together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt, model_validator

from loaderkit._internal.config.settings import ByteSize, Duration, Model
from loaderkit._internal.config.yaml_text import to_yaml
from loaderkit.connectors.config import SourceArgs
from loaderkit.errors import ConfigError
from loaderkit.metrics.address import parse_address
from loaderkit.pipeline.config.mixture import MIXTURE, MixedSourceConfig, MixtureArgs
from loaderkit.pipeline.config.registry import SOURCES
from loaderkit.sources.base import SourceKind
from loaderkit.stages.base import StageConfig
from loaderkit.stages.batch import BatchArgs
from loaderkit.stages.call import FilterArgs
from loaderkit.stages.sequence.pack import PackArgs


class BlockArgs(Model):
    """How `shuffle: block` cuts and mixes."""

    block: ByteSize = Field(8 * 2**20, description="approximate bytes of neighbouring samples in a block")
    window: PositiveInt = Field(16, description="blocks of a lane mixed together")
    lanes: PositiveInt = Field(8, description="blocks read in turns; ranks share them out when they divide it")


def _shuffle_mode(value: Any) -> Any:
    """True means global, False means none."""
    return {True: "global", False: "none"}[value] if isinstance(value, bool) else value


class OrderArgs(Model):
    """Which sample comes when. Shuffling is on by default, also for a pipeline that you mean for validation."""

    shuffle: Annotated[Literal["global", "block", "none"], BeforeValidator(_shuffle_mode)] = Field(
        "global",
        description="any sample anywhere (true); blocks of neighbours, for few large reads from a store; or the canonical "
        "order (false)",
    )
    weights: Literal["by class"] | dict[str, Annotated[float, Field(ge=0)]] | None = Field(
        None,
        description="by class: every class equally often, samples drawn with replacement; or class -> weight, as in {cat: 2, "
        "dog: 1}; for sources that know the class of each sample without reading it",
    )
    seed: NonNegativeInt = Field(0, description="of the order and of every augmentation")
    epochs: PositiveInt | None = Field(None, description="null: no end")
    block: BlockArgs = Field(BlockArgs(), description="for `shuffle: block`, below")


def _without_client(address: Any) -> Any:
    if isinstance(address, str) and address.startswith("ray://"):
        raise ValueError(
            "Ray Client has no memory in common with the cluster: run this program on one of its nodes, with auto"
        )
    return address


_RayAmount = Annotated[float, Field(ge=0.0001)]  # Ray counts in such steps


def _rays_own(resources: Any) -> Any:
    for name in ("CPU", "GPU", "memory", "object_store_memory"):
        if isinstance(resources, dict) and name in resources:
            raise ValueError(
                f"{name} is not a name for it: CPUs are num_cpus, and Ray's GPUs and memory cannot be asked for; a node "
                "may be given resources by names of your own (`ray start --resources='{\"fast_disk\": 4}'`)"
            )
    return resources


class RayArgs(Model):
    """Where the actors of `executor: ray` run: one for each of `processes`."""

    address: Annotated[str, BeforeValidator(_without_client)] = Field(
        "auto",
        min_length=1,
        description="of the cluster, as host:port; auto: of RAY_ADDRESS, else the one that runs on this machine; local: one on "
        "this machine, begun for this program",
    )
    num_cpus: _RayAmount = Field(
        1.0, description="of each actor, by which Ray places them; with `concurrency: auto` it has as many workers"
    )
    resources: Annotated[dict[str, _RayAmount], BeforeValidator(_rays_own)] = Field(
        {}, description="what else each actor needs, by Ray's names"
    )
    strategy: Literal["spread", "default"] = Field(
        "spread", description="over as many nodes as there are; default: Ray's own, which fills nodes first"
    )


class PrefetchArgs(Model):
    """How far and how fast to work ahead."""

    batches: PositiveInt | Literal["auto"] = Field(
        4,
        description="batches being made or ready while the consumer works on another; auto: 4 to begin with, then measured",
    )
    memory: ByteSize = Field(2 * 2**30, description="bound on the memory of those batches")
    concurrency: PositiveInt | Literal["auto"] = Field(
        "auto", description="worker threads in all; auto: one a CPU to begin with, then measured"
    )
    executor: Literal["auto", "inline", "thread", "process", "ray"] = Field(
        "auto",
        description="auto: threads here, and worker processes once the loop waits for user code that is not `thread_safe`; "
        "inline: none, next() does the work; process: threads of other processes; ray: of actors of a Ray cluster",
    )
    ray: RayArgs = Field(RayArgs(), description="for `executor: ray`, below")
    processes: PositiveInt | Literal["auto"] = Field(
        1,
        description="how many, with `executor: process` or `ray`; they share `batches`, `memory` and all workers out evenly; "
        "auto: one to begin with, then measured, and `batches` is auto as well unless it is given",
    )
    max_processes: PositiveInt | None = Field(
        None,
        description="the most that `processes: auto` comes to; default: a process a CPU of this rank (with `ray` what the "
        "cluster has room for), and as many as `batches`, if that is a number",
    )
    restarts: NonNegativeInt = Field(
        3,
        description="with `executor: process` or `ray`: how often, in all, one that died is started again, and its batches are "
        "made again; one death more, or a second one at the same batch, raises WorkerDiedError; 0: the first does",
    )
    timeout: Duration = Field(
        60.0, description="a wait this long is reported with the stage, the sample and stacks; first at a quarter of it"
    )
    on_timeout: Literal["warn", "raise"] = Field(
        "warn", description="after `timeout`: keep waiting, or raise StallTimeout (not with `executor: inline`)"
    )

    @model_validator(mode="before")
    @classmethod
    def _grows_with_processes(cls, data: Any) -> Any:
        is_auto = isinstance(data, dict) and data.get("processes") == "auto"
        return {"batches": "auto", **data} if is_auto else data

    @property
    def first_processes(self) -> int:
        """The number of processes to begin with."""
        return 1 if self.processes == "auto" else self.processes

    @property
    def is_remote(self) -> bool:
        """True if other processes make the batches, here or on other machines."""
        return self.executor in ("process", "ray")

    @property
    def first_batches(self) -> int:
        """The depth to begin with."""
        if self.batches != "auto":
            return self.batches
        return max(4, self.first_processes) if self.is_remote else 4


class ErrorsArgs(Model):
    """What to do with samples that cannot be read, decoded or transformed, and with shards that are damaged or missing."""

    on_bad_sample: Literal["raise", "skip", "replace"] = Field(
        "raise", description="stop; make the batch shorter; or put another sample, drawn from the seed, in its place"
    )
    max_bad_samples: NonNegativeInt = Field(100, description="per rank and epoch; one more raises")
    on_bad_shard: Literal["raise", "skip"] = Field(
        "raise",
        description="of archives and files of many samples, one that is cut, damaged or missing: stop; or leave it out (of a "
        "tar and an array what is behind the damage)",
    )
    max_bad_shards: NonNegativeInt = Field(1, description="in all sources together; one more raises, and names all")
    quarantine: str | None = Field(None, description="a file that gets one JSON line for every bad sample and shard")


class RanksArgs(Model):
    """How ranks of a mesh that need the same batches get them: those behind tensor, pipeline and context parallelism.
    Without such ranks it has no effect."""

    share: Literal["read", "broadcast"] = Field(
        "read",
        description="each reads for itself; broadcast: the first of them reads, and passes batches on to the others",
    )


def _address(value: Any) -> Any:
    if value is not None:
        parse_address(value)
    return value


class MetricsArgs(Model):
    """Where other programs read what the loader counts."""

    prometheus: Annotated[int | str | None, BeforeValidator(_address)] = Field(
        None,
        description="the port at which Prometheus reads it, on this machine; HOST:PORT, as in 0.0.0.0:9431, for others; "
        "with LOCAL_RANK n (torchrun) it is the port + n; the loaders of one process share it",
    )


@dataclass(frozen=True)
class PipelineConfig:
    """A whole pipeline, valid and complete: every default is filled in."""

    source: SourceArgs
    stages: tuple[StageConfig, ...]
    version: int = 1
    name: str = "pipeline"
    order: OrderArgs = field(default_factory=OrderArgs)
    prefetch: PrefetchArgs = field(default_factory=PrefetchArgs)
    errors: ErrorsArgs = field(default_factory=ErrorsArgs)
    output: tuple[str, ...] | None = None
    ranks: RanksArgs = field(default_factory=RanksArgs)
    metrics: MetricsArgs = field(default_factory=MetricsArgs)

    @property
    def source_kind(self) -> str:
        """The name of the source's kind; "mixture" for `sources`."""
        return "mixture" if self.mixture is not None else self.source.kind

    @property
    def kind(self) -> SourceKind:
        """The source's kind."""
        return MIXTURE if self.mixture is not None else SOURCES[self.source_kind]

    @property
    def mixture(self) -> MixtureArgs | None:
        """The arguments of `sources` and `mix`; None for a single source."""
        return self.source if isinstance(self.source, MixtureArgs) else None

    @property
    def members(self) -> tuple[MixedSourceConfig, ...]:
        """The sources of a mixture; none for a single source."""
        return () if self.mixture is None else self.mixture.members

    @property
    def source_names(self) -> list[str] | None:
        """The names of mixed sources; None for a single source."""
        return None if self.mixture is None else self.mixture.names

    @property
    def all_stages(self) -> tuple[StageConfig, ...]:
        """The stages, with those that sources have of their own."""
        return (*(stage for member in self.members for stage in member.stages), *self.stages)

    def stage(self, kind: str) -> StageConfig:
        """The first stage of a kind."""
        return next(stage for stage in self.stages if stage.kind == kind)

    @property
    def batch(self) -> BatchArgs:
        """The arguments of `batch`."""
        args = self.stage("batch").args
        assert isinstance(args, BatchArgs)
        return args

    @property
    def batch_size(self) -> int | None:
        """The samples of a batch, or sequences of `pack`; None if it has as many as its `tokens` allow."""
        if self.batch.tokens is None:
            return self.batch.size
        lengths = [stage.args.length for stage in self.stages if isinstance(stage.args, PackArgs)]
        return self.batch.tokens // lengths[0] if lengths else None

    @property
    def executor_with_workers(self) -> Literal["thread", "process"]:
        """The executor that may replace `executor: inline` or auto: a function with `seeded` cannot run in threads."""
        return "process" if any(getattr(stage.args, "seeded", False) for stage in self.all_stages) else "thread"

    @property
    def filters(self) -> str:
        """The names of the stages that drop samples, for messages."""
        return ", ".join(stage.name for stage in self.all_stages if stage.kind == "filter")

    @property
    def skips_empty_batches(self) -> bool:
        """True if a batch of which nothing is left is skipped: there are filters, and all of them say so."""
        filters = [stage.args for stage in self.all_stages if isinstance(stage.args, FilterArgs)]
        return bool(filters) and all(args.on_empty_batch == "skip" for args in filters)

    def to_dict(self, *, defaults: bool = False) -> dict[str, Any]:
        """Plain values that `parse` turns back into an equal config; with every default, or only what differs.

        Raises ConfigError for objects that a file cannot name (a lambda, a data set given as an object).
        """
        try:
            data: dict[str, Any] = {"version": self.version, "name": self.name}
            if self.mixture is None:
                data["source"] = {"kind": self.source_kind, **_dump(self.source, defaults)}
            else:
                data["sources"] = [_dump_mixed(member, defaults) for member in self.mixture.members]
                data["mix"] = _dump(self.mixture.mix, defaults)
            data["order"] = _dump_order(self.order, defaults)
            data["stages"] = [_dump_stage(stage, defaults) for stage in self.stages]
            data["prefetch"] = _dump(self.prefetch, defaults)
            data["errors"] = _dump(self.errors, defaults)
            data["ranks"] = _dump(self.ranks, defaults)
            data["metrics"] = _dump(self.metrics, defaults)
            data["output"] = list(self.output) if self.output is not None else None
        except ValueError as error:
            raise ConfigError(f"this pipeline cannot be written as YAML: {error}") from error
        return {key: value for key, value in data.items() if defaults or value not in ({}, None)}

    def to_yaml(self, *, defaults: bool = False) -> str:
        """YAML text that describes this pipeline exactly."""
        return to_yaml(escape(self.to_dict(defaults=defaults)), width=120)


def _dump_mixed(member: MixedSourceConfig, defaults: bool) -> dict[str, Any]:
    described = {"kind": member.kind, **_dump(member.mixed, defaults), **_dump(member.args, defaults)}
    own = [replace(stage, name=stage.name.rpartition(".")[0]) for stage in member.stages]
    return described | ({"stages": [_dump_stage(stage, defaults) for stage in own]} if own else {})


def _dump(model: Model, defaults: bool) -> dict[str, Any]:
    check_plain(getattr(model, "args", None), "args")
    dumped = model.model_dump(mode="json", exclude_defaults=not defaults)
    dumped.pop("kind", None)
    return dumped


def _dump_order(order: OrderArgs, defaults: bool) -> dict[str, Any]:
    dumped = _dump(order, defaults)
    if order.shuffle == "block":
        dumped["block"] = _dump(order.block, defaults)
        return {key: value for key, value in dumped.items() if key != "block" or value}
    return {key: value for key, value in dumped.items() if key != "block" or order.block != BlockArgs()}


def _dump_stage(stage: StageConfig, defaults: bool) -> Any:
    dumped = _dump(stage.args, defaults)
    if defaults:
        dumped["name"] = stage.name
    return {stage.kind: dumped} if dumped else stage.kind


def check_plain(value: Any, where: str) -> None:
    """Raise ValueError unless YAML can hold `value` and give it back unchanged."""
    if isinstance(value, float) and math.isnan(value):
        raise ValueError(f"{where}: nan is not equal to itself when it is read again")
    if value is None or type(value) in (bool, int, float, str):
        return
    if type(value) is list:
        for number, item in enumerate(value):
            check_plain(item, f"{where}[{number}]")
    elif type(value) is dict and all(type(key) is str for key in value):
        for key, item in value.items():
            check_plain(item, f"{where}.{key}")
    else:
        raise ValueError(f"{where}: a {type(value).__name__} is not plain data")


def escape(value: Any) -> Any:
    """A copy in which `${` in texts is written `$${`."""
    if isinstance(value, str):
        return value.replace("${", "$${")
    if isinstance(value, Mapping):
        return {key: escape(item) for key, item in value.items()}
    return [escape(item) for item in value] if type(value) is list else value
