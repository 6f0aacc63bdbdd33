"""Memory two processes see: blocks, what becomes of them, and packing that refers to them."""

from __future__ import annotations

import gc
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from num_examples import num_examples

from loaderkit import errors
from loaderkit.engine.process import messages
from loaderkit.engine.process.leases import LeaseTable
from loaderkit.engine.process.shared_memory import Allocator, Block, SharedArena
from loaderkit.engine.remote import error_transport

PAGE = mmap.PAGESIZE


@pytest.fixture
def arena() -> Iterator[SharedArena]:
    made = SharedArena.create()
    yield made
    made.release_descriptor()


def used_bytes(arena: SharedArena) -> int:
    """What the arena takes of the machine's memory."""
    return os.fstat(arena.fileno()).st_blocks * 512


class TestAllocator:
    @settings(max_examples=num_examples(30))
    @given(st.lists(st.tuples(st.booleans(), st.integers(1, 5 * PAGE)), max_size=40))
    def test_blocks_never_overlap_and_are_found(self, steps: list[tuple[bool, int]]) -> None:
        arena = SharedArena.create()
        allocator = Allocator(arena)
        live: list[tuple[np.ndarray[Any, Any], int]] = []
        for number, (frees, size) in enumerate(steps):
            if frees and live:
                live.pop(size % len(live))
                continue
            block = allocator.allocate(size)
            assert block.nbytes == size
            block[:] = number % 251
            live.append((block, number % 251))
        for block, value in live:
            assert (block == value).all()
            address = block.__array_interface__["data"][0]
            assert address % PAGE == 0
            found = allocator.block_of(address + block.nbytes - 1, 1)
            assert found is not None
            place, around = found
            assert around.start <= place.start < around.start + around.size
            assert arena.view(place)[0] == value
        arena.release_descriptor()

    def test_memory_of_dead_blocks_goes_back_and_their_places_are_used_again(self, arena: SharedArena) -> None:
        allocator = Allocator(arena)
        block = allocator.allocate(100 * PAGE)
        block[:] = 1
        assert used_bytes(arena) == 100 * PAGE
        del block
        assert used_bytes(arena) == 0
        for _ in range(50):
            allocator.allocate(100 * PAGE)
        assert allocator.end == 100 * PAGE

    def test_pinned_pages_are_kept(self, arena: SharedArena) -> None:
        allocator = Allocator(arena, keep_pages=True)
        allocator.allocate(4 * PAGE)
        assert used_bytes(arena) == 4 * PAGE

    def test_too_much_is_an_error_that_says_what_to_do(self, arena: SharedArena) -> None:
        with pytest.raises(OSError, match=r"GiB of shared memory.*prefetch\.memory"):
            Allocator(arena).allocate(len(arena.memory) + 1)

    def test_memory_that_is_refused(self, arena: SharedArena, monkeypatch: pytest.MonkeyPatch) -> None:
        """posix_fallocate finds out; a first touch would be SIGBUS."""

        def refuse(*arguments: int) -> None:
            raise OSError(28, "No space left on device")

        allocator = Allocator(arena)
        monkeypatch.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(OSError, match="keep fewer batches alive") as caught:
            allocator.allocate(PAGE)
        assert caught.value.errno == 28
        monkeypatch.undo()
        assert allocator.allocate(PAGE).nbytes == PAGE

    def test_borrowed_blocks_fit_again(self, arena: SharedArena) -> None:
        allocator = Allocator(arena)
        first = allocator.borrow(1_000_000)
        allocator.spare(first)
        assert allocator.borrow(990_000) == first
        assert first.size <= 1_000_000 * 1.26
        for size in range(1, 40):
            allocator.spare(allocator.borrow(size * PAGE * 8))
        assert used_bytes(arena) < 17 * 40 * PAGE * 8

    def test_foreign_memory_is_in_no_block(self, arena: SharedArena) -> None:
        allocator = Allocator(arena)
        allocator.allocate(PAGE)
        assert allocator.block_of(np.zeros(10).__array_interface__["data"][0], 80) is None
        assert allocator.block_of(arena.memory.__array_interface__["data"][0] + 2 * PAGE, 1) is None


STDIO_CLOSED = """
import io, os, sys
from loaderkit.engine.process.shared_memory import SharedArena
for number in range(3):
    os.close(number)
arena = SharedArena.create() if sys.argv[1] == "before" else SharedArena(io.FileIO(os.dup2(int(sys.argv[2]), 9), "r+"))
found = {place: os.path.realpath(f"/proc/self/fd/{place}") for place in os.listdir("/proc/self/fd")}
os._exit(any("memfd" in target for place, target in found.items() if int(place) < 3))
"""


class TestStdio:
    @pytest.mark.parametrize("moment", ["before", "between"])
    def test_what_prints_never_prints_into_the_arena(self, moment: str, arena: SharedArena) -> None:
        """Stdin, stdout and stderr are closed before it is made, or between the making and the mapping."""
        command = [sys.executable, "-c", STDIO_CLOSED, moment, str(arena.fileno())]
        assert subprocess.run(command, pass_fds=[arena.fileno()]).returncode == 0


