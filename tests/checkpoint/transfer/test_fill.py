"""What is filled by a few threads, or by the caller alone: every byte once, in order, and nothing is left of it."""

from __future__ import annotations

import random
import threading
import weakref
from collections.abc import Callable

import pytest
import torch

from loaderkit.checkpoint.transfer.fetch import Access, Fill
from loaderkit.checkpoint.transfer.layout import ByteSpan, ReadLimits, bytes_of
from loaderkit.checkpoint.transfer.plan import PreparedRead, ReadRequest
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.errors import CheckpointError, ConnectorError


class Counted(MemoryConnector):
    """Notes which threads read; fails at the bytes from `fails_at` on."""

    def __init__(self, objects: dict[str, bytes], fails_at: int) -> None:
        super().__init__(objects)
        self.threads: set[str] = set()
        self.fails_at = fails_at

    def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        self.threads.add(threading.current_thread().name)
        if start + len(buffer) > self.fails_at:
            raise ConnectorError("the line is cut")
        super().read_into(key, start, buffer, etag=etag)


def request(name: str, start: int, tensor: torch.Tensor) -> ReadRequest:
    def prepare(limits: ReadLimits) -> PreparedRead:
        return [ByteSpan(name, "x", start, len(tensor), bytes_of(tensor), None)], lambda: [(name, tensor)]

    return ReadRequest(name, ("x", start), len(tensor), 0, prepare)


def made(rng: random.Random, num_tensors: int) -> tuple[bytes, Callable[[], list[ReadRequest]]]:
    """An object, and what makes requests for `num_tensors` new tensors that fill it."""
    sizes = [rng.choice([1, 50, 3000, 200_000]) for _ in range(num_tensors)]
    data = rng.randbytes(sum(sizes))

    def requests() -> list[ReadRequest]:
        starts = [sum(sizes[:number]) for number in range(num_tensors)]
        return [
            request(str(number), start, torch.zeros(size, dtype=torch.uint8))
            for number, (start, size) in enumerate(zip(starts, sizes, strict=True))
        ]

    return data, requests


@pytest.mark.parametrize("num_workers", [1, 3])
def test_every_byte_in_order(rng: random.Random, num_workers: int) -> None:
    data, requests = made(rng, 30)
    connector = Counted({"x": data}, len(data))
    fill = Fill(requests(), connector, {}, memory_bytes=2**20, access=Access(num_workers))
    delivered = [item for items in fill for item in items]
    assert [name for name, _ in delivered] == [str(number) for number in range(30)]
    assert b"".join(tensor.numpy().tobytes() for _, tensor in delivered) == data
    here = threading.current_thread().name
    assert connector.threads == {here} if num_workers == 1 else here not in connector.threads
    assert fill.plan.totals.needed_bytes == fill.plan.totals.fetched_bytes == len(data)


@pytest.mark.parametrize("ends", ["whole", "by an error", "left"])
@pytest.mark.parametrize("num_workers", [1, 3])
def test_nothing_is_left(rng: random.Random, num_workers: int, ends: str) -> None:
    """Neither threads nor, before the collector runs, the memory of tensors."""
    data, requests = made(rng, 30)
    num_threads = threading.active_count()
    connector = Counted({"x": data}, len(data) // 2 if ends == "by an error" else len(data))
    asked = requests()
    tensors = [weakref.ref(asked[number].prepare(ReadLimits(2**20, 0, 0))[1]()[0][1]) for number in range(30)]
    loop = iter(Fill(asked, connector, {}, memory_bytes=2**20, access=Access(num_workers)))
    if ends == "by an error":
        with pytest.raises(CheckpointError, match="the line is cut"):
            list(loop)
    elif ends == "left":
        next(loop)
    else:
        list(loop)
    del loop
    assert threading.active_count() == num_threads
    del asked
    assert not any(tensor() is not None for tensor in tensors)


class FailingTogether(MemoryConnector):
    """All threads fail at the same moment."""

    def __init__(self, objects: dict[str, bytes], num: int) -> None:
        super().__init__(objects)
        self.together = threading.Barrier(num)

    def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        self.together.wait(60)
        raise ConnectorError(f"no byte {start}")


def test_an_error_is_raised_though_others_come_before_it_is(rng: random.Random) -> None:
    for _ in range(30):
        data, requests = made(rng, 30)
        connector = FailingTogether({"x": data}, 3)
        fill = Fill(requests(), connector, {}, memory_bytes=2**20, access=Access(3))
        with pytest.raises((ConnectorError, CheckpointError)):
            list(fill)
