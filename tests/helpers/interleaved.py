"""Runs several threads one at a time: at each operation on a store another one may go on, for how long is drawn."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator

from loaderkit.connectors.base import Connector, ConnectorLayer, ObjectInfo, ObjectWriter, Writes
from loaderkit.connectors.writing import WriterLayer, WritesLayer


class Turns:
    """Whose turn it is. A thread that has begun counts as waiting from its first `step` on, so all begin with one."""

    def __init__(self, rng: random.Random) -> None:
        """A thread goes on for one step or for many, up to its end, before another one is drawn."""
        self._rng = rng
        self._changed = threading.Condition()
        self._waiting: set[str] = set()
        self._running: set[str] = set()
        self._turn, self._num_left = "", 0

    def run(self, functions: dict[str, Callable[[], None]]) -> dict[str, BaseException | None]:
        """Call all functions, each in a thread of this name; what each has raised."""
        ends: dict[str, BaseException | None] = {}
        self._running = {*functions}

        def call(name: str) -> None:
            try:
                self.step()
                functions[name]()
                ends[name] = None
            except BaseException as error:
                ends[name] = error
            finally:
                with self._changed:
                    self._running.discard(name)
                    self._num_left = 0
                    self._draw()

        threads = [threading.Thread(target=call, args=(name,), name=name) for name in functions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return ends

    def step(self) -> None:
        """Wait for a turn."""
        name = threading.current_thread().name
        if name not in self._running:
            return
        with self._changed:
            self._waiting.add(name)
            self._draw()
            self._changed.wait_for(lambda: self._turn == name)
            self._waiting.discard(name)
            self._turn = ""

    def _draw(self) -> None:
        if self._turn or self._waiting != self._running or not self._running:
            return
        if self._num_left <= 0 or self._last not in self._running:
            self._last = self._rng.choice(sorted(self._running))
            self._num_left = self._rng.randint(1, self._rng.choice([6, 100, 10**6]))
        self._num_left -= 1
        self._turn = self._last
        self._changed.notify_all()

    _last = ""


class InTurns(ConnectorLayer):
    """A store whose every operation waits for a turn."""

    def __init__(self, inner: Connector, turns: Turns) -> None:
        super().__init__(inner)
        self._turns = turns

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self._turns.step()
        yield from [*self.inner.list(prefix)]

    def stat(self, key: str) -> ObjectInfo:
        self._turns.step()
        return self.inner.stat(key)

    def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        self._turns.step()
        self.inner.read_into(key, start, buffer, etag=etag)

    def writes(self) -> Writes | None:
        inner = super().writes()
        return inner and _Writes(inner, self._turns)


class _Writes(WritesLayer):
    def __init__(self, inner: Writes, turns: Turns) -> None:
        super().__init__(inner)
        self._turns = turns

    def create(self, key: str, size: int) -> ObjectWriter:
        self._turns.step()
        return _Writer(self.inner.create(key, size), self._turns)

    def put(self, key: str, data: bytes | bytearray | memoryview) -> ObjectInfo:
        self._turns.step()
        return self.inner.put(key, data)

    def delete(self, key: str) -> None:
        self._turns.step()
        self.inner.delete(key)

    def clear(self, prefix: str, *, deep: bool = True) -> None:
        self._turns.step()
        self.inner.clear(prefix, deep=deep)


class _Writer(WriterLayer):
    def __init__(self, inner: ObjectWriter, turns: Turns) -> None:
        super().__init__(inner)
        self._turns = turns

    def commit(self) -> ObjectInfo:
        self._turns.step()
        return self.inner.commit()
