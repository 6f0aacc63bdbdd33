"""`sources` and `mix`: several sources, each with a weight and stages of its own, as one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PositiveInt, model_validator

from loaderkit._internal.config.settings import Model, as_tuple
from loaderkit.connectors.config import SourceArgs
from loaderkit.pipeline.config.registry import SOURCES
from loaderkit.sampling.mix_rules import WeightChange
from loaderkit.sources.base import SourceKind
from loaderkit.stages.base import StageConfig

Weight = Annotated[float, Field(ge=0, le=1e12)]


class MixedArgs(Model):
    """One of `sources`. It also takes the keys of its `kind`, any but `iterable` and `checkpoint`."""

    name: str = Field(pattern=r"^[A-Za-z_][\w-]*$", description="in messages, statistics and `mix.changes`")
    weight: Weight = Field(
        1.0, description="its share of the samples is its part of the sum of all weights; 0: none yet"
    )
    epochs: PositiveInt | None = Field(
        None,
        description="passes over it in an epoch, after which it is used up; default: 1, and with `stop: never` no end",
    )
    repeat: bool = Field(False, description="it is never used up")

    @model_validator(mode="after")
    def _ends_one_way(self) -> MixedArgs:
        if self.repeat and self.epochs is not None:
            raise ValueError("`repeat: true` has no end, and `epochs` is one: remove one of them")
        return self


class ChangeArgs(Model):
    """Other weights from a position of the epoch on."""

    at: PositiveInt = Field(
        description="the position, in samples over all ranks, also with `by: tokens`; with `pack` these are documents"
    )
    weights: dict[str, Weight] = Field(description="name -> weight, of all sources")


def _ascending(value: tuple[ChangeArgs, ...]) -> tuple[ChangeArgs, ...]:
    places = [change.at for change in value]
    if any(later <= earlier for earlier, later in pairwise(places)):
        raise ValueError(f"changes at ascending positions, not at {', '.join(map(str, places))}")
    return value


class MixArgs(Model):
    """How `sources` take turns: the position alone says whose sample it is."""

    by: Literal["sample", "tokens"] = Field(
        "sample",
        description="what weights are shares of; tokens: those of each sample, whose number must be known before it is read",
    )
    stop: Literal["first", "all", "never"] = Field(
        "first",
        description="an epoch ends when one source is used up; when all are, the rest taking over the share of those that went "
        "before; or never, as each begins again",
    )
    changes: Annotated[tuple[ChangeArgs, ...], BeforeValidator(as_tuple), AfterValidator(_ascending)] = Field(
        (), description="other weights from a position on: a list of `{at: 100000, weights: {web: 0.5, code: 0.5}}`"
    )


@dataclass(frozen=True)
class MixedSourceConfig:
    """One of the sources of a mixture: the arguments of its place in the mixture, those of its kind, and its stages
    before the common ones."""

    mixed: MixedArgs
    kind: str
    args: SourceArgs
    stages: tuple[StageConfig, ...]

    @property
    def name(self) -> str:
        return self.mixed.name


class MixtureArgs(SourceArgs):
    """Takes the place of a source's arguments in a mixture. Made by `mixture_args`, from parts that were checked."""

    sources: tuple[Any, ...] = ()  # of MixedSourceConfig
    mix: MixArgs = MixArgs()

    @property
    def members(self) -> tuple[MixedSourceConfig, ...]:
        """The sources, in their order."""
        return self.sources

    @property
    def names(self) -> list[str]:
        """Their names."""
        return [member.name for member in self.members]

    @property
    def changes(self) -> list[WeightChange]:
        """The weights at the beginning, and every change of them."""
        later = [
            WeightChange(change.at, tuple(float(change.weights[name]) for name in self.names))
            for change in self.mix.changes
        ]
        return [WeightChange(0, tuple(float(member.mixed.weight) for member in self.members)), *later]

    def num_passes(self, member: MixedSourceConfig) -> int | None:
        """The passes after which a source is used up; None if it never is."""
        if self.mix.stop == "never" or member.mixed.repeat:
            return None
        return member.mixed.epochs or 1


def mixture_args(members: tuple[MixedSourceConfig, ...], mix: MixArgs) -> MixtureArgs:
    """The arguments of a mixture."""
    return MixtureArgs.model_construct(sources=members, mix=mix)


def _fields(args: Any) -> Mapping[str, str] | None:
    """What the description says of the fields; None where sources differ, or where their own stages may change the fields."""
    known = [None if member.stages else SOURCES[member.kind].fields(member.args) for member in args.members]
    return known[0] if all(fields == known[0] for fields in known) else None


MIXTURE = SourceKind(MixtureArgs, fields=_fields)
