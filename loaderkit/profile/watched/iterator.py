"""One pass over what is watched: its batches as they come, each timed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from loaderkit._internal.system.processes import thread_delayed_s
from loaderkit.profile.watched.dataloader import LoaderView, view_of
from loaderkit.profile.watched.recorder import Recorder

_DELAYS_S = 0.005  # how often the loop's thread is asked for how long it had no CPU: that takes 10 us


def open_watched(recorder: Recorder, open_inner: Callable[[], Any]) -> WatchedIterator:
    """Begin one pass over what `open_inner` gives the iterator of."""
    begin_s = recorder.opening()
    inner = open_inner()
    view = view_of(inner, recorder.clock)
    recorder.opened(begin_s, view)
    return (_SizedIterator if hasattr(type(inner), "__len__") else WatchedIterator)(recorder, inner, view)


class WatchedIterator:
    """The iterator that the loop gets. It gives the items of another iterator, and has all other attributes of that one."""

    __slots__ = ("__weakref__", "_inner", "_is_first", "_is_over", "_next_delay_s", "_recorder", "_view")

    def __init__(self, recorder: Recorder, inner: Any, view: LoaderView | None) -> None:
        self._recorder, self._inner, self._view = recorder, inner, view
        self._is_first, self._is_over = True, False
        self._next_delay_s = 0.0

    # `sys` may be gone at Python's end, so it is asked for beforehand.
    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """The loop has left an epoch early: ending workers takes time, for they finish the batch that they make."""
        if self._is_over or is_finalizing():
            return
        recorder, view = self._recorder, self._view
        recorder.leaving(view)
        begin_s = recorder.clock()
        self._inner = self._view = view = None
        recorder.left(begin_s)

    def __iter__(self) -> WatchedIterator:
        return self

    def gives(self, inner: Any) -> bool:
        """True if it takes its batches from `inner` itself: an iterator."""
        return self._inner is inner

    def __next__(self) -> Any:
        recorder, view, clock = self._recorder, self._view, self._recorder.clock
        begin_s, delayed_s = recorder.asked(), None
        if begin_s >= recorder.next_look_s and not self._is_first:
            recorder.look(begin_s)
        if begin_s >= self._next_delay_s:
            self._next_delay_s, delayed_s = begin_s + _DELAYS_S, thread_delayed_s()
        begin_s = clock()
        all_done = view is not None and view.asked(recorder, begin_s)
        begin_cpu_s = time.thread_time()
        try:
            batch = next(self._inner)
        except BaseException as error:
            if isinstance(error, StopIteration):
                self._is_over = True
                recorder.ended(begin_s)
            else:
                recorder.failed()
            raise
        cpu_s, now_s = time.thread_time() - begin_cpu_s, clock()
        if delayed_s is not None:
            delayed_s = thread_delayed_s() - delayed_s
        recorder.came(batch, now_s - begin_s, cpu_s, delayed_s, is_first=self._is_first, all_done=all_done)
        if view is not None:
            view.came(recorder, now_s)
        if self._is_first:
            self._on_first()
        recorder.gave(batch)
        return batch

    def _on_first(self) -> None:
        self._is_first = False
        if self._view is None and (view := view_of(self._inner, self._recorder.clock)) is not None:
            self._view = view  # a generator has begun by now
            self._recorder.see(view)

    def __getattr__(self, name: str) -> Any:
        if name in WatchedIterator.__slots__:  # not set yet
            raise AttributeError(name)
        return getattr(self._inner, name)


class _SizedIterator(WatchedIterator):
    __slots__ = ()

    def __len__(self) -> int:
        return len(self._inner)
