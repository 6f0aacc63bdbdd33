"""`kind: iterable`: anything that can be iterated over, such as a torch IterableDataset or a streaming data set.

    iterable ──next, in order, one thread at a time──> Pass ──items of this rank and process──> `read`

How many items there are shows when it ends, so an epoch has no length before. Every rank and every loading process iterates
over all of it and keeps its share: item i is that of position i in the order, as with any other source.
"""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from pydantic import Field, field_validator

from loaderkit._internal.forks import ending_forks
from loaderkit._internal.imports import is_name
from loaderkit.connectors.base import Connector
from loaderkit.errors import USER_ERRORS, ClosedError, SourceError
from loaderkit.sampling.schedule import UNKNOWN, BatchSampler
from loaderkit.sampling.shard import WHOLE, Shard
from loaderkit.sources.base import Source, SourceKind
from loaderkit.sources.dataset import DatasetArgs, DatasetSource, open_object


class IterableArgs(DatasetArgs):
    """A Python object that can only be iterated over.

    It is iterated over anew for every epoch, after `set_epoch(epoch)` if it has that, in its own order (`shuffle: none`). Every
    rank and every loading process iterates over all of it and keeps its share, so give it whole, not split by rank or worker.
    """

    kind: Literal["iterable"] = "iterable"  # type: ignore[assignment]
    object: Any = Field(
        description='"package.module:name" of the iterable or of a function that returns it, or the iterable or function'
    )
    resume: Literal["auto", "skip"] = Field(
        "auto",
        description="auto: by its `state_dict` and `load_state_dict`, if it has them; skip: by iterating up to the position",
    )

    @field_validator("object")
    @classmethod
    def _is_object(cls, value: Any) -> Any:
        if isinstance(value, str):
            if not is_name(value):
                raise ValueError(f'"package.module:name", not {value!r}')
        elif isinstance(value, Iterator):
            raise ValueError(
                f"a {type(value).__name__} can be iterated over only once: give what it was made of, or a function that makes "
                "one"
            )
        elif not (hasattr(value, "__iter__") or callable(value)):
            raise ValueError(f"an object with __iter__, or a function that returns one, not {type(value).__name__}")
        return value


class Snapshot(NamedTuple):
    """The iterable's own state before the item at `position` of an epoch."""

    epoch: int
    position: int
    state: Any


class IterableSource(DatasetSource):
    """The items of an iterable, numbered in their order."""

    def __init__(self, args: IterableArgs, snapshot: Snapshot | None = None) -> None:
        self._args = args
        self._first: Any = _made(args)
        super().__init__(self._first, args, size=UNKNOWN)
        self.has_state = args.resume == "auto" and all(
            hasattr(self._first, name) for name in ("state_dict", "load_state_dict")
        )
        self.limit = UNKNOWN if args.limit is None else args.limit
        self.snapshot = snapshot  # behind the last batch delivered, if the iterable has a state
        self._iterator: Iterator[Any] | None = None
        self.latest: Pass | None = None
        self.lock = threading.Lock()  # one thread at a time iterates over it, one of an ended pass included

    def __reduce__(self) -> tuple[Any, ...]:
        """What was given by name is made anew in each process, as it may hold open files."""
        return IterableSource, (self._args, self.snapshot)

    def made(self) -> Any:
        """The iterable: the same one each time, unless it was used up or must be made by a function. Raises ConfigError."""
        first, self._first = self._first, None
        made = _made(self._args) if first is None else first
        if not isinstance(made, Iterator):
            self._first = made
        return made

    def made_apart(self) -> Any:
        """Another one, to load a state into: that may last for later epochs, also in what shares parts with it (datasets 5.2).
        Raises ConfigError."""
        made = _made(self._args)
        if made is not self._first:
            return made
        try:
            return pickle.loads(pickle.dumps(made))  # noqa: S301 - an object of this process
        except Exception as error:
            raise SourceError(
                f"it cannot be copied to load its state ({type(error).__name__}: {error}): give a function that makes it, or "
                "set `resume: skip`"
            ) from error

    def new_iterator(self, iterable: Any) -> Iterator[Any]:
        """An iterator over what `made` has returned. Raises SourceError if it is one that has been read from."""
        iterator: Iterator[Any] = ending_forks(iter)(iterable)
        if iterator is self._iterator:
            raise SourceError(
                "it gave the same iterator a second time, which has been read from: let it make a new one"
            )
        self._iterator = iterator
        return iterator

    def interrupt(self) -> None:
        """Let no worker read on: they are to stop."""
        if self.latest is not None:
            self.latest.is_ended = True

    def fingerprint(self) -> str:
        return self._name if self._args.limit is None else f"{self._name}-{self._args.limit}"


def own_state(source: Source, here: tuple[int, int]) -> Any:
    """The source's own state at (epoch, position), if it has one and stands there."""
    snapshot = source.snapshot if isinstance(source, IterableSource) else None
    return snapshot.state if snapshot is not None and snapshot[:2] == here else None


