"""`kind: iterable`: anything that can be iterated over, such as a torch IterableDataset or a streaming data set.

    iterable ──next, in order, one thread at a time──> Pass ──items of this rank and process──> `read`

How many items there are shows when it ends, unless `length` says so. Every rank and every loading process iterates over all of
it and keeps its share: item i is at position i in the order, as with any other source.

Each pass iterates over an object of its own, a copy or one that a function has made, so no pass sees what another has read.
"""

from __future__ import annotations

import copy
import logging
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Literal, NamedTuple

from pydantic import Field

from loaderkit._internal.imports import import_named
from loaderkit._internal.system.forks import ending_forks
from loaderkit.errors import USER_ERRORS, ClosedError, ConfigError, SourceError
from loaderkit.samples.chunk import SampleChunk
from loaderkit.sampling.schedule import UNKNOWN, BatchSampler
from loaderkit.sampling.shard import Shard
from loaderkit.sources.base import ReadContext, Reader, SourceKind
from loaderkit.sources.objects.args import DatasetArgs, open_object
from loaderkit.sources.objects.checks import is_unseeded, items_differ, num_ranks_of, seen_alike, state_is_inexact
from loaderkit.sources.objects.dataset import DatasetSource
from loaderkit.sources.objects.reader import ItemReader

logger = logging.getLogger("loaderkit")


class IterableArgs(DatasetArgs):
    """A Python object that can only be iterated over.

    For every epoch a copy of it, or what the function makes, is iterated over in its own order (`shuffle: none`), after
    `set_epoch(epoch)` if it has that. Every rank and every loading process iterates over all of it and keeps its share, so give
    it whole, not split by rank or worker.
    """

    kind: Literal["iterable"] = "iterable"  # type: ignore[assignment]
    object: Any = Field(
        description='"package.module:name" of the iterable or of a function that returns it, or the iterable or function'
    )
    length: int | None = Field(
        None,
        ge=1,
        description="items of an epoch, over all ranks: gives the loader its length; fewer are an error, more are left out, "
        "with a warning unless `limit` is that number, too",
    )
    thread_safe: bool | Literal["auto"] = Field(
        "auto",
        description="one thread at a time iterates in any case; false: and no function of the pipeline's that is not declared "
        "runs meanwhile, for what shares something with them",
    )
    resume: Literal["auto", "skip"] = Field(
        "auto",
        description="auto: by its `state_dict` and `load_state_dict`, if it has them; skip: by iterating up to the position",
    )

    @classmethod
    def check_given(cls, value: Any) -> None:
        """Raise ValueError unless `value` can be iterated over more than once, or makes what can be iterated over."""
        if isinstance(value, Iterator):
            raise ValueError(
                f"an iterable that can be iterated over again for each epoch, not a {type(value).__name__}, which is an "
                "iterator: give what it was made of, or a function that makes it"
            )
        if not (hasattr(value, "__iter__") or callable(value)):
            raise ValueError(f"an object with __iter__, or a function that returns one, not {type(value).__name__}")


class IterableState(NamedTuple):
    """The iterable's own state before the item at `position` of an epoch."""

    epoch: int
    position: int
    state: Any


