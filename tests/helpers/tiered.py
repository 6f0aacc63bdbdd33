"""Two stores in memory, of which the far one can be held, or fail; and what is in each of them."""

from __future__ import annotations

import threading
from typing import Any

import torch

import loaderkit
from loaderkit.checkpoint.discovery.manifest import NAME
from loaderkit.connectors.base import Connector, ConnectorLayer, ObjectWriter, Writes, writes_of
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.connectors.writing import WritesLayer


class Held(ConnectorLayer):
    """A store whose files wait to be written until `gate` is set, or fail with `error`. `created` are the keys of those begun;
    `begun` is set with the first of them that waits."""

    def __init__(self, inner: Connector) -> None:
        super().__init__(inner)
        self.gate = threading.Event()
        self.gate.set()
        self.begun = threading.Event()
        self.error: Exception | None = None
        self.created: list[str] = []

    def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        self.inner.read_into(key, start, buffer, etag=etag)

    def writes(self) -> Writes:
        return _HeldWrites(writes_of(self.inner), self)

    def hold(self) -> None:
        self.begun.clear()
        self.gate.clear()


class _HeldWrites(WritesLayer):
    def __init__(self, inner: Writes, store: Held) -> None:
        super().__init__(inner)
        self._store = store

    def create(self, key: str, size: int) -> ObjectWriter:
        self._store.created.append(key)
        if not self._store.gate.is_set():
            self._store.begun.set()
            assert self._store.gate.wait(60)
        if self._store.error is not None:
            raise self._store.error
        return self.inner.create(key, size)


class Two:
    """A near and a far store, and managers for them."""

    def __init__(self, far: Connector | None = None, near: Connector | None = None) -> None:
        self.near = MemoryConnector() if near is None else near
        self.far = Held(MemoryConnector() if far is None else far)

    def manager(self, local: dict[str, Any] | None = None, **settings: Any) -> loaderkit.CheckpointManager:
        return loaderkit.CheckpointManager(
            "far://", local={"path": "near://", **(local or {})}, connectors=self.connectors, **settings
        )

    @property
    def connectors(self) -> dict[str, Connector]:
        return {"near": self.near, "far": self.far}


def steps_in(store: Connector) -> list[int]:
    """The steps that have a manifest."""
    keys = [info.key for info in store.list("step-")]
    return sorted(int(key.split("/")[0].removeprefix("step-")) for key in keys if key.endswith(f"/{NAME}"))


def state_of(step: int, num: int = 1000) -> dict[str, Any]:
    return {"x": torch.arange(float(num)) + step, "n": step}


def number_in(checkpoints: loaderkit.CheckpointManager, step: int | None = None, num: int = 1000) -> int:
    """The number of the state that is restored; fails unless it is that state to the last bit. -1: none."""
    state = state_of(-1, num)
    if checkpoints.restore(state, step) is None:
        return -1
    assert torch.equal(state["x"], state_of(state["n"], num)["x"])
    return int(state["n"])


def flip(store: Connector, step: int, at: int = 3000) -> None:
    """Change bytes in the middle of a step's tensors."""
    (key,) = (info.key for info in store.list("") if f"{step:010}" in info.key and info.key.endswith(".distcp"))
    data = bytearray(store.stat(key).size)
    store.read_into(key, 0, memoryview(data))
    data[at : at + 4] = b"\xff\xff\xff\x7f"
    writes_of(store).put(key, data)
