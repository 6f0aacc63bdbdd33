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
    """Threads, descriptors, mappings of the arena, and processes of ours.

    A thread that was not begun by `threading`, but asked for itself, is counted there for good, and is not ours.
    """
    gc.collect()
    children: list[str] = []
    for file in Path("/proc/self/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            children += file.read_text().split()
    maps = Path("/proc/self/maps").read_text().count("memfd:loaderkit")
    threads = sum(not isinstance(thread, threading._DummyThread) for thread in threading.enumerate())
    return threads, len(os.listdir("/proc/self/fd")), maps, len(children)


@cache
def _open_cuda() -> None:
    """The driver opens descriptors of its own with the first context and copy, and keeps them."""
    if torch.cuda.is_available():
        torch.ones(1).pin_memory().to("cuda", non_blocking=True)
        torch.cuda.synchronize()


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Every test must leave threads, descriptors, mappings and processes as they were."""
    _open_cuda()
    before = resources()
    yield
    assert resources() == before
