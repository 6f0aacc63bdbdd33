"""What can be seen of an iterator of torch's DataLoader: its arguments, its processes, and how many of them have work.

The one module that reads torch's own attributes. What another release calls differently is not seen, and the report leaves it
out.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any, Protocol

from torch.utils.data import IterableDataset
from torch.utils.data import dataloader as torch_dataloader

from loaderkit.diagnosis.watched.counters import LoaderArguments

A_WAIT_S = 1e-3  # a shorter one is not looked at more closely
_MOST_OBJECTS = 400


class LoaderAccount(Protocol):
    """The account to which a view adds."""

    def worked(self, seconds: float, num_workers: int, busy: float, *, is_wait: bool, is_asking: bool) -> None:
        """Of `num_workers` workers, `busy` had batches to make for so long."""

    def collated(self, seconds: float, cpu_s: float) -> None:
        """`collate_fn` ran in the loop's own thread."""

    def before_end(self) -> None:
        """Workers are about to end."""


class LoaderView:
    """One iterator of a DataLoader, seen from outside, in the loop's thread."""

    def __init__(self, iterator: Any) -> None:
        self.arguments = LoaderArguments(
            num_workers=iterator._num_workers,
            batch_size=getattr(iterator._index_sampler, "batch_size", None),
            prefetch_factor=getattr(iterator, "_prefetch_factor", None),
            pin_memory=bool(getattr(iterator, "_pin_memory", False)),
            persistent_workers=bool(getattr(iterator, "_persistent_workers", False)),
            in_order=bool(getattr(iterator, "_in_order", True)),
            dataset=type(iterator._dataset).__name__,
            is_iterable=isinstance(iterator._dataset, IterableDataset),
        )

    def asked(self, account: LoaderAccount, now_s: float) -> bool:
        """The loop is about to call next(). True if it will not wait for workers: they have finished all they were asked for,
        or what they have finished waits to be pinned."""
        return False

    def came(self, account: LoaderAccount, now_s: float) -> None:
        """It has a batch."""


class InlineView(LoaderView):
    """A DataLoader without workers: `collate_fn`, which the iterator calls for every batch, is timed.

    The iterator refers to the view, and the view does not refer to the iterator, which is freed as early as ever.
    """

    def __init__(self, iterator: Any, clock: Callable[[], float]) -> None:
        super().__init__(iterator)
        fetcher = iterator._dataset_fetcher
        self._collate, self._clock = fetcher.collate_fn, clock
        self._collated = (0.0, 0.0)
        fetcher.collate_fn = self._timed

    def came(self, account: LoaderAccount, now_s: float) -> None:
        """Count how long `collate_fn` took."""
        account.collated(*self._collated)
        self._collated = (0.0, 0.0)

    def _timed(self, samples: Any) -> Any:
        begin_s, begin_cpu_s = self._clock(), time.thread_time()
        try:
            return self._collate(samples)
        finally:
            passed_s, passed_cpu_s = self._collated
            self._collated = (
                passed_s + self._clock() - begin_s,
                passed_cpu_s + time.thread_time() - begin_cpu_s,
            )


class WorkersView(LoaderView):
    """A DataLoader with workers: counts how many of them have batches to make, from moment to moment."""

    def __init__(self, iterator: Any, now_s: float) -> None:
        super().__init__(iterator)
        self.pids: tuple[int, ...] = tuple(worker.pid for worker in iterator._workers)
        thread = getattr(iterator, "_pin_memory_thread", None)
        self.pin_thread: int | None = getattr(thread, "native_id", None)
        self._iterator = iterator
        self._num_workers = self.arguments.num_workers
        self._num_ahead = self.arguments.num_ahead
        self._num_done = iterator._worker_result_queue.qsize
        self._num_pinned = iterator._data_queue.qsize if self.arguments.pin_memory else None
        self._mark_s, self._mark_busy = now_s, float(min(self._num_workers, self.num_unfinished()))
        self._is_asking(), self._has_ended()  # raise AttributeError where another release has them not

    def num_unfinished(self) -> int:
        """Batches that workers have been asked for and have not finished."""
        num_done: int = self._num_done()
        unfinished: int = self._iterator._tasks_outstanding - num_done
        if self._num_pinned is None:
            return unfinished
        return (
            unfinished - int(self._num_pinned()) - (num_done > 0)
        )  # of which the thread that pins has one more in work

    def asked(self, account: LoaderAccount, now_s: float) -> bool:
        """Count what workers did while the loop computed."""
        num_unfinished = self.num_unfinished()
        self._count(account, now_s, min(self._num_workers, num_unfinished), is_wait=False)
        if self._has_ended():
            account.before_end()
        if self._num_pinned is not None and not self._num_pinned() and self._num_done():
            return True  # some wait to be pinned
        return num_unfinished <= 0

    def came(self, account: LoaderAccount, now_s: float) -> None:
        """Count what they did while it waited."""
        is_wait = now_s - self._mark_s > A_WAIT_S
        left = min(self._num_workers, self.num_unfinished())
        self._count(account, now_s, self._num_working() if is_wait else left, is_wait=is_wait)
        self._mark_busy = left

    def _count(self, account: LoaderAccount, now_s: float, busy: float, *, is_wait: bool) -> None:
        mean, seconds = (busy + self._mark_busy) / 2, now_s - self._mark_s
        account.worked(seconds, self._num_workers, mean, is_wait=is_wait, is_asking=self._is_asking())
        self._mark_s, self._mark_busy = now_s, busy

    def _is_asking(self) -> bool:
        """False at an epoch's end: no more batches are asked for than those that are left."""
        return len(self._iterator._task_info) >= self._num_ahead

    def _has_ended(self) -> bool:
        """True if the next call of next() ends the epoch."""
        return bool(self._iterator._rcvd_idx >= self._iterator._send_idx)

    def _num_working(self) -> int:
        """Workers that worked when the last batch came: the one that made it, and others with batches to finish. The batch that
        was asked for since is not counted."""
        newest = self._iterator._send_idx - 1
        tasks = self._iterator._task_info.items()
        working = {info[0] for number, info in tasks if len(info) == 1 and number != newest}
        return min(self._num_workers, 1 + len(working))


def view_of(iterator: Any, clock: Callable[[], float]) -> LoaderView | None:
    """The view of the iterator of a DataLoader, which may lie within generators or other iterators around it; None if there is
    none. Takes 10 to 100 us."""
    found = next((one for one in _inside(iterator) if isinstance(one, torch_dataloader._BaseDataLoaderIter)), None)
    if found is None:
        return None
    try:
        return WorkersView(found, clock()) if found._num_workers else InlineView(found, clock)
    except (AttributeError, NotImplementedError):  # of another release
        return None


def _inside(iterator: Any) -> Iterator[Any]:
    """The iterator, and what it iterates over, by the references that the garbage collector follows. Nothing is called."""
    seen, waiting = {id(iterator)}, [iterator]
    for _ in range(_MOST_OBJECTS):
        if not waiting:
            return
        one = waiting.pop(0)
        yield one
        for inner in gc.get_referents(one):
            if id(inner) not in seen and _may_lead_on(inner):
                seen.add(id(inner))
                waiting.append(inner)


def _may_lead_on(value: Any) -> bool:
    if isinstance(value, (dict, list, tuple)):
        return len(value) < 64
    return hasattr(type(value), "__next__") and not isinstance(value, (type, ModuleType, FunctionType))
