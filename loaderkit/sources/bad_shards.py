"""Shards that are damaged or missing: they are an error, or are left out, as `errors.on_bad_shard` says.

A source finds them while it is listed and indexed, so samples of a shard that is left out are in no order, on any rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Literal, NamedTuple, TypeVar

from loaderkit.errors import FormatError, LoaderkitError, ObjectNotFoundError, SourceError, TooManyBadShardsError

_Argument = TypeVar("_Argument")
_Result = TypeVar("_Result")
OnBadShard = Literal["raise", "skip"]
_MOST_IN_STATES = 10
OPTION = "to go on without damaged shards: `errors: {on_bad_shard: skip}`"


class BadShard(NamedTuple):
    """A shard that is left out: its key in the source, the store's name for it, and what is wrong. `num_kept`: its
    samples before the damage, which stay. `source`: the name of its mixed source."""

    key: str
    origin: str
    error: str
    num_kept: int = 0
    source: str | None = None

    @property
    def name(self) -> str:
        """Its key, with the name of its source."""
        return self.key if self.source is None else f"{self.source}: {self.key}"

    def __str__(self) -> str:
        kept = f" ({self.num_kept} samples before that stay)" if self.num_kept else ""
        return f"{self.name}: {self.error}{kept}"


class BadShards:
    """The bad shards of one source, found while it is opened. For one thread, except for the function that `tried` makes."""

    def __init__(self, action: OnBadShard = "raise") -> None:
        self.skips = action == "skip"
        self._found: dict[str, BadShard] = {}  # by key

    @property
    def found(self) -> list[BadShard]:
        """Those that were left out, in canonical order."""
        return sorted(self._found.values(), key=lambda shard: shard.key.encode("utf-8", "surrogateescape"))

    @staticmethod
    def tried(load: Callable[[_Argument], _Result]) -> Callable[[_Argument], _Result | LoaderkitError]:
        """A version of `load` that returns the error of a shard that is damaged or missing. Other errors, of a store
        that may work again, are raised: another rank, or a later start, would have that shard."""

        def call(shard: _Argument) -> _Result | LoaderkitError:
            try:
                return load(shard)
            except (FormatError, ObjectNotFoundError) as error:
                return error

        return call

    def leave_out(self, key: str, origin: str, error: LoaderkitError, num_kept: int = 0) -> None:
        """Note a bad shard, or raise its error, with what to set instead."""
        if not self.skips:
            raise type(error)(f"{error}; {OPTION}") from error
        self._found.setdefault(key, BadShard(key, origin, str(error), num_kept))

    def refuse_empty(self) -> None:
        """Raise SourceError, naming all bad shards, if there are any: nothing is left of the source without them."""
        if self._found:
            raise SourceError(f"no sample is left without what is damaged: {said(self.found)}")


def check_number(shards: Sequence[BadShard], most: int) -> None:
    """Raise TooManyBadShardsError, naming all, if there are more than `errors.max_bad_shards`."""
    if len(shards) > most:
        raise TooManyBadShardsError(
            f"{len(shards)} shards are damaged or missing, more than errors.max_bad_shards = {most}: {said(shards)}. Mend "
            "them, leave them out of the source, or allow as many"
        )


def said(shards: Sequence[BadShard]) -> str:
    """All of them, with what is wrong."""
    return "; ".join(map(str, shards))


def names_of(shards: Sequence[BadShard]) -> str:
    """All bad shards for a saved state, by name, with the number of samples that stay; if they are many, the first ones
    and a digest of all."""
    texts = [f"{one.name} from sample {one.num_kept} on" if one.num_kept else one.name for one in shards]
    if len(texts) <= _MOST_IN_STATES:
        return ", ".join(texts)
    digest = blake2b("\0".join(texts).encode("utf-8", "surrogateescape"), digest_size=4).hexdigest()
    return f"{', '.join(texts[:_MOST_IN_STATES])}, ... {len(texts)} in all, digest {digest}"
