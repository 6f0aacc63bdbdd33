"""The numbers that the tuner changes, and the record of a change."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

LADDER = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


@dataclass
class TunedSetting:
    """One number that the tuner changes: the workers that `stages` share, the batches ahead, or the processes. It is a
    multiple of `unit`, the number of processes, as each of them has equally many."""

    name: str
    stages: tuple[str, ...]
    value: int
    most: int = LADDER[-1]
    unit: int = 1
    kind: Literal["workers", "batches", "processes"] = "workers"

    @property
    def _ladder(self) -> list[int]:
        return [self.unit * rung for rung in LADDER]

    def rung(self, num_steps: int) -> int:
        """The value `num_steps` rungs of the ladder up or down, within bounds."""
        top = min(self.most // self.unit * self.unit, self._ladder[-1])
        values = sorted({*(value for value in self._ladder if value <= top), self.value, top or self.value})
        place = values.index(self.value) + num_steps
        return values[max(0, min(place, len(values) - 1))]

    def enough_for(self, workers: float) -> int:
        """The lowest rung with at least `workers`, or the value as it is."""
        return min((value for value in self._ladder if value >= workers and value <= self.value), default=self.value)


@dataclass
class Decision:
    """A change that was tried, the reason for it, and its result."""

    at_s: float  # since the first wait for a batch
    knob: str
    before: int
    after: int
    reason: str
    kept: bool | None = None  # None if not known yet
    effect: str = ""
    stages: list[str] = field(default_factory=list)  # whose workers they are; empty for batches and processes
    gain: float | None = None  # in throughput, as a share; None if not known yet

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


class Move(NamedTuple):
    """A change to be made now."""

    setting: TunedSetting
    before: int
    value: int
