"""What must be as it was, once a loader is gone."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest
import torch


def resources() -> tuple[int, int, int, int]:
    """How many threads, descriptors, mappings of the arena, and processes of ours there are."""
    found = [kind for kind, _ in traces()]
    return found.count("thread"), found.count("descriptor"), found.count("mapping"), found.count("process")


def children() -> set[int]:
    """The processes that this one has begun and that run."""
    found: set[int] = set()
    for file in Path("/proc/self/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            found |= set(map(int, file.read_text().split()))
    return found


def traces() -> set[tuple[str, str]]:
    """The same one by one, (kind, which).

    A thread that was not begun by `threading`, but asked for itself, is counted there for good, and is not ours.
    """
    gc.collect()
    found: set[tuple[str, str]] = {("process", str(pid)) for pid in children()}
    mappings = Path("/proc/self/maps").read_text().splitlines()
    found |= {("mapping", line) for line in mappings if "memfd:loaderkit" in line}
    threads = [thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)]
    found |= {("thread", f"{thread.name} {thread.ident}") for thread in threads}
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that this listing had opened
            file = os.readlink(f"/proc/self/fd/{descriptor}")
            if not file.startswith("/dev/nvidia"):  # the driver opens and keeps them, for a stream or an event
                found.add(("descriptor", f"{descriptor} {file}"))
    return found


@cache
def _open_cuda() -> None:
    """The driver opens descriptors of its own with the first context and copy, and keeps them."""
    if torch.cuda.is_available():
        torch.ones(1).pin_memory().to("cuda", non_blocking=True)
        torch.cuda.synchronize()


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No test may leave a thread, descriptor, mapping or process that was not there before. What others have left, and ends
    meanwhile, is not its."""
    _open_cuda()
    before = traces()
    yield
    left = traces() - before
    assert not left, left
