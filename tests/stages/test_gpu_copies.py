"""How fast batches are copied to a GPU, told by a GPU that is made up: calls take their time, and give up the GIL."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from loaderkit._internal.cuda.streams import STREAMS
from loaderkit.stages.gpu_copies import BatchCopies
from loaderkit.stages.transfer import TransferStream

_RECORD_S, _COPY_S, _QUERY_S = 3e-6, 8e-6, 2e-6  # until the device has been told, or has told
_BYTES_PER_S = 50e9
_SIZE = 35 * 2**20


class Gpu:
    """A stream of a GPU, the clock of the host, and for how long other threads have the GIL after each call of torch."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.free_s = 0.0
        self.waits: Iterator[float] = iter(())
        self.num_events = 0

    def clock(self) -> float:
        return self.now_s

    def call(self, call_s: float, work_s: float = 0.0) -> float:
        """Ask for work; the time when the device is done with it."""
        self.now_s += call_s
        self.free_s = done_s = max(self.now_s, self.free_s) + work_s
        self.now_s += next(self.waits, 0.0)
        return done_s


class Event:
    gpu: Gpu

    def __init__(self, **options: bool) -> None:
        self.at_s = 0.0

    def record(self, stream: Any) -> None:
        self.at_s = self.gpu.call(_RECORD_S)

    def query(self) -> bool:
        self.gpu.now_s += _QUERY_S
        is_over = self.at_s <= self.gpu.now_s
        self.gpu.now_s += next(self.gpu.waits, 0.0)
        return is_over

    def synchronize(self) -> None:
        self.gpu.now_s = max(self.gpu.now_s, self.at_s)

    def elapsed_time(self, end: Event) -> float:
        return 1000 * (end.at_s - self.at_s)


class Stream:
    def __init__(self, *args: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Event.gpu = Gpu()
    copied, moved = torch.Tensor.copy_, torch.Tensor.to

    def copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        gpu.call(_COPY_S, source.nbytes / _BYTES_PER_S)
        return copied(target, source)

    def to(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if options.get("non_blocking"):
            gpu.call(_COPY_S, tensor.nbytes / _BYTES_PER_S)
        return moved(tensor, *args, **options)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(STREAMS, "_free", {})
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, nullcontext)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr("loaderkit.stages.gpu_copies.perf_counter", gpu.clock, raising=False)
    return gpu


def batch_of(num_bytes: int = _SIZE) -> dict[str, Any]:
    """Labels come first; an image is copied first."""
    return {"label": torch.zeros(256), "image": torch.empty(num_bytes, dtype=torch.uint8), "__key__": ["a"]}


def move(stream: TransferStream, batch: dict[str, Any]) -> None:
    stream.run(stream.move, batch)


def rate(stream: TransferStream) -> float:
    counters = stream.counters()
    return counters["timed_bytes"] / counters["copy_s"]


@pytest.mark.parametrize("wait_s", [50e-6, 200e-6, 400e-6, 5e-3])
@pytest.mark.parametrize("call", range(7))
def test_a_wait_for_the_gil_is_no_copying(gpu: Gpu, call: int, wait_s: float) -> None:
    """One batch in three waits, after any of the calls. The GPU copies half an image in 367 us: it is busy through the short
    waits, and through the long ones it is not, so that what it did meanwhile is not known."""
    stream = TransferStream(torch.device("meta"))
    for number in range(9):
        gpu.waits = iter([0.0] * call + [wait_s] if number % 3 == 0 else [])
        move(stream, batch_of())
    assert rate(stream) == pytest.approx(_BYTES_PER_S, rel=1e-6)
    counters = stream.counters()
    assert counters["num_bytes"] == 9 * (_SIZE + 1024)
    is_lost = wait_s > 300e-6 and call < 4  # before it is asked whether the GPU is still busy
    assert counters["timed_bytes"] == (6 if is_lost else 9) * (_SIZE + 1024)


@pytest.mark.parametrize(
    ("num_bytes", "is_timed"), [(2**20, False), (2**22 - 1, False), (2**22, True), (2**22 + 1, True)]
)
def test_small_batches_have_no_speed(gpu: Gpu, num_bytes: int, is_timed: bool) -> None:
    """They are copied while the calls are made."""
    stream = TransferStream(torch.device("meta"))
    move(stream, batch_of(num_bytes))
    assert stream.counters()["timed_bytes"] == is_timed * (num_bytes + 1024)
    assert stream.counters()["copy_s"] == pytest.approx(is_timed * (num_bytes + 1024) / _BYTES_PER_S)


@pytest.mark.parametrize("change", ["none", "channels last", "gaps", "one row many times"])
def test_every_byte_arrives_in_whatever_memory_it_lies(gpu: Gpu, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    """To the CPU, whose tensors can be looked at."""
    monkeypatch.setattr("loaderkit.stages.gpu_copies._is_plain", lambda tensor: True)
    source = torch.randint(256, (3, 5, 701, 499), dtype=torch.uint8)
    if change == "channels last":
        source = source.contiguous(memory_format=torch.channels_last)
    elif change == "gaps":
        source = source[..., 1:]
    elif change == "one row many times":
        source = source[:1].expand(3, -1, -1, -1)
    copies = BatchCopies(torch.device("meta"))
    monkeypatch.setattr(copies, "_device", None)
    target = copies.add(source)
    copies.start(Stream(), timed=True)
    timed = copies.wait()
    assert torch.equal(target, source)
    assert target.stride() == torch.empty_like(source).stride()
    assert (timed is not None) == (change in ("none", "channels last"))


def test_a_batch_is_not_timed_beside_a_stage_that_works_on_the_stream(gpu: Gpu) -> None:
    """What that stage asks for may come between two copies."""
    stream = TransferStream(torch.device("meta"))
    with ThreadPoolExecutor(1) as other:
        stream.run(lambda: other.submit(move, stream, batch_of()).result())
        assert stream.counters()["timed_bytes"] == 0
        other.submit(move, stream, batch_of()).result()
    assert stream.counters()["timed_bytes"] == _SIZE + 1024


def test_copies_behind_those_of_another_batch_are_timed_by_themselves(gpu: Gpu) -> None:
    stream = TransferStream(torch.device("meta"))
    gpu.free_s = gpu.now_s + 0.5
    move(stream, batch_of())
    assert rate(stream) == pytest.approx(_BYTES_PER_S, rel=1e-3)


@pytest.mark.parametrize(
    ("late_s", "exposed"),
    [(-10.0, 1.0), (-4e-4, 4e-4 * _BYTES_PER_S / (_SIZE + 1024)), (0.0, 0.0), (1.0, 0.0)],
    ids=["waits for all that comes before, too", "comes while it is copied", "just there", "late"],
)
def test_how_much_of_the_copying_the_loop_waits_for(gpu: Gpu, late_s: float, exposed: float) -> None:
    stream, batch = TransferStream(torch.device("meta")), batch_of()
    move(stream, batch)
    stream.hand_over(batch, gpu.now_s + late_s)
    stream.hand_over(batch, gpu.now_s - 1.0)  # another one at the same place in memory, whose copy was not timed
    counters = stream.counters()
    assert counters["exposed_s"] / counters["copy_s"] == pytest.approx(exposed, rel=0.02)