class IterableSource(DatasetSource):
    """The items of an iterable, numbered in their order."""

    def __init__(self, args: IterableArgs, saved: IterableState | None = None) -> None:
        """`saved`: where the first pass begins, if the iterable has a state. Raises ConfigError."""
        self._args = args
        made = _made(args)
        sizes = [size for size in (args.limit, args.length) if size is not None]
        super().__init__(made, args, size=UNKNOWN if args.length is None else min(sizes))
        self.dataset = None  # what it holds open ends with a pass
        self.owner = self if args.thread_safe is False else None
        self.length, self.max_items = args.length, min(sizes, default=UNKNOWN)
        self.seeks_more = args.limit is None  # True: nobody has looked for items behind `length`
        self.num_ranks, self.is_unseeded = num_ranks_of(made), is_unseeded(made)
        self._check_readers: Callable[[int, int], None] | None = getattr(made, "check_readers", None)
        self.has_state = args.resume == "auto" and all(
            hasattr(made, name) for name in ("state_dict", "load_state_dict")
        )
        self.saved = saved  # behind the last batch delivered
        self._unused = [made]
        self._passes: weakref.WeakSet[Pass] = weakref.WeakSet()
        self._last_made: Callable[[], Any] = lambda: None

    def __reduce__(self) -> tuple[Any, ...]:
        """An iterable that a function makes is made again in each process, as it may hold open files."""
        return IterableSource, (self._args, self.saved)

    @property
    def in_order(self) -> IterableSource:  # type: ignore[override]
        """See `ItemsInOrder`."""
        return self

    def reader(self, context: ReadContext) -> Reader:
        """A reader that takes the next items."""
        return _NextItems(self, context)

    def begin_pass(self, epoch: int, position: int, first_step: int, *, schedule: BatchSampler, shard: Shard) -> Pass:
        """See `Pass`."""
        return Pass(self, epoch, position, first_step, schedule=schedule, shard=shard)

    def new_iterable(self, of: Pass) -> Any:
        """An object for one pass to iterate over. Raises ConfigError, and SourceError if the last pass had the same one."""
        self._passes.add(of)
        made = self._unused.pop() if self._unused else _made(self._args)
        if made is self._last_made():
            raise SourceError(
                "the function returned the same object a second time, which has been read from: let it make a new one, or, if "
                "it can be copied, give the object itself"
            )
        self._last_made = _reference(made)
        return made

    def make_another(self) -> Any:
        """The iterable for something other than a pass. Raises ConfigError."""
        return _made(self._args)

    def check_readers(self, world_size: int, num_processes: int) -> None:
        """Raise ConfigError if it is known that several ranks, or processes of one, would not iterate over the same items; the
        iterable's own `check_readers` may know."""
        if self._check_readers is not None:
            self._check_readers(world_size, num_processes)
        if world_size * num_processes > 1 and self.is_unseeded:
            raise ConfigError(
                f"source.object: the {self._name} shuffles without a seed, so each of {world_size} ranks with {num_processes} "
                "loading processes would see another order, and samples would be repeated and left out: shuffle by a seed "
                "(`shuffle(seed=0)` and `interleave_datasets(..., seed=0)` of Hugging Face's datasets; DataLoader has "
                "`generator`), or give a data set with a length as `kind: dataset` with `shuffle: global`"
            )
        if world_size > 1 and self.num_ranks > 1:
            raise ConfigError(
                f"source.object: the {self._name} is split over {self.num_ranks} ranks already, and each of the {world_size} "
                "ranks of this loader keeps its share of what it iterates over, so samples would be left out: give the whole, "
                "without split_dataset_by_node or a DistributedSampler"
            )

    def state_at(self, epoch: int, position: int) -> tuple[Any, ...]:
        """The iterable's own state there, in a tuple, which is empty without one."""
        saved = self.saved
        return (saved.state,) if saved is not None and saved[:2] == (epoch, position) else ()

    def resume(self, epoch: int, position: int, own_state: tuple[Any, ...] | None) -> None:
        """Begin the next pass there, by the iterable's own state if `own_state` holds one."""
        self.saved = IterableState(epoch, position, own_state[0]) if own_state else None
        if position and self.is_unseeded:
            logger.warning(
                "the %s shuffles without a seed, so its order may not be the one of which %d items of epoch %d were delivered: "
                "what comes may repeat some and leave out others. Shuffle by a seed",
                self._name,
                position,
                epoch,
            )

    def interrupt(self) -> None:
        """Let no worker read on: they are to stop."""
        for one in list(self._passes):
            one.end()

    def waits_for(self, thread_id: int) -> str | None:
        """What that thread waits for, if it is in the iterable."""
        is_inside = any(one.reader == thread_id for one in list(self._passes))
        return f"the next item of the iterable {self._name}" if is_inside else None

    def fingerprint(self) -> str:
        return self._name if self._args.limit is None else f"{self._name}-{self._args.limit}"


def _made(args: IterableArgs) -> Any:
    """What the function makes, or a copy of the given object, which may remember where it is, or share parts that do."""
    made = open_object(args, ("__iter__",))
    if made is not (import_named(args.object) if isinstance(args.object, str) else args.object):
        return made
    try:
        return _copy_of(made)
    except USER_ERRORS as error:
        raise ConfigError(
            f"source.object: the {type(made).__qualname__} cannot be copied ({type(error).__name__}: {error}), and each epoch "
            "iterates over a copy, as the workers of a DataLoader do: give a function that makes it"
        ) from error


def _copy_of(made: Any) -> Any:
    try:
        return pickle.loads(pickle.dumps(made))  # noqa: S301 - an object of this process, as the workers of a DataLoader get it
    except Exception:  # it holds a lambda, say
        try:
            return copy.deepcopy(made)
        except RuntimeError:  # a dict of its own, the cache of `datasets`, grows with the first copy in a thread
            return copy.deepcopy(made)


def _reference(made: Any) -> Callable[[], Any]:
    """A reference that does not keep the object alive, as it may hold threads, files or processes."""
    try:
        return weakref.ref(made)
    except TypeError:  # built in, such as a list
        return lambda: made


