"""A loader's calls of Ray, none of which outlives the connection to the cluster.

Without a connection most of Ray's functions start one, or a whole cluster, by themselves. After `ray.shutdown()`, and
while the program ends, any thread that still asks for something would do that. So all calls for a loader go through its
`Connection`.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from typing import Any

import ray

from loaderkit.engine.ray.cluster import connect
from loaderkit.errors import ClosedError

_IS_EXITING = threading.Event()
atexit.register(_IS_EXITING.set)  # after Ray's own hook, which importing it has registered, so this runs before that


class Connection:
    """The connection that a loader has found or begun. Methods are for any thread."""

    def __init__(self, address: str) -> None:
        """`address` as Ray takes it, or `auto`."""
        self._address = address
        self._opening = threading.Lock()
        self._context: Any = None
        self._opened: tuple[str, str] | None = None  # the node and the job

    def open(self) -> None:
        """Connect this process, unless it is connected. Raises ConfigError if there is no cluster, and ClosedError if the
        connection has ended since the first call: batches and actors belong to that connection."""
        with self._opening:
            if self._opened is None:
                connect(self._address)
                self._context = ray.get_runtime_context()
                self._opened = self._current()
        self.check()

    def _current(self) -> tuple[str, str]:
        return self._context.get_node_id(), self._context.get_job_id()

    @property
    def is_there(self) -> bool:
        """False before `open`, after `ray.shutdown()` (with another connection begun, too), and while the program ends."""
        if self._opened is None or _IS_EXITING.is_set() or not ray.is_initialized():
            return False
        try:
            return self._current() == self._opened
        except Exception:  # of whatever kind: it ends meanwhile
            return False

    def check(self) -> None:
        """Raises ClosedError unless the connection is there."""
        if not self.is_there:
            raise ClosedError(
                "the connection to the Ray cluster, to which the loader's actors and batches belong, has ended (by "
                "ray.shutdown(), or with the program): close the loader before, or build another one"
            )

    def do(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call a function of Ray's. Raises what it raises, and ClosedError if the connection is not there or ends meanwhile."""
        self.check()
        try:
            return function(*arguments, **options)
        except Exception:
            self.check()
            raise
