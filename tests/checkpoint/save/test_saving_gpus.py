"""Saving tensors on GPUs: through pinned memory, on streams of their own, with nothing on a GPU that has none of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fake_gpus import FakeGpus

from loaderkit._internal.cuda import host_pages
from loaderkit._internal.cuda.host_pages import HostPins
from loaderkit._internal.dtypes import Bytes
from loaderkit.checkpoint.flush.shared_pages import SharedPages
from loaderkit.checkpoint.save.engine import save_files
from loaderkit.checkpoint.save.file_plan import FilePlan, TensorItem
from loaderkit.checkpoint.save.memory import PartBuffers
from loaderkit.checkpoint.save.staging import HostCopies
from loaderkit.connectors.memory import MemoryConnector

SLICE = 64 * 2**10


@pytest.fixture
def gpus() -> Iterator[FakeGpus]:
    with FakeGpus().installed() as installed:
        yield installed


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    return {f"t{n}": torch.randn(1000 * n + 1) for n in range(12)} | {"large": torch.randn(100_000)}


@pytest.fixture(params=["thread", "process"])
def copies(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> HostCopies:
    """As `flush: thread` and `flush: process` make them."""
    monkeypatch.setattr(host_pages, "_SLICE_BYTES", SLICE, raising=False)
    return HostCopies() if request.param == "thread" else HostCopies(SharedPages().allocate)


def on(gpus: FakeGpus, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same, in turn on GPUs 1 and 2."""
    return {name: gpus.put(tensor.clone(), 1 + n % 2) for n, (name, tensor) in enumerate(state.items())}


