"""Host memory whose pages are there before anybody touches them."""

from __future__ import annotations

import mmap
import resource

import numpy as np
import pytest

from loaderkit._internal.cuda import host_pages
from loaderkit._internal.cuda.host_pages import make_all_pages, make_pages, pages
from loaderkit._internal.system.descriptors import memory_file

PAGE = resource.getpagesize()


def num_faults() -> int:
    """Page faults of this thread so far."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


@pytest.mark.parametrize("is_registered", [False, True])
def test_made_pages_are_written_to_without_faults(monkeypatch: pytest.MonkeyPatch, is_registered: bool) -> None:
    monkeypatch.setattr(host_pages, "_SLICE_BYTES", 16 * PAGE)
    memory = pages(1000 * PAGE + 1, is_registered=is_registered)
    memory[PAGE] = 7
    if not make_all_pages(memory):
        pytest.skip("a kernel before 5.14")
    before = num_faults()
    memory[2 * PAGE :] = 1
    assert num_faults() - before < 100
    assert memory[PAGE] == 7


def test_only_the_bytes_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel makes besides, in larger pages, is its own affair."""
    asked: list[tuple[int, ...]] = []
    madvise = host_pages._madvise

    def note(*named: int) -> int:
        asked.append(named)
        code: int = madvise(*named)
        return code

    monkeypatch.setattr(host_pages, "_madvise", note)
    memory = pages(100 * PAGE, is_registered=True)
    is_made = make_pages(memory, 10 * PAGE, 20 * PAGE)
    assert [named[:2] for named in asked] == [(memory.ctypes.data + 10 * PAGE, 10 * PAGE)]
    if not is_made:
        pytest.skip("a kernel before 5.14")
    before = num_faults()
    memory[10 * PAGE : 20 * PAGE] = 1
    assert num_faults() - before < 5


def test_without_room_it_says_so() -> None:
    """As behind the end of a file: a touch would be SIGBUS."""
    with memory_file("test") as file:
        file.truncate(4 * PAGE)
        memory = np.frombuffer(mmap.mmap(file.fileno(), 4 * PAGE), np.uint8)
        file.truncate(PAGE)
        assert not make_all_pages(memory)