def _made(args: IterableArgs) -> Any:
    return open_object(args, ("__iter__",))


class Pass:
    """One reading of the iterable, from a position of an epoch on. `take` may be called by any thread."""

    def __init__(
        self,
        source: IterableSource,
        epoch: int,
        position: int,
        schedule: BatchSampler,
        shard: Shard,
    ) -> None:
        """It keeps what the batches of one rank and process hold."""
        source.latest = self
        self._source = source
        self._epoch = epoch
        self._begin = position
        self._schedule = schedule
        self._shard = shard
        self._iterable: Any = None
        self._iterator: Iterator[Any] | None = None
        self._num = position  # of items read, those before `position` included
        self._items: dict[int, Any] = {}  # read for batches of this rank and process, and not taken yet
        self._snapshots: dict[int, Snapshot] = {}  # at the ends of those batches
        self._error: BaseException | None = None
        self.end: int | None = None  # the number of items, once it is known
        self.is_ended = False  # set by another thread: nothing more is to be read

    @classmethod
    def from_first(cls, source: IterableSource) -> Pass:
        """A pass over all items."""
        return cls(source, 0, 0, BatchSampler(UNKNOWN, 0, 1, 1, drop_last=False), WHOLE)

    def take(self, indices: list[int], up_to: int) -> tuple[list[Any], Snapshot | None]:
        """The items at `indices`, after reading up to `up_to`, fewer at its end; and its own state there, if it
        has one and a batch ends there. Raises SourceError."""
        with self._source.lock:
            if self._error is None:
                try:
                    self._read(up_to)
                except USER_ERRORS as error:
                    self._error = error
            if self._error is not None and self._num < up_to:  # what was read before is delivered
                raise self._named(self._error) from self._error
            if self.is_ended:
                raise ClosedError("reading has gone on elsewhere")
            items = [self._items.pop(index) for index in indices if index in self._items]
            return items, self._snapshots.pop(up_to, None)

    def num_left(self, indices: list[int], begin: int, end: int) -> int:
        """How many samples a batch of `indices` has that stands for positions [begin, end) of all ranks.

        A last one that not every rank has a sample for is left out, so that all ranks have as many batches.
        """
        if self.end is None or end <= self.end:
            return len(indices)
        if self._schedule.drop_last or self.end - begin < self._schedule.world_size:
            return 0
        return sum(index < self.end for index in indices)

    def _read(self, up_to: int) -> None:
        if self._iterator is None and not self.is_ended:
            self._iterator = self._start()
        while self._num < up_to and self.end is None and not self.is_ended:
            assert self._iterator is not None
            if self._num >= self._source.limit:
                self.end = self._num
                return
            try:
                item = ending_forks(next)(self._iterator)
            except StopIteration:
                self.end = self._num
                return
            if self._is_mine(self._num):
                self._items[self._num] = item
            self._num += 1
            if self._source.has_state and self._ends_mine(self._num):
                state = copy.deepcopy(self._iterable.state_dict())
                self._snapshots[self._num] = Snapshot(self._epoch, self._num, state)

    def _is_mine(self, index: int) -> bool:
        is_of_rank = index % self._schedule.world_size == self._schedule.rank
        return is_of_rank and self._schedule.step_of(self._begin, index) % self._shard.of == self._shard.number

    def _ends_mine(self, position: int) -> bool:
        step, rest = divmod(position - self._begin, self._schedule.batch_size * self._schedule.world_size)
        return rest == 0 and (step - 1) % self._shard.of == self._shard.number

    def _start(self) -> Iterator[Any]:
        """An iterator whose next item is that of `position`."""
        saved, num = self._source.snapshot, 0
        is_saved = self._source.has_state and saved is not None and saved[:2] == (self._epoch, self._begin)
        self._iterable = iterable = self._source.made_apart() if is_saved else self._source.made()
        if hasattr(iterable, "set_epoch"):
            ending_forks(iterable.set_epoch)(self._epoch)
        if is_saved and saved is not None:
            iterable.load_state_dict(copy.deepcopy(saved.state))
            num = self._begin
        iterator = self._source.new_iterator(iterable)
        for number in range(num, self._begin):
            if self.is_ended:
                break
            if number >= self._source.limit or next(iterator, self) is self:
                raise SourceError(f"it has only {number} items now, and reading goes on at position {self._begin}")
        return iterator

    def _named(self, error: BaseException) -> SourceError:
        reason = str(error) if isinstance(error, SourceError) else f"{type(error).__name__}: {error}"
        return SourceError(
            f"the iterable {self._source.origin(0)} failed at item {self._num} of epoch {self._epoch}: {reason}; what comes "
            "after it is not known, so this is no bad sample that could be skipped"
        )


def _open(args: IterableArgs, connector: Connector | None) -> IterableSource:
    return IterableSource(args)


ITERABLE = SourceKind(
    IterableArgs,
    "items",
    _open,
    objects=lambda args: {"object": args.object, "args": args.args},
    is_stream=True,
)
