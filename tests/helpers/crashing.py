"""A store that dies at one of its operations, as a process does; and the states that are saved to it."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from checkpoint_states import same
from power_cut import DroppingConnector
from torch.distributed.checkpoint.state_dict_saver import save

import loaderkit
from loaderkit.checkpoint import StreamWriter
from loaderkit.checkpoint.discovery.description import Format
from loaderkit.checkpoint.discovery.locate import SAVING
from loaderkit.connectors.base import Connector, ConnectorLayer, ObjectInfo, ObjectWriter, Writes, writes_of
from loaderkit.connectors.file import FileConnector
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.connectors.writing import WriterLayer, WritesLayer
from loaderkit.errors import UnreachableError

_LEFT: list[ObjectWriter] = []  # of processes that have died


class DeadError(Exception):
    """The process has died: it does nothing any more."""


class Clock:
    """Counts operations; the one with the number `last` is done, or not if `is_before`, and none after it."""

    def __init__(self, last: int | None = None, *, is_before: bool = False) -> None:
        self._last, self._is_before = last, is_before
        self._lock = threading.Lock()
        self.names: list[str] = []
        self.is_dead = False

    def run(self, name: str, operation: Callable[[], Any]) -> Any:
        with self._lock:  # one after the other: what is done at the time of death is known
            if self.is_dead:
                raise DeadError
            self.is_dead = len(self.names) == self._last
            self.names.append(name)
            if self.is_dead and self._is_before:
                raise DeadError
            result = operation()
            if self.is_dead:
                raise DeadError
            return result


class Mortal(ConnectorLayer):
    """A connector that stops writing when its clock does."""

    def __init__(self, inner: Connector, clock: Clock, *, renames: bool = True) -> None:
        super().__init__(inner)
        self.clock, self._renames = clock, renames

    def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        self.inner.read_into(key, start, buffer, etag=etag)

    def writes(self) -> Writes:
        return _MortalWrites(writes_of(self.inner), self.clock, self._renames)


class _MortalWrites(WritesLayer):
    def __init__(self, inner: Writes, clock: Clock, renames: bool) -> None:
        super().__init__(inner)
        self._clock, self._renames = clock, renames

    def create(self, key: str, size: int) -> ObjectWriter:
        def create() -> ObjectWriter:
            _LEFT.append(self.inner.create(key, size))
            return _LEFT[-1]

        return _MortalWriter(self._clock.run("create", create), self._clock)

    def put(self, key: str, data: bytes | bytearray | memoryview) -> ObjectInfo:
        name = key.rpartition("/")[2]
        try:
            info: ObjectInfo = self._clock.run(f"put {name}", lambda: self.inner.put(key, data))
        except DeadError as error:
            if name.startswith(f"{SAVING}job"):  # nothing depends on it: what is saved to another store is committed
                raise UnreachableError(name) from error
            raise
        return info

    def delete(self, key: str) -> None:
        self._clock.run("delete", lambda: self.inner.delete(key))

    def rename(self, prefix: str, new_prefix: str) -> bool:
        return self._renames and self._clock.run("rename", lambda: self.inner.rename(prefix, new_prefix))

    def sync(self, prefix: str) -> None:
        self._clock.run("sync", lambda: self.inner.sync(prefix))

    def clear(self, prefix: str, *, deep: bool = True) -> None:
        self._clock.run("clear", lambda: self.inner.clear(prefix, deep=deep))


class _MortalWriter(WriterLayer):
    def __init__(self, inner: ObjectWriter, clock: Clock) -> None:
        super().__init__(inner)
        self._clock = clock

    def write(self, start: int, data: memoryview) -> None:
        self._clock.run("write", lambda: self.inner.write(start, data))

    def commit(self) -> ObjectInfo:
        info: ObjectInfo = self._clock.run("commit", self.inner.commit)
        return info

    def abort(self) -> None:
        self._clock.run("abort", self.inner.abort)


@contextmanager
def made_store(kind: str) -> Iterator[Connector]:
    """A store without anything in it."""
    try:
        with _made(kind) as store:
            yield store
    finally:
        for writer in _LEFT:  # what the system does when a process dies
            writer.abort()
        _LEFT.clear()


@contextmanager
def _made(kind: str) -> Iterator[Connector]:
    if kind.startswith("memory"):
        yield MemoryConnector()
        return
    with tempfile.TemporaryDirectory() as folder:
        yield (
            FileConnector(f"{folder}/files")
            if kind == "file"
            else DroppingConnector(f"{folder}/files", f"{folder}/durable")
        )


def state_of(number: int) -> dict[str, Any]:
    """A state unlike that of another number, and of other sizes."""
    generator = torch.Generator().manual_seed(number)
    tensors = {f"w{n}": torch.randn(1 + 40 * n * (number + 1), 101, generator=generator) for n in range(3)}
    return {"model": tensors, "step": number, "names": [f"{number}"] * number}


def save_to(store: Connector, name: str, number: int, format: Format = "dcp") -> None:  # noqa: A002 (as of StreamWriter)
    writer = StreamWriter(f"given://{name}", format=format, connectors={"given": store})
    save(state_of(number), storage_writer=writer, no_dist=True)


def number_in(store: Connector, name: str, *, verify: Any = "auto") -> int:
    """The number of the state that a checkpoint holds. Fails unless it is that state to the last bit."""
    found = loaderkit.restore(f"given://{name}", connectors={"given": store}, verify=verify)
    number = found["step"]
    wanted = state_of(number)
    assert found["names"] == wanted["names"]
    for key, tensor in wanted["model"].items():
        assert same(found[f"model.{key}"], tensor), key
    return int(number)


def names_in(store: Connector) -> list[str]:
    """All that is there, directories without a file included."""
    names = [info.key for info in store.list("")]
    root = getattr(store, "root", None) or (Path(store.describe("")) if isinstance(store, FileConnector) else None)
    if root is not None:
        names += [
            f"{folder}/"
            for folder, folders, files in os.walk(root)
            if not folders and not files and Path(folder) != root
        ]
    return names