class TestStaging:
    def test_what_training_changes_afterwards_is_not_in_the_copy(
        self, gpus: FakeGpus, copies: HostCopies, state: dict[str, torch.Tensor]
    ) -> None:
        for _ in range(3):
            given = on(gpus, state)
            copy = copies.copy(given)
            for tensor in given.values():
                torch.Tensor.zero_(tensor)
            gpus.finish()
            assert all(torch.equal(copy[name], tensor) for name, tensor in state.items())
            assert all(pinned for _, _, pinned in gpus.copies)
            del copy
        assert gpus.contexts == {1, 2}
        copies.close()
        assert gpus.registered == {}
        assert gpus.contexts == {1, 2}

    def test_copies_begin_before_all_memory_is_pinned(
        self, gpus: FakeGpus, copies: HostCopies, state: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Registering a large state takes seconds, for which the training would stand still."""
        has_begun = threading.Event()
        add = HostPins.add

        def add_later(pins: HostPins, memory: Bytes, device: torch.device, lo: int, hi: int) -> None:
            if lo >= 4 * SLICE:
                assert has_begun.wait(20), "a copy waits for all of the memory"
            add(pins, memory, device, lo, hi)

        class Noted(list[Any]):
            def append(self, item: Any) -> None:
                super().append(item)
                has_begun.set()

        monkeypatch.setattr(HostPins, "add", add_later)
        gpus.copies = Noted()
        copy = copies.copy(on(gpus, state))
        assert has_begun.is_set()
        assert all(torch.equal(copy[name], tensor) for name, tensor in state.items())
        assert gpus.num_registered > 4

    def test_pages_are_there_when_they_are_pinned(
        self, gpus: FakeGpus, copies: HostCopies, state: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """CUDA would make them one after another, which takes six times as long as pinning."""
        made: list[int] = []
        make_pages = host_pages.make_pages

        def note(memory: Bytes, lo: int = 0, hi: int | None = None) -> bool:
            made.append(memory.ctypes.data + lo)
            return make_pages(memory, lo, hi)

        def check(number: int) -> None:
            assert len(made) > number

        monkeypatch.setattr(host_pages, "make_pages", note)
        gpus.on_register = check
        copies.copy(on(gpus, state))
        assert gpus.registered.keys() <= set(made)

    @pytest.mark.parametrize("most_pinned", [0, 3 * SLICE])
    def test_where_memory_cannot_be_pinned_the_state_is_copied_all_the_same(
        self, copies: HostCopies, state: dict[str, torch.Tensor], most_pinned: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        with FakeGpus(most_pinned=most_pinned).installed() as gpus:
            for _ in range(2):
                copy = copies.copy(on(gpus, state))
                gpus.finish()
                assert all(torch.equal(copy[name], tensor) for name, tensor in state.items())
                assert len(gpus.registered) == most_pinned // SLICE
                del copy
            assert 1 <= caplog.text.count("cannot be pinned (CUDA error 2)") <= 4, "once, or by each thread"
            copies.close()

    def test_after_an_error_no_copy_is_under_way(
        self, gpus: FakeGpus, copies: HostCopies, state: dict[str, torch.Tensor]
    ) -> None:
        """The memory is used for the next state."""

        class Failing(list[Any]):
            def append(self, item: Any) -> None:
                if len(self) == 5:
                    raise RuntimeError("CUDA error: out of memory")
                super().append(item)

        gpus.copies = Failing()
        with pytest.raises(RuntimeError, match="out of memory"):
            copies.copy(on(gpus, state))
        assert all(gpus.current_stream(device).num_left == 0 for device in gpus.devices)

    def test_what_copies_itself_has_done_so(
        self, gpus: FakeGpus, copies: HostCopies, state: dict[str, torch.Tensor]
    ) -> None:
        """A sparse tensor is cloned on its GPU, and another thread reads the clone."""

        class Sparse:
            def __deepcopy__(self, memo: Any) -> Any:
                gpus.current_stream(gpus.devices[1]).put(lambda: done.append(1))
                return self

        done: list[int] = []
        copies.copy({"sparse": Sparse(), "dense": on(gpus, state)})
        assert done == [1]

    def test_a_state_on_the_cpu_does_not_begin_cuda(
        self, gpus: FakeGpus, copies: HostCopies, state: dict[str, torch.Tensor]
    ) -> None:
        copy = copies.copy(state)
        assert all(torch.equal(copy[name], tensor) for name, tensor in state.items())
        assert gpus.contexts == set()


class TestWriting:
    def saved(self, store: MemoryConnector, tensors: dict[str, torch.Tensor], buffers: PartBuffers) -> bytes:
        plan = FilePlan("f", [TensorItem(name, tensor) for name, tensor in tensors.items()])
        save_files([plan], store, "", num_workers=3, buffers=buffers)
        data = bytearray(store.stat("f").size)
        store.read_into("f", 0, memoryview(data))
        return bytes(data)

    def test_from_several_gpus_each_on_streams_that_training_does_not_use(
        self, gpus: FakeGpus, state: dict[str, torch.Tensor]
    ) -> None:
        wanted = self.saved(MemoryConnector(), state, PartBuffers())
        assert gpus.contexts == set(), "the process that writes a copied state has no use for CUDA"
        buffers = PartBuffers()
        for _ in range(4):
            assert self.saved(MemoryConnector(), on(gpus, state), buffers) == wanted
        assert gpus.contexts == {1, 2}
        assert all(stream in gpus.streams and pinned for _, stream, pinned in gpus.copies)
        assert len(gpus.streams) <= 2 * 3
        assert set(gpus.registered.values()) == {64 * 2**10}, "of one part, not of the next power of two"
        del buffers
        assert gpus.registered == {}

    def test_where_buffers_cannot_be_pinned(
        self, state: dict[str, torch.Tensor], caplog: pytest.LogCaptureFixture
    ) -> None:
        wanted = self.saved(MemoryConnector(), state, PartBuffers())
        with FakeGpus(most_pinned=0).installed() as gpus:
            assert self.saved(MemoryConnector(), on(gpus, state), PartBuffers()) == wanted
        assert "cannot be pinned (CUDA error 2)" in caplog.text

    def test_buffers_for_the_cpu_are_not_taken_for_a_gpu(self, gpus: FakeGpus) -> None:
        buffers = PartBuffers()
        with buffers.buffer(8192) as plain:
            pass
        with buffers.buffer(8192, gpus.devices[1]) as pinned:
            assert pinned.ctypes.data in gpus.registered
        with buffers.buffer(8192) as again:
            assert again is plain
        with buffers.buffer(100, gpus.devices[2]) as again:
            assert again is pinned
