"""Copies a batch's tensors to a GPU, and measures how fast the copies were, by the GPU's own clock, and whether the
loop waited for them.

Torch's calls give up the GIL, and a worker may get it back only milliseconds later, while a batch is copied in less than one:
38 MB in 0.7 ms. A wait between two events would count as copying, and no clock of the host tells the two apart. So the
largest tensor is copied in two halves, with an event on either side of the second. If the GPU has not reached the first
event when the second is requested, it goes from one half to the other without a pause, and the time between the events
is the time of the second half. Else the batch is not timed. Calls that keep the GIL would hold up all of Python where
another thread has the driver's lock, which pinning takes for 10 ms.
"""

from __future__ import annotations

import threading
from time import perf_counter
from typing import Any, NamedTuple

import torch

_Pair = tuple[torch.Tensor, torch.Tensor]  # where to, and what

LEAST_PINNED = 64 * 2**10
"""A smaller tensor is copied to the device faster than it is pinned."""

_LEAST_TIMED = 4 * 2**20  # bytes: half of it is copied in 40 us, and what is asked for meanwhile takes 15 to 20
_MOST_KEPT = 1024  # batches; those that a seek drops are never taken

_DENSE_PARTS = {
    "torch.sparse_csr": ("crow_indices", "col_indices", "values"),
    "torch.sparse_bsr": ("crow_indices", "col_indices", "values"),
    "torch.sparse_csc": ("ccol_indices", "row_indices", "values"),
    "torch.sparse_bsc": ("ccol_indices", "row_indices", "values"),
}


def dense_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The dense tensors that hold a tensor's memory: itself, or the parts of a sparse or nested one."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.is_nested:
        jagged: Any = tensor
        parts = (
            (jagged.values(), jagged.offsets(), jagged.lengths())
            if tensor.layout is torch.jagged
            else (jagged.values(),)
        )
        return tuple(part for part in parts if part is not None)
    names = _DENSE_PARTS.get(str(tensor.layout))
    return (tensor,) if names is None else tuple(getattr(tensor, name)() for name in names)


class TimedCopy(NamedTuple):
    """The copy of a batch: its bytes, the seconds they take on the device at the rate of the copies that were timed,
    and when all of them were there, by `perf_counter`."""

    num_bytes: int
    seconds: float
    ended_s: float


class BatchCopies:
    """The copies of one batch: `add` its tensors, `start`, `wait`. All in one thread, on the stream to the device."""

    def __init__(self, device: torch.device) -> None:
        self.num_bytes = 0
        self._device = device
        self._pairs: list[_Pair] = []
        self._half_bytes = 0  # that were timed
        self._begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on the device; `start` fills it. Memory is allocated here, since that may wait for the device."""
        if tensor.device == self._device:
            return tensor
        self.num_bytes += sum(part.nbytes for part in dense_parts(tensor))
        if not _is_plain(tensor):
            return tensor.to(self._device, non_blocking=True)
        target = torch.empty_like(tensor, device=self._device)
        self._pairs.append((target, tensor))
        return target

    def start(self, stream: Any, *, timed: bool) -> None:
        """Start the copies of the added tensors, which must live until `wait` returns. `timed`: nothing else is queued
        on the stream meanwhile."""
        self._pairs.sort(key=lambda pair: -pair[1].nbytes)
        halves = _halves(*self._pairs[0]) if timed and self._pairs else None
        if halves is not None:
            self._copy_timed(stream, *halves)
        for target, source in self._pairs[0 if halves is None else 1 :]:
            target.copy_(source, non_blocking=True)
        self._done.record(stream)

    def _copy_timed(self, stream: Any, first: _Pair, second: _Pair) -> None:
        for (target, source), event in ((first, self._begin), (second, self._end)):
            target.copy_(source, non_blocking=True)
            event.record(stream)
        if not self._begin.query():  # type: ignore[no-untyped-call]
            self._half_bytes = second[1].nbytes

    def wait(self) -> TimedCopy | None:
        """Wait until all copies are there; returns how long that took, without tensors that torch copies in its own way
        (sparse and nested ones, and tensors that could not be pinned). None if it was not timed."""
        self._done.synchronize()
        ended_s = perf_counter()
        if not self._half_bytes:
            return None
        num_bytes = sum(source.nbytes for _, source in self._pairs)
        half_s = self._begin.elapsed_time(self._end) / 1000
        return TimedCopy(num_bytes, half_s * num_bytes / self._half_bytes, ended_s)


def _halves(target: torch.Tensor, source: torch.Tensor) -> tuple[_Pair, _Pair] | None:
    """Both halves of a tensor and of what it is copied to, each one piece of memory; None if it is too small, or has gaps."""
    order = sorted(range(source.ndim), key=source.stride().__getitem__, reverse=True)
    to, of = target.permute(order), source.permute(order)
    if source.nbytes < _LEAST_TIMED or not (to.is_contiguous() and of.is_contiguous()):
        return None
    to, of, half = to.view(-1), of.view(-1), source.numel() // 2
    return (to[:half], of[:half]), (to[half:], of[half:])


def _is_plain(tensor: torch.Tensor) -> bool:
    """True if the tensor is copied by one copy that does not block."""
    return (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.requires_grad)
        and (tensor.nbytes < LEAST_PINNED or tensor.is_pinned())
    )


class CopyAccount:
    """What was copied to a GPU, and for how much of that time the loop waited; for any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_bytes = self._timed_bytes = 0
        self._copy_s = self._exposed_s = 0.0
        self._not_taken: dict[int, TimedCopy] = {}  # by the batch's id

    def copied(self, batch: dict[str, Any], num_bytes: int, timed: TimedCopy | None) -> None:
        """A batch is there."""
        with self._lock:
            self._num_bytes += num_bytes
            if timed is not None:
                self._timed_bytes += timed.num_bytes
                self._copy_s += timed.seconds
                self._not_taken[id(batch)] = timed
                while len(self._not_taken) > _MOST_KEPT:
                    del self._not_taken[next(iter(self._not_taken))]

    def taken(self, batch: dict[str, Any], asked_s: float) -> None:
        """The loop has the batch that it has waited for since `asked_s`, by `perf_counter`."""
        with self._lock:
            timed = self._not_taken.pop(id(batch), None)
            if timed is not None:
                self._exposed_s += min(timed.seconds, max(0.0, timed.ended_s - asked_s))

    def counters(self) -> dict[str, float]:
        """The bytes copied, how many of these were in batches that were timed, the seconds these took on the device (by
        CUDA events around a part of each), and for how many of these seconds the loop waited."""
        with self._lock:
            return {
                "num_bytes": self._num_bytes,
                "timed_bytes": self._timed_bytes,
                "copy_s": self._copy_s,
                "exposed_s": self._exposed_s,
            }