class Pass:
    """One pass over the iterable, from a position of an epoch on. All methods may be called by any thread."""

    def __init__(
        self,
        source: IterableSource,
        epoch: int,
        position: int,
        first_step: int,
        *,
        schedule: BatchSampler,
        shard: Shard,
    ) -> None:
        """It keeps the items of one rank's and process's batches: of the batches from `position` on number
        `first_step`, and every `shard.of`th one after it."""
        self.begin = (epoch, position, first_step)
        self._source = source
        self._epoch = epoch
        self._begin = position
        self._first_step = first_step
        self._schedule = schedule
        self._num_shards = shard.of
        self._end_of_batches = schedule.position_after(position, schedule.num_batches(position))
        self._iterable: Any = None
        self._iterator: Iterator[Any] | None = None
        self._num = position  # of items read, those before `position` included
        self._items: dict[int, Any] = {}  # read for batches of this rank and process, and not taken yet
        self._states: dict[int, IterableState] = {}  # at the ends of those batches
        self._error: BaseException | None = None
        self._lock = threading.Lock()  # one thread at a time reads
        self.num_peekable = schedule.batch_size * schedule.world_size * shard.of  # items; those behind are lost
        self._is_ended = False  # nothing more is to be read
        self.reader: int | None = None  # the thread that is in the iterable
        self.num_items: int | None = None  # of the epoch, once it is known
        self.is_whole = True  # False: what was peeked at is gone

    def take(self, indices: list[int], up_to: int) -> tuple[list[Any], IterableState | None]:
        """The items at `indices`, after reading up to `up_to`, fewer at the end of the iterable; and its own state there, if it
        has one and a batch ends there. Raises SourceError."""
        try:
            with self._lock:
                self._read(up_to)
                if up_to == self._end_of_batches:
                    self._compare_length()
                items = [self._items.pop(index) for index in indices if index in self._items]
                return items, self._states.pop(up_to, None)
        finally:
            self._let_go()

    def peek(self, index: int) -> list[Any]:
        """A copy of the next item, whose index is `index`, as the only one; none at the end. It is still there for `take`,
        unless more were looked at than a batch has, or it cannot be copied: then `is_whole` is False. Raises SourceError."""
        try:
            with self._lock:
                item = self._read(index + 1)
                if self._num <= index:
                    return []
                if self.is_whole and index - self._begin < self.num_peekable:
                    with suppress(Exception):  # it holds a lock, say, that a later stage leaves out
                        return [copy.deepcopy(item)]
                self.is_whole = False
                self._items.clear()
                self._states.clear()
                return [item]
        finally:
            self._let_go()

    def num_left(self, indices: list[int], begin: int, end: int) -> int:
        """The number of samples in a batch of `indices` that covers positions [begin, end) of all ranks.

        A last batch for which some rank has no sample is left out, so that all ranks have equally many batches.
        """
        if self.num_items is None or end <= self.num_items:
            return len(indices)
        if self._schedule.drop_last or self.num_items - begin < self._schedule.world_size:
            return 0
        return sum(index < self.num_items for index in indices)

    def end(self) -> None:
        """Let nothing more be read, and let go of the iterable: now, or when the thread that reads is back from it."""
        self._is_ended = True
        self._let_go()

    def _let_go(self) -> None:
        if self._is_ended and self._lock.acquire(blocking=False):
            try:
                self._iterator = self._iterable = None
                self._items.clear()
            finally:
                self._lock.release()

    def _read(self, up_to: int) -> Any:
        """Read up to there, and return the last item. Items that were read before an error can still be taken."""
        item = None
        if self._error is None:
            self.reader = threading.get_ident()
            try:
                item = self._advance(up_to)
            except USER_ERRORS as error:
                self._error = error
            finally:
                self.reader = None
        if self._error is not None and self._num < up_to:
            raise self._named(self._error) from self._error
        if self._is_ended:
            raise ClosedError("reading was stopped")
        return item

    def _advance(self, up_to: int) -> Any:
        item = None
        if self._iterator is None and not self._is_ended:
            self._iterator = self._start()
        while self._num < up_to and self.num_items is None and not self._is_ended:
            assert self._iterator is not None
            if self._num >= self._source.max_items:
                self.num_items = self._num
                break
            try:
                item = ending_forks(next)(self._iterator)
            except StopIteration:
                self._check_length()
                self.num_items = self._num
                break
            if self._is_mine(self._num):
                self._items[self._num] = item
            self._num += 1
            if self._source.has_state and self._ends_mine(self._num):
                state = copy.deepcopy(self._iterable.state_dict())
                self._states[self._num] = IterableState(self._epoch, self._num, state)
        return item

    def _check_length(self) -> None:
        if self._source.length is not None:
            raise SourceError(
                f"it has ended after {self._num} items, and source.length is {self._source.length}: set it to the number of "
                "items that every epoch has, or leave it out"
            )

    def _compare_length(self) -> None:
        """Behind the last batch: is `length` the number of items that there are? Raises SourceError if there are fewer.
        If there are more, that is logged once; it is not checked where `limit` leaves them out."""
        source = self._source
        if source.length is None or source.max_items < source.length:
            return
        self._read(source.length)
        if source.seeks_more and self._iterator is not None:
            source.seeks_more = False
            self.reader = threading.get_ident()
            try:
                has_more = ending_forks(next)(self._iterator, self) is not self
            except USER_ERRORS:  # of an item that nobody asked for
                has_more = False
            finally:
                self.reader = None
            if has_more:
                logger.warning(
                    "the iterable %s has more items than source.length, which is %d: the others are left out of every epoch. "
                    "Set the right number, or `limit: %d` as well if that is meant (logged once)",
                    source.origin(0),
                    source.length,
                    source.length,
                )

    def _is_mine(self, index: int) -> bool:
        if index % self._schedule.world_size != self._schedule.rank:
            return False
        return (self._schedule.step_of(self._begin, index) - self._first_step) % self._num_shards == 0

    def _ends_mine(self, position: int) -> bool:
        step, rest = divmod(position - self._begin, self._schedule.batch_size * self._schedule.world_size)
        return rest == 0 and (step - 1 - self._first_step) % self._num_shards == 0

    def _start(self) -> Iterator[Any]:
        """An iterator whose next item is the item at `position`."""
        saved, num = self._source.saved, 0
        self._iterable = iterable = self._source.new_iterable(self)
        if hasattr(iterable, "set_epoch"):
            ending_forks(iterable.set_epoch)(self._epoch)
        if self._source.has_state and saved is not None and saved[:2] == (self._epoch, self._begin):
            iterable.load_state_dict(copy.deepcopy(saved.state))
            num = self._begin
        iterator: Iterator[Any] = ending_forks(iter)(iterable)
        for number in range(num, self._begin):
            if self._is_ended:
                break
            if number >= self._source.max_items or next(iterator, self) is self:
                raise SourceError(
                    f"it has only {number} items now, and reading continues at position {self._begin}: has it changed, or does "
                    "a loop count its batches over epochs of unknown length? Then give `length` in `source`"
                )
        return iterator

    def _named(self, error: BaseException) -> SourceError:
        reason = str(error) if isinstance(error, SourceError) else f"{type(error).__name__}: {error}"
        return SourceError(
            f"the iterable {self._source.origin(0)} failed at item {self._num} of epoch {self._epoch}: {reason}; what comes "
            "after it is not known, so this is no bad sample that could be skipped"
        )


