"""A verdict: what limits a loop, in words, and as settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from loaderkit.engine.metrics.stalls import EPOCH, MEMORY, NETWORK, RELEASE, RESTART, START, WAKEUP

_NEARLY = 2 / 3  # of the longest wait; a cause with as much is named beside it
_MOST_NAMED = 3


class Part(BaseModel):
    """A part of a report. When it is read, fields that a newer version has added are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class Setting(Part):
    """One value of the pipeline's description, as `--set` and `overrides` take it."""

    key: str = Field(description='dotted, as in "prefetch.concurrency"')
    before: Any = Field(None, description="as it was; null: not set")
    value: Any = Field(description="as it should be")
    why: str = Field("", description="what for; empty where the verdict says it")
    tried: str = Field("", description="what a trial of it and of the verdict's others found; empty: none was made")

    def __str__(self) -> str:
        return f"{self.key}: {self.value}"


class Remedy(NamedTuple):
    """What to change: the words for a reader, and the settings that they mean."""

    text: str
    settings: tuple[Setting, ...] = ()
    is_exact: bool = True  # the words give the value of each setting

    def then(self, text: str) -> Remedy:
        """With words behind it."""
        return self._replace(text=f"{self.text}{text}")


class Cause(Part):
    """One of the things that the loop waited for. Where two kinds explain the same wait about equally well, each is a cause."""

    stage: str | None = Field(description="as of the verdict")
    kind: str = Field(description="as of the verdict")
    percent: float = Field(description="of the time lost to it")
    confidence: float = Field(description="from 0 to 1")
    change: str = Field("", description="what to do about it, in words")
    settings: list[Setting] = Field([], description="the same as values to set; empty where it is nothing to be set")


class Verdict(NamedTuple):
    """What limits the loop.

    `stage` is what the loop waited for longest: a stage's name, or `start`, `memory`, `wakeup`, `network`, `worker restart` or
    `release`; None if training is the limit. `percent` of the interval's wall time were lost to it (if it is None, this
    share was not lost to loading). `confidence` is from 0 to 1. `kind` says in one word how it limits: training,
    computing, gil, oversubscription, lock, latency, bandwidth, stragglers, waiting, memory, depth, start, wakeup,
    network, restart, quota, failed, unknown. `source` begins with the name of the one of several sources that alone
    holds the loop up, if one does, and says how that is seen. `settings`: the values to set for `change`; empty if no
    setting does it. `is_exact`: `change` names them all. `or_kind`: another kind that fits the figures about as well,
    or training, if little is lost; None if `kind` fits best. `causes`: all that the loop waited for, the longest first,
    whose stage is `stage` unless training is the limit; `settings` are for all of them that the headline names.
    """

    stage: str | None
    percent: float
    confidence: float
    evidence: str
    change: str
    kind: str
    source: str | None = None
    settings: tuple[Setting, ...] = ()
    is_exact: bool = True
    or_kind: str | None = None
    causes: tuple[Cause, ...] = ()

    @property
    def headline(self) -> str:
        """The verdict in one line."""
        return headline(self.stage, self.kind, self.or_kind, self.causes)

    def to_dict(self) -> dict[str, Any]:
        """JSON values, without the settings: a report has the settings as keys of the pipeline's file."""
        values = {name: value for name, value in self._asdict().items() if name not in ("settings", "is_exact")}
        causes = [cause.model_dump(mode="json") for cause in self.causes]
        return {**values, "causes": causes, "headline": self.headline}


def say(settings: Sequence[Setting], joint: str = ", ") -> str:
    """Settings in words, as a file has them."""
    return joint.join(map(str, settings))


_WITHOUT_A_STAGE: Mapping[str, str] = {
    START: "Starting up is the limit: the first batch",
    EPOCH: "Changing epochs is the limit: nothing is ready when one begins",
    MEMORY: "Memory is the limit: no room for more batches ahead",
    WAKEUP: "Waking up the loop is the limit: its batch was there",
    NETWORK: "The network is the limit: batches wait for the way to the trainer",
    RESTART: "Restarting worker processes is the limit: they die",
    RELEASE: "Releasing batches is the limit: their memory goes back to the system",
}


_BY_KIND: Mapping[str, str] = {
    "quota": "The CPU quota is the limit: the loop's thread was held back",
    "unknown": "Too few batches to say what is the limit",
}
_WITHOUT_A_WAIT: Mapping[str, str] = {
    "training": "Training is the limit",
    "unknown": "Nothing to say yet",
    "failed": "No batch came: the loop ended by an error",
}


def headline(stage: str | None, kind: str, or_kind: str | None = None, causes: Sequence[Cause] = ()) -> str:
    """A verdict in one line."""
    if stage is None:
        found = _WITHOUT_A_WAIT.get(kind, _WITHOUT_A_WAIT["training"])
        return f"{found}, and then {causes[0].stage}: {or_kind}" if or_kind is not None and causes else found
    together = named_together(causes)
    if len(together) < 2 or kind == "unknown":
        return _of_one(stage, kind, or_kind)
    names, kinds = [str(one.stage) for one in together], _kinds_of(together, causes)
    said = kinds[0] if len({*kinds}) == 1 else ", ".join(map(_of_cause, names, kinds))
    return f"{', '.join(names[:-1])} and {names[-1]} together are the limit: {said}"


def _of_one(stage: str, kind: str, or_kind: str | None) -> str:
    if or_kind not in (None, "training"):
        return f"{stage} is the limit: cannot tell {kind} from {or_kind}"
    if stage == NETWORK and kind != "network":
        return "Batches ahead are the limit: too few are on the way to the trainer at a time"
    return _BY_KIND.get(kind) or _WITHOUT_A_STAGE.get(stage, f"{stage} is the limit: {kind}")


def named_together(causes: Sequence[Cause]) -> list[Cause]:
    """The first cause, and causes that the loop waited for nearly as long: within a third of it, at most three in all."""
    by_stage = {cause.stage: cause for cause in reversed(causes)}
    ranked = [cause for cause in causes if by_stage[cause.stage] is cause]
    return [cause for cause in ranked if cause.percent >= _NEARLY * ranked[0].percent][:_MOST_NAMED]


def _kinds_of(named: Sequence[Cause], causes: Sequence[Cause]) -> list[str]:
    """The kind of each cause, or the two kinds that cannot be told apart."""
    return [" or ".join(other.kind for other in causes if other.stage == one.stage) for one in named]


def _of_cause(name: str, kind: str) -> str:
    return name if kind == name else f"{name} {kind}"