class TestLeaseTable:
    def test_a_batch_ends_with_its_last_view(self, arena: SharedArena) -> None:
        lease_table = LeaseTable(arena)
        view = torch.from_numpy(lease_table.lend(7, (Block(0, PAGE),))[:100])[3:].detach()
        assert lease_table.ended() == []
        del view
        assert lease_table.ended() == [7]

    def test_behind_the_end_only_what_is_seen_stays(self, arena: SharedArena) -> None:
        allocator = Allocator(arena)
        blocks = [allocator.take(3 * PAGE) for _ in range(3)]
        lease_table = LeaseTable(arena)
        kept = torch.from_numpy(lease_table.lend(1, (blocks[1],))[blocks[1].start : blocks[1].start + 10])
        kept[:] = 5
        lease_table.close()
        assert used_bytes(arena) == 3 * PAGE
        assert kept.tolist() == [5] * 10
        del kept
        assert used_bytes(arena) == 0

    def test_memory_that_two_batches_see_outlives_the_first(self, arena: SharedArena) -> None:
        block = Allocator(arena).take(PAGE)
        lease_table = LeaseTable(arena)
        one, other = (torch.from_numpy(lease_table.lend(n, (block,))[:8]) for n in (1, 2))
        one[:] = 9
        lease_table.close()
        del one
        assert other.tolist() == [9] * 8

    def test_a_fork_gives_nothing_back(self, arena: SharedArena, monkeypatch: pytest.MonkeyPatch) -> None:
        block = Allocator(arena).take(PAGE)
        lease_table = LeaseTable(arena)
        seen = torch.from_numpy(lease_table.lend(1, (block,))[:8])
        lease_table.close()
        pid = os.getpid()
        monkeypatch.setattr(os, "getpid", lambda: pid + 1)  # as in the child of a fork
        del seen
        assert used_bytes(arena) == PAGE

    def test_blocks_are_pinned_once_and_for_the_device_they_are_copied_to(
        self, arena: SharedArena, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cuda = Cuda()
        monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
        monkeypatch.setattr(torch.cuda, "device", cuda.device)
        allocator = Allocator(arena)
        blocks = [allocator.take(PAGE), allocator.take(3 * PAGE)]
        lease_table = LeaseTable(arena, pinned_for=torch.device("cuda", 3))
        for number in range(3):
            lease_table.lend(number, tuple(blocks))
        begin = arena.memory.ctypes.data
        assert cuda.registered == {begin + block.start: block.size for block in blocks}
        lease_table.close()
        assert cuda.registered == {}

    @pytest.mark.parametrize(("code", "warnings"), [(2, 1), (710, 0)])
    def test_what_keeps_memory_from_being_pinned(
        self,
        arena: SharedArena,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        code: int,
        warnings: int,
    ) -> None:
        """A failed kernel is not that of pinning, and does not keep a loader from closing."""
        cuda = Cuda()
        monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
        monkeypatch.setattr(torch.cuda, "device", cuda.device)
        allocator = Allocator(arena)
        lease_table = LeaseTable(arena, pinned_for=torch.device("cuda", 3))
        lease_table.lend(0, (allocator.take(PAGE),))
        cuda.code = code
        monkeypatch.setattr(torch, "ones", lambda *size, **options: None)  # a kernel on the device
        lease_table.lend(1, (allocator.take(PAGE),))
        assert caplog.text.count("cannot be pinned") == warnings
        cuda.is_broken = code == 710
        lease_table.close()
        assert len(cuda.registered) == cuda.is_broken


class Cuda:
    """The runtime, as far as memory is registered with it: always while device 3 is current."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.current = 0
        self.code = 0  # what registering returns
        self.is_broken = False

    @contextmanager
    def device(self, wanted: torch.device) -> Iterator[None]:
        if self.is_broken:
            raise RuntimeError("CUDA error: device-side assert triggered")
        before, self.current = self.current, wanted.index
        yield
        self.current = before

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert self.current == 3
        if self.code == 0:
            self.registered[address] = size
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        assert self.current == 3
        del self.registered[address]
        return 0


def values() -> dict[str, Any]:
    base = torch.arange(6000, dtype=torch.float32).reshape(60, 100)
    return {
        "whole": base,
        "view": base[3:5, ::7],
        "transposed": base.T,
        "expanded": torch.ones(1).expand(5000),
        "bfloat16": base.to(torch.bfloat16),
        "bool": base > 7,
        "complex": torch.complex(base, base),
        "conjugate": torch.complex(base, base).conj(),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
        "sparse": torch.eye(5).to_sparse(),
        "parameter": torch.nn.Parameter(torch.ones(2000)),
        "array": np.arange(3000.0)[::-1],
        "text": ["a" * 20_000, "\ud800"],
        "bytes": b"x" * 20_000,
    }


class TestPacking:
    def post(self, value: Any, arena: SharedArena, allocator: Allocator) -> Any:
        packed, _ = messages.post(value, arena, allocator)
        return packed.open(arena.memory)

    @pytest.mark.parametrize("name", values())
    def test_values_arrive(self, name: str, arena: SharedArena) -> None:
        value = values()[name]
        found = self.post({"x": [value]}, arena, Allocator(arena))["x"][0]
        assert type(found) is type(value)
        if isinstance(value, torch.Tensor):
            assert (found.dtype, found.shape, found.layout) == (value.dtype, value.shape, value.layout)
            assert torch.equal(found.to_dense(), value.to_dense())
        else:
            np.testing.assert_array_equal(found, value)

    def test_what_lies_in_the_arena_is_not_copied(self, arena: SharedArena) -> None:
        allocator = Allocator(arena)
        slab = torch.from_numpy(allocator.allocate(100_000)).view(torch.float32)
        packed, borrowed = messages.post({"all": slab, "part": slab[2000:9000]}, arena, allocator)
        assert borrowed == []
        assert len(packed.blocks) == 1
        found = packed.open(arena.memory)
        slab[2000] = 8
        assert found["part"][0] == 8
        assert found["all"][2000] == 8

    def test_tensors_of_one_memory_stay_so(self, arena: SharedArena) -> None:
        base = torch.zeros(5000)
        found = self.post([base, base, base.view(50, 100)], arena, Allocator(arena))
        found[0][:] = 1
        assert found[1] is found[0]
        assert found[2].sum() == 5000

    def test_a_small_view_does_not_bring_its_storage_along(self, arena: SharedArena) -> None:
        _, borrowed = messages.post(torch.zeros(10_000_000)[500:2500], arena, Allocator(arena))
        assert sum(block.size for block in borrowed) < 10_000

    def test_what_arrives_may_be_written_to(self, arena: SharedArena) -> None:
        for size in (3, 5000):
            found = self.post([torch.zeros(size), np.zeros(size)], arena, Allocator(arena))
            found[0] += 1
            found[1] += 1

    def test_messages_stay_short(self, arena: SharedArena) -> None:
        packed, _ = messages.post([torch.zeros(5000) for _ in range(3000)], arena, Allocator(arena))
        assert isinstance(packed.body, Block)
        assert len(packed.blocks) == 2

    def test_nothing_stays_borrowed_behind_an_error(self, arena: SharedArena) -> None:
        with pytest.raises(TypeError, match="lock"):
            messages.post([torch.zeros(5000), threading.Lock()], arena, Allocator(arena))
        gc.collect()
        assert used_bytes(arena) == 0


class AwkwardError(Exception):
    """Its arguments are not those of its `__init__`."""

    def __init__(self, code: int, *, detail: str) -> None:
        super().__init__(f"code {code}")
        self.code, self.detail = code, detail


def every_error() -> list[type[errors.LoaderkitError]]:
    def below(kind: type[errors.LoaderkitError]) -> list[type[errors.LoaderkitError]]:
        return [kind, *(one for child in kind.__subclasses__() for one in below(child))]

    return below(errors.LoaderkitError)


class TestErrors:
    @pytest.mark.parametrize("kind", every_error())
    def test_every_error_of_ours_arrives(self, kind: type[errors.LoaderkitError]) -> None:
        error = kind("what happened")
        for name in error.__dict__:
            setattr(error, name, ("a value", 1))
        found = error_transport.unpack_error(error_transport.pack_error(error))
        assert type(found) is kind
        assert str(found) == "what happened"
        assert found.__dict__ == error.__dict__

    def test_causes_and_the_text_of_tracebacks(self) -> None:
        def fail() -> None:
            raise AwkwardError(3, detail="deep")

        try:
            try:
                fail()
            except AwkwardError as awkward:
                raise errors.StageError("call failed", stage="call", key="k", epoch=2, position=5) from awkward
        except errors.StageError as error:
            found = error_transport.unpack_error(error_transport.pack_error(error))
        assert isinstance(found, errors.StageError)
        assert (found.stage, found.key, found.epoch, found.position) == ("call", "k", 2, 5)
        cause = found.__cause__
        assert isinstance(cause, AwkwardError)
        assert (cause.code, cause.detail, cause.args) == (3, "deep", ("code 3",))
        assert "in fail" in cause.__notes__[-1]

    def test_what_cannot_be_pickled_is_left_out(self) -> None:
        error = AwkwardError(3, detail="d")
        error.lock = threading.Lock()  # type: ignore[attr-defined]
        found = error_transport.unpack_error(error_transport.pack_error(error))
        assert isinstance(found, AwkwardError)
        assert found.__dict__ == {"code": 3, "detail": "d"}

    def test_an_exception_that_cannot_be_made_again_is_told_as_text(self) -> None:
        class LockedError(Exception):
            lock = threading.Lock()  # the class cannot be sent, by name or by value

        found = error_transport.unpack_error(error_transport.pack_error(LockedError("door")))
        assert type(found) is errors.RemoteError
        assert "LockedError: door" in str(found)

    def test_an_exception_that_has_no_name_in_a_module_arrives_as_it_is(self) -> None:
        class LocalError(Exception):
            pass

        found = error_transport.unpack_error(error_transport.pack_error(LocalError("door")))
        assert type(found) is LocalError
        assert found.args == ("door",)
