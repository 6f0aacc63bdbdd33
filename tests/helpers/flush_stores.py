"""Stores for a process that writes checkpoints, and a program that saves to them: what another process imports.

python flush_stores.py FOLDER    saves step 1, then step 2, which waits at the gate; prints the pids of its processes
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import leftovers
import torch
from crashing import Clock

import loaderkit
from loaderkit.checkpoint.flush.shared_pages import MappedPages
from loaderkit.connectors.base import ObjectWriter, Writes, writes_of
from loaderkit.connectors.file import FileConnector
from loaderkit.connectors.writing import WritesLayer
from loaderkit.errors import ConnectorError


class Killing(Clock):
    """Kills the process at its operation with the number `last`, or a later one, if the file `flag` is there; once."""

    def __init__(self, last: int, flag: Path, *, is_before: bool) -> None:
        super().__init__(last, is_before=is_before)
        self._settings = last, flag, is_before

    def __reduce__(self) -> Any:
        last, flag, is_before = self._settings
        return _killing, (last, flag, is_before)

    def run(self, name: str, operation: Callable[[], Any]) -> Any:
        last, flag, is_before = self._settings
        with self._lock:
            dies = len(self.names) >= last and flag.exists()
            self.names.append(name)
            if dies:
                flag.unlink()
                if not is_before:
                    operation()
                os.kill(os.getpid(), signal.SIGKILL)
            return operation()


def _killing(last: int, flag: Path, is_before: bool) -> Killing:
    return Killing(last, flag, is_before=is_before)


class Gated(FileConnector):
    """Files whose writing waits at a FIFO `gate` beside the folder, if it is there, until someone has opened and closed it, and
    fails as the file `fails` says; and which cannot be removed while the file `stuck` is there."""

    def writes(self) -> Writes:
        return _GatedWrites(writes_of(FileConnector(self.describe(""))), Path(self.describe("")).parent)


class _GatedWrites(WritesLayer):
    def __init__(self, inner: Writes, folder: Path) -> None:
        super().__init__(inner)
        self._folder = folder

    def create(self, key: str, size: int) -> ObjectWriter:
        gate, fails = self._folder / "gate", self._folder / "fails"
        if gate.exists():
            gate.read_bytes()
        if fails.exists():
            text = fails.read_text()
            fails.unlink()
            logging.getLogger("loaderkit").warning("it is said there that %s", text)
            raise ConnectorError(text)
        return self.inner.create(key, size)

    def delete(self, key: str) -> None:
        if key.endswith(".distcp") and (self._folder / "stuck").exists():
            raise ConnectorError("it is stuck")
        self.inner.delete(key)


def add(memory: MappedPages) -> Callable[[Any, float], float]:
    """Makes a function that adds what a state holds to a number."""
    return lambda state, number: float(state["w"].sum()) + number


def state_of(number: int) -> dict[str, Any]:
    """A state unlike that of another number."""
    tensors = {f"w{n}": torch.arange(float(1000 * n + 10)) + number for n in range(4)}
    return {"model": tensors, "step": number, "names": [f"{number}"] * number}


def manager_of(folder: Path, **settings: Any) -> loaderkit.CheckpointManager:
    """Saves to `folder`/run in a process of its own."""
    settings = {"flush": "process", "connectors": {"store": Gated(folder / "run")}} | settings
    return loaderkit.CheckpointManager("store://", **settings)


def children() -> list[int]:
    """The processes that write checkpoints for this one and have not ended; other tests' servers are no such ones."""
    return [pid for pid in leftovers.children() if "loaderkit.checkpoint.flush" in _command(pid)]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:  # it has ended
        return ""


def main(folder: Path) -> None:
    """Save step 1, and step 2, which waits at the gate; print the pids of the processes, and do nothing more."""
    with manager_of(folder) as checkpoints:
        checkpoints.save(1, state_of(1), wait=True)
        os.mkfifo(folder / "gate")
        checkpoints.save(2, state_of(2))
        print(*children(), flush=True)
        while True:
            signal.pause()
