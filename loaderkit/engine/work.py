"""What the engine moves: a `WorkItem` is split into `Chunk`s, which go through the `Stage`s; the last to land completes it.

The plan and the stages keep their data in subclasses of both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from operator import add
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from loaderkit.engine.user_code import UserLock

_ALIGNMENT = 64


class SourceCounts(NamedTuple):
    """How much of each mixed source a work item holds, in the order of the sources; () stands for zeros."""

    samples: tuple[int, ...] = ()  # that the loop gets; with `pack` documents
    tokens: tuple[int, ...] = ()  # of those, if they are known
    dropped: tuple[int, ...] = ()  # left out by `filter`
    skipped: tuple[int, ...] = ()  # left out as they were bad
    replaced: tuple[int, ...] = ()  # bad, and another one stands in their slot

    def plus(self, other: SourceCounts | None) -> SourceCounts:
        """The counts of both; 1 us where all samples of `other` are given."""
        if other is None:
            return self
        if self.samples and other.samples and not any(other[1:]):
            return SourceCounts(tuple(map(add, self.samples, other.samples)), *self[1:])
        both = zip(self, other, strict=True)
        return SourceCounts(*(tuple(map(add, one, more)) if one and more else one or more for one, more in both))

    def minus(self, earlier: SourceCounts) -> SourceCounts:
        """The rise since earlier ones."""
        return self.plus(SourceCounts(*(tuple(-number for number in numbers) for numbers in earlier)))


class WorkItem:
    """Memory that chunks fill, and its result.

    `num_pending` counts the chunks that have not landed (guarded by the engine's lock). The rest is written once by the engine
    when the item is opened or finished.
    """

    __slots__ = (
        "begin",
        "cancelled",
        "chunks",
        "done_s",
        "end",
        "epoch",
        "error",
        "is_done",
        "last_chunk",
        "num_items",
        "num_pending",
        "opened_s",
        "result",
    )
    failures: Sequence[Any] = ()  # of items that the plan tolerates; each has an `error`
    num_dropped: int = 0  # of its items, those that a stage left out
    num_skipped: int = 0  # of its items, those that are left out since they failed
    by_source: SourceCounts | None = None  # of an item of mixed sources
    is_empty: bool = False  # nothing is left of it, so the loop does not get it
    is_end: bool = False  # empty, as the epoch has ended
    source_state: Any = None  # the source's own state behind it

    def __init__(self, epoch: int, begin: int, end: int, num_items: int) -> None:
        self.epoch = epoch
        self.begin = begin  # the position in the epoch before this item, and after it
        self.end = end
        self.num_items = num_items
        self.chunks: list[Chunk] = []
        self.num_pending = 0
        self.result: Any = None
        self.error: BaseException | None = None
        self.cancelled = False
        self.is_done = False
        self.opened_s = 0.0
        self.done_s = 0.0
        self.last_chunk: Chunk | None = None

    def __len__(self) -> int:
        return self.num_items

    def __str__(self) -> str:
        """Its name in messages."""
        return f"item {self.begin} of epoch {self.epoch}"

    def let_go(self) -> None:
        """Drop the references to the memory: it belongs to the result, or is free."""


class Delivery(Protocol):
    """A finished work item, or the error that came in its place, as an executor hands it to the loader."""

    @property
    def epoch(self) -> int: ...

    @property
    def end(self) -> int:
        """The position in the epoch behind it."""

    def __len__(self) -> int:
        """The number of its items."""

    @property
    def failures(self) -> Sequence[Any]:
        """The plan's notes on items that failed and were tolerated."""

    @property
    def num_dropped(self) -> int:
        """Of its items, those that a stage left out."""

    @property
    def num_skipped(self) -> int:
        """The number of its items that are left out because they failed."""

    @property
    def by_source(self) -> SourceCounts | None:
        """What it holds of mixed sources."""

    @property
    def is_empty(self) -> bool:
        """True if nothing is left of it: stages dropped its items, or the epoch has ended."""

    @property
    def is_end(self) -> bool:
        """True if it is empty as the epoch has ended."""

    @property
    def source_state(self) -> Any:
        """The source's own state behind it, if it has one."""

    @property
    def error(self) -> BaseException | None: ...

    @property
    def result(self) -> Any: ...


class Chunk:
    """The unit of work: slots [lo, hi) of a work item.

    `marks` are (time in s, worker state), one for each change of the chunk's state. `scratch` is memory that stages reuse from
    chunk to chunk. `slowest` is (seconds, row) of the slowest item in a stage that works item by item, until it is noted.
    """

    __slots__ = ("current", "epoch", "has_landed", "hi", "lo", "marks", "number", "scratch", "slowest", "work_item")
    failures: Sized = ()  # the items that have failed in a stage

    def __init__(self, work_item: WorkItem, lo: int, hi: int) -> None:
        self.work_item = work_item
        self.lo = lo
        self.hi = hi
        self.epoch = work_item.epoch
        self.has_landed = False
        self.number = 0  # in the order in which workers have taken chunks
        self.marks: list[tuple[float, int]] = []
        self.scratch: dict[str, Any] = {}
        self.slowest: tuple[float, int] | None = None
        # For hang reports: the row of the item a stage works on, or the list of its results so far; None if all at
        # once.
        self.current: int | list[Any] | None = None

    def __len__(self) -> int:
        return self.hi - self.lo

    def __str__(self) -> str:
        """Its name in messages."""
        return f"slots {self.lo} to {self.hi}"

    @property
    def num_failed(self) -> int:
        """How many items have failed so far."""
        return len(self.failures)

    def index_of(self, row: int) -> int:
        """The plan's index of the item at `row` of the chunk."""
        return self.lo + row

    def let_go(self) -> None:
        """Drop the contents: the chunk has landed."""

    def memory(self, name: str, size: int) -> memoryview:
        """`size` bytes of scratch, aligned to 64; the next chunk with this scratch overwrites them.

        Fresh memory for every file costs 16 % of its read (page faults).
        """
        buffer = self.scratch.get(name)
        if buffer is None or len(buffer) < size:
            whole = np.empty(size + size // 4 + _ALIGNMENT, np.uint8)
            buffer = self.scratch[name] = whole[-whole.ctypes.data % _ALIGNMENT :].data
        view: memoryview = buffer[:size]
        return view


@dataclass(frozen=True)
class Stage:
    """A stage ready to run. `run` acts on a chunk (scope "sample"), or on a finished result and the plan's context of it
    (scope "batch")."""

    name: str
    kind: str
    scope: Literal["sample", "batch"]
    run: Callable[..., Any]
    workers: int | None = None  # None if it shares the automatic pool
    close: Callable[[], None] | None = None  # frees its resources; it may run again after that
    interrupt: Callable[[], None] | None = None  # ends its waits, before its workers are joined
    waits_for: Callable[[int], str | None] = lambda thread_id: None
    """What that thread waits for in code that nothing can end, so that a close does not wait for it long; for messages."""
    waits: bool = False  # it may wait for something other than a CPU or the GIL
    finishes: bool = False  # `Plan.finish` completes its work, and counts as its time
    source: str = ""  # the mixed source that it is for alone
    in_turn: bool = False
    """Of the first stage: one worker at a time runs it, in the order of the chunks; waiting for that is not its time."""
    content: str = ""  # what it acts on, where stages of its kind may act on different things; for what is said of it
    owner: Any = None  # the user's object that it runs code of, if one thread at a time may
    lock: UserLock | None = None
    """The lock that it takes and holds while it runs. A caller that has to wait for the lock takes it beforehand, so
    that waiting is not the stage's time."""
    part: Callable[[Any], Chunk | None] | None = None
    """A function that gives the items of a chunk on which it acts, as a chunk, or None if there are none. Without it
    the stage acts on all."""
    pool: str = ""  # neighbours with the same name share a pool, also with `workers`