class Preview:
    """Gives items to `read` that show what a batch holds, before the first batch is opened."""

    def __init__(self, of: Pass) -> None:
        self._pass = of

    def take(self, indices: list[int], up_to: int) -> tuple[list[Any], None]:
        """A copy of the one item; see `Pass.peek`."""
        (index,) = indices
        return self._pass.peek(index), None


class _NextItems(ItemReader):
    """Takes the next items of the pass that a batch belongs to."""

    in_turn = True

    def __init__(self, source: IterableSource, context: ReadContext) -> None:
        super().__init__(source, context)
        self.interrupt, self.waits_for = source.interrupt, source.waits_for  # type: ignore[method-assign]

    def take(self, chunk: SampleChunk, indices: list[int]) -> list[Any]:
        """The chunk's items, fewer at the end of the stream. A batch's last chunk reads on to the batch's end on all ranks."""
        work_item = chunk.work_item
        assert work_item.stream is not None
        is_last = chunk.hi == len(work_item)
        items, state = work_item.stream.take(indices, work_item.end if is_last else indices[-1] + 1)
        if is_last:
            work_item.source_state = state
        return items


def _check_items(args: IterableArgs, source: IterableSource) -> dict[str, Any]:
    differ = items_differ(source.make_another)
    # Where items differ anyway, what follows a state says nothing of it.
    return {
        "seen_alike": differ or seen_alike(source.make_another(), args, is_iterable=True),
        "is_unseeded": source.is_unseeded,
        "items_differ": differ,
        "state_is_inexact": not differ and source.has_state and state_is_inexact(source.make_another, source.origin(0)),
    }


ITERABLE = SourceKind(
    IterableArgs,
    lambda args, connector: IterableSource(args),
    has_blocks=False,
    objects=lambda args: {"object": args.object, "args": args.args},
    is_stream=True,
    check_items=_check_items,
)
