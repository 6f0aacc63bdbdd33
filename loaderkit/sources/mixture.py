"""Several sources as one index space, source by source. The order (`sampling/mixture.py`) decides which sample comes when.

A `SourcePart` is one of them under the indices of the whole, so that a sample has one index, and with it one set of random
numbers, in all stages. An index also says in which pass over the samples it comes: it is the sample's number plus the number of
all samples times the pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loaderkit.connectors.base import Connector
from loaderkit.connectors.config import SourceArgs
from loaderkit.errors import ConfigError, SourceError
from loaderkit.sources.bad_shards import OnBadShard
from loaderkit.sources.base import OwnedConnector, ReadContext, Reader, Source, SourceKind, shortened

_MOST_AT_ONCE = 32  # sources that are listed side by side
Int64 = NDArray[np.int64]
Member = tuple[str, SourceKind, SourceArgs]
"""The name of a source, its kind and its arguments."""


class SourcePart(Source):
    """One source of a mixture, under the mixture's indices. Its own order and blocks are the order and blocks of `inner`."""

    def __init__(
        self, name: str, inner: Source, first: int, total: int, reopen: Callable[[], Source] | None = None
    ) -> None:
        """Its samples have the numbers from `first` on, of `total`. `reopen` opens `inner` in another process, to which
        it is then not sent."""
        self.name = name
        self.first = first
        self.total = total
        self.classes, self.labels = inner.classes, inner.labels
        self.is_typed, self.runs_user_code = inner.is_typed, inner.runs_user_code
        self.index_s = inner.index_s
        self.bad_shards = [shard._replace(source=name) for shard in inner.bad_shards]
        self._size = len(inner)
        self._inner: Source | None = inner
        self._reopen = reopen

    @property
    def inner(self) -> Source:
        """The source itself."""
        if self._inner is None:
            assert self._reopen is not None
            self._inner = self._reopen()
        return self._inner

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_inner": None} if self._reopen is not None else self.__dict__

    def own(self, index: int) -> int:
        """The index in the source itself."""
        return index % self.total - self.first

    def own_of(self, indices: Int64) -> Int64:
        """The indices in the source itself."""
        numbers: Int64 = indices % self.total - self.first
        return numbers

    def is_own(self, indices: Int64) -> NDArray[np.bool_]:
        """True for the samples that are of this source."""
        numbers = self.own_of(indices)
        return (numbers >= 0) & (numbers < self._size)

    def __len__(self) -> int:
        return self._size

    def key(self, index: int) -> str:
        return self.inner.key(self.own(index))

    def keys(self, indices: Int64) -> list[str]:
        """The keys of several samples."""
        return self.inner.keys(self.own_of(indices))

    def origin(self, index: int) -> str:
        return self.inner.origin(self.own(index))

    def reader(self, context: ReadContext) -> Reader:
        return self.inner.reader(context)

    def blocks(self, block_bytes: int) -> Int64:
        return self.inner.blocks(block_bytes)

    def source_name(self, index: int) -> str | None:
        """Its name."""
        return self.name

    def fingerprint(self) -> str:
        return self.inner.fingerprint()


