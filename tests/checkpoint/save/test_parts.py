"""The engine that writes files: bounded memory, checksums that wait for other parts, errors that leave nothing."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from checkpoint_states import bytes_in, random_tensor, saved

from loaderkit import native
from loaderkit.checkpoint.save.crc import PieceCrc
from loaderkit.checkpoint.save.engine import SavedFile, save_files
from loaderkit.checkpoint.save.file_plan import BytesItem, FilePlan, Item, TensorItem
from loaderkit.checkpoint.save.memory import PartBuffers
from loaderkit.checkpoint.save.staging import HostCopies
from loaderkit.connectors.base import ObjectWriter
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.connectors.writing import WriterLayer, WritesLayer
from loaderkit.errors import CheckpointError, ConnectorError

PART = 64 * 2**10  # of a MemoryConnector


def written(store: MemoryConnector, key: str) -> bytes:
    data = bytearray(store.stat(key).size)
    store.read_into(key, 0, memoryview(data))
    return bytes(data)


def run(store: Any, plans: list[FilePlan], workers: int = 3) -> list[SavedFile]:
    return save_files(plans, store, "a/", num_workers=workers, buffers=PartBuffers())


@pytest.mark.parametrize("in_python", [False, True])
def test_files_are_their_items_one_after_the_other(in_python: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if in_python:  # as beside an xxhash that exports no function
        monkeypatch.setattr(native, "address_of_hash", lambda: None)
    store = MemoryConnector()
    tensors = [random_tensor(torch.float32, (n,), n) for n in (0, 10, 100_001, 3)]
    items: list[Item] = [TensorItem(f"{n}", tensor) for n, tensor in enumerate(tensors)]
    items.append(BytesItem("b", b"x" * 200_001))
    files = run(store, [FilePlan("f", items), FilePlan("g", []), FilePlan("h", [BytesItem("c", b"y")])])
    assert [file.name for file in files] == ["f", "g", "h"]
    data = written(store, "a/f")
    contents = [*map(saved, tensors), b"x" * 200_001]
    wanted = b""
    for content in contents:
        wanted += bytes(-len(wanted) % 64) + content
    assert data == wanted
    assert written(store, "a/g") == b""
    assert written(store, "a/h") == b"y"
    for file, content in zip(files, (wanted, b"", b"y"), strict=True):
        assert file.num_bytes == len(content)
        step = file.block_bytes
        assert file.hexadecimal() == [
            xxhash.xxh3_64_hexdigest(content[n : n + step]) for n in range(0, len(content), step)
        ]


@pytest.mark.parametrize("part_bytes", [4096, 12288, 2**20])
def test_blocks_end_with_parts(part_bytes: int) -> None:
    class Parts(WritesLayer):
        def part_bytes_of(self, size: int) -> int:
            return part_bytes

        def create(self, key: str, size: int) -> ObjectWriter:
            return Collected(size)

    class Collected(WriterLayer):
        def __init__(self, size: int) -> None:
            super().__init__(self)
            self.data = bytearray(size)
            made.append(self)

        def write(self, start: int, data: memoryview) -> None:
            assert start % part_bytes == 0
            self.data[start : start + len(data)] = data

        def commit(self) -> Any:
            return None

    made: list[Collected] = []
    tensor = random_tensor(torch.int16, (700, 701), 1).t()
    (file,) = run(Parts(MemoryConnector()), [FilePlan("f", [TensorItem("w", tensor)])])
    assert part_bytes % file.block_bytes == 0
    data = bytes(made[0].data)
    assert data == saved(tensor.contiguous())
    assert file.hexadecimal() == [
        xxhash.xxh3_64_hexdigest(data[n : n + file.block_bytes]) for n in range(0, len(data), file.block_bytes)
    ]


def test_a_copy_that_nobody_changes_is_written_from_where_it_lies() -> None:
    class Addresses(WritesLayer):
        def part_bytes_of(self, size: int) -> int:
            return 2**20

        def create(self, key: str, size: int) -> ObjectWriter:
            outer = super().create(key, size)

            class Writer(WriterLayer):
                def __init__(self) -> None:
                    super().__init__(outer)
                    self.data = bytearray(size)

                def write(self, start: int, data: memoryview) -> None:
                    addresses.append(np.frombuffer(data, np.uint8).ctypes.data)
                    self.data[start : start + len(data)] = data

                def commit(self) -> Any:
                    made.append(bytes(self.data))

            return Writer()

    made: list[bytes] = []
    state = {"a": torch.randn(3), "large": torch.randn(2**20 + 17), "b": torch.ones(5), "other": torch.randn(2**19)}
    copies = HostCopies()
    fixed = copies.copy(state)
    contents = []
    for tensors in (fixed, state):
        addresses: list[int] = []
        assert [copies.owns(tensor) for tensor in tensors.values()] == [tensors is fixed] * 4
        plan = FilePlan(
            "f", [TensorItem(name, tensor, is_fixed=copies.owns(tensor)) for name, tensor in tensors.items()]
        )
        (file,) = run(Addresses(MemoryConnector()), [plan])
        inside = range(tensors["large"].data_ptr(), tensors["large"].data_ptr() + tensors["large"].nbytes)
        assert len([address for address in addresses if address in inside]) == (3 if tensors is fixed else 0)
        assert all(address % 4096 == 0 for address in addresses)
        data = made.pop()
        assert file.hexadecimal() == [
            xxhash.xxh3_64_hexdigest(data[n : n + file.block_bytes]) for n in range(0, len(data), file.block_bytes)
        ]
        contents.append([data[start : start + item.size] for start, item in zip(plan.starts, plan.items, strict=True)])
    assert contents[0] == contents[1] == [saved(tensor) for tensor in state.values()]


def test_a_worker_has_one_buffer_of_one_part() -> None:
    class Watched(PartBuffers):
        def __init__(self) -> None:
            super().__init__()
            self.made: set[int] = set()

        def buffer(self, num_bytes: int, device: torch.device | None = None) -> Any:
            manager = super().buffer(num_bytes, device)
            assert num_bytes == PART
            assert device is None

            class Noting:
                def __enter__(noting) -> Any:  # noqa: N805
                    buffer = manager.__enter__()
                    self.made.add(buffer.ctypes.data)
                    return buffer

                def __exit__(noting, *error: Any) -> Any:  # noqa: N805
                    return manager.__exit__(*error)

            return Noting()

    buffers = Watched()
    plan = FilePlan("f", [TensorItem("w", torch.ones(10**6))])
    for _ in range(3):
        save_files([plan], MemoryConnector(), "", num_workers=2, buffers=buffers)
        plan = FilePlan("f", [TensorItem("w", torch.ones(10**6))])
    assert len(buffers.made) <= 2


class Disturbed(WritesLayer):
    """Calls `before` with the start of each part before it is written; notes commits and aborts."""

    def __init__(self, inner: MemoryConnector, before: Callable[[int], None]) -> None:
        super().__init__(inner)
        self.before = before
        self.events: list[str] = []

    def create(self, key: str, size: int) -> ObjectWriter:
        outer = self

        class Writer(WriterLayer):
            def write(self, start: int, data: memoryview) -> None:
                outer.before(start)
                super().write(start, data)

            def commit(self) -> Any:
                outer.events.append(f"commit {key}")
                return super().commit()

            def abort(self) -> None:
                outer.events.append(f"abort {key}")
                super().abort()

        return Writer(self.inner.create(key, size))


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_the_first_error_is_raised_and_nothing_is_left(workers: int) -> None:
    def fail(start: int) -> None:
        if start >= 3 * PART:
            raise ConnectorError("the disk is full")

    store = MemoryConnector()
    writes = Disturbed(store, fail)
    plans = [FilePlan("f", [TensorItem("w", torch.ones(10**6))]), FilePlan("g", [BytesItem("b", b"1")])]
    with pytest.raises(ConnectorError, match="the disk is full"):
        run(writes, plans, workers)
    assert writes.events == ["abort a/f", "abort a/g"]
    assert list(store.list("")) == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("loaderkit-save")]


def test_an_error_of_a_tensor_ends_those_that_wait_for_its_checksum() -> None:
    class Torn:
        """A tensor's bytes, which cannot be copied from the fourth part on."""

        device = torch.device("cpu")
        fixed = None

        def __init__(self, data: Any) -> None:
            self.num_bytes, self.data = data.num_bytes, data

        def copy(self, start: int, target: Any) -> None:
            if start > 3 * PART:
                raise RuntimeError("the device is gone")
            self.data.copy(start, target)

    item = TensorItem("w", torch.ones(10**6))
    item.data = Torn(item.data)  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="the device is gone"):
        run(MemoryConnector(), [FilePlan("f", [item])], 4)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_bytes_that_do_not_add_up_are_an_error_and_no_wait(workers: int, rng: random.Random) -> None:
    """A byte of one tensor is copied never, or twice; its end lies in a part that waits for its other parts."""
    for num_off in (1, -1):
        items = [TensorItem(f"w{n}", torch.ones(rng.randrange(1, PART))) for n in range(5)]
        torn = rng.choice(items)
        torn.crc = PieceCrc(torn.data.num_bytes + num_off)
        store = MemoryConnector()
        saving: Future[Any] = Future()

        def save(items: list[TensorItem] = items, store: Any = store, saving: Future[Any] = saving) -> None:
            try:
                saving.set_result(run(store, [FilePlan("f", items)], workers))
            except BaseException as error:
                saving.set_exception(error)

        threading.Thread(target=save, daemon=True).start()
        with pytest.raises(CheckpointError, match=f"f: .* bytes of '{torn.name}'"):
            saving.result(20)
        assert list(store.list("")) == []


