"""What must be as it was, once a loader is gone."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest


def resources() -> tuple[int, int, int, int]:
    """Threads, descriptors, mappings of the arena, and processes of ours."""
    gc.collect()
    children = [pid for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()]
    maps = Path("/proc/self/maps").read_text().count("memfd:loaderkit")
    return threading.active_count(), len(os.listdir("/proc/self/fd")), maps, len(children)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Every test must leave threads, descriptors, mappings and processes as they were."""
    before = resources()
    yield
    assert resources() == before
