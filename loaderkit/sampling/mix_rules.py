"""The rules of a mixture: which sources take turns from a position on, with which weights, and when an epoch ends.

They are the same whether weights are shares of samples (`mixture`) or of tokens (`token_mixture`), which differ only in
which source has each turn.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from hashlib import blake2b
from typing import Literal, NamedTuple

from loaderkit.errors import ConfigError
from loaderkit.sampling.interleaving import LEAST_SHARE, MOST_TOTAL, whole_weights
from loaderkit.sampling.state import State

Stop = Literal["first", "all", "never"]


class MixedSource(NamedTuple):
    """One of the sources: its samples, and the passes over them after which it is used up in an epoch, or None for never."""

    name: str
    num_samples: int
    num_passes: int | None

    @property
    def most(self) -> int | None:
        """Its samples of an epoch."""
        return None if self.num_passes is None else self.num_samples * self.num_passes


class WeightChange(NamedTuple):
    """From position `at` of an epoch on these weights hold, one for each source."""

    at: int
    weights: tuple[float, ...]


@dataclass(frozen=True)
class Segment:
    """Positions [begin, end) of an epoch in which the weights do not change. `sources` are the numbers of the sources
    that have any."""

    begin: int
    end: int
    before: tuple[int, ...]  # the samples of every source before it
    sources: tuple[int, ...]
    weights: tuple[int, ...]  # of `sources`, whole numbers
    used_up: int | None  # the source that its end uses up
    tokens_before: tuple[int, ...] = ()  # where weights are shares of tokens: each source's before it

    @property
    def shares(self) -> dict[int, float]:
        """By number of the source, summing to 1."""
        total = sum(self.weights)
        return {source: weight / total for source, weight in zip(self.sources, self.weights, strict=True)}


class MixRules:
    """Sources, the weights from every position on, and when to stop."""

    def __init__(self, sources: Sequence[MixedSource], changes: Sequence[WeightChange], stop: Stop) -> None:
        """`changes` begin with one at 0, in ascending order."""
        self.sources = tuple(sources)
        self.changes = tuple(changes)
        self.stop = stop
        self.limits = [None if stop == "never" else source.most for source in sources]
        """By source, the samples after which it is used up in an epoch."""

    def sources_from(
        self, position: int, used_up: Collection[int], most_total: int = MOST_TOTAL
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(numbers, whole weights with a sum of at most `most_total`) of the sources that take turns from a position on. Raises
        ConfigError if there is none, if the share of one is below `LEAST_SHARE`, or if the epoch would never end."""
        weights, later = self._weights_at(position)
        numbers = [number for number, weight in enumerate(weights) if weight > 0 and number not in used_up]
        if not numbers:
            raise ConfigError(self._empty(position))
        if self.stop != "never" and not later and all(self.limits[number] is None for number in numbers):
            raise ConfigError(
                f"mix.stop: {self.stop} ends an epoch when a source is used up, and from position {position} on none of "
                f"{', '.join(self.sources[number].name for number in numbers)} is ever: give one of them `epochs`, or set "
                "`stop: never`"
            )
        shares = whole_weights([Fraction(repr(float(weights[number]))) for number in numbers], most_total)
        least = min(shares)
        if least < LEAST_SHARE * sum(shares):
            name = self.sources[numbers[shares.index(least)]].name
            raise ConfigError(
                f"sources.{name}: its share from position {position} on is {least / sum(shares):.1e}, and must be 0 or at "
                f"least {LEAST_SHARE:.0e}: give it more weight, or mix it with another one beforehand"
            )
        return tuple(numbers), tuple(shares)

    def next_change(self, position: int) -> int | None:
        """The first position behind this one at which the weights change; None if they never do."""
        return next((change.at for change in self.changes if change.at > position), None)

    def is_over(self, position: int, used_up: Collection[int]) -> bool:
        """True if the epoch ends at a position, at which one of the sources in `used_up` has just been used up."""
        if self.stop == "first":
            return True
        weights, later = self._weights_at(position - 1)
        return not any(
            limit is not None
            and number not in used_up
            and max(weights[number], *(change.weights[number] for change in later), 0) > 0
            for number, limit in enumerate(self.limits)
        )

    def _weights_at(self, position: int) -> tuple[tuple[float, ...], list[WeightChange]]:
        """The weights at a position, and the changes behind it."""
        reached = [change for change in self.changes if change.at <= position]
        return reached[-1].weights, list(self.changes[len(reached) :])

    def _empty(self, position: int) -> str:
        if position == 0:
            return "sources: at position 0 no source has a weight above 0"
        later = self.next_change(position)
        following = f" before the change at {later}" if later is not None else ""
        return (
            f"mix: at position {position} every source with a weight above 0 is used up{following}: give one that is left a "
            "weight there, or let one `repeat: true`"
        )

    def fingerprint(self, by: Literal["sample", "tokens"] = "sample") -> str:
        """`stop`, and the position and a digest of the weights of every change: `same_until` compares two of them."""
        names = [source.name for source in self.sources]
        texts = [f"{one.at}:{_digest(tuple(zip(names, one.weights, strict=True)))}" for one in self.changes]
        return " ".join([self.stop if by == "sample" else f"{self.stop}/{by}", *texts])


def _digest(value: object) -> str:
    return blake2b(repr(value).encode(), digest_size=4).hexdigest()


def same_until(one: str, other: str, position: int) -> bool:
    """True if two mixtures of the same sources, by their fingerprints, have the same samples before `position` of epoch 0."""
    (stop, *changes), (other_stop, *other_changes) = one.split(" "), other.split(" ")
    before = [[text for text in texts if _place(text) < max(position, 1)] for texts in (changes, other_changes)]
    return stop == other_stop and before[0] == before[1]


def _place(text: str) -> int:
    place = text.partition(":")[0]
    return int(place) if place.isdecimal() else 0


def with_later_changes(
    state: State,
    fingerprint: dict[str, str],
    positions_before: Callable[[int, int], int] = lambda epoch, position: position,
) -> State:
    """The state, with a mixture's changes of weights in place of its own, if they differ only behind its position.

    `positions_before` gives for (epoch, the state's position) the position of the mixture before which it has all samples."""
    before, now = state.fingerprint.get("mix"), fingerprint.get("mix")
    if before is None or now is None or before == now or state.epoch:
        return state
    if not same_until(before, now, positions_before(0, state.position)):
        return state
    return replace(state, fingerprint={**state.fingerprint, "mix": now})
