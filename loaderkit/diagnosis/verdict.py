"""A verdict: what limits a loop, in words, and as settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from loaderkit.engine.metrics.stalls import EPOCH, MEMORY, NETWORK, RELEASE, RESTART, START, WAKEUP


class Part(BaseModel):
    """A part of a report. Fields that a newer version has added are passed over when it is read."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class Setting(Part):
    """One value of the pipeline's description, as `--set` and `overrides` take it."""

    key: str = Field(description='dotted, as in "prefetch.concurrency"')
    before: Any = Field(None, description="as it was; null: not set")
    value: Any = Field(description="as it should be")
    why: str = Field("", description="what for; empty where the verdict says it")

    def __str__(self) -> str:
        return f"{self.key}: {self.value}"


class Remedy(NamedTuple):
    """What to change: the words for a reader, and the settings that they come to."""

    text: str
    settings: tuple[Setting, ...] = ()
    is_exact: bool = True  # the words give the value of each setting

    def then(self, text: str) -> Remedy:
        """With words behind it."""
        return self._replace(text=f"{self.text}{text}")


class Verdict(NamedTuple):
    """What limits the loop.

    `stage` is what the loop waited for longest: a stage's name, or `start`, `memory`, `wakeup`, `network`, `worker restart` or
    `release`; None: training is the limit. `percent` of the interval's wall time were lost to it (for None: not lost to
    loading). `confidence` is from 0 to 1. `kind` says in one word how it limits: training, computing, gil, oversubscription,
    lock, latency, bandwidth, stragglers, waiting, memory, depth, start, wakeup, network, restart, quota, unknown. `source`
    begins with the name of the one of several sources that alone holds the loop up, if one does, and says how that is seen.
    `settings`: the values to set for `change`; empty where it is nothing to be set. `is_exact`: `change` names them all.
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

    def to_dict(self) -> dict[str, Any]:
        """JSON values, without the settings: a report has those of the pipeline's file."""
        return {name: value for name, value in self._asdict().items() if name not in ("settings", "is_exact")}


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


def headline(stage: str | None, kind: str) -> str:
    """A verdict in one line."""
    if stage is None:
        return "Nothing to say yet" if kind == "unknown" else "Training is the limit"
    if kind == "quota":
        return "The CPU quota is the limit: the loop's thread was held back"
    if stage == NETWORK and kind != "network":
        return "Batches ahead are the limit: too few are on the way to the trainer at a time"
    return _WITHOUT_A_STAGE.get(stage, f"{stage} is the limit: {kind}")