class MixtureSource(Source):
    """All parts together. `read` takes each sample from its own part.

    `classes` are the classes of all sources, if they agree.
    """

    def __init__(
        self, parts: Sequence[SourcePart], describe: Sequence[Callable[[str], str]], *, share_labels: bool
    ) -> None:
        """`describe` give the names of objects in the stores of the parts. `share_labels`: no own stage of a part can
        change its labels, so that parts with different classes cannot be mixed. Raises ConfigError in that case."""
        self.parts = tuple(parts)
        self._describe = tuple(describe)
        self._total = sum(map(len, parts))
        self._firsts = np.array([part.first for part in parts], np.int64)
        self.index_s = sum(part.index_s for part in parts)
        self.bad_shards = [shard for part in parts for shard in part.bad_shards]
        self.runs_user_code = any(part.runs_user_code for part in parts)
        known = [part for part in parts if part.classes is not None]
        self.classes = known[0].classes if known and all(part.classes == known[0].classes for part in parts) else None
        if share_labels and known and any(part.classes != known[0].classes for part in known):
            named = "; ".join(f"{part.name} {shortened(part.classes or [])}" for part in known)
            raise ConfigError(
                f"sources: one label would stand for several classes, as the sources number theirs apart: {named}. Give all of "
                "them the same `classes`, or number the labels of each in a `call` of its own `stages`"
            )

    def numbers_of(self, indices: Int64) -> Int64:
        """The part that each sample is of."""
        numbers: Int64 = np.searchsorted(self._firsts, indices % self._total, "right") - 1
        return numbers

    def _part(self, index: int) -> SourcePart:
        return self.parts[int(np.searchsorted(self._firsts, index % self._total, "right")) - 1]

    def __len__(self) -> int:
        return self._total

    def key(self, index: int) -> str:
        return self._part(index).key(index)

    def keys(self, indices: Int64) -> list[str]:
        """The keys of several samples."""
        keys = [""] * len(indices)
        numbers = self.numbers_of(indices)
        for number in np.unique(numbers).tolist():
            places = np.flatnonzero(numbers == number)
            for place, key in zip(places.tolist(), self.parts[number].keys(indices[places]), strict=True):
                keys[place] = key
        return keys

    def origin(self, index: int) -> str:
        part = self._part(index)
        return f"{part.name}: {self._describe[self.parts.index(part)](part.origin(index))}"

    def reader(self, context: ReadContext) -> Reader:
        """Each part has a reader of its own, because `read` is a stage for each part."""
        raise TypeError("a mixture is read part by part")

    def others(self, index: int, draws: NDArray[np.float64]) -> Int64:
        """Samples of the same source, so that its share stays, in the same pass."""
        part = self._part(index)
        numbers: Int64 = index // self._total * self._total + part.first + (draws * len(part)).astype(np.int64)
        return numbers

    def number(self, index: int) -> int:
        """The sample's number without its pass."""
        return index % self._total

    def source_name(self, index: int) -> str | None:
        """The name of the part."""
        return self._part(index).name

    def fingerprint(self) -> str:
        return " ".join(part.fingerprint() for part in self.parts)

    def lacking(self) -> dict[str, Int64]:
        """By the names of source and field."""
        return {
            f"{part.name}: {field}": indices + part.first
            for part in self.parts
            for field, indices in part.inner.lacking().items()
        }


def open_mixture(
    members: Sequence[Member],
    given: Mapping[str, Connector],
    opened: ExitStack,
    *,
    share_labels: bool,
    on_bad_shard: OnBadShard = "raise",
) -> tuple[MixtureSource, tuple[OwnedConnector, ...]]:
    """Sources, listed one after another, those in other places than the file system side by side, and their connectors; see
    `SourceKind.open_with` and `MixtureSource`. Raises ConfigError, SourceError with the name of the source."""

    def open_one(member: Member) -> tuple[Source, OwnedConnector]:
        name, kind, args = member
        try:
            return kind.open_with(args, given, opened, on_bad_shard)
        except (ConfigError, SourceError) as error:
            raise type(error)(f"sources.{name}: {error}") from error

    elsewhere = [member for member in members if member[1].is_elsewhere(member[2])]
    with ThreadPoolExecutor(max(1, min(len(elsewhere), _MOST_AT_ONCE)), "loaderkit-open") as pool:
        try:
            begun = {member[0]: pool.submit(open_one, member) for member in elsewhere}
            both = [begun[member[0]].result() if member[0] in begun else open_one(member) for member in members]
        finally:
            pool.shutdown(cancel_futures=True)  # what was opened is closed behind it
    sources, connectors = zip(*both, strict=True)
    total, first = sum(map(len, sources)), 0
    parts: list[SourcePart] = []
    for (name, kind, args), source in zip(members, sources, strict=True):
        parts.append(SourcePart(name, source, first, total, kind.reopen(args, len(source))))
        first += len(source)
    describe = [str if one.connector is None else one.connector.describe for one in connectors]
    return MixtureSource(parts, describe, share_labels=share_labels), connectors
