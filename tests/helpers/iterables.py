"""Things that can only be iterated over; importable in loading processes."""

from __future__ import annotations

import random
import threading
import weakref
from collections.abc import Iterator
from typing import Any, ClassVar

from torch.utils.data import IterableDataset

READ: list[int] = []  # by `Stateful`, in this process


class Counting(IterableDataset[dict[str, Any]]):
    """Item i of epoch e holds i and e."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number in range(self.size):
            yield {"x": number, "epoch": self.epoch}


class Stateful(Counting):
    """The same, which can begin at any item."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.begin = self.num_read = 0

    def state_dict(self) -> dict[str, int]:
        return {"num_read": self.num_read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["num_read"]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number in range(self.begin, self.size):
            self.num_read = number + 1
            READ.append(number)
            yield {"x": number, "epoch": self.epoch}


class Continuing(Stateful):
    """It remembers where it is, and begins there when it is iterated over again."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while self.num_read < self.size:
            self.num_read += 1
            yield {"x": self.num_read - 1, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_read = state["num_read"]


class Sharing(Counting):
    """All its iterators take from one."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.shared = iter(range(size))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number in self.shared:
            yield {"x": number, "epoch": self.epoch}


class Buffered(Stateful):
    """It reads ahead what its state counts as read, as a shuffle buffer does."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for item in super().__iter__():
            self.num_read = item["x"] + 5
            yield item


def unseeded(size: int) -> Iterator[dict[str, Any]]:
    """Another order in each pass."""
    for number in random.sample(range(size), size):
        yield {"x": number}


class Stuck(Counting):
    """It waits for ever behind its last item, or until it is `released`."""

    released = threading.Event()
    num_waiting = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield from super().__iter__()
        Stuck.num_waiting += 1
        self.released.wait()
        Stuck.num_waiting -= 1


class Uncopyable:
    """Of which no copy can be made."""

    alive: ClassVar[weakref.WeakSet[Uncopyable]] = weakref.WeakSet()

    def __init__(self, number: int) -> None:
        self.number = number
        self.lock = threading.Lock()
        self.alive.add(self)


def counting(size: int) -> Iterator[dict[str, Any]]:
    """A generator function: made anew for each epoch, whose number it does not know."""
    for number in range(size):
        yield {"x": number, "epoch": 0}


def failing(size: int) -> Iterator[dict[str, Any]]:
    yield from counting(size)
    raise OSError("the line is dead")