def test_parts_that_are_written_in_another_order() -> None:
    """The last part, with the end of the archive, is held until all others are written; the first is written last."""
    tensor = random_tensor(torch.float32, (5 * PART // 4,), 1)
    written_parts: set[int] = set()
    changed = threading.Condition()

    def wait(start: int) -> None:
        with changed:
            if start == 0:
                changed.wait_for(lambda: len(written_parts) == 5)
            written_parts.add(start)
            changed.notify_all()

    store = MemoryConnector()
    run(Disturbed(store, wait), [FilePlan("f", [TensorItem("w", tensor)])], 2)
    assert written(store, "a/f") == saved(tensor)


def test_torch_uses_one_thread_in_a_worker_and_as_many_as_before_elsewhere() -> None:
    num_threads = torch.get_num_threads()
    inside: list[int] = []
    writes = Disturbed(MemoryConnector(), lambda start: inside.append(torch.get_num_threads()))
    run(writes, [FilePlan("f", [TensorItem("w", torch.ones(10**5).reshape(10, -1).t())])])
    assert set(inside) == {1}
    assert torch.get_num_threads() == num_threads


def test_interrupted_while_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes while the threads write: they end, and what is half is removed."""
    join, started = threading.Thread.join, threading.Event()

    def interrupted(thread: threading.Thread, timeout: float | None = None) -> None:
        if thread.name == "loaderkit-save-0" and not started.is_set():
            started.set()
            raise KeyboardInterrupt
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    store = MemoryConnector()
    writes = Disturbed(store, lambda start: None)
    with pytest.raises(KeyboardInterrupt):
        run(writes, [FilePlan("f", [TensorItem("w", torch.ones(10**6))])], 1)
    assert writes.events == ["abort a/f"]
    assert list(store.list("")) == []


def test_bytes_of_the_tensor_are_those_at_the_time_of_the_save() -> None:
    tensor = torch.arange(1000.0)
    store = MemoryConnector()
    run(store, [FilePlan("f", [TensorItem("w", tensor[::2])])])
    assert bytes_in(tensor[::2]) in written(store, "a/f")
    assert np.frombuffer(written(store, "a/f")[:2], "S2")[0] == b"PK"
