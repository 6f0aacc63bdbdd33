"""The DALI pipelines of a renderer: each runs in one thread at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class PipelinePool:
    """Pipelines that are not in use. One is built at a time, which takes 2 s on a GPU: meanwhile the other threads wait for
    those that there are."""

    def __init__(self) -> None:
        self._idle: list[Any] = []
        self._is_building = False
        self._changed = threading.Condition()  # guards both

    def take(self, build: Callable[[], Any]) -> Any:
        """A pipeline for this thread alone, a new one by `build` if there is none. Raises what `build` raises."""
        with self._changed:
            while self._is_building and not self._idle:
                self._changed.wait()
            if self._idle:
                return self._idle.pop()
            self._is_building = True
        try:
            return build()
        finally:
            with self._changed:
                self._is_building = False
                self._changed.notify_all()

    def give_back(self, pipeline: Any) -> None:
        """For the next one that takes it. One that has failed is invalid, and dropped instead."""
        with self._changed:
            self._idle.append(pipeline)
            self._changed.notify()

    def clear(self) -> None:
        """Drop those that are not in use."""
        with self._changed:
            self._idle.clear()
