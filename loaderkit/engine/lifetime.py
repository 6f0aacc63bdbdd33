"""Whether a loader, or its executor, may still be used. All messages of why it may not be used are here."""

from __future__ import annotations

import os

from loaderkit.errors import ClosedError


class Lifetime:
    """The time in which an object may be used: from its creation in this process until it is closed. Methods are for
    any thread."""

    def __init__(self) -> None:
        self.is_closed = False
        self.pid = os.getpid()

    @property
    def is_fork(self) -> bool:
        """True in a fork's child: neither threads nor processes are there, and a lock may have been copied while held."""
        return os.getpid() != self.pid

    def check_open(self) -> None:
        """Raise ClosedError once it is closed."""
        if self.is_closed:
            raise ClosedError("the loader is closed: build another one")

    def check_usable(self) -> None:
        """Raise ClosedError once it is closed, and in a fork's child."""
        self.check_open()
        if self.is_fork:
            raise ClosedError(
                "the loader was made before a fork and used after it, where its threads do not exist and its processes answer "
                "only to the parent: build one in each process"
            )

    def check_awaited(self) -> None:
        """Raise ClosedError if it was closed since the consumer began to wait."""
        if self.is_closed:
            raise ClosedError("the loader was closed while a batch was awaited")
