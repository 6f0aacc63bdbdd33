"""Memory of two processes for copies of a state, and how a state travels."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from checkpoint_states import flat_states, same
from hypothesis import given
from leftovers import nothing_left, resources  # noqa: F401 - a fixture for every test here

from loaderkit._internal.cuda import host_pages
from loaderkit.checkpoint.flush.shared_pages import MappedPages, SharedPages
from loaderkit.checkpoint.flush.transport import ReceivedCopies, pack_state, unpack_state
from loaderkit.checkpoint.save.staging import HostCopies
from loaderkit.errors import CheckpointError


def received(stream: bytes, areas: set[int], memory: SharedPages) -> tuple[Any, MappedPages]:
    """The state as another process maps it."""
    mapped = MappedPages()
    for number in areas:
        mapped.add(number, memory.file_of(number).fileno())
    return unpack_state(stream, mapped), mapped


@given(flat_states())
def test_states_arrive_as_they_were(state: dict[str, torch.Tensor]) -> None:
    memory = SharedPages()
    copy = HostCopies(memory.allocate).copy({"state": state, "list": [1, {"x": (2.5, None, b"abc")}]})
    stream, areas = pack_state(copy, memory)
    found, mapped = received(stream, areas, memory)
    copies = ReceivedCopies(mapped)
    assert found["list"] == [1, {"x": (2.5, None, b"abc")}]
    assert found["state"].keys() == state.keys()
    for name, tensor in state.items():
        assert same(found["state"][name], tensor)
        assert copies.owns(found["state"][name]) == bool(tensor.numel())
    assert not copies.owns(torch.ones(3))


def test_tensors_do_not_travel_in_the_stream() -> None:
    memory = SharedPages()
    tied = torch.randn(1000, 1000)
    copy = HostCopies(memory.allocate).copy({"a": tied, "b": tied, "view": tied[:10]})
    stream, areas = pack_state(copy, memory)
    assert len(stream) < 1000
    assert len(areas) == 1
    found, _ = received(stream, areas, memory)
    assert found["a"].data_ptr() == found["b"].data_ptr()
    copy["a"].fill_(3)
    assert found["b"].eq(3).all()  # the same memory
    assert same(found["view"], tied[:10])


def test_memory_stays_while_a_tensor_of_it_is_left() -> None:
    memory = SharedPages()
    before = resources()
    copies = HostCopies(memory.allocate)
    copy = copies.copy({"w": torch.arange(100_000.0)})
    copies.close()
    del copies
    part = copy.pop("w")[50_000:]
    assert len(memory.numbers()) == 1
    assert part[0].item() == 50_000
    assert memory.place_of(part.data_ptr(), part.nbytes) is not None
    del part
    assert memory.numbers() == []
    assert resources() == before


def test_what_grows_gets_other_memory() -> None:
    memory, mapped = SharedPages(), MappedPages()
    copies = HostCopies(memory.allocate)
    for size in range(1000, 100_000, 1000):
        copy = copies.copy({"w": torch.full((size,), float(size))})
        stream, areas = pack_state(copy, memory)
        for number in areas:
            mapped.add(number, memory.file_of(number).fileno())
        mapped.keep(memory.numbers())
        assert unpack_state(stream, mapped)["w"].eq(size).all()
        assert len(memory.numbers()) <= 2
        del copy


def test_without_memory_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    before = resources()
    monkeypatch.setattr(host_pages, "_madvise", lambda *args: -1)
    monkeypatch.setattr("os.posix_fallocate", refuse)
    with pytest.raises(CheckpointError, match=r"there are no 4.* of shared memory.*use flush: thread"):
        HostCopies(SharedPages().allocate).copy({"w": torch.ones(1000)})
    assert resources() == before


def test_an_old_kernel_makes_the_pages_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Linux 5.14 threads cannot."""
    monkeypatch.setattr(host_pages, "_madvise", lambda *args: -1)
    allocated: list[int] = []
    monkeypatch.setattr("os.posix_fallocate", lambda descriptor, begin, size: allocated.append(size))
    copy = HostCopies(SharedPages().allocate).copy({"w": torch.ones(1000)})
    assert copy["w"].eq(1).all()
    assert allocated == [4032]


def test_what_cannot_be_sent_is_named() -> None:
    state = {"model": {"good": torch.ones(3), "bad": threading.Lock()}, "worse": [{"x": lambda: None}], "n": 3}
    with pytest.raises(CheckpointError, match=r"'model.bad', 'worse.0.x' cannot be sent .*use flush: thread"):
        pack_state(state, SharedPages())
